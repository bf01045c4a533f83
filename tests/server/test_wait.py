"""The predicted wait for a first token: what is ahead, when there is room, and how it follows what is measured."""

from __future__ import annotations

import math
from typing import Any

import pytest

from machines import native, small_llama
from twostroke.core.engine_settings import EngineSettings
from twostroke.planner.serving.plan import plan_serving
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.serving.under_load import Server
from twostroke.planner.serving.workload import Workload
from twostroke.server.wait import FORGOTTEN_S, TRUSTED, Asked, PlannedSteps, Ratio, Ticket, Waiting

TOKEN_S, STEP_S = 1e-3, 0.01


class PlainSteps:
    """A prompt's token takes a millisecond, a step ten, whatever is in it."""

    engines = 1

    def __init__(self, max_running: int = 8, token_budget: int = 100, cache_tokens: float = math.inf) -> None:
        self.max_running, self.token_budget, self.cache_tokens = max_running, token_budget, cache_tokens

    def prompt_tokens(self, answers: float, context: float, others: float) -> float:
        return self.token_budget - answers

    def prompt_s(self, begin: int, end: int) -> float:
        return TOKEN_S * (end - begin)

    def decode_s(self, answers: int, context: float) -> float:
        return STEP_S if answers else 0.0


def waiting_of(**limits: Any) -> tuple[Waiting, list[float]]:
    now = [100.0]
    return Waiting(PlainSteps(**limits), clock=lambda: now[0]), now


def hand(waiting: Waiting, tokens: int, client: str = "", priority: int = 0, most: int = 100) -> Ticket:
    ids = [len(waiting._waiting) + 7 * len(waiting._decoding)] * tokens
    (asked,), (keys,) = waiting.asked([ids], 1, priority, client, "", True)
    return waiting.hand(asked, keys, most, True, False)


def predicted(waiting: Waiting, tokens: int, client: str = "", priority: int = 0) -> float:
    return waiting._seconds([Asked(tokens, tokens, 1, TOKEN_S * tokens, priority, client)])


def test_an_idle_engine_takes_a_prompt_s_own_time() -> None:
    waiting, _ = waiting_of()
    assert predicted(waiting, 50) == pytest.approx(0.05)


def test_one_s_own_prompts_are_ahead_and_of_another_client_s_as_much_as_one_has() -> None:
    waiting, _ = waiting_of()
    hand(waiting, 30)
    assert predicted(waiting, 50) == pytest.approx(0.08)
    hand(waiting, 500, client="b")
    assert predicted(waiting, 50) == pytest.approx(0.08 + 0.08)
    hand(waiting, 10, client="c")
    assert predicted(waiting, 50) == pytest.approx(0.08 + 0.08 + 0.01)
    assert predicted(waiting, 50, client="c") == pytest.approx(0.06 + 0.06 + 0.03)


def test_what_is_behind_in_priority_does_not_count_and_what_is_before_counts_whole() -> None:
    waiting, _ = waiting_of()
    hand(waiting, 300, priority=5)
    assert predicted(waiting, 50) == pytest.approx(0.05)
    assert predicted(waiting, 50, priority=6) == pytest.approx(0.35)


def test_a_prefix_that_was_computed_is_not_waited_for() -> None:
    waiting, _ = waiting_of()
    prompt = list(range(100))
    (first,), (keys,) = waiting.asked([prompt], 1, 0, "", "", True)
    assert first.new == 100
    waiting.began(waiting.hand(first, keys, 10, True, False))
    for client, model, cacheable, new in (
        ("", "", True, 4),
        ("other", "", True, 4),
        ("", "lora", True, 100),
        ("", "", False, 100),
    ):
        assert waiting.asked([prompt], 1, 0, client, model, cacheable)[0][0].new == new
    assert waiting.asked([prompt[:50] + [999] * 50], 1, 0, "", "", True)[0][0].new == 100 - 48
    assert waiting.asked([prompt[:32]], 1, 0, "", "", True)[0][0].new == 1, "the last token is always computed"
    apart = Waiting(PlainSteps(), separate=True)
    apart.began(apart.hand(*(found[0] for found in apart.asked([prompt], 1, 0, "a", "", True)), 10, True, False))
    assert [apart.asked([prompt], 1, 0, client, "", True)[0][0].new for client in ("a", "b")] == [4, 100]


