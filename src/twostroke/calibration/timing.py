"""Times one operation on a machine that others may be using. After a warm-up it takes the best of several runs, of those during
which no other program had our processors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from twostroke.core.contention import low_by, waited_s

WINDOW_S = 0.005
"""Runs are judged in windows of at least this length, because asking the system how long we waited takes some 0.1 ms."""

DISTURBED_SHARE = 0.02
"""If our threads waited for a processor for more than this share of a window, its runs are not trusted."""

PATIENCE = 4
"""A measurement without enough undisturbed windows goes on for up to so many times its usual seconds."""

PATIENCE_S = 40.0
"""All measurements of a calibration together go on for so long at most. Waiting helps against a burst of another program, and
not against one that never pauses: a calibration beside such a program was still at it after twelve minutes without this."""


class Window:
    """A stretch of time. ``waited_share`` is the time that our threads waited in it for a processor that other programs had,
    summed over threads, as a share of its length. It is 0 if the system does not count this."""

    def __init__(self) -> None:
        self._waited, self.began = waited_s(), time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.began

    @property
    def waited_share(self) -> float:
        waited, elapsed = waited_s(), self.elapsed_s
        return 0.0 if self._waited is None or waited is None else (waited - self._waited) / elapsed


@dataclass
class Clock:
    """Times callables on one device. ``effort`` scales how long a measurement repeats; tests use little.

    ``waited_shares`` has one number for each measurement: 0 if it found an undisturbed window, else the least
    ``Window.waited_share``. A measurement without an undisturbed window still counts, and the profile says by how much it may
    read low.
    """

    device: str = "cpu"
    effort: float = 1.0
    started: float = field(default_factory=time.perf_counter)
    waited_shares: list[float] = field(default_factory=list)
    patience_s: float = PATIENCE_S  # that are left
    _patient_since: float | None = None

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started

    @property
    def disturbed_share(self) -> float:
        """Share of all measurements that other programs disturbed throughout."""
        return sum(share > 0 for share in self.waited_shares) / max(1, len(self.waited_shares))

    @property
    def low_by_share(self) -> float:
        """By what share the measurements may read low (``core.contention.low_by``). It is their mean, because a plan adds up
        many of them, and its error is nearer to their mean than to the worst."""
        n = torch.get_num_threads()
        return sum(low_by(share, 1.0, n) for share in self.waited_shares) / max(1, len(self.waited_shares))

    def wait(self) -> None:
        """Wait until the device has finished what was launched."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def once_s(self, run: Callable[[], object]) -> float:
        begin = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - begin

    def best_s(self, run: Callable[[], object], seconds: float = 0.03, least: int = 4) -> float:
        """Seconds of the shortest of repeated runs, after one that warms up. There are at least ``least`` runs, over at least
        ``seconds``·effort.

        The shortest counts, because whatever else runs on the machine can only add time.
        """
        self.once_s(run)
        return self._best(lambda: (self.once_s(run),), seconds, least)[0]

    def least_s(self, run: Callable[[], float], seconds: float = 0.03, least: int = 4) -> float:
        """As ``best_s``, of the seconds that ``run`` itself returns, and without a warm-up."""
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
        """Elementwise minimum over the samples of undisturbed windows, or over all if none was undisturbed."""
        least = max(1, round(least * min(1.0, self.effort)))
        begin, span = time.perf_counter(), seconds * self.effort
        clean: list[tuple[float, ...]] = []
        others: list[tuple[float, ...]] = []
        shares: list[float] = []
        while True:
            window, found = Window(), [sample()]
            while window.elapsed_s < WINDOW_S:
                found.append(sample())
            shares.append(window.waited_share)
            (others if shares[-1] > DISTURBED_SHARE else clean).extend(found)
            elapsed = time.perf_counter() - begin
            if len(clean) + len(others) >= least and self.is_over(elapsed, span, len(clean) >= least):
                break
        self.count(shares)
        return tuple(map(min, zip(*(clean or others), strict=True)))

    def is_over(self, elapsed_s: float, usual_s: float, is_clean: bool) -> bool:
        """Whether a measurement that has enough runs ends ``elapsed_s`` after its begin: after its usual seconds with enough
        undisturbed runs, or when patience is at its end, its own or the calibration's."""
        now = time.perf_counter()
        if self._patient_since is not None:
            self.patience_s = max(0.0, self.patience_s - (now - self._patient_since))
        waits = elapsed_s >= usual_s and not is_clean and elapsed_s < PATIENCE * usual_s and self.patience_s > 0
        self._patient_since = now if waits else None
        return elapsed_s >= usual_s and not waits

    def count(self, shares: Iterable[float]) -> None:
        """Remember one measurement whose windows had these ``waited_share``s."""
        least = min(shares)
        self.waited_shares.append(least if least > DISTURBED_SHARE else 0.0)
