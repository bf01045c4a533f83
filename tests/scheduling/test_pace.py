"""The bound of steps in which requests decode: kept, starving nobody, and corrected by what is measured."""

from __future__ import annotations

import random
import zlib
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.core.errors import ConfigError
from twostroke.core.policy import BEHIND_TOKENS, BESIDE_TOKENS, QUIET_STEPS
from twostroke.scheduling.pace import Pace, StepCosts
from twostroke.scheduling.request import Request
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.scheduling.scheduler import Scheduler
from twostroke.scheduling.step import ScheduledStep, SchedulerConfig

PAGE = 4
ROWS = (1, 8, 64, 512)


def costs(own_s: float = 1.0, row_s: float = 0.1, key_s: float = 1e-3, pair_s: float = 1e-4) -> StepCosts:
    """Linear ones: a step's own seconds, those of a row, of a key and of a pair."""
    seconds = tuple(own_s + n * row_s for n in ROWS)
    return StepCosts(ROWS, seconds, seconds, key_s, pair_s)


def make(pace: Pace | None, token_budget: int = 64, max_running: int = 8) -> Scheduler:
    return Scheduler(SchedulerConfig(token_budget, max_running, PAGE, 4000, 2000), pace=pace)


def request(name: str, n_prompt: int, max_tokens: int = 4, priority: int = 0) -> Request:
    first = zlib.crc32(name.encode()) % 10**6
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(name, list(range(first, first + n_prompt)), params, priority)


def run_step(scheduler: Scheduler) -> ScheduledStep:
    step = scheduler.schedule()
    scheduler.update(step, [5 if step.samples(i) else None for i in range(len(step.requests))])
    return step


def seconds_of(step: ScheduledStep, of: StepCosts) -> float:
    """Token by token, as far as the costs are linear."""
    row_s = (of.decode_s[1] - of.decode_s[0]) / (ROWS[1] - ROWS[0])
    seconds = of.decode_s[0] - row_s + step.n_tokens * row_s + sum(step.starts[: step.n_decodes]) * of.key_s
    for start, count in zip(step.starts[step.n_decodes :], step.counts[step.n_decodes :], strict=True):
        seconds += count * (start + count / 2) * of.pair_s
    return seconds


def alone_s(step: ScheduledStep, of: StepCosts) -> float:
    """The same step without its prompts."""
    n = step.n_decodes
    row_s = (of.decode_s[1] - of.decode_s[0]) / (ROWS[1] - ROWS[0])
    return of.decode_s[0] - row_s + n * row_s + sum(step.starts[:n]) * of.key_s


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=12),
    st.sampled_from((1.01, 1.5, 2.0, 4.0)), st.sampled_from((0.01, 0.1, 1.0)), st.sampled_from((0.0, 1e-3)),
    st.sampled_from((0.0, 1e-4, 1e-2)), st.sampled_from((16, 64, 512)),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_a_step_keeps_to_the_bound_and_every_prompt_goes_on(
    arrivals: list[tuple[int, int, int]], ratio: float, row_s: float, key_s: float, pair_s: float, token_budget: int
) -> None:
    of = costs(1.0, row_s, key_s, pair_s)
    s = make(Pace(of, ratio, PAGE), token_budget)
    coming = [(at, request(f"r{i}", n, m)) for i, (at, n, m) in enumerate(arrivals)]
    n_steps = 0
    while coming or s.has_work:
        for each in [pair for pair in coming if pair[0] <= n_steps]:
            coming.remove(each)
            s.add(each[1])
        n_steps += 1
        if not s.has_work:
            continue
        waited = s.n_waiting + sum(len(r.tokens) - r.n_computed > 1 for r in s.requests.values() if r.slot >= 0)
        step = s.schedule()
        prompts = step.counts[step.n_decodes :]
        if step.n_decodes and prompts:
            limit_s = ratio * (1 + max(0, waited - 1) / step.n_decodes) * alone_s(step, of)
            assert seconds_of(step, of) <= limit_s * (1 + 1e-9) or (len(prompts) == 1 and prompts[0] <= PAGE)
            for i in range(step.n_decodes, len(step.requests)):
                whole = step.completes(i) or step.counts[i] % PAGE == 0
                assert whole or step.n_tokens == token_budget, "neither pages, nor a prompt's end, nor all there is"
        s.update(step, [5 if step.samples(i) else None for i in range(len(step.requests))])
        assert n_steps < 10**4, "no end"
    assert s.pool.n_used == 0


def test_a_prompt_goes_on_by_a_page_where_none_fits() -> None:
    s = make(Pace(costs(0.001, 1.0), 1.01, PAGE))
    s.add(request("decodes", 3, 400))
    run_step(s)
    s.add(request("prompt", 100))
    for _ in range(25):
        assert run_step(s).by_request() == {"decodes": 1, "prompt": PAGE}
    assert run_step(s).by_request() == {"decodes": 1, "prompt": 1}


