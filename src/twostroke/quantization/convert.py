"""A quantised copy of a model directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twostroke.core.errors import InputError
from twostroke.core.families import layout, read_config
from twostroke.core.families.weights import Entry
from twostroke.core.schemes import DEFAULT_WRITTEN, Scheme, written_scheme
from twostroke.kernels.codes import CODE_TYPES, quantize
from twostroke.kernels.words import pack_words
from twostroke.model.adapter_directory import SCALED_INPUTS
from twostroke.model.families import read_entry, stored_rows, write_entry
from twostroke.model.load import open_weights
from twostroke.model.published.compressed_tensors import PACKED, SCALE, SHAPE, ZERO
from twostroke.model.published.registry import module_name
from twostroke.model.safetensors_file import WeightFiles
from twostroke.model.save import (
    COMPANION_FILES,
    MAX_SHARD_BYTES,
    require_finite,
    require_writable,
    write_tensors,
    written_aside,
)
from twostroke.quantization.directory import Quantisation, bits_per_weight
from twostroke.quantization.fitting import Fitted


@dataclass(frozen=True)
class QuantizeReport:
    """``source_bytes`` and ``bytes`` are of the weights as stored. ``relative_error`` is √(Σ(w − ŵ)² / Σw²) over all quantised
    matrices, ``worst`` the matrix where it is largest. Of weights that were fitted to text: how many tokens of it
    (``fitted_to_tokens``), how many matrices are held in int8 instead, and what the whole costs on text beside it
    (``fitting.Judgement``). ``bits_per_weight`` is of the quantised matrices, scales included. ``notes`` are the source's."""

    scheme: str
    n_matrices: int
    source_bytes: int
    bytes: int
    relative_error: float
    worst: str
    worst_relative_error: float
    bits_per_weight: float
    n_int8_matrices: int = 0
    fitted_to_tokens: int = 0
    judged_tokens: int = 0
    kl_nats: float | None = None
    perplexity_ratio: float | None = None
    notes: tuple[str, ...] = ()


