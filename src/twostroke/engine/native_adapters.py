"""Adapters in the form that the native step reads: ``ts::Adapter``, with all their numbers in one block of memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from twostroke.engine import plan as p
from twostroke.engine.adapters import Part, Parts
from twostroke.engine.native_structs import CAdapter, CAdapterAt, CAdapterPart
from twostroke.kernels.native_matrix import PANEL_OUTPUTS, NativePair

_ALIGNMENT = 64


class NativeAdapter:
    """An adapter of ``plan``, valid while this object lives. ``width``: the most numbers that an operation's A makes of a row.

    A's of one operation are one matrix, an A after another. Matrices lie in panels of ``PANEL_OUTPUTS`` outputs, each of which
    has that many numbers for every input in turn, zeros behind the last output (``ts::Kernels::thin``).
    """

    def __init__(self, plan: p.Plan, parts: Parts) -> None:
        adapted = {
            i: list(_pieces(op, parts[op.module]))
            for i, op in enumerate(plan.ops)
            if isinstance(op, p.Adaptable) and op.module in parts
        }
        inputs = {i: torch.cat([part.a for part in parts[plan.ops[i].module]]) for i in adapted}  # type: ignore[union-attr]
        matrices = [m for i, pieces in adapted.items() for m in (inputs[i], *(piece.b for piece in pieces))]
        sizes, dtype = [_padded(m) for m in matrices], matrices[0].dtype
        self._numbers = torch.zeros(sum(sizes) + _ALIGNMENT, dtype=dtype)
        skipped = -self._numbers.data_ptr() % _ALIGNMENT // dtype.itemsize
        places = iter(_packed(self._numbers[skipped:], matrices, sizes))
        self._at = (CAdapterAt * len(plan.ops))()
        for i, pieces in adapted.items():
            at = self._at[i]
            at.packed, at.n, at.n_parts = next(places), len(inputs[i]), len(pieces)
            for j, piece in enumerate(pieces):
                at.parts[j] = CAdapterPart(
                    next(places), piece.begin, len(piece.b), piece.first, piece.b.shape[1], piece.second, 0
                )
        self.width = max(at.n for at in self._at)
        self.c = CAdapter(ctypes.addressof(self._at), int(dtype is torch.bfloat16))


class _Piece(NamedTuple):
    """B of a part, or of its gate or up alone: the library has these apart (``second``: up). ``first``: its A's place."""

    begin: int
    b: Tensor
    first: int
    second: bool


def _pieces(op: p.Adaptable, parts: tuple[Part, ...]) -> Iterator[_Piece]:
    gate_rows = op.matrix.gate.n_rows if isinstance(op, p.MlpUp) and isinstance(op.matrix, NativePair) else None
    first = 0
    for part in parts:
        in_gate = len(part.b) if gate_rows is None else max(0, gate_rows - part.begin)
        if in_gate > 0:
            yield _Piece(part.begin, part.b[:in_gate], first, False)
        if in_gate < len(part.b):
            yield _Piece(part.begin + in_gate - (gate_rows or 0), part.b[in_gate:], first, True)
        first += len(part.a)


def _padded(matrix: Tensor) -> int:
    """Numbers that it takes: whole panels, and whole cache lines."""
    n, k = matrix.shape
    numbers = -(-n // PANEL_OUTPUTS) * PANEL_OUTPUTS * k
    line = _ALIGNMENT // matrix.dtype.itemsize
    return -(-numbers // line) * line


def _packed(numbers: Tensor, matrices: list[Tensor], sizes: list[int]) -> list[int]:
    """Addresses of ``matrices`` in panels, written into ``numbers`` one after another."""
    addresses, begin = [], 0
    for matrix, size in zip(matrices, sizes, strict=True):
        n, k = matrix.shape
        whole = n // PANEL_OUTPUTS
        panels = numbers[begin : begin + -(-n // PANEL_OUTPUTS) * PANEL_OUTPUTS * k].view(-1, k, PANEL_OUTPUTS)
        panels[:whole] = matrix[: whole * PANEL_OUTPUTS].view(whole, PANEL_OUTPUTS, k).transpose(1, 2)
        if n % PANEL_OUTPUTS:
            panels[whole, :, : n % PANEL_OUTPUTS] = matrix[whole * PANEL_OUTPUTS :].T
        addresses.append(panels.data_ptr())
        begin += size
    return addresses
