"""Waiting beside others is that of a simulated engine of steps."""

from __future__ import annotations

import random
import statistics

import pytest

from twostroke.planner.serving.load import Latency, Steps, closed_loop, open_loop_first_token

STEPS = Steps(prefill_s=0.01, added_s=0.008, step_s=0.004, prompt_tokens=64, output_tokens=64, token_budget=512)


def simulated(steps: Steps, users: int, answers: tuple[int, int], n: int) -> Latency:
    """Medians of a closed loop in an engine of steps: all decode one token, and at most g prompts go in."""
    rng, now, sent, together = random.Random(1), 0.0, users, steps.together(users)
    waiting = [0.0] * users
    left: list[tuple[int, float, float, int]] = []  # tokens due, arrival, first token, tokens in all
    ttft, tpot, e2e = [], [], []
    while waiting or left:
        taken = [t for t in waiting if t <= now][:together]
        if not taken and not left:
            now = min(waiting)
            continue
        for arrived in taken:
            waiting.remove(arrived)
        now += steps.step_s + steps.added_s * len(taken) if left else steps.prefill_s * len(taken)
        ttft += [now - arrived for arrived in taken]
        ended = [one for one in left if one[0] == 1]
        e2e += [now - arrived for _, arrived, _, _ in ended]
        tpot += [(now - first) / (tokens - 1) for _, _, first, tokens in ended]
        left = [(due - 1, *rest) for due, *rest in left if due > 1]  # type: ignore[misc]
        lengths = [rng.randint(*answers) for _ in taken]
        left += [(tokens - 1, arrived, now, tokens) for arrived, tokens in zip(taken, lengths, strict=True)]
        again = min(len(ended), n - sent)
        waiting += [now + 1e-6] * again  # after the next step has begun
        sent += again
    return Latency(statistics.median(ttft), statistics.median(tpot), statistics.median(e2e))


@pytest.mark.parametrize(
    ("users", "prompt", "answers", "n"),
    [(4, 64, (64, 64), 64), (4, 64, (32, 96), 200), (8, 100, (64, 64), 200), (8, 400, (40, 80), 400), (4, 64, (64, 64), 6),
     (16, 64, (60, 68), 600), (1, 64, (64, 64), 10)],
)  # fmt: skip
def test_latency_beside_others_is_that_of_a_simulated_engine(users: int, prompt: int, answers: tuple[int, int], n: int) -> None:
    """Prompts that come together go together: four users with equal answers wait four prefills, not one."""
    steps = STEPS._replace(prompt_tokens=prompt, output_tokens=sum(answers) // 2)
    found = closed_loop(steps, users, answers[1] - answers[0] + 1, n)
    exact = simulated(steps, users, answers, n)
    assert found.ttft_s == pytest.approx(exact.ttft_s, rel=0.25)  # q others are a mean, and waits vary around it
    assert found.tpot_s == pytest.approx(exact.tpot_s, rel=0.05)
    assert found.e2e_s == pytest.approx(exact.e2e_s, rel=0.05)


@pytest.mark.parametrize("users", [1, 2, 8, 9, 64, 1000])
@pytest.mark.parametrize("output", [1, 2, 64])
@pytest.mark.parametrize("lengths", [1, 7])
def test_no_token_comes_sooner_than_its_step_and_the_times_add_up(users: int, output: int, lengths: int) -> None:
    steps = STEPS._replace(output_tokens=output)
    found = closed_loop(steps, users, lengths)
    assert found.tpot_s >= steps.step_s * (1 - 1e-12)
    assert found.ttft_s >= min(steps.prefill_s, steps.added_s)
    if output > 1:
        assert found.e2e_s == pytest.approx(found.ttft_s + (output - 1) * found.tpot_s)


def test_prompts_that_are_computed_elsewhere_hold_nothing_up() -> None:
    apart = STEPS._replace(prefill_s=0.0, added_s=0.0)
    assert closed_loop(apart, 50).tpot_s == pytest.approx(STEPS.step_s)


def test_an_idle_server_answers_after_the_prompt_alone() -> None:
    wait_s, ttft_s = open_loop_first_token(STEPS, 1e-9, decoding=0.0)
    assert wait_s == pytest.approx(0.0, abs=1e-9)
    assert ttft_s == pytest.approx(STEPS.prefill_s)
