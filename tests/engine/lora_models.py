"""Small models with adapters for tests of serving them: adapter directories, and the base with one merged in."""

from __future__ import annotations

from pathlib import Path

import torch

from small_models import EVERY, decoder_of, saved
from twostroke.model.adapter_directory import save_adapters
from twostroke.model.adapters import AdapterSettings, attach_adapters, choose_targets, peft_names, peft_weights
from twostroke.model.decoder import Decoder
from twostroke.model.load import load_model


def adapter_of(
    base: Path,
    name: str,
    directory: Path,
    seed: int,
    targets: tuple[str, ...] = ("all-linear",),
    rank: int = 3,
    size: float = 0.1,
) -> Path:
    """An adapter of the small model ``name`` saved in ``base``, whose B is normal with deviation ``size``."""
    decoder = decoder_of(name)
    settings = AdapterSettings(rank, 2.0 * rank, targets)
    attach_adapters(decoder, decoder.spec, settings, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in decoder.named_parameters():
            if parameter_name.endswith(".b"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    names = peft_names(choose_targets(decoder.spec, targets))
    trained = {n: p.detach() for n, p in decoder.named_parameters() if p.requires_grad and n in names}
    return save_adapters(peft_weights(decoder.spec, trained), decoder.spec, settings, base, directory, base)


def models(name: str, folder: Path, n_adapters: int, **kwargs: object) -> tuple[Path, list[Path], list[Decoder]]:
    """A base, adapters of it, and for each the decoder with the adapter merged in."""
    assert name in EVERY
    _, base = saved(name, folder / "base")
    adapters = [adapter_of(base, name, folder / f"adapter{i}", 10 + i, **kwargs) for i in range(n_adapters)]  # type: ignore[arg-type]
    return base, adapters, [load_model(directory) for directory in adapters]
