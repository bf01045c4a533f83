"""Optimizer state on disk: a step reads it block by block, updates each block, and writes it back.

An update of AdamW, Adam or SGD looks at one number of each tensor at a time. So a tensor is cut into pieces, where its bits do
not depend on it: at multiples of the pieces that stochastic rounding takes, which are whole cache lines, as fused kernels share
them out. Muon and LAMB update whole matrices, so their pieces are whole. The order is the one in which the optimizer would take
them, so stochastic rounding draws the same numbers (tests/training/test_offload.py compares runs bit by bit).

A thread reads the next block and writes the one before while a block is updated; the first block of a step is read while the
step before ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twostroke.core.policy import OFFLOAD_BLOCK
from twostroke.training.scratch import ScratchFile
from twostroke.training.stochastic_rounding import PIECE

_LINE = 64
"""Bytes at a multiple of which each piece's state begins."""


@dataclass(frozen=True, eq=False)
class _Piece:
    """``leaf`` shares memory with the elements of ``parameter`` from ``start`` on, and its gradient with theirs."""

    leaf: Tensor
    parameter: Tensor
    start: int


@dataclass(frozen=True)
class _Kept:
    """State ``name`` of a parameter: where it is in the file."""

    name: str
    offset: int
    dtype: torch.dtype