def test_where_nobody_decodes_a_prompt_takes_the_budget() -> None:
    s = make(Pace(costs(0.001, 1.0), 1.01, PAGE))
    s.add(request("prompt", 100))
    assert run_step(s).by_request() == {"prompt": 64}


def test_those_who_wait_for_a_first_token_count_like_those_who_decode() -> None:
    pace = Pace(costs(), 2.0, PAGE)
    assert pace.limit_s(4, 100, 0) == pytest.approx(2 * pace.costs.decode(4, 100))
    assert pace.limit_s(4, 100, 4) == pytest.approx(2 * pace.limit_s(4, 100, 0))
    tokens = [pace.tokens_beside(4, 100, others) for others in range(20)]
    assert all(one <= more for one, more in pairwise(tokens))
    assert tokens[19] > 5 * tokens[0]


def test_only_a_step_that_the_bound_does_not_cut_has_room_for_drafts() -> None:
    config = SchedulerConfig(64, 8, PAGE, 4000, 2000, draft_rows=8)
    s = Scheduler(config, pace=Pace(costs(0.001, 1.0), 2.0, PAGE))
    s.add(request("decodes", 3, 100))
    run_step(s)
    asked = []

    def propose(decoding: object, n_tokens: int, room: int) -> dict[int, list[int]]:
        asked.append(room)
        return {}

    for n_prompt in (100, 1):
        s.add(request(f"prompt{n_prompt}", n_prompt, 1))
        step = s.schedule(propose)
        s.update(step, [5 if step.samples(i) else None for i in range(len(step.requests))])
        s.abort(f"prompt{n_prompt}")
    assert asked == [8]


@pytest.mark.parametrize("slower", [1.0, 3.0])
@pytest.mark.parametrize("wrong", [0.5, 1.0, 2.0])
def test_steps_that_are_measured_correct_the_bound_and_the_machines_speed_does_not(slower: float, wrong: float) -> None:
    """Steps with prompts take ``wrong`` times what is predicted, and all steps ``slower`` times."""
    planned = costs(1.0, 0.1, 0.0, 0.0)
    pace, chance = Pace(planned, 3.0, 1), random.Random(1)
    s = make(pace, 512)
    s.add(request("decodes", 10, 1500))
    run_step(s)
    for i in range(400):
        if i % 3 == 0:
            s.add(request(f"p{i}", 200, 1))
        step = s.schedule()
        prompts = step.n_decodes < len(step.requests)
        s.update(step, [5 if step.samples(k) else None for k in range(len(step.requests))])
        if prompts:
            s.abort(f"p{i}")
        seconds = slower * (wrong if prompts else 1.0) * seconds_of(step, planned) * chance.lognormvariate(0.0, 0.1)
        pace.saw(step, seconds)
    found = pace.limit_s(1, 0, 0)
    assert found == pytest.approx(3.0 * planned.decode(1, 0) / wrong, rel=0.06)  # 400 steps that vary by a tenth


def test_a_step_that_the_system_interrupted_says_little() -> None:
    pace = Pace(costs(), 2.0, PAGE)
    step = ScheduledStep(1, [request("a", 4), request("b", 40)], [1, 16], [3, 0], 1, [], [])
    for _ in range(50):
        pace.saw(step, seconds_of(step, pace.costs))
    before = pace.limit_s(1, 3, 0)
    pace.saw(step, 1000 * seconds_of(step, pace.costs))
    assert pace.limit_s(1, 3, 0) == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("ratio", [1.0, 0.5, float("nan")])
def test_a_ratio_that_leaves_no_room_is_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match="max_step_ratio"):
        Pace(costs(), ratio, PAGE)


def test_what_decodes_waits_for_a_prompt_before_it_and_not_for_one_without_a_place() -> None:
    s = make(None, 64, max_running=2)
    s.add(request("low", 4, 50, priority=1))
    run_step(s)
    s.add(request("high", 100))
    assert run_step(s).by_request() == {"high": 63}  # a token of the budget stays with the one that waits
    assert run_step(s).by_request() == {"high": 37}
    assert run_step(s).by_request() == {"low": 1, "high": 1}
    s.add(request("equal", 8, priority=1))
    assert run_step(s).by_request() == {"low": 1, "high": 1}  # it has no place


def test_a_prompt_behind_others_takes_less_of_a_step_until_they_were_not_seen_for_long() -> None:
    s = make(None, 512)
    s.add(request("high", 4, 2))
    run_step(s)
    run_step(s)
    s.add(request("low", 500, priority=1))
    assert run_step(s).by_request() == {"low": BESIDE_TOKENS}
    s.abort("low")
    s.add(request("long", 4, QUIET_STEPS + 10, priority=1))
    for _ in range(QUIET_STEPS):
        run_step(s)
    s.add(request("later", 500, priority=1))
    assert run_step(s).by_request() == {"long": 1, "later": BEHIND_TOKENS}
