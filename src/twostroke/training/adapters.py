"""Training of adapters beside a frozen base: loads the base, in NF4 for method "qlora", and writes the adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from twostroke.core.errors import ConfigError, CorruptFileError
from twostroke.core.recipe import TrainRecipe
from twostroke.core.spec import ModelSpec
from twostroke.model.adapter_directory import fingerprint, is_adapter_directory, save_adapters
from twostroke.model.adapters import (
    AdapterSettings,
    Nf4Experts,
    Nf4Linear,
    all_targets,
    attach_adapters,
    choose_targets,
    peft_weights,
)
from twostroke.model.decoder import Decoder
from twostroke.model.families import to_canonical
from twostroke.model.load import open_weights, torch_dtype


def adapter_settings(recipe: TrainRecipe) -> AdapterSettings:
    lora = recipe.lora
    return AdapterSettings(
        rank=lora.rank,
        alpha=lora.alpha,
        targets=lora.targets,
        dropout=lora.dropout,
        nf4=recipe.method == "qlora",
        nf4_block=lora.nf4_block,
        double_quantization=lora.double_quantization,
    )


def _base(recipe: TrainRecipe) -> Path:
    assert recipe.model.init_from is not None  # TrainRecipe refuses adapters without a base
    return Path(recipe.model.init_from)


def check_adapters(recipe: TrainRecipe, spec: ModelSpec) -> None:
    """Raise ConfigError if the base itself consists of adapters, a target is unknown, or the rank is above that of every
    matrix."""
    if not recipe.trains_adapters:
        return
    if is_adapter_directory(_base(recipe)):
        raise ConfigError(
            f"model.init_from={str(_base(recipe))!r} holds adapters. Merge them into their base first with "
            "`twostroke export --merge`, or name the base."
        )
    chosen = choose_targets(spec, recipe.lora.targets)
    largest = max(chosen, key=lambda target: min(target.rows, target.columns))
    most = min(largest.rows, largest.columns)
    if recipe.lora.rank > most:  # above the rank of single matrices, such as keys with few heads, it is allowed
        raise ConfigError(
            f"lora.rank={recipe.lora.rank} is above the rank of every target: {largest.name} is {largest.rows} × "
            f"{largest.columns}. Use at most {most}."
        )


@torch.no_grad()
def load_adapted(recipe: TrainRecipe, device: torch.device) -> Decoder:
    """The base of ``recipe``, frozen and in the compute dtype, with new fp32 adapters beside its matrices.

    Tensors are read one at a time, so that NF4 matrices are not all held in full precision. Memory: the base, and one tensor.
    """
    settings, dtype = adapter_settings(recipe), torch_dtype(recipe.train.compute_dtype)
    spec, get = open_weights(_base(recipe))
    decoder = Decoder(spec, device="meta")
    in_nf4 = {target.module: target.copies for target in all_targets(spec)} if settings.nf4 else {}
    nf4 = (None, settings.nf4_block, settings.double_quantization)
    for name, tensor in to_canonical(spec, get):
        module, _, kind = name.rpartition(".")
        if module in in_nf4 and kind == "weight":
            # A bias comes after its weight in the layout.
            weight, copies = tensor.to(device), in_nf4[module]
            decoder.set_submodule(module, Nf4Linear(weight, *nf4) if copies == 1 else Nf4Experts(weight, copies, *nf4))
            continue
        owner = decoder.get_submodule(module)
        if kind in owner._buffers:
            setattr(owner, kind, tensor.to(device, owner.get_buffer(kind).dtype, copy=True))
        else:
            setattr(owner, kind, nn.Parameter(tensor.to(device, dtype, copy=True).contiguous(), requires_grad=False))
    for owner in decoder.modules():
        for kind, buffer in owner.named_buffers(recurse=False):
            if buffer.is_meta:  # what routers count in
                setattr(owner, kind, torch.zeros_like(buffer, device=device))
    attach_adapters(decoder, spec, settings, recipe.seed)
    return decoder


def base_state(recipe: TrainRecipe) -> dict[str, Any]:
    """The fingerprint of the base for a checkpoint, which does not hold the base itself."""
    return {"base": fingerprint(_base(recipe))} if recipe.trains_adapters else {}


def check_base(recipe: TrainRecipe, state: Mapping[str, Any]) -> None:
    """Raise CorruptFileError if the checkpoint of ``state`` was trained on another base."""
    if recipe.trains_adapters and state.get("base") != fingerprint(_base(recipe)):
        raise CorruptFileError(
            f"the weights of {_base(recipe)} have changed since the run began, so it cannot be continued exactly. Restore the "
            "earlier weights, or start another run with --set output=..."
        )


def write_adapters(recipe: TrainRecipe, spec: ModelSpec, weights: Mapping[str, Tensor], directory: Path) -> None:
    """Write the run's ``model`` directory: adapters in PEFT's layout, which every command opens as the base with them merged
    in."""
    tokenizer = Path(recipe.data.tokenizer) if recipe.data.tokenizer is not None else _base(recipe)
    save_adapters(peft_weights(spec, weights), spec, adapter_settings(recipe), _base(recipe), directory, tokenizer)
