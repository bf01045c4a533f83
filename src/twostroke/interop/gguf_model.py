"""Reads models from GGUF files: the spec by ``gguf_families``, the weights by canonical name, and the tokenizer."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from twostroke.core.errors import CorruptFileError
from twostroke.core.families import layout
from twostroke.core.families.experts import prediction_layers_left_out
from twostroke.core.families.weights import Entry, tensors
from twostroke.core.spec import ModelSpec
from twostroke.core.units import format_bytes
from twostroke.interop.gguf import GgufFile
from twostroke.interop.gguf_codes import coded_rows, read_rows
from twostroke.interop.gguf_families import ROPE_DIVISORS, ROPE_FACTORS, GgufFamily, names_in, row_of, spec_of
from twostroke.interop.gguf_metadata import Metadata
from twostroke.interop.gguf_parts import open_gguf
from twostroke.interop.gguf_tokenizer import read_tokenizer
from twostroke.interop.moved import Held, HeldTensor
from twostroke.interop.source import SourceModel, halves_from_pairs
from twostroke.model.families import read_entry
from twostroke.model.lazy_state import LazyState
from twostroke.model.published.gguf import KeptRows, storage_of
from twostroke.model.published.registry import holding


def read_gguf(path: Path, dtype: str = "auto") -> SourceModel:
    """The model and tokenizer in ``path``, which may be any of its parts. Quantised matrices are read in fp32, or in bf16 where
    ``dtype`` is "bf16" or "auto"; with "auto" those that our engine computes with as they are can be had so.

    Raises InputError for a missing part, CorruptFileError for a file that breaks the format or lacks something,
    UnsupportedFamilyError and ConfigError for what is not supported. All are raised before any weight is read.
    """
    file = open_gguf(path)
    metadata = Metadata(file)
    row = row_of(metadata)
    spec = spec_of(row, metadata)
    spec.require_buildable()
    quantised = {info.name: info for info in file.tensors.values() if info.kind.dtype is None}
    read_in = torch.bfloat16 if quantised and dtype in ("auto", "bf16") else torch.float32
    n_left_out = metadata.integer(f"{row.architecture}.nextn_predict_layers", 0)
    entries = {entry.canonical: entry for entry in tensors(spec, names_in(row, file))}
    state = LazyState(_readers(file, row, spec, entries.values(), read_in, n_left_out))
    held = _held(file, spec, entries, read_in)
    tokenizer, notes = read_tokenizer(metadata, spec), prediction_layers_left_out(n_left_out)
    if quantised:
        kept = _kept(file, row, spec, entries) if dtype == "auto" else None
        said = _what_was_quantised(file, kept)
        return SourceModel("GGUF", spec, state, "fp32", held, tokenizer, (said, *notes), "bf16", kept)
    types = {info.kind.name for info in file.tensors.values() if len(info.shape) > 1}
    exact = {frozenset(("F16",)): "fp16", frozenset(("BF16",)): "bf16"}.get(frozenset(types), "fp32")
    return SourceModel("GGUF", spec, state, exact, held, tokenizer, notes)


_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _held(file: GgufFile, spec: ModelSpec, entries: Mapping[str, Entry], read_in: torch.dtype) -> Held:
    """What reading every tensor takes: a copy of each, decoded where it is quantised."""
    tensors: dict[str, HeldTensor] = {}
    for entry in layout(spec):
        infos = [info for part in entries[entry.canonical].parts if (info := file.tensors.get(part.name)) is not None]
        decoded: Counter[str] = Counter()
        for info in infos:
            if info.kind.dtype is None:
                decoded[info.kind.name] += math.prod(info.shape)
        dtypes = {_DTYPES[info.kind.dtype or read_in] for info in infos}
        dtype = dtypes.pop() if len(dtypes) == 1 else "fp32"
        tensors[entry.canonical] = HeldTensor(math.prod(entry.shape), dtype, decoded, is_new=True)
    n_bytes = sum(info.n_bytes for info in file.tensors.values())
    return Held(n_bytes, n_bytes, tensors)


def _kept(file: GgufFile, row: GgufFamily, spec: ModelSpec, entries: Mapping[str, Entry]) -> KeptRows | None:
    """The blocks' matrices as they are; None where our engine would compute with the codes of none of them."""
    heads = row.heads(spec)
    rows = coded_rows(file, spec, entries, lambda name, order: _in_halves(heads, name, order))
    kinds, shapes = {name: each.kind for name, each in rows.items()}, {name: each.shape for name, each in rows.items()}
    kept = KeptRows(kinds, shapes, lambda name: read_rows(file, rows[name]))
    return kept if holding(list(layout(spec)), storage_of(kept.config)).scheme is not None else None