class OffloadedUpdates:
    """Steps a torch optimizer whose state lies in ``file``, between steps in ``file`` alone.

    ``update`` updates the parameters of the optimizer's groups as they then are. ``whole`` says that it updates whole tensors,
    which cannot be cut. ``n_moments`` is the largest number of state tensors that a parameter has.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        update: Callable[[], None],
        whole: bool,
        n_moments: int,
        file: ScratchFile,
    ) -> None:
        self._optimizer, self._update, self._file = optimizer, update, file
        groups = optimizer.param_groups
        self._blocks = [(number, block) for number, group in enumerate(groups) for block in _blocks(group["params"], whole)]
        self._pieces: dict[Tensor, list[_Piece]] = {parameter: [] for group in groups for parameter in group["params"]}
        for _, block in self._blocks:
            for piece in block:
                self._pieces[piece.parameter].append(piece)
        self._kept: dict[Tensor, list[_Kept]] = {}
        # Of each leaf that has been updated: the number of steps, which stays in memory.
        self._counts: dict[Tensor, dict[str, Tensor]] = {}
        offset = file.reserve(sum(n_moments * _aligned(parameter.nbytes) for parameter in self._pieces))
        self._offsets: dict[Tensor, int] = {}
        for parameter in self._pieces:
            self._offsets[parameter] = offset
            offset += n_moments * _aligned(parameter.nbytes)
        largest = max(sum(n_moments * _aligned(piece.leaf.nbytes) for piece in pieces) for _, pieces in self._blocks)
        self._buffers = [torch.empty(largest, dtype=torch.uint8) for _ in range(min(2, len(self._blocks)))]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="optimizer state")
        self._first: Future[int] | None = None  # the reading ahead of the next step's first block

    @torch.no_grad()
    def step(self) -> None:
        groups = self._optimizer.param_groups
        writes: list[Future[None]] = []
        reading = self._first or self._thread.submit(self._read, 0)
        try:
            for number, (group, pieces) in enumerate(self._blocks):
                # What was written before it is on disk too, because one thread does all in turn.
                self._file.read_bytes += reading.result()
                if number + 1 < len(self._blocks):
                    reading = self._thread.submit(self._read, number + 1)
                for piece, state in self._views(number):
                    if state:
                        self._optimizer.state[piece.leaf] = self._counts[piece.leaf] | state
                self._optimizer.param_groups = [{**groups[group], "params": [piece.leaf for piece in pieces]}]
                self._update()
                for piece in pieces:
                    writes += self._keep(piece, self._optimizer.state.pop(piece.leaf, {}))
        finally:
            self._optimizer.param_groups = groups
            self._optimizer.state.clear()
            self._first = None
        for write in writes:
            write.result()
        self._first = self._thread.submit(self._read, 0)

    def _views(self, number: int) -> Iterator[tuple[_Piece, dict[str, Tensor]]]:
        """Each piece of a block with its state in the block's buffer; without any before its first update."""
        buffer, at = self._buffers[number % len(self._buffers)], 0
        for piece in self._blocks[number][1]:
            state: dict[str, Tensor] = {}
            for kept in self._kept_of(piece):
                n_bytes = piece.leaf.numel() * kept.dtype.itemsize
                state[kept.name] = buffer[at : at + n_bytes].view(kept.dtype).view(piece.leaf.shape)
                at += _aligned(n_bytes)
            yield piece, state

    def _read(self, number: int) -> int:
        """Read the state of a block into its buffer, and return its bytes."""
        n_bytes = 0
        for piece, state in self._views(number):
            for kept in self._kept_of(piece):
                self._file.read(kept.offset + piece.start * kept.dtype.itemsize, state[kept.name])
                n_bytes += state[kept.name].nbytes
        return n_bytes

    def _kept_of(self, piece: _Piece) -> list[_Kept]:
        return self._kept.get(piece.parameter, []) if piece.leaf in self._counts else []

    def _keep(self, piece: _Piece, state: Mapping[str, Any]) -> list[Future[None]]:
        """Write what an update left as the state of a piece, in the background."""
        present = {name: value for name, value in state.items() if value is not None}
        self._counts[piece.leaf] = {name: value for name, value in present.items() if not value.dim()}
        places = self._places(piece.parameter, {name: value for name, value in present.items() if value.dim()})
        return [
            self._thread.submit(self._file.write, kept.offset + piece.start * kept.dtype.itemsize, present[kept.name])
            for kept in places
        ]

    def _places(self, parameter: Tensor, state: Mapping[str, Tensor]) -> list[_Kept]:
        """Where the state of ``parameter`` is: what its first update made, in that order."""
        if parameter not in self._kept and state:
            first, each = self._offsets[parameter], _aligned(parameter.nbytes)
            self._kept[parameter] = [
                _Kept(name, first + number * each, value.dtype) for number, (name, value) in enumerate(state.items())
            ]
        return self._kept.get(parameter, [])

    def first_leaves(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter, and the leaf that its elements begin in; the others follow in their order."""
        for parameter, pieces in self._pieces.items():
            yield parameter, pieces[0].leaf

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._pieces

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of ``parameter`` as the optimizer names it, in mapped memory."""
        shape = tuple(parameter.shape)
        moments = {kept.name: self._file.mapped(kept.offset, kept.dtype, shape) for kept in self._kept.get(parameter, ())}
        return self._counts.get(self._pieces[parameter][0].leaf, {}) | moments

    def load_state(self, states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Take ``states`` in the place of what was kept, by parameter. What has none is as before its first update."""
        if self._first is not None:
            self._first.result()
            self._first = None
        self._kept = {parameter: kept for parameter, kept in self._kept.items() if parameter in states}
        self._counts.clear()
        for parameter, state in states.items():
            for piece in self._pieces[parameter]:
                elements = slice(piece.start, piece.start + piece.leaf.numel())
                for write in self._keep(
                    piece,
                    {name: value.reshape(-1)[elements] if value.dim() else value.clone() for name, value in state.items()},
                ):
                    write.result()

    @property
    def buffer_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _LINE) * _LINE


def _blocks(parameters: Iterable[Tensor], whole: bool) -> list[list[_Piece]]:
    """Pieces of ``parameters`` in their order, in blocks of at most ``OFFLOAD_BLOCK`` elements. Whole tensors may have more."""
    blocks: list[list[_Piece]] = []
    room = 0
    for parameter in parameters:
        start, n = 0, parameter.numel()
        while start < n:
            taken = n - start
            if taken > room and not whole:
                taken = room // PIECE * PIECE
            if taken > room or taken == 0:
                blocks.append([])
                room = OFFLOAD_BLOCK
                taken = n - start if whole else min(n - start, OFFLOAD_BLOCK)
            blocks[-1].append(_piece(parameter, start, taken))
            start, room = start + taken, room - taken
    return blocks


def _piece(parameter: Tensor, start: int, n: int) -> _Piece:
    if n == parameter.numel():
        return _Piece(parameter, parameter, 0)
    assert parameter.grad is not None
    leaf = parameter.view(-1)[start : start + n].detach()
    leaf.grad = parameter.grad.view(-1)[start : start + n]
    return _Piece(leaf, parameter, start)


class StateInTurn(dict[str, Any]):
    """State of which some tensors are mapped from ``file``. Each is verified when it is read, and what reading it took of
    memory is given back when the next one is."""

    def __init__(self, state: Mapping[str, Any], file: ScratchFile) -> None:
        super().__init__(state)
        self._file = file
        self._last: Tensor | None = None

    def __getitem__(self, name: str) -> Any:
        if self._last is not None:
            self._file.unmap(self._last)
            self._last = None
        found = super().__getitem__(name)
        if isinstance(found, Tensor) and self._file.holds(found):
            self._file.verify(found)
            self._last = found
        return found
