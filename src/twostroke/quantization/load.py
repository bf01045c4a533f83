"""Weights of a model directory, quantised by us or not, in canonical names."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from twostroke.core.errors import ConfigError, CorruptFileError
from twostroke.core.families import read_config, read_spec
from twostroke.core.spec import ModelSpec
from twostroke.model.decoder import Decoder
from twostroke.model.families import layout
from twostroke.model.families.layout import Entry, read_entry
from twostroke.model.load import load_model, load_state, torch_dtype
from twostroke.model.safetensors_file import WeightFiles
from twostroke.quantization.schemes import METHOD, Scheme, scale_name, scheme_of


def load_any_state(directory: Path | str) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Spec and canonical tensors. Quantised matrices come as they are stored, ``<name>.weight`` int8 beside ``<name>.scale``.

    Errors: as ``model.load.open_weights``, ConfigError for a scheme that is not known.
    """
    config = read_config(directory)
    quantised = config.get("quantization_config")
    if not quantised:
        return load_state(directory)
    if quantised.get("quant_method") != METHOD:
        raise ConfigError(f"{directory} is quantised by {quantised.get('quant_method')!r}, which is not supported.")
    return load_quantized(directory, scheme_of(str(quantised.get("scheme"))))


def load_decoder(directory: Path | str, dtype: str = "fp32", device: torch.device | str = "cpu") -> Decoder:
    """The decoder of any model directory: as ``load_model``, and a quantised one with weights ≈ code·scale in ``dtype``.

    That is what rounding did to the weights; the rounding of activations that the engine's products add is not in it.
    """
    if not read_config(directory).get("quantization_config"):
        return load_model(directory, dtype, device)
    spec, state = load_any_state(directory)
    decoder = Decoder(spec, torch_dtype(dtype), device="meta").to_empty(device=device)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            scale = state.get(name.removesuffix(".weight") + ".scale")
            parameter.copy_(state[name] if scale is None else state[name].float() * scale[:, None])
    return decoder.eval()


def load_quantized(directory: Path | str, scheme: Scheme) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The state of a directory that ``quantize_model`` wrote, every name, shape and format checked first."""
    spec, files = read_spec(directory), WeightFiles(directory)
    expected: set[str] = set()
    for entry in layout(spec):
        for part in entry.parts:
            shape = entry.stored_shape(part)
            if scheme.touches(entry.canonical):
                _check(files, part.name, shape, ("I8",))
                _check(files, scale_name(part.name), (part.rows,), ("F32",))
                expected |= {part.name, scale_name(part.name)}
            else:
                _check(files, part.name, shape, ("BF16", "F32", "F16"))
                expected.add(part.name)
    unexpected = sorted(set(files) - expected)
    if unexpected:
        raise CorruptFileError(f"{directory} holds tensor {unexpected[0]!r}, which a {scheme.name} copy of its model has not.")
    state: dict[str, Tensor] = {}
    for entry in layout(spec):
        state[entry.canonical] = read_entry(entry, files.get)
        if scheme.touches(entry.canonical):
            state[entry.canonical.removesuffix(".weight") + ".scale"] = _scales(entry, files)
    return spec, state


def _scales(entry: Entry, files: WeightFiles) -> Tensor:
    scale = torch.cat([files.get(scale_name(part.name)) for part in entry.parts])
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise CorruptFileError(f"{files.directory}: scales of {entry.parts[0].name!r} must be positive and finite.")
    return scale


def _check(files: WeightFiles, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if name not in files:
        raise CorruptFileError(f"{files.directory} has no tensor {name!r}, which its config.json asks for.")
    info = files.infos[name]
    if info.shape != shape or info.dtype not in dtypes:
        raise CorruptFileError(
            f"{files.directory}: tensor {name!r} is {info.dtype} {list(info.shape)}; {'/'.join(dtypes)} {list(shape)} is due."
        )