def test_without_a_place_an_answer_must_end_first() -> None:
    waiting, now = waiting_of(max_running=2)
    for most in (40, 80):
        waiting.began(hand(waiting, 10, most=most))
    assert predicted(waiting, 10) == pytest.approx(40 * STEP_S + 0.01 + 1.5 * STEP_S)
    now[0] += 20 * STEP_S  # in which each answer got twenty tokens
    assert predicted(waiting, 10) == pytest.approx(20 * STEP_S + 0.01 + 1.5 * STEP_S)
    hand(waiting, 10)
    assert predicted(waiting, 10) == pytest.approx(60 * STEP_S + 0.02 + 1.5 * STEP_S)
    hand(waiting, 10)  # which takes the place that comes free first, for the one token that answers have had so far
    assert predicted(waiting, 10) == pytest.approx((20 + 1) * STEP_S + 0.03 + 1.5 * STEP_S)


def test_a_burst_on_an_idle_engine_has_as_many_rounds_as_places_need() -> None:
    waiting, _ = waiting_of(max_running=2)
    for _ in range(200):
        ticket = hand(waiting, 10)
        waiting.began(ticket)
        waiting.ended(ticket, 20)
    for n_before in range(5):
        rounds = n_before // 2
        assert predicted(waiting, 10) == pytest.approx(20 * rounds * STEP_S + 0.01 * (n_before + 1), rel=1e-3)
        hand(waiting, 10)


def test_what_was_heard_of_an_answer_counts_more_than_the_time_that_passed() -> None:
    waiting, now = waiting_of(max_running=1)
    ticket = hand(waiting, 10, most=40)
    waiting.began(ticket)
    ticket.written = 4
    now[0] += 20 * STEP_S  # steps with prompts of others take longer
    assert predicted(waiting, 10) == pytest.approx(36 * STEP_S + 0.01 + 1.5 * STEP_S)


def test_without_pages_an_answer_must_end_first() -> None:
    waiting, _ = waiting_of(cache_tokens=100)
    ticket = hand(waiting, 90, most=30)
    waiting.began(ticket)
    assert predicted(waiting, 20) == pytest.approx(30 * STEP_S + 0.02 + 1.5 * STEP_S)
    assert predicted(waiting, 10) == pytest.approx(0.01 + 1.5 * STEP_S)
    waiting.gone(ticket)
    assert predicted(waiting, 20) == pytest.approx(0.02)


def test_several_engines_share_what_is_ahead_and_each_has_its_places() -> None:
    waiting, _ = waiting_of(max_running=1)
    assert isinstance(waiting.steps, PlainSteps)
    waiting.steps.engines = 2
    hand(waiting, 100)
    assert predicted(waiting, 10) == pytest.approx(0.05 + 0.01)
    for ticket in [*waiting._waiting]:
        waiting.began(ticket)
    assert predicted(waiting, 10) == pytest.approx(0.01 + 1.5 * STEP_S), "the other engine has a place"
    waiting.began(hand(waiting, 10, most=40))
    assert predicted(waiting, 10) == pytest.approx(40 * STEP_S + 0.01 + 1.5 * STEP_S)


def test_answers_are_expected_as_long_as_others_were() -> None:
    waiting, _ = waiting_of(max_running=1)
    for _ in range(200):
        ticket = hand(waiting, 10, most=100)
        waiting.began(ticket)
        waiting.ended(ticket, 20)
    (asked,), (keys,) = waiting.asked([[1]], 1, 0, "", "", True)
    waiting.began(waiting.hand(asked, keys, 1000, False, False))
    assert predicted(waiting, 10) == pytest.approx(200 * STEP_S + 0.01 + 1.5 * STEP_S, rel=0.01)


