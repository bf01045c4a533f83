"""Handling a request is found from how late first tokens came."""

from __future__ import annotations

from dataclasses import replace

import pytest

from machines import native
from twostroke.calibration.http_rates import (
    CROWD,
    FEW_USERS,
    MANY_USERS,
    OUTPUT,
    PROMPT,
    REQUESTS,
    SHORT_OUTPUT,
    _front_end,
    _late_shares,
    _Load,
    _sharing,
)
from twostroke.core.rates import HttpRates
from twostroke.planner.serving.http import FrontEnd, step_sharing_s
from twostroke.planner.serving.policies import policy_of
from twostroke.planner.serving.simulation import simulate
from twostroke.planner.serving.workload import Workload

REQUEST_S, PREFILL_S, STEP = 2e-3, 0.2e-3, (60e-6, 20e-6)


def first_token_s(front: FrontEnd) -> float:
    """The median of the load with which calibration asks."""
    users = Workload.closed(MANY_USERS, REQUESTS, PROMPT, OUTPUT, turnaround_s=0.0)
    found = simulate(
        users,
        policy_of("twostroke"),
        lambda n, _, chunks: len(chunks) * PREFILL_S + (STEP[0] + n * STEP[1] if n else 0.0),
        REQUESTS * OUTPUT,
        front=front,
    )
    return found.ttft_s.median


@pytest.mark.parametrize(
    "front", [FrontEnd(1e-3, 1e-3), FrontEnd(1.5e-3, 0.5e-3), FrontEnd(2e-3, 0.0, 10e-6), FrontEnd(2e-3, 0.0, 25e-6)]
)
def test_first_tokens_are_as_late_with_what_was_found(front: FrontEnd) -> None:
    late_s = first_token_s(front)
    found = _front_end(late_s, REQUEST_S, PREFILL_S, STEP)
    assert first_token_s(found) == pytest.approx(late_s, rel=0.02)
    assert found.handling_s + found.delay_s == pytest.approx(REQUEST_S)
    assert (found.token_s > 0) == (front.token_s > 0)


def test_first_tokens_as_early_as_a_single_user_s_wait_for_nobody() -> None:
    assert _front_end(2.2e-3, REQUEST_S, PREFILL_S, STEP).handling_s < 0.3e-3
    latest = _front_end(1.0, REQUEST_S, PREFILL_S, STEP)
    assert latest.handling_s == REQUEST_S
    assert MANY_USERS * latest.token_s < STEP[0] + MANY_USERS * STEP[1]  # tokens leave faster than they come


LOADS = ((FEW_USERS, OUTPUT), (CROWD, OUTPUT), (CROWD, SHORT_OUTPUT))


@pytest.mark.parametrize("parts", [(2e-4, 3e-5, 1e-3), (2e-4, 0.0, 0.0), (0.0, 3e-5, 0.0), (1e-5, 0.0, 2e-3), (0.0, 0.0, 0.0)])
def test_what_http_takes_of_steps_is_taken_apart_as_plans_add_it_up(parts: tuple[float, float, float]) -> None:
    step_s, answer_s, request_s = parts
    machine = native(http=HttpRates(0, 0, 0, shared_step_s=step_s, shared_answer_s=answer_s, shared_request_s=request_s))
    assert _sharing(*(step_sharing_s(machine, *load) for load in LOADS), most_s=3e-3) == pytest.approx(parts, abs=1e-12)


@pytest.mark.parametrize("measured", [(-1e-5, 2e-4, 1e-4), (3e-4, 1e-4, 2e-4), (1e-4, -1e-5, -2e-5), (-1e-5, -1e-5, -1e-5)])
def test_no_part_of_what_http_takes_is_below_0(measured: tuple[float, float, float]) -> None:
    assert min(_sharing(*measured, most_s=1.0)) >= 0


def test_a_request_takes_no_more_of_steps_than_http_does_for_it() -> None:
    assert _sharing(0.0, 0.0, 1.0, most_s=2e-3).request_s == 2e-3


def test_a_crowd_s_steps_are_planned_as_long_as_measured_if_one_user_s_were_as_without_http() -> None:
    step_s, answer_s, request_s = _sharing(-1e-5, 2e-4, 2e-4, most_s=1.0)
    assert (step_s, request_s) == (0.0, 0.0)
    assert CROWD * answer_s == pytest.approx(2e-4)


def test_a_load_whose_tokens_came_all_at_once_says_nothing_of_late_ones() -> None:
    paced = _Load(2e-3, 1e-4, 2e-4, 1e-4, itl_p90_s=1.5e-4, itl_p95_s=0.9e-4, itl_p99_s=3e-4, startup_s=1.0)
    at_once = replace(paced, tpot_s=0.0, itl_p90_s=0.0)
    assert _late_shares([paced, at_once, paced]) == pytest.approx((0.5, 0.0, 2.0))
    assert _late_shares([at_once]) == (0.0, 0.0, 0.0)
    assert _front_end(5e-3, REQUEST_S, PREFILL_S, (0.0, 0.0)).token_s == 0.0
