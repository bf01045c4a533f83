"""How many drafted tokens a step checks: as many as make the expected tokens of a second most, over all requests."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

_LEAST_GAIN = 1.02
"""Drafts must promise so many times the tokens of a second. Below it the errors of the step times decide."""

_TRIED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of drafted tokens of which the best is taken, and that of all there are: trying each takes up to 0.1 ms a step."""

_LEAST_SURVIVAL = 0.05
"""A draft that is less probable is not considered, nor are those behind it."""

_MATCHES = (3, 4, 5, 6, 8, 11, 16)
"""Lengths of a match from which on acceptance is counted apart."""

_KEPT = 0.98
"""Share of a count that stays when a new one comes: acceptance is that of the last 50 tokens or so."""


class RecentShares:
    """How often each of ``n`` kinds of drafted token was right lately. Without a count it is a half."""

    def __init__(self, n: int) -> None:
        self._right, self._seen = [1.0] * n, [2.0] * n

    def count(self, i: int, right: bool) -> None:
        self._right[i] = _KEPT * self._right[i] + right
        self._seen[i] = _KEPT * self._seen[i] + 1

    def of(self, i: int) -> float:
        return self._right[i] / self._seen[i]


class Acceptance:
    """How often the token that followed a match came again, by the match's length, over all requests.

    It is counted for every match, also for those that were not drafted, so drafting resumes once texts repeat again, and
    nothing has to be tried out."""

    def __init__(self) -> None:
        self._shares = RecentShares(len(_MATCHES) + 1)

    def count(self, length: int, right: bool) -> None:
        """A token was predicted behind a match of ``length`` tokens."""
        self._shares.count(bisect_left(_MATCHES, length), right)

    def of(self, length: int) -> float:
        """Probability of the token behind a match of ``length`` tokens."""
        return self._shares.of(bisect_left(_MATCHES, length))

    def survivals(self, length: int, most: int) -> list[float]:
        """Of up to ``most`` tokens behind such a match the probabilities that each and all before it are right."""
        found: list[float] = []
        survival = 1.0
        for n in range(length, length + most):
            survival *= self.of(n)
            if survival < _LEAST_SURVIVAL:
                break
            found.append(survival)
        return found


_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)

_OWN, _SHARED = 0.2, 0.05
"""Shares of a surprise that the time of its number of rows and all times take. All steps of a busy machine become slower
together, so a number of rows that was not computed for a while must follow the others."""

_KNOWN = 8
"""Steps after which the surprises of a number of rows are the machine's, and no longer the prediction's errors."""

_MOST_SURPRISE = 1.0
"""Nats that one step may surprise by: a step that the system interrupted says nothing of the next."""


class StepTimes:
    """Seconds of a step by its rows: predicted at first, then corrected by every step that was measured."""

    def __init__(self, predict: Callable[[int], float], most_rows: int) -> None:
        n = bisect_left(_ROWS, most_rows) + 1
        self._rows = list(_ROWS[:n])
        self._log_s: list[float] = []
        self._n_seen = [0] * n
        for rows in self._rows:  # more rows never take less time
            self._log_s.append(max(math.log(max(predict(rows), 1e-9)), *self._log_s[-1:], -math.inf))

    def saw(self, rows: int, seconds: float) -> None:
        """A step of ``rows`` took ``seconds``."""
        known, times = self._rows, self._log_s
        place = min(bisect_left(known, rows), len(known) - 1)
        surprise = math.log(seconds / self.seconds(rows))
        surprise = max(-_MOST_SURPRISE, min(_MOST_SURPRISE, surprise))
        n_seen = self._n_seen
        shared = _SHARED * surprise if n_seen[place] >= _KNOWN else 0.0
        own = max(_OWN, 1 / (n_seen[place] + 1)) * surprise
        for i in range(len(times)):  # what was never measured is as wrong as what is measured
            times[i] += shared if n_seen[i] else own
        if not n_seen[place]:
            n_seen[place] = 1
            return
        n_seen[place] += 1
        upper = 1.0 if place == 0 else min(1.0, (rows - known[place - 1]) / (known[place] - known[place - 1]))
        times[place] += own * upper
        if upper < 1 and n_seen[place - 1]:
            times[place - 1] += own * (1 - upper)

    def seconds(self, rows: int) -> float:
        """Seconds of a step of ``rows``, on a line between the numbers of rows that are kept."""
        known, times = self._rows, self._log_s
        i = bisect_left(known, rows)
        if i >= len(known):
            return math.exp(times[-1]) * rows / known[-1]
        upper = math.exp(times[i])
        if known[i] == rows or i == 0:
            return upper
        lower = math.exp(times[i - 1])
        return lower + (upper - lower) * (rows - known[i - 1]) / (known[i] - known[i - 1])


def draft_lengths(
    survivals: Iterable[tuple[int, Sequence[float]]],
    n_decoding: int,
    n_rows: int,
    room: int,
    seconds: Callable[[int], float],
) -> dict[int, int]:
    """Place → drafted tokens that maximise (``n_decoding`` + Σ survival) ÷ seconds(``n_rows`` + drafted tokens).

    ``survivals``: of a place the probability of each drafted token that it and all before it are right, so they fall. The most
    probable tokens of all requests are taken first, so each request's are taken in order. Of the numbers of drafted tokens only
    ``_TRIED`` and all are compared. Empty if less than ``_LEAST_GAIN`` is gained.
    """
    drafts = [(-survival, n, place) for place, of in survivals for n, survival in enumerate(of)]
    drafts.sort()
    best, best_n = _LEAST_GAIN * n_decoding / seconds(n_rows), 0
    expected, before = float(n_decoding), 0
    most = min(room, len(drafts))
    for n in (*(n for n in _TRIED if n < most), most):
        expected -= sum(draft[0] for draft in drafts[before:n])
        before = n
        rate = expected / seconds(n_rows + n)
        if rate > best:
            best, best_n = rate, n
    found: dict[int, int] = {}
    for _, n, place in drafts[:best_n]:
        found[place] = max(found.get(place, 0), n + 1)
    return found
