"""Timing one operation on a machine that others may be using: the best of several runs, after a warm-up, of those during
which no other program had our processors."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from twostroke.core.contention import waited_s

WINDOW_S = 0.005
"""Runs are judged in windows of at least this length: asking the system how long we waited takes some 0.1 ms."""

DISTURBED_SHARE = 0.02
"""Share of a window that our threads may have waited for a processor before its runs are not trusted."""

PATIENCE = 4
"""A measurement may take so many times its usual seconds in the hope of an undisturbed window."""


class Window:
    """A stretch of time; ``disturbed`` says whether other programs had our processors in it. False where nobody counts."""

    def __init__(self) -> None:
        self._waited, self.began = waited_s(), time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.began

    @property
    def disturbed(self) -> bool:
        waited, elapsed = waited_s(), self.elapsed_s
        return self._waited is not None and waited is not None and waited - self._waited > DISTURBED_SHARE * elapsed


@dataclass
class Clock:
    """Times callables on one device. ``effort`` scales how long each measurement repeats; tests use little.

    ``n_measured`` counts measurements, ``n_disturbed`` those for which no undisturbed window was found: their best run is
    taken all the same, and whoever reads the profile is told.
    """

    device: str = "cpu"
    effort: float = 1.0
    started: float = field(default_factory=time.perf_counter)
    n_measured: int = 0
    n_disturbed: int = 0

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started

    @property
    def disturbed_share(self) -> float:
        """Share of all measurements that other programs disturbed throughout."""
        return self.n_disturbed / self.n_measured if self.n_measured else 0.0

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
        return self._best(lambda: (self.once_s(run),), seconds, least)[0]

    def least_s(self, run: Callable[[], float], seconds: float = 0.03, least: int = 4) -> float:
        """As ``best_s``, of what ``run`` itself says it took, without a run that warms up."""
        return self._best(lambda: (run(),), seconds, least)[0]

    def best_of_two_s(
        self, first: Callable[[], object], second: Callable[[object], object], seconds: float = 0.2, least: int = 4
    ) -> tuple[float, float]:
        """As ``best_s``, for a forward and the backward that consumes its result: (best first, best second)."""

        def both() -> tuple[float, float]:
            begin = time.perf_counter()
            result = first()
            self.wait()
            middle = time.perf_counter()
            second(result)
            self.wait()
            return middle - begin, time.perf_counter() - middle

        both()
        best_first, best_second = self._best(both, seconds, least)
        return best_first, best_second

    def _best(self, sample: Callable[[], tuple[float, ...]], seconds: float, least: int) -> tuple[float, ...]:
        """Elementwise minimum over the samples of undisturbed windows; over all where there was none within ``PATIENCE``."""
        least = max(1, round(least * min(1.0, self.effort)))
        begin, span = time.perf_counter(), seconds * self.effort
        clean: list[tuple[float, ...]] = []
        others: list[tuple[float, ...]] = []
        while True:
            window, found = Window(), [sample()]
            while window.elapsed_s < WINDOW_S:
                found.append(sample())
            (others if window.disturbed else clean).extend(found)
            elapsed = time.perf_counter() - begin
            n_enough = len(clean) + len(others) >= least
            if n_enough and (elapsed >= PATIENCE * span or (len(clean) >= least and elapsed >= span)):
                break
        self.n_measured += 1
        self.n_disturbed += not clean
        return tuple(map(min, zip(*(clean or others), strict=True)))
