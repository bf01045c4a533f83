"""Dynamic loss scaling keeps small fp16 gradients from vanishing and large ones from overflowing."""

from __future__ import annotations

import torch
from torch import Tensor

FIRST_SCALE = 2.0**16
LARGEST_SCALE = 2.0**24
GROWTH_STEPS = 2000
"""Steps without an overflow after which the scale is doubled. Like ``FIRST_SCALE`` it is ``torch.amp.GradScaler``'s."""


class DynamicLossScale:
    """The factor by which an fp16 run multiplies its loss before the backward pass and divides its gradients after it.

    fp16 reaches down to 6·10⁻⁸ and up to 65,504; a model's gradients lie mostly below (Micikevicius et al. 2017,
    arXiv:1710.03740, section 3.2). An overflow halves the scale, ``GROWTH_STEPS`` steps without one double it. All scales are
    powers of two, so scaling rounds nothing.
    """

    def __init__(self) -> None:
        self.scale = FIRST_SCALE
        self._good_steps = 0

    def halve(self) -> bool:
        """Halve the scale after an overflow. Returns False at a scale of 1, at which the gradients themselves overflow."""
        self._good_steps = 0
        if self.scale <= 1:
            return False
        self.scale /= 2
        return True

    def count_good_step(self) -> None:
        self._good_steps += 1
        if self._good_steps >= GROWTH_STEPS:
            self.scale = min(2 * self.scale, LARGEST_SCALE)
            self._good_steps = 0

    def state(self) -> dict[str, Tensor]:
        return {
            "scale": torch.tensor(self.scale, dtype=torch.float64),
            "good_steps": torch.tensor(self._good_steps, dtype=torch.int64),
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])
