"""Timing one operation on a machine that others may be using: the best of several runs, after a warm-up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass
class Clock:
    """Times callables on one device. ``effort`` scales how long each measurement repeats; tests use little."""

    device: str = "cpu"
    effort: float = 1.0
    started: float = field(default_factory=time.perf_counter)

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started

    def wait(self) -> None:
        """Until the device has finished what was launched."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def once_s(self, run: Callable[[], object]) -> float:
        begin = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - begin

    def best_s(self, run: Callable[[], object], seconds: float = 0.03, least: int = 4) -> float:
        """Shortest of repeated runs: at least ``least`` and at least ``seconds``·effort of them, after one that warms up.

        The shortest, not the mean: whatever else runs on the machine only ever adds time.
        """
        self.once_s(run)
        best = float("inf")
        deadline, n = time.perf_counter() + seconds * self.effort, 0
        while n < max(1, round(least * min(1.0, self.effort))) or time.perf_counter() < deadline:
            best = min(best, self.once_s(run))
            n += 1
        return best

    def best_of_two_s(
        self, first: Callable[[], object], second: Callable[[object], object], seconds: float = 0.2, least: int = 4
    ) -> tuple[float, float]:
        """As ``best_s``, for a forward and the backward that consumes its result: (best first, best second)."""
        best_first = best_second = float("inf")
        second(first())
        self.wait()
        deadline, n = time.perf_counter() + seconds * self.effort, 0
        while n < max(1, round(least * min(1.0, self.effort))) or time.perf_counter() < deadline:
            begin = time.perf_counter()
            result = first()
            self.wait()
            middle = time.perf_counter()
            second(result)
            self.wait()
            best_first, best_second = min(best_first, middle - begin), min(best_second, time.perf_counter() - middle)
            n += 1
        return best_first, best_second
