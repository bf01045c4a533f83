"""Adapters in the form that the native step reads: ``ts::Adapter``, with all their numbers in one block of memory."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.engine import plan as p
from twostroke.engine.adapters import Part, Parts
from twostroke.engine.native_structs import CAdapter, CAdapterAt, CAdapterPart
from twostroke.kernels.native_matrix import PANEL_OUTPUTS, NativePair

_LINE_BYTES = 64
_WIDTH_MULTIPLE = 32  # of what is rounded to bf16 together


class NativeAdapter:
    """An adapter of ``plan``, valid while this object lives. ``width``: the most numbers that an operation's A makes of a row,
    rounded up as the step has them.

    A's of one operation are one matrix, an A after another, each of an even number of rows. Matrices lie in panels of
    ``PANEL_OUTPUTS`` outputs, each of which has that many numbers for every input in turn, in bf16 pairs of inputs, and zeros
    behind the last output and input (``ts::Kernels::thin_f32``).
    """

    def __init__(self, plan: p.Plan, parts: Parts) -> None:
        adapted = {
            i: (_joined(parts[op.module]), list(_pieces(op, parts[op.module])))
            for i, op in enumerate(plan.ops)
            if isinstance(op, p.Adaptable) and op.module in parts
        }
        matrices = [matrix for joined, pieces in adapted.values() for matrix in (joined, *(piece.b for piece in pieces))]
        self._numbers, addresses = _packed(matrices)
        places = iter(addresses)
        self._at = (CAdapterAt * len(plan.ops))()
        for i, (joined, pieces) in adapted.items():
            at = self._at[i]
            at.packed, at.n, at.n_parts = next(places), len(joined), len(pieces)
            for j, (begin, b, first, second) in enumerate(pieces):
                at.parts[j] = CAdapterPart(next(places), begin, len(b), first, b.shape[1], second, 0)
        self.width = -(-max(at.n for at in self._at) // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
        self.c = CAdapter(ctypes.addressof(self._at), int(self._numbers.dtype is torch.bfloat16))


class _Piece(NamedTuple):
    """B of a part, or of its gate or up alone: the library has these apart (``second``: up). ``first``: its A's place."""

    begin: int
    b: Tensor
    first: int
    second: bool


def _even(n: int) -> int:
    return n + n % 2


def _joined(parts: tuple[Part, ...]) -> Tensor:
    """A of all parts."""
    return torch.cat([F.pad(part.a, (0, 0, 0, len(part.a) % 2)) for part in parts])


def _pieces(op: p.Adaptable, parts: tuple[Part, ...]) -> Iterator[_Piece]:
    gate_rows = op.matrix.gate.n_rows if isinstance(op, p.MlpUp) and isinstance(op.matrix, NativePair) else None
    first = 0
    for part in parts:
        in_gate = len(part.b) if gate_rows is None else max(0, gate_rows - part.begin)
        if in_gate > 0:
            yield _Piece(part.begin, part.b[:in_gate], first, False)
        if in_gate < len(part.b):
            yield _Piece(part.begin + in_gate - (gate_rows or 0), part.b[in_gate:], first, True)
        first += _even(len(part.a))


def _packed(matrices: list[Tensor]) -> tuple[Tensor, list[int]]:
    """``matrices`` in panels, one after another in one block of large pages, and their addresses."""
    dtype = matrices[0].dtype
    together, line = (2 if dtype is torch.bfloat16 else 1), _LINE_BYTES // dtype.itemsize
    shapes = [(-(-n // PANEL_OUTPUTS), -(-k // together), PANEL_OUTPUTS, together) for n, k in (m.shape for m in matrices)]
    sizes = [-(-math.prod(shape) // line) * line for shape in shapes]
    block = mmap.mmap(-1, sum(sizes) * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            block.madvise(mmap.MADV_HUGEPAGE)
    numbers, addresses = torch.frombuffer(block, dtype=dtype), []
    for matrix, shape, place in zip(matrices, shapes, numbers.split(sizes), strict=True):
        (n, k), (n_panels, n_words, _, _) = matrix.shape, shape
        padded = F.pad(matrix, (0, n_words * together - k, 0, n_panels * PANEL_OUTPUTS - n))
        by_panel = padded.view(n_panels, PANEL_OUTPUTS, n_words, together).transpose(1, 2)
        place[: math.prod(shape)].view(shape).copy_(by_panel)
        addresses.append(place.data_ptr())
    return numbers, addresses
