"""``Drafter``: proposes drafts for the scheduler's steps, and learns from what the steps gave."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.engine.speculation.lengths import Acceptance, StepTimes, draft_lengths
from twostroke.engine.speculation.repeats import PastOutputs, Repeats
from twostroke.scheduling.request import Request
from twostroke.scheduling.step import ScheduledStep

MOST_DRAFT = 24
"""Most tokens that are drafted of one request in a step."""


_MATTERS, _SEEN_OF = 32, 8
"""After so many steps without a repeat only one step in ``_SEEN_OF`` corrects the step times."""

_MOST_SKIPPED = 7
"""Steps that a request's text is not searched for repeats, once dozens of searches found none."""


class _Followed:
    """A request's own repeats, and the place that its text follows at present: its next token is expected to be
    ``source[at]``, because the ``length`` tokens before both are equal. ``length`` 0: it follows no place."""

    __slots__ = ("at", "length", "n_fruitless", "n_seen", "own", "skip", "source")

    def __init__(self, request: Request, vocab_size: int) -> None:
        self.own = Repeats(request.tokens, vocab_size)
        self.source = request.tokens
        self.at = self.length = 0
        self.n_fruitless = self.skip = 0  # searches in a row that found nothing; steps before the next one
        self.n_seen = len(request.tokens)

    def advance(self, acceptance: Acceptance, past: PastOutputs | None) -> int:
        """Compare the tokens that came with what was expected, and search where the place was left. Returns ``length``."""
        tokens = self.own.tokens
        if self.length:
            source, at, length = self.source, self.at, self.length
            for token in tokens[self.n_seen :]:
                right = at < len(source) and source[at] == token
                acceptance.count(length, right)
                if not right:
                    length = 0
                    break
                at, length = at + 1, length + 1
            self.at, self.length = at, length if at < len(source) else 0
        self.n_seen = len(tokens)
        if self.length:
            return self.length
        if self.skip:
            self.skip -= 1
            return 0
        found = self._search(past)
        self.n_fruitless = 0 if found else self.n_fruitless + 1
        self.skip = min(_MOST_SKIPPED, self.n_fruitless // 8)
        return found

    def _search(self, past: PastOutputs | None) -> int:
        own = self.own
        own.extend()
        place = own.last_before_end()
        if place >= 0:
            self.source = own.tokens
            self.at, self.length = own.longest(own.tokens, place)
        if past is not None:
            for repeats in past.lists:
                place = repeats.last(own.tokens)
                if place >= 0:
                    at, length = repeats.longest(own.tokens, place)
                    if length > self.length:
                        self.source, self.at, self.length = repeats.tokens, at, length
        return self.length

    def expected(self, n: int) -> list[int]:
        """The next ``n`` tokens. A text that repeats its last tokens is expected to go on so."""
        draft = self.source[self.at : self.at + n]
        if self.source is self.own.tokens:
            period = len(draft)  # behind its end the text is what is expected of it
            while len(draft) < n:
                draft.append(draft[len(draft) - period])
        return draft


class Drafter:
    """Drafts from the request's own text and, unless clients are kept apart, from past outputs.

    ``times`` are seconds of a step by its rows."""

    def __init__(self, vocab_size: int, times: StepTimes, past_outputs: bool) -> None:
        self.times = times
        self.acceptance = Acceptance()
        self._matters = 0  # steps for which step times still matter, because texts repeated lately
        self._vocab_size = vocab_size
        self._past = PastOutputs(vocab_size) if past_outputs else None

    def propose(self, decoding: Sequence[Request], n_rows: int, room: int) -> dict[int, list[int]]:
        """See ``scheduling.step.Propose``."""
        found: list[tuple[int, list[float]]] = []
        for i, request in enumerate(decoding):
            length = self._of(request).advance(self.acceptance, self._past)
            if length:
                survivals = self.acceptance.survivals(length, min(room, MOST_DRAFT))
                if survivals:
                    found.append((i, survivals))
        self._matters = _MATTERS if found else max(0, self._matters - 1)
        if not found:
            return {}
        lengths = draft_lengths(found, len(decoding), n_rows, room, self.times.seconds)
        return {i: self._of(decoding[i]).expected(n) for i, n in lengths.items()}

    def _of(self, request: Request) -> _Followed:
        made = request.drafter
        if not isinstance(made, _Followed):
            made = request.drafter = _Followed(request, self._vocab_size)
        return made

    def saw(self, step: ScheduledStep, seconds: float) -> None:
        """``step`` took ``seconds``. Where nothing repeats, only one step in ``_SEEN_OF`` is counted."""
        if step.n_decodes == len(step.requests) and (self._matters or step.number % _SEEN_OF == 0):
            self.times.saw(step.n_tokens, seconds)

    def ended(self, request: Request) -> None:
        """Remember the output of a request that has ended."""
        if self._past is not None:
            self._past.add(request.tokens[request.n_prompt :])
