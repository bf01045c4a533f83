"""Keeps a running average (EMA) of the weights. It scores better than the last step's weights while the learning rate is
high."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from twostroke.training.precision import MasterWeights


class WeightAverage:
    """ā ← d·ā + (1 − d)·w after update t = 1, 2, …, with d = min(``decay``, t / (t + 9)), in fp32 whatever the weights are.

    The smaller d of the first updates keeps the random initial weights out of the average, where they would otherwise have the
    share ``decay``ᵗ. Memory: 4·N bytes.
    """

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.averages = {name: weight.detach().float().clone() for name, weight in weights.items()}
        self._weights = dict(weights)

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        share = 1 - min(self.decay, self.updates / (self.updates + 9))
        weights = list(self._weights.values())
        if weights[0].dtype != torch.float32:
            weights = [weight.float() for weight in weights]
        torch._foreach_lerp_(list(self.averages.values()), weights, share)

    def state(self) -> dict[str, Tensor]:
        return {"updates": torch.tensor(self.updates, dtype=torch.int64), **self.averages}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.updates = int(state["updates"])
        for name, average in self.averages.items():
            average.copy_(state[name])

    @contextmanager
    def swapped_into(self, masters: MasterWeights) -> Iterator[None]:
        """A context in which the decoder computes with the average. Memory: one more working copy."""
        parameters = list(masters.parameters.values())
        kept = [parameter.clone() for parameter in parameters]
        torch._foreach_copy_(parameters, list(self.averages.values()))
        masters.share_working_copy()
        try:
            yield
        finally:
            torch._foreach_copy_(parameters, kept)
            masters.share_working_copy()

    @property
    def bytes(self) -> int:
        return sum(average.numel() * average.element_size() for average in self.averages.values())
