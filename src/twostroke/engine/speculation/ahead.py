"""What drafters have in common that compute a few tokens ahead of the one that is served, each from the one before."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from twostroke.engine.speculation.lengths import RecentShares, StepTimes
from twostroke.scheduling.request import Request
from twostroke.scheduling.step import ScheduledStep

MOST_AHEAD = 8
"""Most tokens that are computed ahead: the probability that all are right falls with each."""

_TRIED_EVERY = 64
"""Where drafts do not pay, one is made in so many steps, to see whether they do by now."""


class DraftsAhead(ABC):
    """All requests draft equally many tokens: as many as make the expected tokens of a second most, by how often the first,
    second, … draft was right in the last steps. ``times`` and ``draft_times`` are seconds of a step of the served model and of
    a drafting one by its rows."""

    def __init__(self, times: StepTimes, draft_times: StepTimes) -> None:
        self.times, self.draft_times = times, draft_times
        self._shares = RecentShares(MOST_AHEAD)  # of the first draft, the second, …
        self._n_idle = 0
        self._taken_s = 0.0

    def propose(self, decoding: Sequence[Request], n_rows: int, room: int) -> dict[int, list[int]]:
        """See ``scheduling.step.Propose``."""
        began = time.perf_counter()
        for request in decoding:
            self._compare(request)
        n = min(self._ahead(len(decoding), n_rows), max(1, room // len(decoding)))
        found = self._draft_tokens(decoding[: room // n], n) if n else {}
        self._taken_s = time.perf_counter() - began
        return found

    def saw(self, step: ScheduledStep, seconds: float) -> None:
        """``step`` took ``seconds``, with drafting."""
        taken_s, self._taken_s = self._taken_s, 0.0
        if step.n_decodes == len(step.requests):
            self.times.saw(step.n_tokens, max(1e-9, seconds - taken_s))

    @abstractmethod
    def ended(self, request: Request) -> None:
        """Give back what is kept of ``request``."""

    @abstractmethod
    def _compare(self, served: Request) -> None:
        """Count which of the request's drafts were right."""

    @abstractmethod
    def _draft_tokens(self, decoding: Sequence[Request], n: int) -> dict[int, list[int]]:
        """Up to ``n`` tokens behind each request, by its place."""

    def _ahead(self, n_decoding: int, n_rows: int) -> int:
        """Drafts of each request that maximise expected tokens ÷ (seconds of the step + seconds of drafting)."""
        step_s, draft_s = self.times.seconds, self.draft_times.seconds(n_decoding)
        best, best_n = 1.02 * n_decoding / step_s(n_rows), 0
        expected, survival = float(n_decoding), 1.0
        for n in range(1, MOST_AHEAD + 1):
            survival *= self._shares.of(n - 1)
            expected += n_decoding * survival
            rate = expected / (step_s(n_rows + n * n_decoding) + n * draft_s)
            if rate > best:
                best, best_n = rate, n
        self._n_idle = 0 if best_n else self._n_idle + 1
        if self._n_idle >= _TRIED_EVERY:
            self._n_idle, best_n = 0, 1
        return best_n
