"""What loading pages takes and what computing their tokens takes undisturbed, so that no load is slower (decision 152)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from twostroke.engine.speculation.lengths import StepTimes

_LEAST_S = 1e-7
"""Shortest time that is told from none, which has no ratio to others."""

_RISE = 1.1
"""Most by which a step that took longer than expected raises what is expected: most that do were disturbed."""

FIRST_WAIT_S = 0.01
DISK_BYTES_PER_S = 1e8
"""Of a disk that was never waited for: one whose heads move. *Assumed*."""


@dataclass
class Load:
    """What loading took so far: ``n`` pages, ``work_s`` without waiting for the disk, and the waits for it: the first, which
    has the way to the data in it, and those of the ``n_behind`` pages behind it together."""

    n: int = 0
    work_s: float = 0.0
    first_wait_s: float | None = None
    n_behind: int = 0
    behind_s: float = 0.0

    def add(self, seconds: float, waited_s: float) -> None:
        """A page took ``seconds``, ``waited_s`` of them until the disk gave it."""
        self.n += 1
        self.work_s += seconds - waited_s
        if self.first_wait_s is not None:
            self.n_behind += 1
            self.behind_s += waited_s
        elif waited_s > 0:
            self.first_wait_s = waited_s

    @property
    def wait_s(self) -> float | None:
        """Seconds of waiting for a page behind the first; None if there was none."""
        return self.behind_s / self.n_behind if self.n_behind else None

    def rest_s(self, n: int) -> float:
        """Seconds of ``n`` further pages, as those took that were loaded."""
        return n * (self.work_s / self.n + (self.wait_s or 0.0))


class LoadTimes:
    """Seconds of loading pages of ``page_bytes`` bytes: work for each (it comes from the system's page cache, is checked and
    copied), and if they are not all in that cache a first wait for the disk and one for each page.

    They are three numbers because they come apart: pages of 10 KB take 0.03 ms of work each, and the first of them 0.1 to 10 ms
    of waiting, so what is true of a hundred says nothing of six."""

    def __init__(self, page_bytes: int) -> None:
        self.work_s: float | None = None
        self._first_wait_s: float | None = None
        self._wait_s: float | None = None
        self._page_bytes = page_bytes

    def seconds(self, n: int, in_memory: bool) -> float:
        """Of ``n`` pages, which are ``in_memory`` if the system's page cache has them."""
        seconds = n * (self.work_s or 0.0)
        if not in_memory:
            seconds += FIRST_WAIT_S if self._first_wait_s is None else self._first_wait_s
            seconds += n * (self._page_bytes / DISK_BYTES_PER_S if self._wait_s is None else self._wait_s)
        return seconds

    def saw(self, load: Load) -> None:
        """A request loaded so. What is expected moves half way there: up as a ratio, because a load that was interrupted takes
        a hundred times as long as others and the next one is not to be refused for that alone, and down as a difference."""
        self._take(load, only_shorter=False)

    def renew(self, load: Load) -> None:
        """Pages were read so by a thread that waits for others, which says what can be had and not that more is needed."""
        self._take(load, only_shorter=True)

    def _take(self, load: Load, only_shorter: bool) -> None:
        def new(known: float | None, found: float | None) -> float | None:
            if found is None or (only_shorter and known is not None and found > known):
                return known
            if known is None:
                return found
            return math.sqrt(max(known, _LEAST_S) * found) if found > known else (known + found) / 2

        if load.n:
            self.work_s = new(self.work_s, load.work_s / load.n)
            self._first_wait_s = new(self._first_wait_s, load.first_wait_s)
            self._wait_s = new(self._wait_s, load.wait_s)


class PromptTimes:
    """Seconds of a step that computes tokens of a prompt, by their number: as ``predicted``, times a factor for each power of
    two of them. A step that took longer raises a factor by a tenth at most. The first that was shorter sets it, and later ones
    move it half way, as a ratio. So a prompt is expected to take about as long as it takes undisturbed."""

    def __init__(self, predicted: StepTimes) -> None:
        self._predicted = predicted
        self._factors: dict[int, float] = {}
        self._shortened: set[int] = set()

    def seconds(self, rows: int) -> float:
        """Of a step of ``rows``."""
        return self._factor(rows) * self._predicted.seconds(rows)

    def saw(self, rows: int, seconds: float) -> None:
        """A step of ``rows`` took ``seconds``."""
        found, known, of = seconds / self._predicted.seconds(rows), self._factor(rows), rows.bit_length()
        if found >= known:
            self._factors[of] = min(found, _RISE * known)
        else:
            self._factors[of] = math.sqrt(known * found) if of in self._shortened else found
            self._shortened.add(of)

    def _factor(self, rows: int) -> float:
        """Of numbers that no step had yet, the least of the others."""
        known = self._factors.get(rows.bit_length())
        return min(self._factors.values(), default=1.0) if known is None else known
