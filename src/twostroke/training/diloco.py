"""DiLoCo: replicas train by themselves, and exchange what H steps changed (Douillard et al. 2023, arXiv 2311.08105).

Each replica has masters and an optimizer of its own, the inner ones. All have the same outer weights θ and an outer momentum v.
After H steps, with Δ = mean over replicas of θ − θᵢ,

    v ← μ·v + Δ        θ ← θ − η·(Δ + μ·v)        θᵢ ← θ

which is SGD with Nesterov's momentum as torch has it; η = 0.7 and μ = 0.9 are the paper's (section 3). Inner optimizers keep
their state. In ``fragments``, as in streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512), parts of the model take turns:
each is exchanged every H steps, H/fragments steps after the one before, so that a burst is that much smaller.
``parallel.compress`` sends Δ in fewer bits and keeps what rounding left out.

With ``outer_overlap`` = τ a thread exchanges Δ while τ more steps are taken. Then θ is moved as above, and a replica keeps a
share α of its own weights, ``outer_mixing`` (section 2.3 there; α = 0.5 is the paper's):

    θᵢ ← α·θᵢ + (1 − α)·θ

What is under way is waited for by a checkpoint, which holds it, and by the end of the run. It is the same on all ranks, and no
result depends on how long it took.

A checkpoint's weights are θ. What each replica has of its own is beside the optimizer's state. After the last step all is
exchanged. Held against the formulas in float64 in tests/training/test_diloco.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from twostroke.core.errors import InputError
from twostroke.training.ranked_masters import OPTIMIZER, SummedMasters
from twostroke.training.ranks import Part, Ranks
from twostroke.training.step import part_of
from twostroke.training.whole import ReplicasPart, Whole

INNER, MOMENTUM, ARRIVING, SINCE = "inner::", "outer_momentum::", "outer_arriving::", "outer::since"


class LocalMasters(SummedMasters):
    """The masters of a replica that trains by itself between exchanges."""

    def __init__(self, decoder: nn.Module, dtype: torch.dtype, stored: torch.dtype, ranks: Ranks) -> None:
        super().__init__(decoder, dtype, stored, ranks)
        layout = ranks.layout
        self.outer = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self._momentum = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self._fragments = fragments_of(self.shapes, layout.fragments)
        # Steps since the last exchange of each fragment. Beginning apart, they stay apart.
        self._since = [number * layout.outer_every // layout.fragments for number in range(layout.fragments)]
        self._own_share = 1.0
        self._under_way: dict[int, Future[dict[str, Tensor]]] = {}
        """Sums of what fragments changed, which a thread makes in the order in which they began, the same on all ranks."""
        self._thread = ThreadPoolExecutor(1, "outer exchange", torch.set_num_threads, (torch.get_num_threads(),))

    def _over_ranks(self, totals: dict[str, Tensor], wire: torch.dtype) -> None:
        """Replicas keep their gradients to themselves."""

    def _norms(self) -> Tensor:
        """√(mean over replicas of ‖gradient‖²) of each gradient: all replicas decide by the same numbers about a step."""
        own = super()._norms()
        squares = torch.tensor(self.ranks.numbers(own.double().square().tolist()), dtype=torch.float64)
        shared = squares.mean(0).sqrt()
        total = float(torch.linalg.vector_norm(shared))
        self._own_share = float(torch.linalg.vector_norm(own.double().cpu())) / total if total > 0 else 1.0
        return shared.float().to(own.device)

    def norm_to_clip(self, norm: float) -> float:
        return norm * self._own_share

    def took_step(self) -> None:
        layout = self.ranks.layout
        self._since = [steps + 1 for steps in self._since]
        due = [number for number, steps in enumerate(self._since) if steps >= layout.outer_every]
        if layout.outer_overlap:
            for number in due:
                self._under_way[number] = self._thread.submit(self._summed, self._changed([number]))
            self._take_in([number for number in self._under_way if self._since[number] >= layout.outer_overlap])
        else:
            self._exchange(due)
        self.update_working_copy()

    def finish_run(self) -> None:
        self._take_in(list(self._under_way))
        self._exchange([number for number, steps in enumerate(self._since) if steps])
        self.update_working_copy()

    def _exchange(self, numbers: list[int]) -> None:
        """One outer step of the fragments ``numbers``."""
        if numbers:
            self._outer_step(self._summed(self._changed(numbers)), 0.0)

    def _take_in(self, numbers: list[int]) -> None:
        """The outer step of fragments ``numbers`` that are under way."""
        for number in numbers:
            sums = self._arrived(number)
            del self._under_way[number]
            # Without a step since then, at the end of a run, a replica's own weights have nothing that is not in the sums.
            self._outer_step(sums, self.ranks.layout.outer_mixing if self._since[number] else 0.0)

    def _arrived(self, number: int) -> dict[str, Tensor]:
        """The sums of fragment ``number``, which is under way."""
        with self.ranks.progress.blocked():
            return self._under_way[number].result()

    @torch.no_grad()
    def _changed(self, numbers: list[int]) -> dict[str, Tensor]:
        """θ − θᵢ of the fragments ``numbers``, whose steps are counted anew."""
        for number in numbers:
            self._since[number] = 0
        return {name: self.outer[name] - self.weights[name] for number in numbers for name in self._fragments[number]}

    def _summed(self, deltas: dict[str, Tensor]) -> dict[str, Tensor]:
        """``deltas``, replaced by their sums over replicas."""
        if self.compressed is None:
            self.ranks.sum_along(("replica",), list(deltas.values()))
        else:
            self.compressed.sum(deltas)
            self.compressed.accept()
        return deltas

    @torch.no_grad()
    def _outer_step(self, sums: dict[str, Tensor], mixing: float) -> None:
        layout = self.ranks.layout
        for name, delta in sums.items():
            delta /= layout.data
            momentum = self._momentum[name].mul_(layout.outer_momentum).add_(delta)
            self.outer[name].sub_(delta.add_(momentum, alpha=layout.outer_momentum), alpha=layout.outer_learning_rate)
            if mixing:
                self.weights[name].lerp_(self.outer[name], 1 - mixing)
            else:
                self.weights[name].copy_(self.outer[name])

    @property
    def exchange_bytes(self) -> int:
        kept = (*self.outer.values(), *self._momentum.values())
        return super().exchange_bytes + sum(t.numel() * t.element_size() for t in kept)

    # -- checkpoints --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        for number in self._under_way:
            self._arrived(number)
        self._under_way.clear()
        super().load(weights)
        for name, outer in self.outer.items():
            outer.copy_(self.weights[name])

    def whole(self, extra: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self.outer | dict(extra)

    def whole_state(self, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        own = {f"{INNER}{name}": weight for name, weight in self.weights.items()} | dict(state)
        found: dict[str, Tensor | Part] = {
            key: ReplicasPart(value, (self.ranks.layout.data, *value.shape)) if value.dim() else value
            for key, value in own.items()
        }
        found |= {f"{MOMENTUM}{name}": momentum for name, momentum in self._momentum.items()}
        for number in self._under_way:
            found |= {f"{ARRIVING}{name}": delta for name, delta in self._arrived(number).items()}
        if self.compressed is not None:
            found |= self.compressed.state(list(self.weights), self.shapes)
        found[SINCE] = torch.tensor(self._since, dtype=torch.int64)
        return Whole(self.ranks, found, OPTIMIZER)

    @torch.no_grad()
    def own_state(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        n = self.ranks.layout.data
        saved = len(next(value for key, value in state.items() if key.startswith(INNER)))
        if saved != n:
            raise InputError(
                f"the checkpoint is of {saved} replicas that train apart (parallel.outer_every), and {n} resume. Start {saved} "
                "ranks."
            )
        self._since = state[SINCE].tolist()
        for number, names in enumerate(self._fragments):
            if names and f"{ARRIVING}{names[0]}" in state:
                arrived = {name: state[f"{ARRIVING}{name}"].to(self.outer[name].device, copy=True) for name in names}
                self._under_way[number] = Future()
                self._under_way[number].set_result(arrived)
        found = {}
        for key, value in super().own_state(state).items():
            if key.startswith(INNER):
                self.weights[key.removeprefix(INNER)].copy_(value[self.ranks.replica])
            elif key.startswith(MOMENTUM):
                self._momentum[key.removeprefix(MOMENTUM)].copy_(value)
            elif key != SINCE and not key.startswith(ARRIVING):
                found[key] = value[self.ranks.replica] if value.dim() else value
        self.update_working_copy()
        return found


def fragments_of(shapes: Mapping[str, tuple[int, ...]], n: int) -> list[list[str]]:
    """Names of the weights in each of ``n`` fragments: whole blocks, embedding and head, each to the fragment that has fewest
    elements until then."""
    parts: dict[str, list[str]] = {}
    for name in shapes:
        parts.setdefault(part_of(name), []).append(name)
    found: list[list[str]] = [[] for _ in range(n)]
    sizes = [0] * n
    for names in parts.values():
        least = sizes.index(min(sizes))
        found[least] += names
        sizes[least] += sum(torch.Size(shapes[name]).numel() for name in names)
    return found
