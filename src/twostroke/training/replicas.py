"""Masters of replicas that exchange gradients while the last backward pass of a step goes on.

Gradients come from the last layer to the first. They are put into buckets in that order. When a pass has all of a bucket, they
are added to its sum and given back; of the last micro-batch's pass the exchange then begins, and those before it go on. Buckets
begin in one order on all ranks, whatever their passes do, and no element's sum depends on its bucket, so the bits are those of
sums at the end.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from twostroke.training.compression import CodedSums
from twostroke.training.exchanges import Exchange, UnderWay
from twostroke.training.ranked_masters import SummedMasters
from twostroke.training.ranks import Ranks, named_buckets


class ReplicatedMasters(SummedMasters):
    """The whole model's masters on each rank, for every way to exchange gradients but PowerSGD's, which takes them together."""

    def __init__(self, decoder: nn.Module, dtype: torch.dtype, stored: torch.dtype, ranks: Ranks) -> None:
        super().__init__(decoder, dtype, stored, ranks)
        from_the_last = {name: self.gradients[name] for name in reversed(self.weights)}
        self._sum_up([list(bucket) for bucket in named_buckets(from_the_last)])
        self._lacking: list[set[str]] = []
        """Of each bucket the gradients that the pass has not left yet."""
        self._taken_in = 0
        """Buckets, from the first, whose gradients of the pass are in their sums."""
        self._is_last = False
        self._totals: list[list[Tensor]] = []
        """Of each bucket whose exchange has begun its sums over micro-batches, which sums over ranks replace."""
        self._under_way = UnderWay()
        for number, (names, _) in enumerate(self._chunks):
            for name in names:
                hook = functools.partial(self._has_gradient, number, name)
                self._parameters[name].register_post_accumulate_grad_hook(hook)

    def zero_gradients(self) -> None:
        super().zero_gradients()
        self._totals, self._is_last = [], False
        self._expect_gradients()

    def expect_last_pass(self) -> None:
        self._is_last = True

    def _expect_gradients(self) -> None:
        self._lacking, self._taken_in = [set(names) for names, _ in self._chunks], 0

    def _has_gradient(self, number: int, name: str, parameter: Tensor) -> None:
        self._lacking[number].discard(name)
        while self._taken_in < len(self._chunks) and not self._lacking[self._taken_in]:
            self._take_in()
            if self._is_last:
                self._begin_next()

    def _take_in(self) -> None:
        """Add what the pass has left for the next bucket to its sum."""
        super().accumulate(self._taken_in)
        self._taken_in += 1

    def accumulate(self, chunk: int = 0) -> None:
        """Take in what the pass has left, and expect another one."""
        while self._taken_in < len(self._chunks):
            self._take_in()
        self._expect_gradients()

    @torch.no_grad()
    def finish_window(self) -> Tensor:
        while len(self._totals) < len(self._chunks):
            self._begin_next()
        self._under_way.finish()
        for (names, _), totals in zip(self._chunks, self._totals, strict=True):
            self._keep(dict(zip(names, totals, strict=True)))
        return self._norms()

    def _begin_next(self) -> None:
        """Begin the exchange of the next bucket."""
        names, sums = self._chunks[len(self._totals)]
        wire = self._wire(sums.count)
        self._totals.append(sums.total())
        self._under_way.begin(self._summing(dict(zip(names, self._totals[-1], strict=True)), wire))

    def _summing(self, totals: dict[str, Tensor], wire: torch.dtype) -> Exchange:
        if isinstance(self.compressed, CodedSums):
            return self.compressed.summing(totals)
        return self.ranks.summing(("replica", "context"), list(totals.values()), wire)
