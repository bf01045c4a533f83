"""Sums gradients in one order, whatever number of ranks adds them: pairs, then pairs of pairs.

Floating-point addition is commutative and not associative, so equal bits need equal brackets. Micro-batches have numbers, and
their sum is a balanced binary tree over these: (0 + 1) + (2 + 3). A rank that has a part of the micro-batches adds up whole
branches of it, and ranks add up theirs, so 1, 2 and 4 ranks come to the same bits (tests/training/test_tree_sums.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def tree_sum(rows: Sequence[Tensor]) -> Tensor:
    """Σ ``rows`` in fp32, in pairs of neighbours. The rows may be overwritten."""
    found = [row.float() for row in rows]
    while len(found) > 1:
        pairs = [a.add_(b) for a, b in zip(found[::2], found[1::2], strict=False)]
        found = pairs + found[len(pairs) * 2 :]
    return found[0]


class TreeSum:
    """The sum of lists of tensors that come one after another. It keeps one partial sum a level: ⌈log₂ n⌉ + 1 at most. The
    first list, if it is in fp32, is where the sum ends.

    With ``in_order`` False they are added one after another into one partial sum.
    """

    def __init__(self, in_order: bool = True) -> None:
        self._in_order = in_order
        self._levels: list[list[Tensor] | None] = []
        self.count = 0

    def clear(self) -> None:
        self._levels, self.count = [], 0

    @torch.no_grad()
    def add(self, tensors: list[Tensor]) -> None:
        """Add ``tensors``, which belong to the sum from here on."""
        self.count += 1
        level = 0
        while level < len(self._levels) and (partial := self._levels[level]) is not None:
            torch._foreach_add_(partial, tensors)
            if not self._in_order:
                return
            tensors, self._levels[level] = partial, None
            level += 1
        if level == 0:  # a single one in 16 bits is widened; sums are in fp32 already
            tensors = [tensor.float() for tensor in tensors]
        if level == len(self._levels):
            self._levels.append(None)
        self._levels[level] = tensors

    @torch.no_grad()
    def total(self) -> list[Tensor]:
        """The sum, which leaves this empty."""
        partials = [partial for partial in self._levels if partial is not None]
        found = partials[0]
        for partial in partials[1:]:
            torch._foreach_add_(partial, found)
            found = partial
        self.clear()
        return found
