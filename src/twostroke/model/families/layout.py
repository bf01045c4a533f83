"""How a family stores its weights: for each canonical tensor, the stored tensors whose rows it is made of.

The table is data, so both directions, the strict check of names and shapes, and the count of bytes follow from it, and a
model larger than memory is converted one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from twostroke.core.spec import ModelSpec


@dataclass(frozen=True)
class Part:
    """One stored tensor: its name on disk and how many rows of the canonical tensor it holds."""

    name: str
    rows: int


@dataclass(frozen=True)
class Entry:
    """One canonical tensor. ``transposed`` where the family stores (inputs, outputs), as GPT-2's Conv1D does."""

    canonical: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    transposed: bool = False

    def stored_shape(self, part: Part) -> tuple[int, ...]:
        shape = (part.rows, *self.shape[1:])
        return shape[::-1] if self.transposed else shape


Layout = Callable[[ModelSpec], Iterator[Entry]]


def whole(canonical: str, stored: str, *shape: int, transposed: bool = False) -> Entry:
    """A canonical tensor that is one stored tensor."""
    return Entry(canonical, shape, (Part(stored, shape[0]),), transposed)


def read_entry(entry: Entry, get: Callable[[str], Tensor]) -> Tensor:
    """The canonical tensor of ``entry`` from stored ones. A single untransposed part is returned as it is, without a copy."""
    tensors = [get(part.name).T if entry.transposed else get(part.name) for part in entry.parts]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def write_entry(entry: Entry, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(stored name, stored tensor) for each part of ``entry``: the inverse of ``read_entry``."""
    start = 0
    for part in entry.parts:
        piece = tensor[start : start + part.rows]
        yield part.name, piece.T if entry.transposed else piece
        start += part.rows
