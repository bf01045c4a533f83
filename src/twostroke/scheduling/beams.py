"""Beam search: the most probable sequences of a request grow together, and after each step the best continuations go on.

``BeamSearch`` chooses, ``Beams`` is the request's state in the scheduler. The rules are those of transformers' ``generate``
with ``num_beams`` (version 5.23): which sequences go on, which count as ended, and when the search stops.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from twostroke.scheduling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from twostroke.scheduling.request import Request

EarlyStopping = bool | Literal["never"]


@dataclass(eq=False, slots=True)
class Beam:
    """A sequence by its last ``token`` and the beam ``before``, which sequences share. ``score`` is the sum of the
    log-probabilities of its tokens, natural logarithm. ``place`` is that of ``before`` among the live beams, ``stopped`` says
    that a stop token or string ended it. ``logprobs`` and ``text`` belong to the engine."""

    before: Beam | None = None
    token: int = -1
    score: float = 0.0
    place: int = 0
    length: int = 0
    stopped: bool = False
    logprobs: Any = None
    text: Any = None

    def path(self) -> list[Beam]:
        """The beams of all its tokens, the first token's first."""
        found: list[Beam] = []
        beam = self
        while beam.before is not None:
            found.append(beam)
            beam = beam.before
        return found[::-1]


@dataclass(frozen=True)
class BeamSearch:
    """A search after some steps. ``live`` are the sequences that go on, best first. ``ended`` are at most ``width`` sequences
    that have ended, with their sum of log-probabilities ÷ length ** ``length_penalty``, best first; the length counts the
    answer's tokens with the one that ended it.

    ``early_stopping`` says when the search is ``done`` before it reaches ``max_tokens``. True: as soon as ``width`` sequences
    have ended. False: once the best live sequence, ranked by its present length, is also no better than the worst of these.
    "never": the same, but ranked by the longest possible length where that ranks higher.
    """

    width: int
    length_penalty: float
    early_stopping: EarlyStopping
    max_tokens: int
    live: tuple[Beam, ...] = field(default_factory=lambda: (Beam(),))
    ended: tuple[tuple[float, Beam], ...] = ()
    done: bool = False

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]], stops: Callable[[Beam], bool]) -> BeamSearch:
        """The search one token later. ``candidates[i]`` are (token, log-probability) pairs that may follow ``live[i]``, best
        first: at least ``width``, and as many more as may be found to stop. ``stops`` says whether a sequence ends with its
        last token.

        Of all continuations the best ``width`` that do not end go on. One that ends counts only among the best ``width`` of
        all.
        """
        length = self.live[0].length + 1
        last = length >= self.max_tokens
        going: list[Beam] = []
        ended = list(self.ended)
        rows = [_scored(beam, place, row) for place, (beam, row) in enumerate(zip(self.live, candidates, strict=True))]
        for n, (score, place, token) in enumerate(heapq.merge(*rows, key=_descending)):
            if n >= self.width and (last or len(going) == self.width):
                break
            beam = Beam(self.live[place], token, score, place, length)
            beam.stopped = stops(beam)
            if not (last or beam.stopped):
                if len(going) < self.width:
                    going.append(beam)
            elif n < self.width:
                ended.append((self.ranked(beam), beam))
        ended = sorted(ended, key=_descending)[: self.width]  # stable: of equal ones the earlier
        done = last or not going
        if not done and len(ended) == self.width:
            longest = self.early_stopping == "never" and self.length_penalty > 0
            best = going[0].score / (self.max_tokens if longest else length) ** self.length_penalty
            done = self.early_stopping is True or best <= ended[-1][0]
        return replace(self, live=tuple(going), ended=tuple(ended), done=done)

    def ranked(self, beam: Beam) -> float:
        return beam.score / beam.length**self.length_penalty

    def answers(self) -> list[tuple[float, Beam]]:
        """The best sequences with their ranks, best first. Before the search is done, those that go on count as they are."""
        under_way = [] if self.done else [(self.ranked(beam), beam) for beam in self.live if beam.length]
        return sorted((*self.ended, *under_way), key=_descending)[: self.width]


def _scored(beam: Beam, place: int, row: Sequence[tuple[int, float]]) -> Iterator[tuple[float, int, int]]:
    return ((beam.score + logprob, place, token) for token, logprob in row)


def _descending(entry: tuple[float, Any] | tuple[float, int, int]) -> float:
    return -entry[0]


class Beams:
    """The sequences of the request ``root`` in the scheduler: ``live`` has one for each of the search's live beams, in their
    order, each a request of its own with the tokens, pages and slot of its sequence. The ``idle`` ones wait for a sequence.
    ``slots`` are kept for those that are not made yet. Only ``root`` is known by its id, waits, and has a deadline.

    ``folded``: the search was preempted, and ``root`` stands for all sequences, with the tokens that they begin with.
    ``catching_up``: these are computed, and each sequence computes its others, but for the last one."""

    __slots__ = ("catching_up", "folded", "idle", "live", "root", "search", "slots", "width")

    def __init__(self, root: Request, params: SamplingParams) -> None:
        self.root = root
        self.width = params.beam_width
        self.slots: list[int] = []
        self.search = BeamSearch(self.width, params.length_penalty, params.early_stopping, params.max_tokens)
        self.live: list[Request] = [root]
        self.idle: list[Request] = []
        self.folded = self.catching_up = False

    def limit(self, max_tokens: int) -> None:
        """At most ``max_tokens`` tokens an answer."""
        self.search = replace(self.search, max_tokens=max_tokens)

    def fold(self) -> None:
        """Leave the root alone, with the tokens that all sequences begin with, at most all but the last."""
        root, paths = self.root, self._tokens()
        n_common = 0
        while n_common < len(paths[0]) - 1 and len({path[n_common] for path in paths}) == 1:
            n_common += 1
        root.tokens = root.tokens[: root.n_prompt] + paths[0][:n_common]
        self.live, self.idle = [root], []
        self.folded, self.catching_up = bool(paths[0]), False

    def _tokens(self) -> list[list[int]]:
        return [[each.token for each in beam.path()] for beam in self.search.live]

    def unfold(self, others: Sequence[Request]) -> None:
        """Give ``root`` and ``others`` the tokens of the sequences."""
        root = self.root
        prompt = root.tokens[: root.n_prompt]
        self.live = [root, *others]
        for request, path in zip(self.live, self._tokens(), strict=True):
            request.tokens = prompt + path
        self.folded, self.catching_up = False, True

    @property
    def caught_up(self) -> bool:
        """Whether each sequence lacks one token."""
        return all(len(request.tokens) - request.n_computed == 1 for request in self.live)

    @property
    def members(self) -> list[Request]:
        return self.live + self.idle

    def heirs(self, search: BeamSearch) -> list[int]:
        """For each live beam of ``search`` the place in ``live`` whose request it takes over, −1 where that of its sequence is
        taken: then it needs a copy. A request keeps the best continuation of its own sequence."""
        taken: set[int] = set()
        found = []
        for beam in search.live:
            found.append(-1 if beam.place in taken else beam.place)
            taken.add(beam.place)
        return found
