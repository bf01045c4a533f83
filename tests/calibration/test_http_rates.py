"""Handling a request is found from how late first tokens came."""

from __future__ import annotations

import pytest

from twostroke.calibration.http_rates import MANY_USERS, OUTPUT, PROMPT, REQUESTS, _handling_s
from twostroke.planner.serving.http import FrontEnd
from twostroke.planner.serving.policies import policy_of
from twostroke.planner.serving.simulation import simulate
from twostroke.planner.serving.workload import Workload

REQUEST_S, PREFILL_S, STEP = 2e-3, 0.2e-3, (60e-6, 20e-6)


def first_token_s(handling_s: float) -> float:
    """The median of the load with which calibration asks."""
    users = Workload.closed(MANY_USERS, REQUESTS, PROMPT, OUTPUT, turnaround_s=0.0)
    found = simulate(
        users,
        policy_of("twostroke"),
        lambda n, _, chunks: len(chunks) * PREFILL_S + (STEP[0] + n * STEP[1] if n else 0.0),
        REQUESTS * OUTPUT,
        front=FrontEnd(handling_s, REQUEST_S - handling_s),
    )
    return found.ttft_s.median


@pytest.mark.parametrize("handling_s", [1.0e-3, 1.5e-3])
def test_first_tokens_are_as_late_with_what_was_found(handling_s: float) -> None:
    late_s = first_token_s(handling_s)
    assert first_token_s(_handling_s(late_s, REQUEST_S, PREFILL_S, STEP)) == pytest.approx(late_s, rel=0.02)


def test_first_tokens_as_early_as_a_single_user_s_wait_for_nobody() -> None:
    assert _handling_s(2.2e-3, REQUEST_S, PREFILL_S, STEP) < 0.3e-3
    assert _handling_s(1.0, REQUEST_S, PREFILL_S, STEP) == pytest.approx(2e-3, rel=1e-2)
