"""Scores that several ranks compute together are those of one process to the bit, and what goes wrong on one is told by the
first. Ranks are threads here; tests/cli/test_eval_ranks.py has processes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch

from real_model import make_model
from twostroke.core.errors import ConfigError
from twostroke.evaluation import bits, decoder_pass
from twostroke.evaluation.bits import nats_of
from twostroke.evaluation.decoder_scorer import DecoderScorer
from twostroke.evaluation.division import Division, dealt
from twostroke.evaluation.scorer import Scorer
from twostroke.training.progress import Progress

N = 3


class Rank:
    """What a ``Division`` uses of ``Ranks``, for a thread."""

    n, n_local = N, N

    def __init__(self, rank: int, given: list[Queue[Any]], found: list[Queue[Any]]) -> None:
        self.rank, self._given, self._found = rank, given, found
        self.progress = Progress()
        self.n_shares = 0

    def dealt(self, values: Sequence[Any] | None) -> Any:
        for box, value in zip(self._given, values, strict=True) if values is not None else ():
            box.put(value)
        self.n_shares += 1
        return self._given[self.rank].get(timeout=60)

    def collected(self, found: Any) -> list[Any] | None:
        self._found[self.rank].put(found)
        return [box.get(timeout=60) for box in self._found] if self.rank == 0 else None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    """The first one; the others follow in threads, which must end with the test."""
    given, found = [Queue() for _ in range(N)], [Queue() for _ in range(N)]
    ranks = [Rank(rank, given, found) for rank in range(N)]
    followers = [threading.Thread(target=Division(rank).follow, daemon=True) for rank in ranks[1:]]  # type: ignore[arg-type]
    for follower in followers:
        follower.start()
    yield ranks
    for follower in followers:
        follower.join(30)
        assert not follower.is_alive()


def of_all(ranks: list[Rank], model: Path, work: Callable[[Scorer], Any], **options: Any) -> Any:
    division = Division(ranks[0])  # type: ignore[arg-type]
    with division.leading():
        return work(division.open(model, "decoder", "fp32", **options))


@pytest.mark.parametrize("options", [{}, {"layer_by_layer": True}], ids=["whole", "layer-by-layer"])
def test_sequences_texts_and_answers_have_the_bits_of_one_process(
    ranks: list[Rank], model: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bits, "SCORED_TOKENS_PER_PASS", 60)
    monkeypatch.setattr("twostroke.evaluation.decoder_scorer.SCORED_TOKENS_PER_PASS", 60)
    monkeypatch.setattr(decoder_pass, "streamed_tokens", lambda d_model: 100)
    draw = random.Random(3)
    sequences = [([draw.randrange(512) for _ in range(draw.randint(2, 60))], draw.randint(1, 2)) for _ in range(70)]
    stream = np.array([draw.choice((0, *range(60))) for _ in range(3000)])
    prompts = [ids[:5] for ids, _ in sequences[:7]]

    def work(scorer: Scorer) -> tuple[Any, ...]:
        return (
            scorer.token_scores(sequences),
            nats_of(scorer, stream, 0, 40, 30),
            scorer.continue_greedily(prompts, 6, ("e",)),
        )

    wanted, found = work(DecoderScorer.load(model)), of_all(ranks, model, work, **options)
    for (nats, greedy), (own, own_greedy) in zip(wanted[0], found[0], strict=True):
        assert nats.tobytes() == own.tobytes()
        assert greedy.tolist() == own_greedy.tolist()
    assert wanted[1].tobytes() == found[1].tobytes()
    assert wanted[2] == found[2]
    assert len({rank.n_shares for rank in ranks}) == 1
    assert ranks[0].n_shares > 6


def test_an_error_of_any_rank_is_raised_on_the_first_and_ends_the_others(ranks: list[Rank], model: Path) -> None:
    division = Division(ranks[0])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="dtype='int9' is not a format to compute in"), division.leading():
        division.open(model, "decoder", "int9")


def test_shares_are_even_and_have_every_item_once() -> None:
    sizes = [5, 1, 9, 9, 2, 2, 7]
    shares = dealt(sizes, 3)
    assert sorted(i for share in shares for i in share) == list(range(7))
    assert [sum(sizes[i] for i in share) for share in shares] == [12, 11, 12]
    assert dealt([4, 4], 3) == [[0], [1], []]
