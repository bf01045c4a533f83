"""The quantised matrices of a GGUF file as their bytes, in the order of a model directory's rows: nothing is decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from twostroke.core.errors import CorruptFileError
from twostroke.core.families import layout
from twostroke.core.families.weights import Entry
from twostroke.core.spec import ModelSpec
from twostroke.interop.gguf import GgufFile
from twostroke.model.families import held_order, stored_rows
from twostroke.model.published.gguf_blocks import BLOCKS
from twostroke.model.published.gguf_types import halves_are_finite


class Rows(NamedTuple):
    """Rows of a model directory's matrix: those of ``tensors``, one after another, at ``order`` (None: all as they are), all of
    one type. ``shape`` is (rows, bytes), with a dimension in front where the matrices of experts are stored together."""

    kind: str
    tensors: tuple[str, ...]
    order: np.ndarray | None
    shape: tuple[int, ...]


def coded_rows(
    file: GgufFile, spec: ModelSpec, entries: Mapping[str, Entry], turned: Callable[[str, Tensor], Tensor]
) -> dict[str, Rows]:
    """By stored name, the matrices of ``spec``'s blocks whose rows ``file`` holds in one quantised type. ``entries`` are the
    file's by canonical name, ``turned(name, rows)`` the rows of a tensor in the canonical order."""
    found: dict[str, Rows] = {}
    for ours in layout(spec):
        theirs = entries[ours.canonical]
        infos = [file.tensors[part.name] for part in theirs.parts]
        if ours.matrix is None or any(map(theirs.turns, theirs.parts)) or all(info.kind.dtype for info in infos):
            continue
        starts = np.cumsum([0, *(part.rows for part in theirs.parts)])
        numbered = []
        for part, start in zip(theirs.parts, starts, strict=False):
            rows = turned(part.name, torch.arange(int(start), int(start) + part.rows)[:, None])
            numbered.append(rows if theirs.copies == 1 else rows.unflatten(0, (theirs.copies, -1)))
        order = held_order(theirs, torch.cat(numbered, dim=0 if theirs.copies == 1 else 1))
        for part, rows in zip(ours.parts, stored_rows(ours, order), strict=True):
            flat = rows.reshape(-1).numpy()
            owner = np.searchsorted(starts, flat, side="right") - 1
            used = np.unique(owner)
            kinds = {infos[i].kind.name for i in used}
            if len(kinds) != 1 or infos[used[0]].kind.dtype is not None:
                continue
            lengths = [theirs.parts[i].rows for i in used]
            before = np.zeros(len(infos), np.int64)  # rows of those used that come before each
            before[used] = np.cumsum([0, *lengths[:-1]])
            index = flat - starts[owner] + before[owner]
            as_they_are = len(flat) == sum(lengths) and bool((index == np.arange(len(flat))).all())
            kind = kinds.pop()
            row_bytes = ours.shape[1] // BLOCKS[kind].n_values * BLOCKS[kind].n_bytes
            shape = (*rows.shape[:-1], row_bytes)
            found[part.name] = Rows(kind, tuple(infos[i].name for i in used), None if as_they_are else index, shape)
    return found


def read_rows(file: GgufFile, rows: Rows) -> memoryview | Tensor:
    """The bytes of ``rows``, of the file itself where they lie there so. Raises CorruptFileError for a scale that is not
    finite."""
    parts = []
    for name in rows.tensors:
        raw = file.raw(name)
        if not halves_are_finite(file.tensors[name].kind, raw):
            raise CorruptFileError(f"tensor {name!r} of {file.path} has scales that are not finite. Download it again.")
        parts.append(raw.reshape(-1, rows.shape[-1]))
    if rows.order is None and len(parts) == 1:
        return parts[0].reshape(-1).data
    whole = np.concatenate(parts) if len(parts) > 1 else parts[0]
    taken = whole if rows.order is None else whole[rows.order]
    return torch.from_numpy(taken).view(rows.shape)