@torch.inference_mode()
def quantize_model(
    directory: Path | str,
    out_directory: Path | str,
    scheme: str = DEFAULT_WRITTEN,
    replace: bool = False,
    progress: Callable[[float, str], None] | None = None,
    fitted: Fitted | None = None,
) -> QuantizeReport:
    """Write a copy of the model in ``directory`` with its blocks' matrices in ``scheme`` to ``out_directory``.

    Appears whole or not at all. Memory: one matrix in fp32. ``fitted``: for int4, what
    ``fitting.fit_codes`` found with the same group; else every weight goes to its nearest code.
    Of a model that is quantised already, the numbers that its codes stand for are rounded once more.
    Raises what ``open_weights`` does, and ConfigError (an unknown scheme), InputError (``out_directory`` holds something and
    ``replace`` is not set), CorruptFileError (a weight that is not finite). ``progress`` hears the share done and what is next.
    """
    chosen = written_scheme(scheme)
    source, target = Path(directory), Path(out_directory)
    config = read_config(source)
    require_writable(target, replace)
    if target.exists() and target.resolve() == source.resolve():
        raise InputError(f"{target} is the model itself. Name another directory.")
    converter = _Converter(source, chosen, fitted, bool(config.get("quantization_config")))
    with written_aside(target) as aside:
        tensors = converter.tensors(progress or (lambda done, note: None))
        written = write_tensors(converter.due(), tensors, aside, MAX_SHARD_BYTES)
        document = config | {"torch_dtype": "bfloat16", "quantization_config": converter.stored.config()}
        if fitted is not None and fitted.scaled:
            document[SCALED_INPUTS] = True
        document.pop("dtype", None)
        (aside / "config.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        for name in COMPANION_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, aside / name)
    return converter.report(written)


CODES_PER_WORD = 8
"""4-bit ones."""


class _Converter:
    def __init__(self, directory: Path, scheme: Scheme, fitted: Fitted | None, quantised: bool) -> None:
        self.spec, self.get = open_weights(directory)
        self.fitted = fitted
        kept = [entry for entry in layout(self.spec) if fitted is not None and entry.canonical in fitted.int8]
        self.stored, self.n_int8 = Quantisation(scheme).with_others(kept), len(kept)
        self.source_bytes = sum(info.n_bytes for info in WeightFiles(directory).infos.values()) if quantised else 0
        self.counts_source = not quantised
        self.errors: dict[str, tuple[float, float]] = {}  # canonical name: Σ(w − ŵ)², Σw²

    def tensors(self, progress: Callable[[float, str], None]) -> Iterator[tuple[str, Tensor]]:
        """Every stored tensor of the copy, in the order of the family's layout."""
        entries = list(layout(self.spec))
        for i, entry in enumerate(entries):
            progress(i / len(entries), f"tensor {i + 1} of {len(entries)}")
            tensor = read_entry(entry, self.get)
            self.source_bytes += tensor.nbytes if self.counts_source else 0
            tensor = tensor if self.fitted is None else self.fitted.source(entry.canonical, tensor)
            held = self.stored.of(entry)
            if held is not None:
                yield from self._quantised(entry, tensor, held)
            else:
                for name, part in write_entry(entry, require_finite(entry.parts[0].name, tensor)):
                    yield name, part.to(torch.bfloat16)

    def due(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of each of ``tensors``."""
        due: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for entry in layout(self.spec):
            held = self.stored.of(entry)
            for part in entry.parts:
                if held is None:
                    due[part.name] = torch.bfloat16, entry.stored_shape(part)
                    continue
                module, k, rows = module_name(part.name), entry.shape[1], part.rows // entry.copies
                copies = () if entry.copies == 1 else (entry.copies,)
                if held.group is None:
                    due[f"{module}.weight"] = CODE_TYPES[held.element], entry.stored_shape(part)
                    due[f"{module}{SCALE}"] = torch.float32, (*copies, rows, 1)
                    continue
                groups = -(-k // held.group)
                due[f"{module}{PACKED}"] = torch.int32, (*copies, rows, -(-k // CODES_PER_WORD))
                due[f"{module}{SCALE}"] = torch.float32, (*copies, rows, groups)
                due[f"{module}{ZERO}"] = torch.int32, (*copies, -(-rows // CODES_PER_WORD), groups)
                due[f"{module}{SHAPE}"] = torch.int64, (2,)
        return due

    def _quantised(self, entry: Entry, weight: Tensor, scheme: Scheme) -> Iterator[tuple[str, Tensor]]:
        weight = require_finite(entry.parts[0].name, weight.float())
        if self.fitted is None or scheme.group is None:
            quantised = quantize(weight, scheme)
        else:
            quantised = self.fitted.codes[entry.canonical]
        self._count(entry, weight, quantised.values())
        for parts in zip(entry.parts, *(_stored(entry, tensor) for tensor in quantised), strict=True):
            part, codes, scale, zero = parts
            module = module_name(part.name)
            if zero is None:
                yield f"{module}.weight", codes.mT if entry.transposed else codes
                yield f"{module}{SCALE}", scale[..., None]
                continue
            yield f"{module}{PACKED}", _packed(codes)
            yield f"{module}{SCALE}", scale
            yield f"{module}{ZERO}", _packed(zero.mT).mT
            yield f"{module}{SHAPE}", torch.tensor(codes.shape[-2:])

    def _count(self, entry: Entry, weight: Tensor, rounded: Tensor) -> None:
        lost = float((rounded - weight).square().sum(dtype=torch.float64))
        self.errors[entry.canonical] = (lost, float(weight.square().sum(dtype=torch.float64)))

    def report(self, n_bytes: int) -> QuantizeReport:
        relative = {name: (lost / total) ** 0.5 if total else 0.0 for name, (lost, total) in self.errors.items()}
        worst = max(relative, key=relative.__getitem__)
        whole = sum(lost for lost, _ in self.errors.values()) / max(sum(t for _, t in self.errors.values()), 1e-300)
        rounding = (len(relative), self.source_bytes, n_bytes, whole**0.5, worst, relative[worst])
        bits = bits_per_weight(self.spec, self.stored)
        report = QuantizeReport(self.stored.scheme.family, *rounding, bits, notes=self.spec.notes)
        if self.fitted is None:
            return report
        report = replace(report, n_int8_matrices=self.n_int8, fitted_to_tokens=self.fitted.n_tokens)
        judged = self.fitted.judgement
        if judged is None:
            return report
        return replace(report, judged_tokens=judged.n_tokens, kl_nats=judged.kl_nats, perplexity_ratio=judged.perplexity_ratio)


def _stored(entry: Entry, tensor: Tensor | None) -> Iterable[Any]:
    """Of each stored part of ``entry`` its rows of ``tensor``, or None."""
    return (None,) * len(entry.parts) if tensor is None else stored_rows(entry, tensor)


def _packed(codes: Tensor) -> Tensor:
    """``pack_words`` along the last dimension, of one matrix or of several."""
    return pack_words(codes.flatten(0, -2)).unflatten(0, codes.shape[:-1])
