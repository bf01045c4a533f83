"""Muon and LAMB where ranks hold pieces of the matrices: each matrix is updated whole, by the rank of its replica that owns it.

Orthogonalising, and a matrix's length, need all of it. So a rank's piece of weight and gradient travels to the owner, which
updates the matrix as one process would, and the new pieces travel back. Owners take turns in the order of the matrices, and
keep the optimizer's state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from twostroke.training.exchanges import all_to_all
from twostroke.training.holding import HeldPart, Holding, Places
from twostroke.training.ranked_masters import DividedMasters
from twostroke.training.ranks import Part


class OwnedMatrices:
    """The optimizer of the masters by ``names``. ``parts`` are (key, rows) of the matrices that each packs, in order. ``make``
    makes the optimizer of a master's matrices. ``kept`` is what it keeps of each, by name: tensors of the matrix's shape, and
    numbers with their device.

    It has ``param_groups`` and ``step`` as torch's optimizers have.
    """

    def __init__(
        self,
        masters: DividedMasters,
        parts: Mapping[str, Sequence[tuple[str, int]]],
        make: Callable[[str, list[Tensor]], torch.optim.Optimizer],
        kept: Mapping[str, torch.device | None],
    ) -> None:
        self._masters, self._parts, self._names = masters, parts, list(parts)
        masters.owned = frozenset(self._names)
        ranks = masters.ranks
        self._ranks, self._places = ranks, ranks.places_along(masters.axes)
        self._n, self._own = len(self._places), ranks.at(*masters.axes)
        self._group = ranks.group(*masters.axes)
        self._device = next(iter(masters.weights.values())).device
        self._none = torch.empty(0, device=self._device)
        # A leaf for each matrix of an owned master; its memory is there during its update alone.
        self._leaves = {
            name: [torch.empty(0, 0, device=self._device) for _ in parts[name]]
            for number, name in enumerate(self._names)
            if self._owner(number) == self._own
        }
        self._kept = dict(kept)
        self._optimizers = {name: make(name, leaves) for name, leaves in self._leaves.items()}
        rate = make(self._names[0], [torch.empty(1, 1)]).param_groups[0]["lr"]
        self.param_groups: list[dict[str, Any]] = [{"params": [], "lr": rate}]

    def _owner(self, number: int) -> int:
        return number % self._n

    @torch.no_grad()
    def step(self) -> None:
        for start in range(0, len(self._names), self._n):
            self._round(self._names[start : start + self._n])

    def _round(self, names: Sequence[str]) -> None:
        """Update the matrices ``names``, the i-th on rank i."""
        mine = names[self._own] if self._own < len(names) else None
        local = {name: (self._masters.weights[name], self._masters.gradients[name]) for name in names}
        own = self._places[self._own]
        sent = [torch.cat([t.reshape(-1) for t in local[name] if self._sends(name, own)] or [self._none]) for name in names]
        shapes = [] if mine is None else [self._shape(mine, places) for places in self._places if self._sends(mine, places)]
        received = self._exchanged(
            torch.cat(sent),
            [t.numel() for t in sent],
            [0 if mine is None or not self._sends(mine, p) else 2 * math.prod(self._shape(mine, p)) for p in self._places],
        )
        updated = self._none
        if mine is not None:
            holding = self._masters.holdings[mine]
            pairs = received.split([2 * math.prod(shape) for shape in shapes])
            both = [pair.view(2, *shape) for pair, shape in zip(pairs, shapes, strict=True)]
            weight, gradient = (holding.joined([pair[i] for pair in both], self._ranks) for i in range(2))
            self._update(mine, weight, gradient)
            updated = torch.cat([holding.local(weight, self._ranks, places).reshape(-1) for places in self._places])
        sizes = [local[name][0].numel() for name in names]
        back = self._exchanged(
            updated, [0 if mine is None else math.prod(self._shape(mine, places)) for places in self._places], sizes
        )
        for name, rows in zip(names, back.split(sizes), strict=True):
            weight = local[name][0]
            weight.copy_(rows.view_as(weight))

    def _exchanged(self, flat: Tensor, sizes: list[int], counts: list[int]) -> Tensor:
        """``sizes`` of ``flat`` for each rank, the last ones nothing; what came, ``counts`` from each."""
        sizes, counts = (own + [0] * (self._n - len(own)) for own in (sizes, counts))
        received = torch.empty(sum(counts), device=self._device)
        all_to_all(received, flat, self._group, counts, sizes).wait()
        return received

    def _shape(self, name: str, places: Places) -> tuple[int, ...]:
        """What the rank at ``places`` holds of master ``name``."""
        return self._masters.holdings[name].shape_of(self._ranks, places)

    def _sends(self, name: str, places: Places) -> bool:
        """Whether the rank at ``places`` is the first of those that hold the same of master ``name``."""
        holding = self._masters.holdings[name]
        return not any(number for axis, number in places.items() if axis not in holding.axes)

    def _update(self, name: str, weight: Tensor, gradient: Tensor) -> None:
        rows = [n for _, n in self._parts[name]]
        leaves = self._leaves[name]
        for leaf, w, g in zip(leaves, weight.split(rows), gradient.split(rows), strict=True):
            leaf.data, leaf.grad = w, g
        optimizer = self._optimizers[name]
        optimizer.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        optimizer.step()
        for leaf in leaves:
            leaf.grad, leaf.data = None, torch.empty(0, 0, device=self._device)

    def _all(self) -> Iterator[tuple[int, str, int, str, int]]:
        """(owner, master, number of the matrix in it, key, rows) of each matrix."""
        for number, name in enumerate(self._names):
            for place, (key, rows) in enumerate(self._parts[name]):
                yield self._owner(number), name, place, key, rows

    @property
    def keys(self) -> list[str]:
        return [key for *_, key, _ in self._all()]

    def state(self, has_begun: bool) -> dict[str, Part]:
        """What is kept of each matrix, by ``<key>::<name>``; nothing before the first step."""
        found: dict[str, Part] = {}
        for owner, name, place, key, rows in self._all() if has_begun else ():
            held = self._optimizers[name].state[self._leaves[name][place]] if owner == self._own else {}
            where = (*self._masters.holdings[name].place, *self._places[owner].items())
            for kept, device in self._kept.items():
                shape = (rows, *self._masters.shapes[name][1:]) if device is None else ()
                part = HeldPart(held.get(kept), Holding(shape, place=where), torch.float32, device or self._device)
                found[f"{key}::{kept}"] = part
        return found

    def load_state(self, by_key: dict[str, dict[str, Tensor]]) -> None:
        """Restore what is kept of the matrices that this rank owns."""
        for owner, name, place, key, _ in self._all():
            if owner == self._own and key in by_key:
                state = {kept: by_key[key][kept].to(device or self._device, copy=True) for kept, device in self._kept.items()}
                self._optimizers[name].state[self._leaves[name][place]] = state

    @property
    def state_bytes(self) -> int:
        states = (state for optimizer in self._optimizers.values() for state in optimizer.state.values())
        return sum(t.numel() * t.element_size() for state in states for t in state.values())
