"""Measures what it costs to start an operation that has next to nothing to compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from twostroke.calibration.timing import Clock

CALLS = 500


@torch.inference_mode()
def measure_launches(clock: Clock) -> tuple[float, float]:
    """Seconds of one eager elementwise operation and of one eager ``F.linear``, on tiny bf16 tensors: the mean of a series
    of 500 calls, and the best of several series."""
    x = torch.ones(1, 64, device=clock.device, dtype=torch.bfloat16)
    weight = torch.ones(64, 64, device=clock.device, dtype=torch.bfloat16)
    calls = max(10, round(CALLS * clock.effort))

    def elementwise() -> None:
        for _ in range(calls):
            torch.add(x, x)

    def linear() -> None:
        for _ in range(calls):
            F.linear(x, weight)

    return clock.best_s(elementwise, seconds=0.1) / calls, clock.best_s(linear, seconds=0.1) / calls
