"""Steps that are taken at once leave what the same steps leave one by one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.scheduling.request import Request
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.scheduling.steady import SteadyScheduler
from twostroke.scheduling.step import SchedulerConfig


def config(n_pages: int, window: int | None = None, prefix_cache: bool = True) -> SchedulerConfig:
    return SchedulerConfig(32, 8, 4, n_pages, 200, window, prefix_cache=prefix_cache)


def drawn(seed: int, n: int) -> list[Request]:
    """Requests whose prompts often begin alike; their answers differ, as sampled ones do."""
    rng = random.Random(seed)
    made = []
    for i in range(n):
        prompt = [7] * rng.randint(0, 20) + [100 + i] * rng.randint(1, 20)
        made.append(Request(str(i), prompt, SamplingParams(max_tokens=rng.randint(1, 30), ignore_eos=True)))
    return made


def state(scheduler: SteadyScheduler) -> object:
    """With it, what would be evicted first: ended requests give their pages back in turn."""
    rows = [
        (r.id, r.n_computed, len(r.tokens), len(r.pages), r.slot, r.account and r.account.served) for r in scheduler.decoding
    ]
    pool = scheduler.pool
    oldest_first = [pool.tree._entry_of[page] for page in pool._cached]
    counts = scheduler.n_waiting, pool.n_used, scheduler.n_preemptions, scheduler.admission.n_prefix_hit_tokens
    return rows, oldest_first, counts


def one_step(scheduler: SteadyScheduler) -> list[Request]:
    step = scheduler.schedule()
    return scheduler.update(step, [int(r.id) if step.samples(i) else None for i, r in enumerate(step.requests)])


@given(st.integers(0, 10**6), st.integers(18, 60), st.sampled_from((None, 8, 40)), st.booleans())
@settings(max_examples=300, deadline=None)
def test_advancing_equals_so_many_rounds_of_schedule_and_update(
    seed: int, n_pages: int, window: int | None, prefix_cache: bool
) -> None:
    at_once, one_by_one = (SteadyScheduler(config(n_pages, window, prefix_cache)) for _ in range(2))
    for scheduler in (at_once, one_by_one):
        for request in drawn(seed, 14):
            scheduler.add(request)
    while at_once.has_work:
        n_steps = at_once.steady_steps()
        ended = at_once.advance(n_steps, [int(r.id) for r in at_once.decoding]) if n_steps else one_step(at_once)
        expected = [r for _ in range(max(1, n_steps)) for r in one_step(one_by_one)]
        assert [r.id for r in ended] == [r.id for r in expected]
        assert [r.tokens for r in ended] == [r.tokens for r in expected]
        assert state(at_once) == state(one_by_one)
    assert not one_by_one.has_work


def test_no_step_is_foretold_while_a_prompt_is_under_way_or_might_be_admitted() -> None:
    scheduler = SteadyScheduler(config(40))
    assert scheduler.steady_steps() == 0
    first, second = drawn(1, 2)
    scheduler.add(first)
    assert scheduler.steady_steps() == 0
    one_step(scheduler)
    one_step(scheduler)
    assert scheduler.steady_steps() == first.limit - len(first.tokens)
    scheduler.add(second)
    assert scheduler.steady_steps() == 0


def test_no_step_is_foretold_of_an_answer_that_a_token_may_end() -> None:
    scheduler = SteadyScheduler(config(40))
    scheduler.add(Request("1", [1, 2], SamplingParams(max_tokens=20), eos_token_ids=(5,)))
    one_step(scheduler)
    assert scheduler.steady_steps() == 0


def test_without_a_prefix_cache_nothing_is_found_again() -> None:
    scheduler = SteadyScheduler(config(40, prefix_cache=False))
    for name in ("1", "2"):
        scheduler.add(Request(name, [7] * 20, SamplingParams(max_tokens=1, ignore_eos=True)))
        while scheduler.has_work:
            one_step(scheduler)
    assert scheduler.admission.n_prefix_hit_tokens == 0
    assert scheduler.pool.n_cached == 0


@pytest.mark.parametrize("window", [None, 8])
def test_all_pages_come_back(window: int | None) -> None:
    scheduler = SteadyScheduler(config(30, window))
    for request in drawn(5, 10):
        scheduler.add(request)
    taken = 0
    while scheduler.has_work:
        n_steps = scheduler.steady_steps()
        taken += n_steps
        if n_steps:
            scheduler.advance(n_steps, [int(r.id) for r in scheduler.decoding])
        else:
            one_step(scheduler)
    assert taken  # some steps were taken at once
    assert scheduler.pool.n_used == 0
