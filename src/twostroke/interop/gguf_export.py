"""Writes a model directory as one GGUF file: weights, metadata and tokenizer, a tensor at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from twostroke.core.families.weights import tensors
from twostroke.core.spec import ModelSpec
from twostroke.interop.export_targets import ExportSource
from twostroke.interop.gguf_encode import encode
from twostroke.interop.gguf_families import GgufFamily, family_row
from twostroke.interop.gguf_fields import metadata_of, require_same, rope_tensors, token_ids
from twostroke.interop.gguf_mixes import INSTEAD, PLAIN, PRECISIONS, Place, Precision
from twostroke.interop.gguf_model import one_row
from twostroke.interop.gguf_vocabulary import no_vocabulary, vocabulary
from twostroke.interop.gguf_write import Stored, Value, write_header, write_tensor
from twostroke.interop.source import pairs_from_halves
from twostroke.model.families import write_entry
from twostroke.model.published.gguf_types import TYPES, TensorType


@torch.no_grad()  # inference_mode would forbid other threads to fill tensors that were made here
def write_gguf(source: ExportSource, out: Path, precision: str) -> tuple[str, ...]:
    """Write ``source`` as the file ``out`` in one of ``PRECISIONS``; returns notes. Memory: the largest tensor twice.

    Raises UnsupportedFamilyError or ConfigError for a model or a tokenizer that the format has no place for, before a weight is
    read; InputError for a weight beyond the numbers of its type.
    """
    spec = source.spec
    chosen, row = PRECISIONS[precision], family_row(spec)
    words = vocabulary(source.tokenizer, spec) if source.tokenizer is not None else no_vocabulary()
    plan = _Plan(row, spec, chosen, source.importance or {})
    metadata: dict[str, Value] = {
        **metadata_of(row, spec),
        "general.name": out.stem,
        "general.file_type": chosen.number,
        "general.quantization_version": 2,
        **token_ids(spec),
        **words.metadata,
    }
    small = rope_tensors(spec)
    rows = [Stored(name, TYPES["F32"], tuple(tensor.shape)) for name, tensor in small.items()] + plan.rows
    with out.open("w+b") as stream:
        n_bytes = write_header(stream, metadata, rows)
        for stored, tensor in zip(rows, small.values(), strict=False):
            write_tensor(stream, stored, encode(stored.kind, tensor))
        written = stream.tell()
        stream.truncate(n_bytes)
        stream.flush()
        require_same(out, spec)
        stream.seek(written)
        for stored, raw in plan.encoded(source.state):
            write_tensor(stream, stored, raw)
    return (*plan.notes(), *words.notes)


WINDOWLESS = ("llama", "phi3")
"""Architectures whose windows llama.cpp leaves out."""
LITE_LAYERS = (26, 27)
"""How many layers tell llama.cpp that a DeepSeek model does not compress its queries."""


class _Plan:
    """The tensors of a file in order, and how each is made."""

    def __init__(self, row: GgufFamily, spec: ModelSpec, precision: Precision, importance: Mapping[str, Tensor]) -> None:
        self.row, self.spec, self.precision, self.importance = row, spec, precision, importance
        self.entries = list(tensors(spec, row.weights))
        self.heads = row.heads(spec)
        self.larger: list[str] = []
        parts = ((part.name, one_row(entry.stored_shape(part))) for entry in self.entries for part in entry.parts)
        self.rows = [Stored(name, self._kind(name, shape), shape) for name, shape in parts]

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
