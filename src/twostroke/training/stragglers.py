"""How long each rank computes and waits in a step, and which one the others wait for."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from twostroke.training.measurement import rounded
from twostroke.training.ranks import Ranks

WINDOW = 20
"""Steps over which the times of ranks are compared."""

SLOW = 1.25
"""A rank is a straggler if it computes longer than this many times the median rank."""

REMIND_S = 600.0
"""Seconds after which the log names the same straggler again."""

Log = Callable[[str], None]


class RankTimes:
    """Exchanges after each step what every rank computed and waited. All ranks call ``after_step``; the first one logs."""

    def __init__(self, ranks: Ranks, log: Log) -> None:
        self._ranks, self._log = ranks, log
        self._computed: deque[Sequence[float]] = deque(maxlen=WINDOW)
        self._step_s: deque[float] = deque(maxlen=WINDOW)
        self._waited_s = ranks.progress.waited_s
        self._named: tuple[int, float] | None = None

    def begin_step(self) -> None:
        self._waited_s = self._ranks.progress.waited_s

    def after_step(self, step_s: float, warm_up: bool) -> dict[str, Any]:
        """What a step of ``step_s`` adds to its line in the log: seconds by rank, the longest computing over the median, and
        means over the ranks, which add up to the step: of computing, of waiting for the wire, which the rank does too that
        the others wait for, and of waiting for others. Nothing for one rank."""
        if self._ranks.n == 1:
            return {}
        waited_s = self._ranks.progress.waited_s - self._waited_s
        times = self._ranks.numbers([step_s - waited_s, waited_s])
        computed, waited = ([row[i] for row in times] for i in range(2))
        if not warm_up:
            self._computed.append(computed)
            self._step_s.append(step_s)
            if len(self._computed) == WINDOW and self._ranks.is_first:
                self._name_straggler()
        wire_s = min(waited)
        return {
            "computing_s": rounded(statistics.fmean(computed)),
            "wire_s": rounded(wire_s),
            "waiting_s": rounded(statistics.fmean(waited) - wire_s),
            "rank_compute_s": list(map(rounded, computed)),
            "rank_waiting_s": list(map(rounded, waited)),
            "straggler_ratio": rounded(max(computed) / max(1e-9, statistics.median_low(computed))),
        }

    def _name_straggler(self) -> None:
        medians = [statistics.median(times) for times in zip(*self._computed, strict=True)]
        slowest, typical = max(medians), statistics.median_low(medians)
        rank, now = medians.index(slowest), time.monotonic()
        if slowest <= SLOW * typical:
            if self._named is not None:
                self._log(f"rank {self._named[0]} computes about as long as the others again.")
            self._named = None
            return
        if self._named is not None and self._named[0] == rank and now - self._named[1] < REMIND_S:
            return
        self._named = (rank, now)
        self._log(
            f"rank {rank} computes {slowest / typical:.2f} times as long as the median rank ({slowest:.3g} against "
            f"{typical:.3g} s, over {WINDOW} steps of {statistics.median(self._step_s):.3g} s), and the others wait for it."
        )
