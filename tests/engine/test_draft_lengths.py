"""How many drafts pay: acceptance, step times, and the choice between them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.engine.speculation.drafter import Drafter
from twostroke.engine.speculation.lengths import Acceptance, StepTimes, draft_lengths
from twostroke.engine.speculation.repeats import NGRAM, PAST_TOKENS, PastOutputs, Repeats
from twostroke.scheduling.request import Request
from twostroke.scheduling.sampling_params import SamplingParams

SURVIVALS = st.lists(st.lists(st.floats(0.05, 1.0), max_size=4).map(lambda s: sorted(s, reverse=True)), min_size=1, max_size=3)


@given(SURVIVALS, st.floats(0.0, 1.0), st.integers(0, 8))
def test_the_chosen_lengths_are_those_of_every_choice_that_gain_most(found: list[list[float]], slope: float, room: int) -> None:
    """Against every combination of lengths; with up to 4 drafted tokens in all, each number of them is tried."""

    def seconds(rows: int) -> float:
        return 1.0 + slope * rows

    def rate(lengths: Sequence[int]) -> float:
        expected = n + sum(sum(of[:k]) for of, k in zip(found, lengths, strict=True))
        return expected / seconds(n + sum(lengths))

    n, room = len(found), min(room, 4)
    chosen = draft_lengths(enumerate(found), n, n, room, seconds)
    lengths = [chosen.get(i, 0) for i in range(n)]
    assert sum(lengths) <= room
    every = (c for c in itertools.product(*(range(len(of) + 1) for of in found)) if sum(c) <= room)
    best = max(rate(c) for c in every)
    plain = rate([0] * n)
    if best > plain * 1.02 * (1 + 1e-9):
        assert rate(lengths) == pytest.approx(best)
    elif best < plain * 1.02 * (1 - 1e-9):
        assert not chosen


def test_where_rows_cost_what_a_step_does_nothing_is_drafted() -> None:
    certain = [(i, [0.99] * 20) for i in range(32)]
    assert draft_lengths(certain, 32, 32, 64, lambda rows: float(rows)) == {}
    free = draft_lengths(certain, 32, 32, 64, lambda rows: 1.0)
    assert sum(free.values()) == 64


def test_step_times_follow_what_is_measured() -> None:
    times = StepTimes(lambda rows: 1.0 + 0.1 * rows, 64)
    assert times.seconds(1) == pytest.approx(1.1)
    assert times.seconds(20) == pytest.approx(3.0)
    assert times.seconds(128) == pytest.approx(2 * times.seconds(64))
    for _ in range(60):  # eight rows are slower than was predicted, one is not
        times.saw(8, 5.0)
        times.saw(1, 1.1)
    assert times.seconds(8) == pytest.approx(5.0, rel=0.1)
    assert times.seconds(1) == pytest.approx(1.1, rel=0.1)
    for _ in range(60):  # the whole machine became twice as slow, and only steps of one row are seen
        times.saw(1, 2.2)
    assert times.seconds(1) == pytest.approx(2.2, rel=0.1)
    assert 5.5 < times.seconds(8) < 12
    times.saw(1, 1e9)  # one interrupted step is no catastrophe
    assert times.seconds(1) < 3.0


def test_acceptance_is_that_of_the_last_tokens() -> None:
    acceptance = Acceptance()
    assert acceptance.of(3) == acceptance.of(40) == 0.5
    for _ in range(300):
        acceptance.count(5, True)
    assert acceptance.of(5) > 0.95
    assert acceptance.of(3) == 0.5
    for _ in range(300):
        acceptance.count(5, False)
    assert acceptance.of(5) < 0.05
    assert acceptance.survivals(5, 9) == []
    assert acceptance.survivals(40, 9) == pytest.approx([0.5, 0.25, 0.125, 0.0625])


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 3), min_size=3, max_size=12))
def test_the_longest_match_is_that_of_a_plain_search(text: list[int], end: list[int]) -> None:
    repeats = Repeats(list(text), 4)
    repeats.extend()
    at, length = repeats.longest(end, repeats.last(end))
    places = [i for i in range(NGRAM, len(text)) if text[i - NGRAM : i] == end[-NGRAM:]]
    last_is_end = text[-NGRAM:] == end[-NGRAM:]
    latest = places[-(8 - last_is_end) :]  # a place with nothing behind it counts as compared

    def matched(i: int) -> int:
        return next((k for k in range(1, min(i, len(end)) + 1) if text[i - k] != end[-k]), min(i, len(end)) + 1) - 1

    assert length == max(map(matched, latest), default=0)
    if latest:
        assert matched(at) == length


def test_a_text_that_repeats_itself_goes_on_so() -> None:
    drafter = Drafter(10, StepTimes(lambda rows: 1.0, 64), past_outputs=True)
    request = Request("r", [1, 2, 3, 1, 2, 3, 1, 2, 3], SamplingParams())
    (draft,) = drafter.propose([request], 1, 64).values()
    assert draft == [1, 2, 3, 1, 2, 3, 1, 2, 3][: len(draft)]
    request.tokens += [1, 2, 3] * 40
    (draft,) = drafter.propose([request], 1, 64).values()
    assert draft == [1, 2, 3] * 8
    request.tokens += [7, 8, 9]
    assert drafter.propose([request], 1, 64) == {}


def test_an_output_is_drafted_for_the_next_request_with_its_words() -> None:
    random_ids = random.Random(0).sample(range(1000), 40)
    drafter = Drafter(1000, StepTimes(lambda rows: 1.0, 64), past_outputs=True)
    apart = Drafter(1000, StepTimes(lambda rows: 1.0, 64), past_outputs=False)
    first = Request("a", [5, 6], SamplingParams())
    first.tokens += random_ids
    second = Request("b", [7, *random_ids[10:14]], SamplingParams())
    for one in (drafter, apart):
        one.ended(first)
    assert drafter.propose([second], 1, 64)[0] == random_ids[14 : 14 + len(drafter.propose([second], 1, 64)[0])]
    assert apart.propose([Request("c", second.tokens, SamplingParams())], 1, 64) == {}


def test_past_outputs_are_bounded() -> None:
    past = PastOutputs(10)
    for i in range(5 * PAST_TOKENS // 1000):
        past.add([i % 10] * 1000)
    assert len(past.lists) == 2
    assert all(len(repeats.tokens) <= PAST_TOKENS + 1000 for repeats in past.lists)
