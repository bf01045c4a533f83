"""How ranks hold a tensor together: on a stage, in pieces, and of a piece some rows each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from twostroke.training.ranks import AXES, Ranks
from twostroke.training.whole import Cut, rows_of

Places = Mapping[str, int]
"""Numbers of a rank along some of ``ranks.AXES``."""


@dataclass(frozen=True)
class Holding:
    """How the ranks of a replica hold a tensor of ``shape``: those of one ``place``, such as a stage, and all if that is empty.
    Each of them along ``cut_axes`` has a piece by ``cut``, if there is one, and each along ``rows`` some rows of the piece.
    Along other axes they hold the same."""

    shape: tuple[int, ...]
    cut_axes: tuple[str, ...] = ()
    cut: Cut | None = None
    rows: tuple[str, ...] = ()
    place: tuple[tuple[str, int], ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """Those along which ranks hold different parts."""
        return tuple(axis for axis in AXES if axis in self.cut_axes or axis in self.rows)

    @property
    def is_divided(self) -> bool:
        return bool(self.axes)

    def is_at(self, ranks: Ranks) -> bool:
        """Whether this rank is at the tensor's place."""
        return all(ranks.at(axis) == number for axis, number in self.place)

    def shape_of(self, ranks: Ranks, places: Places) -> tuple[int, ...]:
        """The shape of what the rank at ``places`` holds."""
        shape = self.shape if self.cut is None else self.cut.piece_shape(*self._along_cut(ranks, places))
        if not self.rows:
            return shape
        first, end = rows_of(shape[0], *self._along_rows(ranks, places))
        return (end - first, *shape[1:])

    def local(self, whole: Tensor, ranks: Ranks, places: Places) -> Tensor:
        """What the rank at ``places`` holds of ``whole``."""
        piece = whole if self.cut is None else self.cut.piece(whole, *self._along_cut(ranks, places))
        if not self.rows:
            return piece
        first, end = rows_of(len(piece), *self._along_rows(ranks, places))
        return piece[first:end]

    def joined(self, held: Sequence[Tensor], ranks: Ranks) -> Tensor:
        """The whole of what all ranks hold, in their order."""
        pieces: dict[int, list[Tensor]] = {}
        for places, local in zip(ranks.places_along(self.axes), held, strict=True):
            pieces.setdefault(self._along_cut(ranks, places)[0], []).append(local)
        whole = [rows[0] if len(rows) == 1 else torch.cat(rows) for rows in pieces.values()]
        return whole[0] if self.cut is None else self.cut.joined(whole)

    def _along_cut(self, ranks: Ranks, places: Places) -> tuple[int, int]:
        """(number, ranks) of the rank at ``places`` among those that hold pieces."""
        return ranks.number_along(self.cut_axes, places), ranks.size(*self.cut_axes)

    def _along_rows(self, ranks: Ranks, places: Places) -> tuple[int, int]:
        return ranks.number_along(self.rows, places), ranks.size(*self.rows)


@dataclass(frozen=True)
class HeldPart:
    """A tensor that ranks hold by ``holding``, of which ``local`` is what this rank has; None if that is nothing."""

    local: Tensor | None
    holding: Holding
    dtype: torch.dtype
    device: torch.device
    is_of_replicas: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.holding.shape

    def described(self) -> HeldPart:
        """This without its values, for ranks that hold nothing of it."""
        return dataclasses.replace(self, local=None)

    def on(self, device: torch.device) -> HeldPart:
        """This where accelerators are ``device``."""
        return self if self.device.type == "cpu" else dataclasses.replace(self, device=device)

    def gather(self, ranks: Ranks) -> Tensor | None:
        held = []
        for places in ranks.places_along(self.holding.axes):
            holder, shape = ranks.rank_at(dict(self.holding.place) | dict(places)), self.holding.shape_of(ranks, places)
            if holder == ranks.rank and not ranks.is_first:
                assert self.local is not None
                if math.prod(shape):
                    dist.send(self.local.contiguous(), 0)
            elif ranks.is_first and holder == 0:
                assert self.local is not None
                held.append(self.local)
            elif ranks.is_first:
                held.append(torch.empty(shape, dtype=self.dtype, device=self.device))
                if math.prod(shape):
                    dist.recv(held[-1], holder)
        return self.holding.joined(held, ranks) if ranks.is_first else None