def test_predictions_follow_what_was_measured_and_are_used_only_then() -> None:
    waiting, now = waiting_of()
    for i in range(TRUSTED + 20):
        assert waiting.predicts == (i >= TRUSTED)
        (asked,), (keys,) = waiting.asked([[i] * 100], 1, 0, "", "", True)
        ticket = waiting.hand(asked, keys, 1, True, True)
        now[0] += 0.3  # three times as long as planned
        waiting.began(ticket)
        waiting.ended(ticket, 1)
    assert waiting.ratio.mean == pytest.approx(3.0)
    assert 0.3 <= waiting.first_token_s([Asked(100, 100, 1, 0.1)]) < 0.4
    assert waiting.tokens == 0


def test_a_varying_wait_is_predicted_longer_than_nearly_all_were() -> None:
    ratio = Ratio()
    for i in range(200):
        ratio.add(1.0, 2.0 if i % 2 else 0.5, 0.0)
    assert ratio.mean == pytest.approx(1.0, rel=0.1)
    assert ratio.upper(0.0) > 4.0


def test_refusals_do_not_feed_on_themselves() -> None:
    slow, fast = Ratio(), Ratio()
    for i in range(20):
        slow.add(1.0, 10.0, float(i))
        fast.add(1.0, 0.1, float(i))
    assert slow.upper(19.0) > 10.0
    assert slow.upper(19.0 + FORGOTTEN_S) == pytest.approx(math.sqrt(slow.upper(19.0)))
    assert slow.upper(19.0 + 20 * FORGOTTEN_S) == pytest.approx(1.0, abs=1e-4)
    assert fast.upper(1e6) == fast.upper(19.0) < 0.2, "what is faster than planned stays so"


def test_waiting_tokens_are_bounded_and_a_prompt_alone_is_never_too_long() -> None:
    waiting = Waiting(max_tokens=100)
    assert not waiting.is_over(10_000)
    ticket = hand(waiting, 90)
    assert not waiting.is_over(10)
    assert waiting.is_over(11)
    waiting.began(ticket)
    assert not waiting.is_over(11)
    assert not Waiting().is_over(10**9)


def test_nothing_is_kept_of_what_has_ended_in_any_way() -> None:
    waiting, _ = waiting_of()
    for end in ("before", "within", "after"):
        ticket = hand(waiting, 10)
        if end != "before":
            waiting.began(ticket)
        if end == "after":
            waiting.ended(ticket, 3)
        waiting.gone(ticket)
        waiting.gone(ticket)
        waiting.began(ticket)
    assert (waiting._waiting, waiting._queues, waiting._decoding, waiting.tokens) == ({}, {}, {}, 0)


@pytest.mark.parametrize("n", [1, 4, 12, 40])
def test_prompts_that_come_together_are_predicted_as_the_simulated_scheduler_serves_them(n: int) -> None:
    shape = ServingShape("bf16", prompt_tokens=200, output_tokens=2)
    plan = plan_serving(small_llama(), shape, native())
    users = Workload.closed(n, n, 200, 2, turnaround_s=0.0)
    simulated = Server(plan).serve(users)
    waiting = Waiting(PlannedSteps(plan, EngineSettings()))
    found = []
    for i in range(n):
        (asked,), (keys,) = waiting.asked([[i] * 200], 1, 0, "", "", True)
        found.append(waiting._seconds([asked]))
        waiting.hand(asked, keys, 2, True, False)
    assert max(found) == pytest.approx(simulated.ttft_s.p99, rel=0.3)
    assert sum(found) / n == pytest.approx(simulated.ttft_s.mean, rel=0.35)


def test_a_prompt_s_planned_time_is_that_of_the_plan_at_any_length() -> None:
    spec = small_llama()
    plans = {
        n: plan_serving(spec, ServingShape("bf16", prompt_tokens=n, output_tokens=1), native()) for n in (8, 100, 400, 1000)
    }
    steps = PlannedSteps(plans[8], EngineSettings())
    for n, plan in plans.items():
        assert steps.prompt_s(0, n) == pytest.approx(plan.ttft_s, rel=0.15), n
    assert steps.prompt_s(0, 300) + steps.prompt_s(300, 1000) == pytest.approx(steps.prompt_s(0, 1000))
