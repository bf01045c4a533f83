"""Formulas of waiting beside others are near what the simulation finds: they rank, and it decides."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from twostroke.planner.serving.load import Steps, closed_loop
from twostroke.planner.serving.policies import POLICIES
from twostroke.planner.serving.simulation import simulate
from twostroke.planner.serving.strategy import Chunk
from twostroke.planner.serving.workload import Workload

STEPS = Steps(prefill_s=0.01, added_s=0.008, step_s=0.004, prompt_tokens=64, output_tokens=64, token_budget=512)


def seconds(decoding: int, context: float, chunks: Sequence[Chunk]) -> float:
    """The same times as ``STEPS``: a prompt of its 64 tokens alone, or beside others."""
    prompts = sum(chunk.new for chunk in chunks) / STEPS.prompt_tokens
    return STEPS.step_s + STEPS.added_s * prompts if decoding else STEPS.prefill_s * prompts


@pytest.mark.parametrize("users", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("prompt", [64, 400])
def test_latency_beside_others_is_near_the_simulated(users: int, prompt: int) -> None:
    share = prompt / STEPS.prompt_tokens
    steps = STEPS._replace(prefill_s=share * STEPS.prefill_s, added_s=share * STEPS.added_s, prompt_tokens=prompt)
    workload = Workload.closed(users, 12 * users, prompt, 64, warmup=2 * users, cooldown=users)
    exact = simulate(workload, POLICIES["twostroke"], seconds, 10**5)
    found = closed_loop(steps, users)
    assert found.e2e_s == pytest.approx(exact.e2e_s.mean, rel=0.04)
    assert found.tpot_s == pytest.approx(exact.tpot_s.mean, rel=0.15)
    # Prompts that a step cuts wait for those before them, which the formula leaves out: up to half of TTFT. So it only ranks.
    assert 0.45 * exact.ttft_s.mean <= found.ttft_s <= 1.01 * exact.ttft_s.mean
    if users * prompt <= STEPS.token_budget:
        assert found == pytest.approx((exact.ttft_s.mean, exact.tpot_s.mean, exact.e2e_s.mean))


@pytest.mark.parametrize("users", [1, 2, 8, 9, 64, 1000])
@pytest.mark.parametrize("output", [1, 2, 64])
def test_no_token_comes_sooner_than_its_step_and_the_times_add_up(users: int, output: int) -> None:
    steps = STEPS._replace(output_tokens=output)
    found = closed_loop(steps, users)
    assert found.tpot_s >= steps.step_s * (1 - 1e-12)
    assert found.ttft_s >= min(steps.prefill_s, steps.added_s)
    if output > 1:
        assert found.e2e_s == pytest.approx(found.ttft_s + (output - 1) * found.tpot_s)


def test_prompts_that_are_computed_elsewhere_hold_nothing_up() -> None:
    apart = STEPS._replace(prefill_s=0.0, added_s=0.0)
    assert closed_loop(apart, 50).tpot_s == pytest.approx(STEPS.step_s)