def _what_was_quantised(file: GgufFile, kept: KeptRows | None) -> str:
    """How many tensors were of which type, what they take in the file and in bf16, and what becomes of them."""
    found = [info for info in file.tensors.values() if info.kind.dtype is None]
    counts = Counter(info.kind.name for info in found).most_common()
    each = ", ".join(f"{count} {name}" for name, count in counts)
    n_values = sum(info.n_bytes // info.kind.n_bytes * info.kind.n_values for info in found)
    n_bytes = sum(info.n_bytes for info in found)
    said = (
        f"{len(found)} of {len(file.tensors)} tensors were quantised ({each}): {format_bytes(n_bytes)} in the file, "
        f"{format_bytes(2 * n_values)} in bf16. "
    )
    if kept is None:
        return said + "They were converted to the numbers that they stand for."
    return said + (
        f"The blocks' matrices, {format_bytes(sum(map(math.prod, kept.shapes.values())))}, are kept as they are, which other "
        "programs do not read: --dtype bf16 makes plain numbers of them."
    )


def _readers(
    file: GgufFile, row: GgufFamily, spec: ModelSpec, entries: Iterable[Entry], dtype: torch.dtype, n_left_out: int
) -> dict[str, Callable[[], Tensor]]:
    """A reader for each canonical tensor; ``n_left_out`` layers after the last are not read. Raises CorruptFileError for
    tensors that are missing, misshapen or unknown."""
    used = {ROPE_DIVISORS, *ROPE_FACTORS} if spec.positions == "rope" else set()
    heads = row.heads(spec)

    def read(entry: Entry, name: str) -> Tensor:
        tensor = file.read(name, dtype)
        if tensor.dim() < len(entry.shape):
            tensor = tensor.view(entry.shape)
        tensor = _in_halves(heads, name, tensor)
        if spec.departures.norm_offset and entry.canonical.endswith("norm.weight"):
            return tensor.float() - 1  # the converter adds the 1 that Gemma's norms do not store
        return tensor

    readers: dict[str, Callable[[], Tensor]] = {}
    for entry in entries:
        for part in entry.parts:
            info, shape = file.tensors.get(part.name), entry.stored_shape(part)
            if info is None:
                raise CorruptFileError(
                    f"{file.path} has no tensor {part.name!r}, which a model of its metadata needs. The file is incomplete; "
                    "download it again."
                )
            if info.shape != shape and info.shape != one_row(shape):
                raise CorruptFileError(
                    f"{file.path}: tensor {part.name!r} has shape {list(info.shape)}, but its metadata asks for {list(shape)}."
                )
            used.add(part.name)
        readers[entry.canonical] = partial(read_entry, entry, partial(read, entry))
    ignored = range(spec.n_layers, spec.n_layers + n_left_out)
    left_over = [name for name in file.tensors if name not in used and _layer_of(name) not in ignored]
    if left_over:
        raise CorruptFileError(
            f"{file.path} holds {len(left_over)} tensor(s) that its metadata does not explain, such as {left_over[0]!r:.80}. "
            "Leaving them out would change what the model computes."
        )
    return readers


def _in_halves(heads: Mapping[str, int], name: str, rows: Tensor) -> Tensor:
    """``rows`` of the tensor ``name``, from pairs to halves if it is one of ``heads``."""
    stem = name.rsplit(".", 2)[-2]
    return halves_from_pairs(rows, heads[stem]) if stem in heads else rows


def _layer_of(name: str) -> int:
    """The number of the layer that a tensor belongs to; -1: none."""
    found = re.match(r"blk\.([0-9]{1,9})\.", name)
    return int(found[1]) if found else -1


def one_row(shape: tuple[int, ...]) -> tuple[int, ...]:
    """``shape``, of a matrix of one row without its rows: llama.cpp's converter leaves out dimensions of 1."""
    return shape[1:] if len(shape) == 2 and shape[0] == 1 else shape
