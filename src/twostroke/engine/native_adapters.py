"""Adapters in the form that the native step reads: ``ts::Adapter``, with all their numbers in one block of memory."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.core.errors import CapacityError
from twostroke.core.schemes import ADAPTER_CODES
from twostroke.engine import plan as p
from twostroke.engine.adapters import Part, Parts
from twostroke.engine.native_structs import CAdapter, CAdapterAt, CAdapterPart
from twostroke.kernels.native_library import library
from twostroke.kernels.native_matrix import PANEL_OUTPUTS, NativePair, native_columns

_LINE_BYTES = 64
_WIDTH_MULTIPLE = 32  # of what is rounded together
_CODE_ZERO = 128


class _Form(NamedTuple):
    """How the library holds an adapter: its number (``ts::AdapterForm``), the type of a packed number, how many neighbouring
    inputs are a word, and what stands for 0."""

    number: int
    dtype: torch.dtype
    together: int
    zero: int


_FORMS = {
    "fp32": _Form(0, torch.float32, 1, 0),
    ADAPTER_CODES: _Form(1, torch.uint8, 4, _CODE_ZERO),
}


class NativeAdapter:
    """An adapter of ``plan`` in numbers of type ``element``, valid while this object lives. ``width``: the most numbers that an
    operation's A makes of a row, rounded up as the step has them. Raises CapacityError if it does not fit in memory.

    A's of one operation are one matrix, an A after another, each of whole words of rows. Matrices lie in panels of
    ``PANEL_OUTPUTS`` outputs, each of which has that many words of neighbouring inputs in turn, and zeros behind the last
    output and input (``ts::Kernels::thin_f32``). Codes of a rank share a scale in A and one in B, whose product is the rank's.
    """

    def __init__(self, plan: p.Plan, parts: Parts, element: str) -> None:
        form = _FORMS[element]
        adapted = {
            i: _Packed.of(op, parts[op.module], form)
            for i, op in enumerate(plan.ops)
            if isinstance(op, p.Adaptable) and op.module in parts
        }
        matrices = [matrix for at in adapted.values() for matrix in (at.joined, *(piece.b for piece in at.pieces))]
        addresses = iter(self._pack(matrices, form))
        self._scales = [at.scales for at in adapted.values()]
        self._at = (CAdapterAt * len(plan.ops))()
        for i, (joined, scales, pieces) in adapted.items():
            at = self._at[i]
            at.packed, at.n, at.n_parts = next(addresses), len(joined), len(pieces)
            at.scales = None if scales is None else scales.data_ptr()
            for j, (begin, b, first, second) in enumerate(pieces):
                at.parts[j] = CAdapterPart(next(addresses), begin, len(b), first, b.shape[1], second, 0)
        self.width = -(-max(at.n for at in self._at) // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
        self.c = CAdapter(ctypes.addressof(self._at), form.number)
        self._firsts: dict[int, tuple[CAdapter, ctypes.Array[CAdapterAt]]] = {}

    def first(self, n: int) -> CAdapter:
        """The same numbers, for a plan of the first ``n`` operations and two more without adapters (``Plan.first``)."""
        if n not in self._firsts:
            at = (CAdapterAt * (n + 2))()
            ctypes.memmove(at, self._at, n * ctypes.sizeof(CAdapterAt))
            self._firsts[n] = CAdapter(ctypes.addressof(at), self.c.form), at
        return self._firsts[n][0]

    def _pack(self, matrices: list[Tensor], form: _Form) -> list[int]:
        """``matrices`` in panels, one after another in one block of the library's large pages. Their addresses."""
        loaded, (_, dtype, together, zero) = library(), form
        assert loaded is not None
        line = _LINE_BYTES // dtype.itemsize
        shapes = [(-(-n // PANEL_OUTPUTS), -(-k // together), PANEL_OUTPUTS, together) for n, k in (m.shape for m in matrices)]
        sizes = [-(-math.prod(shape) // line) * line for shape in shapes]
        n_bytes = sum(sizes) * dtype.itemsize
        address = loaded.ts_allocate(n_bytes)
        if not address:
            raise CapacityError(f"an adapter of {n_bytes} bytes does not fit in memory.")
        weakref.finalize(self, loaded.ts_release, address)
        numbers, addresses = torch.frombuffer((ctypes.c_char * n_bytes).from_address(address), dtype=dtype), []
        for matrix, shape, place in zip(matrices, shapes, numbers.split(sizes), strict=True):
            (n, k), (n_panels, n_words, _, _) = matrix.shape, shape
            padded = F.pad(matrix, (0, n_words * together - k, 0, n_panels * PANEL_OUTPUTS - n), value=zero)
            by_panel = padded.view(n_panels, PANEL_OUTPUTS, n_words, together).transpose(1, 2)
            place[: math.prod(shape)].view(shape).copy_(by_panel)
            addresses.append(place.data_ptr())
        return addresses


class _Piece(NamedTuple):
    """B of a part, or of its gate or up alone: the library has these apart (``second``: up). ``first``: its A's place."""

    begin: int
    b: Tensor
    first: int
    second: bool


class _Packed(NamedTuple):
    """What an adapter has beside one operation: A of all parts, codes' scales of the ranks, and every B."""

    joined: Tensor
    scales: Tensor | None
    pieces: list[_Piece]

    @classmethod
    def of(cls, op: p.Adaptable, parts: tuple[Part, ...], form: _Form) -> _Packed:
        wide = [-len(part.a) % form.together for part in parts]  # whole words of ranks
        a, b = ([F.pad(part.a, (0, 0, 0, more)) for part, more in zip(parts, wide, strict=True)], [part.b for part in parts])
        scales = None
        if form.dtype is torch.uint8:
            coded_a, coded_b = [_codes(m) for m in a], [_codes(m.T) for m in b]
            a, b = [codes for codes, _ in coded_a], [codes.T.contiguous() for codes, _ in coded_b]
            of_b = [F.pad(scale, (0, more)) for (_, scale), more in zip(coded_b, wide, strict=True)]
            scales = torch.cat([x * y for (_, x), y in zip(coded_a, of_b, strict=True)])
            scales = F.pad(scales, (0, -len(scales) % PANEL_OUTPUTS))
        return cls(torch.cat(a), scales, list(_pieces(op, parts, a, b)))


def _codes(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Codes as the library packs them, and a scale a row."""
    codes, scale = native_columns(matrix)
    return codes.view(torch.uint8) ^ _CODE_ZERO, scale


def _pieces(op: p.Adaptable, parts: tuple[Part, ...], all_a: list[Tensor], all_b: list[Tensor]) -> Iterator[_Piece]:
    gate_rows = op.matrix.gate.n_rows if isinstance(op, p.MlpUp) and isinstance(op.matrix, NativePair) else None
    first = 0
    for part, a, b in zip(parts, all_a, all_b, strict=True):
        in_gate = len(b) if gate_rows is None else max(0, gate_rows - part.begin)
        if in_gate > 0:
            yield _Piece(part.begin, b[:in_gate], first, False)
        if in_gate < len(b):
            yield _Piece(part.begin + in_gate - (gate_rows or 0), b[in_gate:], first, True)
        first += len(a)
