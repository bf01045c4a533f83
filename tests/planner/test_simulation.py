"""Simulated load: taken at once as one by one, by hand where that is possible, and the engines' own rules."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.core.errors import CapacityError, ConfigError
from twostroke.planner.serving.drawn import Gamma, Lognormal, Uniform
from twostroke.planner.serving.http import FrontEnd
from twostroke.planner.serving.policies import AT_ONCE, POLICIES, Taking, policy_of
from twostroke.planner.serving.simulation import simulate
from twostroke.planner.serving.step_costs import step_costs
from twostroke.planner.serving.strategy import Chunk
from twostroke.planner.serving.workload import Arrival, Turns, Workload
from twostroke.scheduling.pace import Pace

PAGES = 10**5


def seconds(decoding: int, context: float, chunks: Sequence[Chunk]) -> float:
    """Like an engine's: a step, its requests and their cache, tokens of prompts and those before them. The step's own time is
    no sum of the others: a request that arrives just when a step ends would be in it or not by the last bit of a sum."""
    prompts = sum(2e-5 * chunk.new + 1e-9 * chunk.new * chunk.before for chunk in chunks)
    return math.pi / 3 * 1e-3 + 2e-5 * decoding + 1e-8 * decoding * context + prompts


def assert_equal(found: object, expected: object) -> None:
    """Equal to 1e-9, NaN to NaN."""
    if dataclasses.is_dataclass(found):
        for field in dataclasses.fields(found):
            assert_equal(getattr(found, field.name), getattr(expected, field.name))
    else:
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    n = draw(st.integers(2, 40))
    lengths = [Uniform(*sorted((draw(st.integers(1, most)), draw(st.integers(1, most))))) for most in (300, 60)]
    drawn = {"warmup": draw(st.integers(0, n - 1)), "answers": draw(st.sampled_from((1, 1, 3)))}
    drawn |= {"shared_prefix": draw(st.sampled_from((0, 64))), "seed": draw(st.integers(0, 99))}
    drawn |= {"turns": Turns(draw(st.sampled_from((1, 1, 3))), draw(st.sampled_from((0.0, 0.1234567))))}
    if draw(st.booleans()):
        return Workload.closed(draw(st.integers(1, n)), n, *lengths, **drawn)
    rate, cap = draw(st.sampled_from((5.0, 50.0, 500.0, math.inf))), draw(st.sampled_from((None, 3)))
    gaps = draw(st.sampled_from(("gamma:0.3", "poisson", "constant", "weibull:0.7")))
    return Workload.open(rate, n, *lengths, gaps=gaps, cap=cap, **drawn)


TAKINGS = (
    None, AT_ONCE, Taking(every=5), Taking(ahead=True, every=3), Taking(hold_steps=6, hold_prompts=3),
    Taking(ahead=True, hold_steps=4, hold_tokens=300),
)  # fmt: skip


@given(
    workloads(), st.sampled_from(sorted(POLICIES)), st.sampled_from((30, 60, 2000)), st.sampled_from((2, 8, 64)),
    st.sampled_from((64, 512)), st.sampled_from((None, 64)), st.sampled_from((None, FrontEnd(0.0, 2e-3), FrontEnd(3e-3, 1e-3))),
    st.sampled_from(TAKINGS), st.sampled_from((None, 1.1, 2.0)),
)  # fmt: skip
@settings(max_examples=160, deadline=None)
def test_steps_taken_at_once_give_what_they_give_one_by_one(
    workload: Workload, engine: str, pages: int, max_running: int, token_budget: int, window: int | None,
    front: FrontEnd | None, taking: Taking | None, ratio: float | None,
) -> None:  # fmt: skip
    pace = None if ratio is None else Pace(step_costs(seconds, token_budget), ratio, 16)
    limits = {"max_running": max_running, "token_budget": token_budget, "window": window, "front": front, "pace": pace}
    policy = dataclasses.replace(POLICIES[engine], taking=taking or POLICIES[engine].taking)
    pages = max(pages, workload.longest // 16 + 2)  # conversations are longer than single requests
    at_once, one_by_one = (simulate(workload, policy, seconds, pages, one_by_one=slowly, **limits) for slowly in (False, True))
    assert_equal(at_once, one_by_one)
    reported = workload.arrivals[workload.warmup :]
    assert at_once.n_requests == len(reported)
    assert at_once.tpot_s.n == sum(arrival.answers for arrival in reported if arrival.output_tokens > 1)
    assert at_once.itl_s.n == sum(arrival.answers * (arrival.output_tokens - 1) for arrival in reported)


def test_one_user_gets_each_prompt_and_step_in_turn() -> None:
    found = simulate(Workload.closed(1, 5, 100, 10), policy_of("twostroke"), seconds, PAGES)
    first = seconds(0, 0, [Chunk(0, 100)])
    later = [seconds(1, 100 + i, ()) for i in range(9)]
    assert found.ttft_s.median == pytest.approx(first)
    assert found.tpot_s.median == pytest.approx(sum(later) / 9)
    assert found.itl_s.p99 == pytest.approx(max(later), rel=1e-3)
    assert found.e2e_s.mean == pytest.approx(first + sum(later))
    assert found.peak_concurrency == 1


def test_two_prompts_at_once_share_a_step_and_a_late_one_joins_the_next() -> None:
    """By hand: 2 prompts of 100 in one step, then both decode; a third comes in the second step and joins the third."""
    first, second = seconds(0, 0, [Chunk(0, 100)] * 2), seconds(2, 100, ())
    rows = [
        {"timestamp": 0, "input_length": 100, "output_length": 4},
        {"timestamp": 0, "input_length": 100, "output_length": 4},
        {"timestamp": 1e3 * (first + second / 2), "input_length": 50, "output_length": 2},
    ]
    found = simulate(Workload.of_trace(rows), policy_of("twostroke"), seconds, PAGES)
    third, fourth = seconds(2, 101, [Chunk(0, 50)]), seconds(3, (2 * 102 + 50) / 3, ())
    ttft = sorted([first, first, second / 2 + third])
    assert found.ttft_s.mean == pytest.approx(sum(ttft) / 3)
    assert found.duration_s == pytest.approx(first + second + third + fourth)
    assert found.steps == 4
    assert found.busy_share == pytest.approx(1.0)
    assert found.itl_s.mean == pytest.approx((2 * second + 2 * third + 3 * fourth) / 7)


def test_a_prompt_whose_last_token_alone_is_left_for_a_step_has_a_first_token() -> None:
    """The cache holds all of it but one token, and the pace leaves that to the next step, in which it counts as decoding."""
    workload = Workload.closed(10, 10, Uniform(65, 80), Uniform(2, 10), shared_prefix=64, seed=62)
    assert any(arrival.prompt_tokens == 65 for arrival in workload.arrivals)
    pace = Pace(step_costs(seconds, 64), 1.1, 16)
    found = simulate(workload, policy_of("llama.cpp"), seconds, 60, max_running=8, token_budget=64, pace=pace)
    assert found.ttft_s.mean < 1.0
    assert found.itl_s.n == sum(arrival.output_tokens - 1 for arrival in workload.arrivals)


def three_requests(late: int) -> Workload:
    """Two of 40 tokens at once, and another that comes in the middle of the ``late``-th step, the first being 0."""
    first, step = seconds(0, 0, [Chunk(0, 100)] * 2), seconds(2, 110, ())
    rows = [{"timestamp": 0, "input_length": 100, "output_length": 40} for _ in range(2)]
    at_s = first / 2 if late == 0 else first + (late - 0.5) * step
    return Workload.of_trace([*rows, {"timestamp": 1e3 * at_s, "input_length": 50, "output_length": 2}])


@pytest.mark.parametrize(
    ("taking", "late", "waits"),
    [
        (AT_ONCE, 5, 0),
        (Taking(ahead=True), 5, 1),  # step 6 was decided while step 5 ran
        (Taking(every=4), 5, 3),  # looked after step 0 and every fourth: before steps 1, 5 and 9
        (Taking(every=4), 0, 0),  # a step with a prompt is followed by a look
        (Taking(hold_steps=7, hold_tokens=500), 5, 7),
        (Taking(hold_steps=7, hold_tokens=52), 5, 0),  # its 50 and the two that decode are enough
        (Taking(hold_steps=7, hold_prompts=2), 5, 7),
        (Taking(hold_steps=7, hold_prompts=1), 5, 0),
    ],
)
def test_an_engine_takes_a_request_when_its_rules_say(taking: Taking, late: int, waits: int) -> None:
    """By hand: the third request waits for the rest of the step in which it came, and so many steps more."""
    policy = dataclasses.replace(policy_of("twostroke"), taking=taking)
    starts: list[Sequence[Chunk]] = []

    def counted(decoding: int, context: float, chunks: Sequence[Chunk]) -> float:
        starts.append(chunks)
        return seconds(decoding, context, chunks)

    simulate(three_requests(late), policy, counted, PAGES)
    prompts = [number for number, chunks in enumerate(starts) if chunks]
    assert prompts == [0, late + 1 + waits]


def test_held_prompts_do_not_wait_where_nothing_decodes() -> None:
    held = dataclasses.replace(policy_of("twostroke"), taking=Taking(hold_steps=50, hold_tokens=1e6))
    found = simulate(Workload.closed(1, 5, 100, 10), held, seconds, PAGES)
    assert found.ttft_s.median == pytest.approx(seconds(0, 0, [Chunk(0, 100)]))


@pytest.mark.parametrize("wrong", [{"every": 0}, {"hold_steps": -1}, {"hold_prompts": -1}, {"hold_tokens": math.nan}])
def test_impossible_rules_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Taking(**wrong)  # type: ignore[arg-type]


def test_a_wave_of_prompts_holds_up_decoding_where_prompts_go_first() -> None:
    workload = Workload.closed(32, 400, Uniform(800, 1000), Uniform(100, 200), seed=1)
    mixed, apart = (simulate(workload, policy_of(engine), seconds, PAGES) for engine in ("vllm", "sglang"))
    assert apart.ttft_s.median < mixed.ttft_s.median
    assert apart.steps > mixed.steps
    assert apart.itl_s.n == mixed.itl_s.n


def test_whole_prompts_wait_for_room_and_a_reserved_cache_never_preempts() -> None:
    workload = Workload.closed(24, 100, Uniform(100, 300), Uniform(200, 400), seed=2)
    pages = 24 * 500 // 16 // 3
    ours = simulate(workload, policy_of("twostroke"), seconds, pages)
    reserved = simulate(workload, policy_of("trtllm"), seconds, pages)
    assert ours.preemptions > 0
    assert reserved.preemptions == 0
    assert reserved.peak_concurrency == 24  # waiting ones count
    assert reserved.ttft_s.median > ours.ttft_s.median


def test_a_whole_prompt_as_long_as_the_budget_runs_beside_those_that_decode() -> None:
    found = simulate(Workload.closed(8, 40, 8192, 100), policy_of("trtllm"), seconds, PAGES)
    alone = seconds(0, 0, [Chunk(0, 8192)])
    assert found.ttft_s.p99 < 10 * alone
    assert found.decoding > 2


def test_slots_bound_how_many_run() -> None:
    workload = Workload.open(math.inf, 12, 100, 50)
    found = simulate(workload, policy_of("llama.cpp"), seconds, PAGES)
    alone = simulate(Workload.open(math.inf, 4, 100, 50), policy_of("llama.cpp"), seconds, PAGES)
    assert found.duration_s == pytest.approx(3 * alone.duration_s, rel=0.02)


def test_a_prompt_longer_than_the_budget_is_cut_and_costs_what_its_chunks_do() -> None:
    found = simulate(Workload.closed(1, 2, 1200, 1), policy_of("twostroke"), seconds, PAGES)
    parts = [Chunk(0, 512, False), Chunk(512, 512, False), Chunk(1024, 176)]
    assert found.ttft_s.median == pytest.approx(sum(seconds(0, 0, [part]) for part in parts))


def test_blocks_of_a_trace_are_found_again() -> None:
    rows = [{"timestamp": 100.0 * i, "input_length": 1100, "output_length": 2, "hash_ids": [1, 2, 10 + i]} for i in range(5)]
    found = simulate(Workload.of_trace(rows), policy_of("twostroke"), seconds, PAGES)
    assert found.prefix_hit_share == pytest.approx(4 * 1024 / (5 * 1100))
    other = simulate(Workload.of_trace([row | {"hash_ids": []} for row in rows]), policy_of("twostroke"), seconds, PAGES)
    assert other.prefix_hit_share == 0
    assert found.ttft_s.median < other.ttft_s.median / 5


def test_answers_to_one_prompt_compute_it_once() -> None:
    found = simulate(Workload.closed(1, 1, 160, 10, answers=4), policy_of("twostroke"), seconds, PAGES)
    assert found.n_requests == 1
    assert found.tpot_s.n == 4
    assert found.ttft_s.median == pytest.approx(seconds(0, 0, [Chunk(0, 160)]))
    assert found.prefix_hit_share == pytest.approx(3 * 159 / (4 * 160))


def test_littles_law_holds() -> None:
    workload = Workload.open(20.0, 2000, Uniform(50, 150), Lognormal(60, 0.7, 400), seed=3)
    found = simulate(workload, policy_of("vllm"), seconds, PAGES)
    assert found.concurrency == pytest.approx(found.requests_per_s * found.e2e_s.mean)
    assert found.requests_per_s == pytest.approx(20.0, rel=0.1)  # 2,000 gaps: ±2% of a mean, and the last answer's time


def test_burstier_arrivals_wait_longer() -> None:
    waits = [
        simulate(
            Workload.open(60.0, 3000, 200, 40, gaps=Gamma(burstiness), seed=4), policy_of("vllm"), seconds, PAGES
        ).ttft_s.p99
        for burstiness in (1.0, 0.25)
    ]
    assert waits[1] > 1.2 * waits[0]


def test_a_capped_client_counts_waiting_for_a_place() -> None:
    free, capped = (
        simulate(Workload.open(50.0, 200, 100, 50, cap=cap), policy_of("vllm"), seconds, PAGES) for cap in (None, 2)
    )
    assert capped.peak_concurrency == 2
    assert capped.ttft_s.median > 10 * free.ttft_s.median
    assert capped.tpot_s.median < free.tpot_s.median


def test_most_steps_are_taken_without_scheduling_each() -> None:
    """What makes 10,000 requests a matter of seconds: a step in five at most holds a prompt, and only those are scheduled."""
    scheduled = 0

    def counted(decoding: int, context: float, chunks: Sequence[Chunk]) -> float:
        nonlocal scheduled
        scheduled += bool(chunks)
        return seconds(decoding, context, chunks)

    found = simulate(Workload.closed(16, 1000, 256, Uniform(100, 140)), policy_of("vllm"), counted, PAGES)
    assert scheduled < found.steps / 5


def test_lengths_and_arrivals_are_as_asked() -> None:
    rng = random.Random(0)
    drawn = sorted(Lognormal(100, 0.5).draw(rng) for _ in range(4000))
    assert drawn[2000] == pytest.approx(100, rel=0.05)
    assert drawn[3364] == pytest.approx(100 * math.exp(0.5), rel=0.06)  # one sigma: 84.1%
    arrivals = Workload.open(10.0, 5000, 1, 1).arrivals
    assert arrivals[-1].at_s == pytest.approx(500, rel=0.05)
    assert arrivals[0].at_s == 0


def test_a_published_trace_is_served(assets: Path) -> None:
    lines = (assets / "traces/mooncake_conversation_trace.jsonl").read_text().splitlines()[:200]
    workload = Workload.of_trace(map(json.loads, lines), speed=0.2)
    found = simulate(workload, policy_of("vllm"), lambda n, c, k: 5e-3 + 1e-5 * sum(x.new for x in k), 10**6)
    assert found.n_requests == 200
    seen: set[int] = set()
    known = 0
    for arrival in workload.arrivals:  # one after another and with room for all, blocks that came before are found again
        known += 512 * next((i for i, block in enumerate(arrival.blocks) if block not in seen), len(arrival.blocks))
        seen.update(arrival.blocks)
    assert found.prefix_hit_share == pytest.approx(known / sum(a.prompt_tokens for a in workload.arrivals), rel=0.1)


@pytest.mark.parametrize(
    "wrong",
    [lambda: Workload.closed(0, 4, 1, 1), lambda: Workload.closed(1, 4, 1, 1, warmup=4), lambda: Workload.open(0.0, 4, 1, 1),
     lambda: Uniform(0, 4), lambda: Lognormal(0.0, 1.0), lambda: policy_of("vlm")],
)  # fmt: skip
def test_impossible_loads_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError):
        wrong()  # type: ignore[operator]


def test_a_request_that_no_cache_holds_is_refused() -> None:
    with pytest.raises(CapacityError, match="KV-cache pages"):
        simulate(Workload.closed(1, 1, 200, 10), policy_of("vllm"), seconds, 4)


def test_a_front_end_takes_one_request_after_another() -> None:
    """Three requests at once, 10 ms of handling each, 5 ms on the way, steps of 1 ms. The first two have their tokens when all
    three are handled, after 30 ms; the last comes to the engine after 35."""
    workload = Workload.open(math.inf, 3, 8, 4)
    found = simulate(workload, policy_of("twostroke"), lambda *_: 1e-3, PAGES, front=FrontEnd(0.010, 0.005))
    assert found.ttft_s.median == pytest.approx(0.030)
    assert found.ttft_s.mean == pytest.approx((0.030 + 0.030 + 0.036) / 3)


def test_tokens_wait_while_the_front_end_handles_a_request() -> None:
    """The first request's tokens are computed after 11 to 15 ms. Another is sent after 12.5 and handled for 10, so the last
    three of them come after 22.5. The other's come after 23.5 to 27.5, 11 to 15 ms after it was sent."""
    arrivals = (Arrival(0.0, 8, 5), Arrival(0.0125, 8, 5))
    found = simulate(Workload(arrivals), policy_of("twostroke"), lambda *_: 1e-3, PAGES, front=FrontEnd(0.010, 0.0))
    assert found.e2e_s.mean == pytest.approx((0.0225 + 0.0150) / 2)
    assert found.tpot_s.mean == pytest.approx((0.0115 + 0.004) / 2 / 4)
    assert found.itl_s.median == pytest.approx(0.001)
