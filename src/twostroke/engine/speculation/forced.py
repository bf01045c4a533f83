"""``ForcedDrafts``: where a form leaves one text alone to follow, that text is drafted.

A text can be cut into tokens in many ways, and a model may choose any of them, so forced text is not appended but drafted in
the way in which the tokenizer cuts it: the answer is the same as without. How often the model agrees is counted, whether a
draft was made or not, so nothing has to be tried out.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from twostroke.engine.grammars import Matcher
from twostroke.engine.speculation.lengths import RecentShares, StepTimes, draft_lengths
from twostroke.scheduling.request import Request

MOST_DRAFT = 24
_FRUITLESS, _SKIPPED = 16, 7
"""After so many looks in a row without a draft, so many steps are left out between two."""


class ForcedDrafts:
    """``times`` are seconds of a step by its rows."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._shares = RecentShares(2)  # of first tokens, and of those behind a right one
        self._n_fruitless = self._skip = 0

    def propose(self, decoding: Sequence[Request], drafted: Container[int], n_rows: int, room: int) -> dict[int, list[int]]:
        """Drafts for those of ``decoding`` that have none by ``drafted``. See ``scheduling.step.Propose``."""
        if self._skip:
            self._skip -= 1
            return {}
        found: list[tuple[int, list[float]]] = []
        for i, request in enumerate(decoding):
            matcher = request.matcher
            if not isinstance(matcher, Matcher):
                continue
            for place, right in matcher.compared(request.tokens):
                self._shares.count(min(place, 1), right)
            if i not in drafted and (expected := matcher.forced(request.tokens)):
                found.append((i, self._survivals(min(len(expected), room, MOST_DRAFT))))
        lengths = draft_lengths(found, len(decoding), n_rows, room, self._times.seconds) if found else {}
        self._n_fruitless = 0 if lengths else self._n_fruitless + 1
        self._skip = _SKIPPED if self._n_fruitless > _FRUITLESS else 0
        drafts: dict[int, list[int]] = {}
        for i, n in lengths.items():
            matcher = decoding[i].matcher
            assert isinstance(matcher, Matcher)
            drafts[i] = matcher.expected[:n]
        return drafts

    def _survivals(self, most: int) -> list[float]:
        first, later = self._shares.of(0), self._shares.of(1)
        return [first * later**n for n in range(most)]
