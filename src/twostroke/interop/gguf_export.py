"""Writes a model directory as one GGUF file: weights, metadata and tokenizer, a tensor at a time."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from twostroke.core.aside import directory_beside, flush_to_disk
from twostroke.core.errors import ConfigError, InputError
from twostroke.core.families import layout
from twostroke.core.families.weights import Entry, tensors
from twostroke.core.spec import ModelSpec
from twostroke.core.units import format_bytes
from twostroke.interop.gguf_encode import encode
from twostroke.interop.gguf_families import GgufFamily, family_row
from twostroke.interop.gguf_fields import metadata_of, require_same, rope_tensors, token_ids
from twostroke.interop.gguf_types import TYPES, TensorType
from twostroke.interop.gguf_vocabulary import no_vocabulary, vocabulary
from twostroke.interop.gguf_write import Stored, Value, write_header, write_tensor
from twostroke.interop.source import pairs_from_halves
from twostroke.model.families import write_entry
from twostroke.model.save import require_finite

Choice = Callable[["Place"], str]


@dataclass(frozen=True)
class Place:
    """A matrix of a file: its name without layer and ``.weight``, the layer (None: none), of how many, and the model."""

    name: str
    layer: int | None
    n_layers: int
    is_head: bool
    architecture: str
    n_experts: int


def _more_bits(place: Place) -> bool:
    """The layers whose matrices llama.cpp's medium mixes give more bits (``use_more_bits`` in its ``llama-quant.cpp``): the
    first and the last eighth, and every third between."""
    assert place.layer is not None
    eighth = place.n_layers // 8
    return place.layer < eighth or place.layer >= 7 * place.n_layers // 8 or (place.layer - eighth) % 3 == 2


def _mixed(usual: str, more: str, medium: bool) -> Choice:
    """llama.cpp's mixes of K types (``llama_tensor_get_type``): the head in Q6_K; of the medium ones, half of the values and of
    the MLP's outputs in Q6_K and packed projections in the next larger type ``more``."""

    def choose(place: Place) -> str:
        falcon = place.architecture == "falcon"
        if place.is_head:
            return "Q8_0" if falcon else "Q6_K"
        if place.n_experts == 8 and place.name in ("attn_v", "attn_k"):
            return "Q8_0"
        if place.n_experts == 8 and place.name == "attn_output" and usual == "Q4_K":
            return "Q5_K"
        if place.layer is None:
            return usual
        if place.name == "attn_qkv":
            return more if medium else usual
        if place.name == "attn_v":
            if medium:
                return "Q6_K" if _more_bits(place) else usual
            return "Q5_K" if usual == "Q4_K" and place.layer < 4 else usual
        if place.name in ("ffn_down", "ffn_down_exps"):
            if medium and falcon and usual == "Q4_K":
                early = place.layer < place.n_layers // 16
                return "Q6_K" if early else "Q5_K" if _more_bits(place) else usual
            if medium:
                return "Q6_K" if _more_bits(place) else usual
            return "Q5_K" if usual == "Q4_K" and place.layer < place.n_layers // 8 and not falcon else usual
        return usual

    return choose


def _one(usual: str, head: str | None = None) -> Choice:
    return lambda place: head if head and place.is_head else usual


@dataclass(frozen=True)
class Precision:
    """A row: the name that a person gives, llama.cpp's number of such files, and the type of each matrix."""

    name: str
    number: int
    choose: Choice = field(repr=False)


PRECISIONS: dict[str, Precision] = {
    p.name: p
    for p in (
        Precision("F32", 0, _one("F32")),
        Precision("F16", 1, _one("F16")),
        Precision("BF16", 32, _one("BF16")),
        Precision("Q8_0", 7, _one("Q8_0")),
        Precision("Q4_0", 2, _one("Q4_0", "Q6_K")),
        Precision("Q5_0", 8, _one("Q5_0", "Q6_K")),
        Precision("Q4_K_S", 14, _mixed("Q4_K", "Q5_K", False)),
        Precision("Q4_K_M", 15, _mixed("Q4_K", "Q5_K", True)),
        Precision("Q5_K_S", 16, _mixed("Q5_K", "Q6_K", False)),
        Precision("Q5_K_M", 17, _mixed("Q5_K", "Q6_K", True)),
        Precision("Q6_K", 18, _one("Q6_K")),
    )
}
"""What ``--precision`` may be."""

