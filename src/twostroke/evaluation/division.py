"""Divides the work of an evaluation over ranks: the first one has the questions and the report, and hands out shares.

What is handed out does not depend on the number of ranks: passes of the decoder are made before they are shared, and the native
library computes a sequence alike in any company. So scores are those of one process, bit for bit, if each rank has as many
threads (tests/evaluation/test_division.py).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from twostroke.core.errors import TwostrokeError
from twostroke.engine.scoring import TokenScores
from twostroke.evaluation.decoder_pass import Pass
from twostroke.evaluation.decoder_scorer import DecoderScorer
from twostroke.evaluation.engines import open_scorer
from twostroke.evaluation.scorer import Progress, Scorer
from twostroke.model.decoder import Decoder
from twostroke.training.progress import Phase
from twostroke.training.ranks import Ranks

T = TypeVar("T")

PASSES_AT_ONCE, SEQUENCES_AT_ONCE = 8, 64
"""Passes of the decoder and sequences of the other engine that a rank gets together. At the end of each such share ranks wait
for the slowest."""

OPEN = "open"

Order = tuple[str, tuple[Any, ...]]
"""What a rank calls of its scorer, or ``OPEN``, with which arguments."""


class Division:
    """The ranks of one evaluation. The first one opens a model and asks; the others ``follow``."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._scorer: Any = None

    # -- on the first rank ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """Inside, work is handed out. At the end, or after an error of this rank, the others have no more to do."""
        try:
            yield
        except RuntimeError:  # another rank is lost, and each sees that by itself
            raise
        except BaseException:
            self.ranks.dealt([None] * self.ranks.n)
            raise
        self.ranks.dealt([None] * self.ranks.n)

    def open(self, directory: Path, engine: str, dtype: str | None, **options: Any) -> Scorer:
        """``open_scorer`` on every rank, as a scorer whose work all of them do. Raises what that raises on any of them."""
        options |= {"replicas": self.ranks.n_local}  # which share the memory, and the packed weights if there are such
        opened = self._everywhere([(OPEN, ([directory, engine, dtype, options],))] * self.ranks.n)
        if isinstance(self._scorer, DecoderScorer):
            return DividedDecoderScorer(self._scorer.decoder, self._scorer.tokenizer, self)
        return DividedScorer(self._scorer, min(longest for (longest,) in opened), self)

    def shared(self, work: str, items: Sequence[Any], sizes: Sequence[int], *arguments: Any) -> list[Any]:
        """One result for each of ``items``, in their order, from the scorer's method ``work``, which every rank calls with a
        part of them."""
        shares = dealt(sizes, self.ranks.n)
        found = self._everywhere([(work, ([items[i] for i in share], *arguments)) for share in shares])
        results: dict[int, Any] = {}
        for share, theirs in zip(shares, found, strict=True):
            results |= zip(share, theirs, strict=True)
        return [results[i] for i in range(len(items))]

    def _everywhere(self, orders: Sequence[Order]) -> list[Any]:
        """What each rank says of its order. Raises the error of one."""
        outcomes = self.ranks.collected(self._outcome(*self.ranks.dealt(orders)))
        assert outcomes is not None
        for outcome in outcomes:
            if isinstance(outcome, TwostrokeError):
                raise outcome
        return outcomes

    # -- on the others ----------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Do what the first rank hands out, until it has no more."""
        while (order := self._next()) is not None:
            self.ranks.collected(self._outcome(*order))

    def _next(self) -> Order | None:
        order: Order | None = self.ranks.dealt(None)
        return order

    def _outcome(self, work: str, arguments: tuple[Any, ...]) -> list[Any] | TwostrokeError:
        """What this rank has to say of its share, which may be an error."""
        try:
            with self.ranks.progress.doing(Phase.BUILDING if work == OPEN else Phase.EVALUATING):
                if work != OPEN:
                    return list(getattr(self._scorer, work)(*arguments))
                ((directory, engine, dtype, options),) = arguments
                self._scorer = open_scorer(directory, engine, dtype, **options)
                return [self._scorer.longest]
        except TwostrokeError as error:
            return error


def dealt(sizes: Sequence[int], n: int) -> list[list[int]]:
    """The numbers of items of such ``sizes`` for each of ``n`` ranks: the largest first, to the rank with the least."""
    shares: list[list[int]] = [[] for _ in range(n)]
    totals = [0] * n
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = totals.index(min(totals))
        shares[rank].append(i)
        totals[rank] += sizes[i]
    return shares


class DividedDecoderScorer(DecoderScorer):
    """A ``DecoderScorer`` whose passes all ranks of ``division`` compute."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, division: Division) -> None:
        super().__init__(decoder, tokenizer)
        self._division = division

    def score_passes(self, passes: Iterable[Pass]) -> Iterator[TokenScores]:
        for some in _runs(passes, PASSES_AT_ONCE * self._division.ranks.n):
            yield from self._division.shared("score_passes", some, [each.tokens.size for each in some])

    def next_tokens(self, rows: Sequence[Sequence[int]]) -> list[int]:
        return self._division.shared("next_tokens", rows, [len(ids) for ids in rows])


class DividedScorer:
    """``scorer``, whose sequences and prompts all ranks of ``division`` compute; each of them has memory for ``longest``
    tokens."""

    def __init__(self, scorer: Scorer, longest: int, division: Division) -> None:
        self.engine, self.dtype, self.formats = scorer.engine, scorer.dtype, scorer.formats
        self.spec, self.tokenizer, self.longest = scorer.spec, scorer.tokenizer, longest
        self._division = division

    def token_scores(
        self, sequences: Sequence[tuple[Sequence[int], int]], progress: Progress | None = None
    ) -> list[TokenScores]:
        return self._shared("token_scores", sequences, [len(ids) for ids, _ in sequences], progress)

    def continue_greedily(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Sequence[str] = (), progress: Progress | None = None
    ) -> list[str]:
        return self._shared("continue_greedily", prompts, [len(ids) for ids in prompts], progress, max_tokens, stop)

    def _shared(
        self, work: str, items: Sequence[T], sizes: Sequence[int], progress: Progress | None, *arguments: Any
    ) -> list[Any]:
        found: list[Any] = []
        for some in _runs(zip(items, sizes, strict=True), SEQUENCES_AT_ONCE * self._division.ranks.n):
            found += self._division.shared(work, [item for item, _ in some], [size for _, size in some], *arguments)
            if progress is not None:
                progress(len(found) / len(items))
        return found


def _runs(items: Iterable[T], length: int) -> Iterator[list[T]]:
    rest = iter(items)
    while run := list(itertools.islice(rest, length)):
        yield run
