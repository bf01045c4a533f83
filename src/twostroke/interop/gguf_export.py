"""Writes a model directory as one GGUF file: weights, metadata and tokenizer, a tensor at a time."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from twostroke.core.families.weights import tensors
from twostroke.interop.export_targets import ExportSource
from twostroke.interop.gguf_encode import encode, rounding_of
from twostroke.interop.gguf_families import family_row
from twostroke.interop.gguf_fields import metadata_of, require_same, rope_tensors, token_ids
from twostroke.interop.gguf_mixes import INSTEAD, PLAIN, PRECISIONS, Place
from twostroke.interop.gguf_model import one_row
from twostroke.interop.gguf_vocabulary import no_vocabulary, vocabulary
from twostroke.interop.gguf_write import Stored, Value, write_header, write_tensor
from twostroke.interop.moved import WORDS, Held, Made, new_memory
from twostroke.interop.source import pairs_from_halves
from twostroke.model.families import write_entry
from twostroke.model.published.gguf_types import TYPES, TensorType


@torch.no_grad()  # inference_mode would forbid other threads to fill tensors that were made here
def write_gguf(source: ExportSource, out: Path, precision: str) -> tuple[str, ...]:
    """Write ``source`` as the file ``out`` in one of ``PRECISIONS``; returns notes. Memory: the largest tensor twice.

    Raises UnsupportedFamilyError or ConfigError for a model or a tokenizer that the format has no place for, before a weight is
    read; InputError for a weight beyond the numbers of its type.
    """
    spec, plan = source.spec, _Plan(source, precision)
    small = rope_tensors(spec)
    rows = plan.with_small(small)
    with out.open("w+b") as stream:
        n_bytes = write_header(stream, plan.metadata(out.stem), rows)
        for stored, tensor in zip(rows, small.values(), strict=False):
            write_tensor(stream, stored, encode(stored.kind, tensor))
        written = stream.tell()
        stream.truncate(n_bytes)
        stream.flush()
        require_same(out, spec)
        stream.seek(written)
        for stored, raw in plan.encoded(source.state):
            write_tensor(stream, stored, raw)
    return (*plan.notes(), *plan.words.notes)


def expect_gguf(source: ExportSource, held: Held, precision: str) -> Made:
    """What ``write_gguf`` will write, but for the length of the name in it. Raises its errors that need no weight."""
    plan = _Plan(source, precision)
    n_bytes = write_header(io.BytesIO(), plan.metadata(source.directory.stem), plan.with_small(rope_tensors(source.spec)))
    encoded: Counter[str] = Counter()
    for row in plan.rows:
        encoded[rounding_of(row.kind, source.importance is not None)] += math.prod(row.shape)
    encoded[WORDS] = sum(len(value) for value in plan.metadata("").values() if isinstance(value, list))
    in_codes = sum(row.kind.dtype is None for row in plan.rows)
    sizes = [row.n_bytes for row in plan.rows]
    return Made(n_bytes, encoded, in_codes, new_memory(sizes), max(sizes))


WINDOWLESS = ("llama", "phi3")
"""Architectures whose windows llama.cpp leaves out."""
LITE_LAYERS = (26, 27)
"""How many layers tell llama.cpp that a DeepSeek model does not compress its queries."""


class _Plan:
    """The tensors of a file in order, and how each is made."""

    def __init__(self, source: ExportSource, precision: str) -> None:
        self.spec = spec = source.spec
        self.row, self.precision, self.importance = family_row(spec), PRECISIONS[precision], source.importance or {}
        self.words = vocabulary(source.tokenizer, spec) if source.tokenizer is not None else no_vocabulary()
        self.entries = list(tensors(spec, self.row.weights))
        self.heads = self.row.heads(spec)
        self.larger: list[str] = []
        parts = ((part.name, one_row(entry.stored_shape(part))) for entry in self.entries for part in entry.parts)
        self.rows = [Stored(name, self._kind(name, shape), shape) for name, shape in parts]

    def metadata(self, name: str) -> dict[str, Value]:
        """Of a file called ``name``."""
        return {
            **metadata_of(self.row, self.spec),
            "general.name": name,
            "general.file_type": self.precision.number,
            "general.quantization_version": 2,
            **token_ids(self.spec),
            **self.words.metadata,
        }

    def with_small(self, small: Mapping[str, Tensor]) -> list[Stored]:
        """All rows of the file, those of ``small`` tensors first."""
        return [Stored(name, TYPES["F32"], tuple(tensor.shape)) for name, tensor in small.items()] + self.rows

    def _kind(self, name: str, shape: tuple[int, ...]) -> TensorType:
        *above, stem, ending = name.split(".")
        layer = int(above[1]) if above else None
        if len(shape) == 1 or ending == "bias" or stem in PLAIN:
            return TYPES["F32"]
        is_head = stem == self.row.weights.head or (self.spec.tied_embeddings and stem == self.row.weights.embed)
        n_experts = self.spec.moe.n_experts if self.spec.moe else 0
        place = Place(stem, layer, self.spec.n_layers, is_head, self.row.architecture, n_experts)
        kind = self.precision.choose(place)
        fitting = kind
        while shape[-1] % TYPES[fitting].n_values:
            fitting = INSTEAD.get(fitting, "F16")
        if fitting != kind:
            self.larger.append(fitting)
        return TYPES[fitting]

    def encoded(self, state: Mapping[str, Tensor]) -> Iterator[tuple[Stored, np.ndarray]]:
        """The bytes of every tensor, one at a time."""
        rows = iter(self.rows)
        for entry in self.entries:
            tensor = state[entry.canonical]
            if self.spec.departures.norm_offset and entry.canonical.endswith("norm.weight"):
                tensor = tensor.float() + 1
            weighed = self.importance.get(entry.canonical)
            for place, (name, part) in zip(entry.parts, write_entry(entry, tensor), strict=True):
                stored = next(rows)
                stem = name.rsplit(".", 2)[-2]
                if stem in self.heads:
                    part = pairs_from_halves(part, self.heads[stem])
                yield stored, encode(stored.kind, part, None if entry.turns(place) else weighed)

    def notes(self) -> Iterator[str]:
        moe = self.spec.moe
        if self.row.architecture == "olmoe" and self.spec.n_kv_heads < self.spec.n_heads:
            yield "llama.cpp does not open this architecture where key heads are fewer than query heads."
        if self.spec.mla is not None and self.spec.mla.q_lora_rank is None and self.spec.n_layers not in LITE_LAYERS:
            yield "llama.cpp opens models of this architecture without compressed queries at 26 or 27 layers alone."
        if moe is not None and moe.n_groups > 1 and not moe.correction_bias:
            yield "llama.cpp rates a group of experts by its two best scores, and this model by the best: its logits differ."
        if self.larger:
            counts = ", ".join(f"{count} in {name}" for name, count in Counter(self.larger).most_common())
            yield (
                f"{len(self.larger)} matrices have rows that are no whole blocks of their type in {self.precision.name}: they "
                f"are held in larger types, {counts}."
            )
        if self.row.architecture in WINDOWLESS and self.spec.sliding_window:
            yield "llama.cpp computes this architecture without the model's window: texts beyond it differ."
        if self.spec.rope.scaling == "yarn" and not self.spec.rope.truncate:
            yield "llama.cpp rounds the bounds of YaRN's blend to whole dimensions, and this model does not: its logits differ."