NARROWER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What stands for a K type where a row is no whole number of its blocks of 256, as in llama.cpp."""

PLAIN = ("ffn_gate_inp", "ffn_gate_inp_shexp", "position_embd")
"""Matrices that stay in F32: routers and positions."""


@dataclass(frozen=True)
class GgufReport:
    """What was written. ``types`` are numbers of tensors by type; ``fallbacks`` those whose rows K types do not fit."""

    file: str
    architecture: str
    precision: str
    n_parameters: int
    n_bytes: int
    types: dict[str, int]
    fallbacks: int
    notes: tuple[str, ...]


def require_precision(name: str) -> Precision:
    """The row of ``name``. Raises ConfigError for another."""
    found = PRECISIONS.get(name.upper())
    if found is None:
        raise ConfigError(f"precision={name!r:.40} is not one that GGUF is written in. Use {', '.join(PRECISIONS)}.")
    return found


@torch.inference_mode()
def write_gguf(
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    target: Path,
    precision: str,
    tokenizer: Path | None = None,
    importance: Mapping[str, Tensor] | None = None,
    replace: bool = False,
    name: str = "",
) -> GgufReport:
    """Write the model of ``spec`` with the canonical tensors ``state`` to the file ``target``.

    ``tokenizer``: a model directory with a ``tokenizer.json``. ``importance``, by canonical name: the mean square of each column's
    inputs, which weighs the errors of K types. The file appears whole or not at all. Memory: the largest tensor twice.

    Raises UnsupportedFamilyError or ConfigError for a model or tokenizer that the format has no place for, InputError where
    ``target`` exists without ``replace`` or a weight is beyond the type's numbers, CorruptFileError for one that is not finite.
    All but the last two come before a weight is read.
    """
    chosen = require_precision(precision)
    if target.is_dir():
        raise InputError(f"{target} is a directory, and a GGUF model is one file. Name a file, such as {target.name}.gguf.")
    if target.exists() and not replace:
        raise InputError(f"{target} exists. Name a new file, or replace it with --replace.")
    row = family_row(spec)
    words = vocabulary(tokenizer, spec) if tokenizer is not None else no_vocabulary()
    plan = _Plan(row, spec, chosen, importance or {})
    metadata: dict[str, Value] = {
        **metadata_of(row, spec),
        "general.name": name or spec.family,
        "general.file_type": chosen.number,
        "general.quantization_version": 2,
        **token_ids(spec),
        **words.metadata,
    }
    small = rope_tensors(spec)
    rows = [Stored(n, TYPES["F32"], tuple(t.shape)) for n, t in small.items()] + [stored for stored, _ in plan.rows()]
    target = Path(os.path.abspath(target))
    with directory_beside(target) as aside:
        file = aside / "model.gguf"
        with file.open("w+b") as stream:
            n_bytes = write_header(stream, metadata, rows)
            for stored, tensor in zip(rows, small.values(), strict=False):
                write_tensor(stream, stored, encode(stored.kind, tensor))
            written = stream.tell()
            stream.truncate(n_bytes)
            stream.flush()
            require_same(file, spec)
            stream.seek(written)
            for stored, raw in plan.encoded(state):
                write_tensor(stream, stored, raw)
        flush_to_disk(file)
        os.replace(file, target)
        flush_to_disk(target.parent)
    n_parameters = sum(math.prod(entry.shape) for entry in layout(spec))
    types = dict(Counter(stored.kind.name for stored in rows).most_common())
    notes = (*plan.notes(), *words.notes)
    return GgufReport(str(target), row.architecture, chosen.name, n_parameters, n_bytes, types, plan.fallbacks, notes)


class _Plan:
    """The tensors of a file in order, and how each is made."""

    def __init__(self, row: GgufFamily, spec: ModelSpec, precision: Precision, importance: Mapping[str, Tensor]) -> None:
        self.row, self.spec, self.precision, self.importance = row, spec, precision, importance
        self.entries = list(tensors(spec, row.weights))
        self.heads = row.heads(spec)
        self.fallbacks = 0
        self.of_part = {part.name: self._stored(entry, part.name, entry.stored_shape(part)) for entry, part in self._parts()}

    def _parts(self) -> Iterator[tuple[Entry, object]]:
        return ((entry, part) for entry in self.entries for part in entry.parts)

    def rows(self) -> Iterator[tuple[Stored, Entry]]:
        return ((self.of_part[part.name], entry) for entry, part in self._parts())

    def _stored(self, entry: Entry, name: str, shape: tuple[int, ...]) -> Stored:
        return Stored(name, self._kind(name, shape), shape)

    def _kind(self, name: str, shape: tuple[int, ...]) -> TensorType:
        *above, stem, ending = name.split(".")
        layer = int(above[1]) if above else None
        if len(shape) == 1 or ending == "bias" or stem in PLAIN:
            return TYPES["F32"]
        is_head = stem == self.row.weights.head or (self.spec.tied_embeddings and stem == self.row.weights.embed)
        n_experts = self.spec.moe.n_experts if self.spec.moe else 0
        place = Place(stem, layer, self.spec.n_layers, is_head, self.row.architecture, n_experts)
        kind = self.precision.choose(place)
        if shape[-1] % TYPES[kind].n_values and kind in NARROWER:
            self.fallbacks += 1
            kind = NARROWER[kind]
        if shape[-1] % TYPES[kind].n_values:
            self.fallbacks += 1
            kind = "F16"
        return TYPES[kind]

    def encoded(self, state: Mapping[str, Tensor]) -> Iterator[tuple[Stored, np.ndarray]]:
        """The bytes of every tensor, one at a time."""
        for entry in self.entries:
            tensor = require_finite(entry.canonical, state[entry.canonical])
            if self.spec.departures.norm_offset and entry.canonical.endswith("norm.weight"):
                tensor = tensor.float() + 1
            for name, part in write_entry(entry, tensor):
                stored = self.of_part[name]
                stem = name.rsplit(".", 2)[-2]
                if stem in self.heads:
                    part = pairs_from_halves(part, self.heads[stem])
                yield stored, encode(stored.kind, part, self.importance.get(entry.canonical))

    def notes(self) -> Iterator[str]:
        if self.fallbacks:
            yield (
                f"{self.fallbacks} matrices have rows that are no whole blocks of their type in {self.precision.name}, and are "
                "held in a larger one."
            )
        if self.row.architecture == "llama" and self.spec.sliding_window:
            yield "llama.cpp computes this architecture without the model's window: texts beyond it differ."


def describe(report: GgufReport) -> str:
    """One line."""
    each = ", ".join(f"{count} {name}" for name, count in report.types.items())
    return f"{report.file}: {report.architecture} in {report.precision}, {format_bytes(report.n_bytes)} ({each})."
