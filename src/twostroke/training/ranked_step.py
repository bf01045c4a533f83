"""The step of a run whose recipe has ``[parallel]``: a window of numbered micro-batches that ranks share out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from twostroke.data.loader import Batch
from twostroke.training.clock import StepClock
from twostroke.training.context_parallel import ring_attention
from twostroke.training.expert_parallel import balance_together
from twostroke.training.ranked_masters import SummedMasters
from twostroke.training.ranks import Ranks
from twostroke.training.step import TrainStep, WindowAbandoned

SEED_STRIDE = 0x9E3779B97F4A7C15
"""2⁶⁴ over the golden ratio: seeds of neighbouring micro-batches differ in many bits."""


class RankedStep(TrainStep):
    """A micro-batch is one pass, whatever the layout, and draws random numbers by its own number in the window."""

    masters: SummedMasters

    def __init__(self, ranks: Ranks, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.ranks = ranks
        self.ring = ring_attention(self.decoder, ranks)
        balance_together(self.decoder, ranks)

    def _n_valid(self, batches: Sequence[Batch]) -> int:
        by_rank = self.ranks.numbers([batch.n_valid for batch in batches])
        return int(sum(map(sum, self.ranks.of_readers(by_rank))))

    def _parts(self, batch: Batch) -> list[Batch]:
        return [batch]

    def _window(
        self, batches: Sequence[Batch], n_valid: int, clock: StepClock, abandon: Callable[[], bool]
    ) -> tuple[float, Tensor]:
        loss_scale, share = self._begin_window(), 1.0 / max(1, n_valid)
        # Replicas that train apart take the mean over their own tokens.
        n_own = sum(batch.n_valid for batch in batches) if self.ranks.layout.outer_every else n_valid
        seed = int(torch.randint(2**62, ()))  # the same on all ranks, whose generators are in one state between steps
        state = torch.get_rng_state()
        numbers = self.ranks.micro_batches(len(batches) * self.ranks.n_readers)
        seeds = [(seed + number * SEED_STRIDE) % 2**63 for number in numbers]
        losses = self._passes(batches, seeds, 1.0 / max(1, n_own) * loss_scale, clock, abandon)
        torch.manual_seed(seed)  # a GPU's generator too
        torch.set_rng_state(state)
        norms = self.masters.finish_window()
        if self.experts is not None:
            self.ranks.sum_counts([mlp.load for mlp in self.experts.mixtures])
        # fsum is exact, so the order in which ranks computed them does not matter.
        by_rank = self.ranks.numbers(torch.stack(losses).tolist())
        flat = [loss for rank in self.ranks.of_tokens(by_rank) for loss in rank]
        total = math.fsum(flat) if all(map(math.isfinite, flat)) else sum(flat)
        clock.lap("optimizer")
        return total * share, norms / loss_scale

    def _passes(
        self, batches: Sequence[Batch], seeds: Sequence[int], scale: float, clock: StepClock, abandon: Callable[[], bool]
    ) -> list[Tensor]:
        """The loss of each of ``batches``, whose gradients, times ``scale``, go into the masters in their order."""
        losses: list[Tensor] = []
        for seed, batch in zip(seeds, batches, strict=True):
            if len(losses) == len(batches) - 1 and not self._unproven:  # a pass that fails to compile is repeated
                self.masters.expect_last_pass()
            if losses and self.ranks.n == 1 and abandon():  # ranks stop together, at the end of a step
                raise WindowAbandoned
            torch.manual_seed(seed)
            self.ranks.progress.again()
            own = batch if self.ring is None else self.ring.begin(batch)
            losses.append(self._forward_backward_guarded(own, scale, clock))
            if self.ring is not None:
                self.ring.end()
            self.masters.accumulate()
            clock.lap("optimizer")
        return losses
