"""Weights of a model directory, quantised by us or not, in canonical names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from twostroke.core.errors import CorruptFileError
from twostroke.core.families import layout, read_spec
from twostroke.core.families.weights import Entry, Part
from twostroke.core.schemes import Scheme
from twostroke.core.spec import ModelSpec
from twostroke.kernels.codes import Codes
from twostroke.model.decoder import Decoder
from twostroke.model.families import held_order, read_entry
from twostroke.model.lazy_state import LazyState
from twostroke.model.load import filled, load_model, load_state, torch_dtype
from twostroke.model.safetensors_file import WeightFiles
from twostroke.quantization.directory import (
    Quantisation,
    packed_name,
    scale_name,
    shape_name,
    stored_quantisation,
    zero_name,
)
from twostroke.quantization.four_bits import CODES_PER_WORD, unpack_words


def load_any_state(directory: Path | str) -> tuple[ModelSpec, LazyState]:
    """Spec and canonical tensors. Quantised matrices come as ``kernels.codes.Codes``: ``<name>.weight`` beside
    ``<name>.scale`` and, of groups, ``<name>.zero``.

    Errors: as ``model.load.open_weights``, ConfigError for a scheme that is not known.
    """
    stored = stored_quantisation(directory)
    return load_state(directory) if stored is None else load_quantized(directory, stored)


def load_decoder(directory: Path | str, dtype: str = "fp32", device: torch.device | str = "cpu") -> Decoder:
    """The decoder of any model directory: as ``load_model``, and a quantised one with its codes turned into ``dtype``.

    That is what rounding did to the weights; the rounding of activations that the engine's products add is not in it.
    """
    if stored_quantisation(directory) is None:
        return load_model(directory, dtype, device)
    spec, state = load_any_state(directory)
    decoder = Decoder(spec, torch_dtype(dtype), device="meta")
    return filled(decoder, device, ((name, expanded(state, name)) for name in decoder.tensors))


def expanded(state: Mapping[str, Tensor], name: str) -> Tensor:
    """The tensor ``name``, fp32 if it is held in codes."""
    stem = name.removesuffix(".weight")
    scale = state.get(f"{stem}.scale")
    return state[name] if scale is None else Codes(state[name], scale, state.get(f"{stem}.zero")).values()


def load_quantized(directory: Path | str, stored: Quantisation) -> tuple[ModelSpec, LazyState]:
    """The state of a directory that ``quantize_model`` wrote. Every name, shape and format is checked first; that scales are
    numbers, when they are read."""
    spec, files = read_spec(directory), WeightFiles(directory)
    expected: set[str] = set()
    for entry in layout(spec):
        held = stored.of(entry)
        for part in entry.parts:
            if held is None:
                _check(files, part.name, entry.stored_shape(part), ("BF16", "F32", "F16"))
                expected.add(part.name)
                continue
            for name, shape, dtypes in _stored_tensors(held, entry, part):
                _check(files, name, shape, dtypes)
                expected.add(name)
    unexpected = sorted(set(files) - expected)
    if unexpected:
        raise CorruptFileError(
            f"{directory} holds tensor {unexpected[0]!r}, which a {stored.scheme.family} copy of its model does not have."
        )
    readers: dict[str, Callable[[], Tensor]] = {}
    for entry in layout(spec):
        held = stored.of(entry)
        if held is None:
            readers[entry.canonical] = partial(read_entry, entry, files.get)
            continue
        stem = entry.canonical.removesuffix(".weight")
        readers[f"{stem}.scale"] = partial(_scales, entry, files, held)
        if held.group is None:
            readers[entry.canonical] = partial(read_entry, entry, files.get)
        else:
            readers[entry.canonical] = partial(_codes, entry, files)
            readers[f"{stem}.zero"] = partial(_zeros, entry, files)
    return spec, LazyState(readers)


def _codes(entry: Entry, files: WeightFiles) -> Tensor:
    parts = [unpack_words(files.get(packed_name(part.name)), entry.shape[1]) for part in entry.parts]
    return held_order(entry, torch.cat(parts))


def _zeros(entry: Entry, files: WeightFiles) -> Tensor:
    parts = [unpack_words(files.get(zero_name(part.name)).t(), part.rows).t() for part in entry.parts]
    return held_order(entry, torch.cat(parts)).contiguous()


def _stored_tensors(scheme: Scheme, entry: Entry, part: Part) -> list[tuple[str, tuple[int, ...], tuple[str, ...]]]:
    """(name, shape, formats) of the tensors of one quantised part. Packed codes are (outputs, inputs) in every family."""
    assert scheme.disk is not None
    floats, codes = ("F32", "BF16", "F16"), (scheme.disk.tag,)
    if scheme.group is None:
        return [(part.name, entry.stored_shape(part), codes), (scale_name(part.name), (part.rows, 1), floats)]
    width = entry.shape[1]
    n_groups = -(-width // scheme.group)
    return [
        (packed_name(part.name), (part.rows, -(-width // CODES_PER_WORD)), codes),
        (scale_name(part.name), (part.rows, n_groups), floats),
        (zero_name(part.name), (-(-part.rows // CODES_PER_WORD), n_groups), codes),
        (shape_name(part.name), (2,), ("I64",)),
    ]


def _scales(entry: Entry, files: WeightFiles, scheme: Scheme) -> Tensor:
    scale = held_order(entry, torch.cat([files.get(scale_name(part.name)).float() for part in entry.parts]))
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise CorruptFileError(f"{files.directory}: scales of {entry.parts[0].name!r} must be positive and finite.")
    return scale.flatten() if scheme.group is None else scale


def _check(files: WeightFiles, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if name not in files:
        raise CorruptFileError(f"{files.directory} has no tensor {name!r}, which its config.json asks for.")
    info = files.infos[name]
    if info.shape != shape or info.dtype not in dtypes:
        raise CorruptFileError(
            f"{files.directory}: tensor {name!r} is {info.dtype} {list(info.shape)}; {'/'.join(dtypes)} {list(shape)} is due."
        )
