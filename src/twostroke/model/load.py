"""Reads model directories in Hugging Face layout, strictly. ``twostroke.model.save`` writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from twostroke.core.dtypes import TORCH_NAMES
from twostroke.core.errors import ConfigError, CorruptFileError
from twostroke.core.families import layout, read_config, read_spec
from twostroke.core.spec import ModelSpec
from twostroke.model.adapter_directory import is_adapter_directory, open_merged
from twostroke.model.decoder import Decoder
from twostroke.model.families import is_recomputed, read_entry, stored_name, to_canonical
from twostroke.model.lazy_state import LazyState
from twostroke.model.published.reading import QuantisedWeights
from twostroke.model.published.storage import FLOATS
from twostroke.model.safetensors_file import WeightFiles

M = TypeVar("M", bound=nn.Module)


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype for ``fp32``, ``bf16`` or ``fp16``. Raises ConfigError for another name."""
    if name not in ("fp32", "bf16", "fp16"):
        raise ConfigError(f"dtype={name!r} is not a format to compute in. Use fp32, bf16 or fp16.")
    dtype: torch.dtype = getattr(torch, TORCH_NAMES[name])
    return dtype


def open_weights(directory: Path | str) -> tuple[ModelSpec, Callable[[str], Tensor]]:
    """The spec of ``directory``, and a reader of its stored tensors by family name. All names and shapes are checked first.

    Raises InputError (no model there), ConfigError (an impossible configuration), CorruptFileError (a tensor that is missing,
    unexpected or of another shape, or a file that breaks its format). It reads no weights itself. An adapter directory is read
    as its base with the adapters merged in (``model.adapter_directory``), a quantised one as the fp32 numbers that its codes
    stand for (``model.published``), which the spec's last note says.
    """
    directory = Path(directory)
    if is_adapter_directory(directory):
        return open_merged(directory, open_weights)
    spec, files = open_files(directory)
    if isinstance(files, QuantisedWeights):
        return spec, files.get
    return spec, lambda name: files.get(stored_name(spec, name, files.infos))


def open_files(directory: Path) -> tuple[ModelSpec, WeightFiles | QuantisedWeights]:
    """The spec of ``directory``, which holds no adapters, and its files; the checks and errors of ``open_weights``."""
    config = read_config(directory)
    spec = read_spec(directory)
    spec.require_buildable()
    if config.get("quantization_config"):
        quantised = QuantisedWeights(directory)
        return quantised.spec, quantised
    files = WeightFiles(directory)
    expected: set[str] = set()
    for entry in layout(spec):
        for part in entry.parts:
            name = stored_name(spec, part.name, files.infos)
            if name not in files:
                raise CorruptFileError(
                    f"{directory} has no tensor {name!r}, which its config.json ({spec.family}) asks for. Download the model "
                    "again."
                )
            info, shape = files.infos[name], entry.stored_shape(part)
            if info.shape != shape:
                raise CorruptFileError(
                    f"{directory}: tensor {name!r} has shape {list(info.shape)}, but its config.json asks for {list(shape)}."
                )
            if info.dtype not in FLOATS:
                raise CorruptFileError(f"{directory}: tensor {name!r} is {info.dtype}; weights must be {', '.join(FLOATS)}.")
            expected.add(name)
    unexpected = [name for name in files if name not in expected and not is_recomputed(spec, name)]
    if unexpected:
        raise CorruptFileError(
            f"{directory} holds {len(unexpected)} tensor(s) that a {spec.family} model of its config.json does not have, "
            f"such as {unexpected[0]!r}. Leaving them out would change what the model computes."
        )
    return spec, files


def load_state(directory: Path | str) -> tuple[ModelSpec, LazyState]:
    """Spec and canonical tensors in their stored dtypes, each read on access. A tensor that is stored as one part stays
    memory-mapped.

    Raises the errors of ``open_weights``.
    """
    spec, get = open_weights(directory)
    return spec, LazyState({entry.canonical: partial(read_entry, entry, get) for entry in layout(spec)})


@torch.no_grad()
def load_model(directory: Path | str, dtype: str = "fp32", device: torch.device | str = "cpu") -> Decoder:
    """The decoder in ``directory``. Weights are converted to ``dtype`` and copied to ``device`` one tensor at a time.

    Memory: the weights in ``dtype`` and one tensor more. Raises the errors of ``open_weights``.
    """
    wanted = torch_dtype(dtype)
    spec, get = open_weights(directory)
    return filled(Decoder(spec, wanted, device="meta"), device, to_canonical(spec, get))


@torch.no_grad()
def filled(module: M, device: torch.device | str, tensors: Iterable[tuple[str, Tensor]]) -> M:
    """``module``, a decoder or a part of one on device "meta", on ``device`` with ``tensors`` by their names in it."""
    module = module.to_empty(device=device).eval()
    for buffer in module.buffers():
        buffer.zero_()
    held = module.state_dict()
    for name, tensor in tensors:
        held[name].copy_(tensor)
    return module
