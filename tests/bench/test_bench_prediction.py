"""What is predicted of a load, and what is measured under the same names."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from typing import Any

import pytest

from twostroke.bench.definitions import RequestRecord, summarise
from twostroke.bench.load import LoadSpec
from twostroke.bench.prediction import expected_concurrency, first_token_s, latency_quantiles, measured_values, predict_load
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware import load_hardware
from twostroke.planner.serving import ServingShape, plan_serving

SPEC = ModelSpec("llama", 32_000, 16, 1024, 16, 4, 64, 4096, 4096)
HARDWARE = load_hardware("a100-sxm-80gb")


def load(**changes: Any) -> LoadSpec:
    return LoadSpec(**{"prompt_tokens": (100, 300), "output_tokens": (50, 50), "n_requests": 1000} | changes)


def test_a_lone_user_is_the_planners_idle_server() -> None:
    plan = plan_serving(SPEC, ServingShape(batch=1, prompt_tokens=200, output_tokens=50), HARDWARE)
    predicted = predict_load(SPEC, load(users=1), "bf16", HARDWARE)
    for name in ("ttft_s", "tpot_s", "e2e_s", "prefill_tok_per_s", "decode_tok_per_s", "output_tok_per_s"):
        assert predicted[name] == pytest.approx(getattr(plan, name)), name


def test_times_of_a_closed_loop_are_consistent() -> None:
    p = predict_load(SPEC, load(users=8), "bf16", HARDWARE)
    assert p["concurrency"] == 8
    assert p["e2e_s"] == pytest.approx(p["ttft_s"] + 49 * p["tpot_s"])
    # Little's law: requests in flight = rate · time in the system.
    assert p["output_tok_per_s"] / 50 * p["e2e_s"] == pytest.approx(8)


def simulated_ttft_s(users: int, prefill: float, step: float, together: int, answers: tuple[int, int], n: int) -> float:
    """Median TTFT of a closed loop in an engine of steps: all decode one token, and at most ``together`` prompts go in."""
    rng, now, sent, left, found = random.Random(1), 0.0, users, [], []
    waiting = [0.0] * users
    while waiting or left:
        taken = [t for t in waiting if t <= now][:together]
        if not taken and not left:
            now = min(waiting)
            continue
        for arrived in taken:
            waiting.remove(arrived)
        now += (step if left else 0.0) + prefill * len(taken)
        found += [now - arrived for arrived in taken]
        ended = sum(1 for tokens in left if tokens == 1)
        left = [tokens - 1 for tokens in left if tokens > 1] + [rng.randint(*answers) - 1 for _ in taken]
        again = min(ended, n - sent)
        waiting += [now + 1e-6] * again  # after the next step has begun
        sent += again
    return statistics.median(found)


@pytest.mark.parametrize(
    ("users", "prompt", "answers", "n"),
    [(4, 64, (64, 64), 64), (4, 64, (32, 96), 200), (8, 100, (64, 64), 200), (8, 400, (40, 80), 400), (4, 64, (64, 64), 6),
     (16, 64, (60, 68), 600)],
)  # fmt: skip
def test_the_first_token_waits_as_in_a_simulated_engine(users: int, prompt: int, answers: tuple[int, int], n: int) -> None:
    """Prompts that come together go together: four users with equal answers wait four prefills, not one."""
    wanted = load(users=users, prompt_tokens=(prompt, prompt), output_tokens=answers, n_requests=n)
    plan = plan_serving(
        SPEC, ServingShape(batch=users, prompt_tokens=prompt, output_tokens=sum(answers) // 2), HARDWARE
    )  # fmt: skip
    exact = simulated_ttft_s(users, plan.ttft_s, plan.tpot_s, max(1, min(users, 512 // prompt)), answers, n)
    assert first_token_s(wanted, plan) == pytest.approx(exact, rel=0.2)


def test_more_users_mean_longer_waits_and_more_tokens() -> None:
    predictions = [predict_load(SPEC, load(users=n), "bf16", HARDWARE) for n in (1, 2, 8, 32)]
    for fewer, more in itertools.pairwise(predictions):
        assert more["tpot_s"] > fewer["tpot_s"]
        assert more["output_tok_per_s"] > fewer["output_tok_per_s"]


def test_an_open_loops_concurrency_follows_littles_law_within_its_cap() -> None:
    alone = predict_load(SPEC, load(users=1), "bf16", HARDWARE)["e2e_s"]
    assert expected_concurrency(SPEC, load(request_rate=0.1 / alone), "bf16", HARDWARE) == 1
    busy = expected_concurrency(SPEC, load(request_rate=4 / alone), "bf16", HARDWARE)
    assert 4 <= busy < 64
    assert expected_concurrency(SPEC, load(request_rate=math.inf, max_concurrency=16), "bf16", HARDWARE) == 16
    assert expected_concurrency(SPEC, load(request_rate=math.inf, n_requests=5), "bf16", HARDWARE) == 5


def test_measured_values_have_the_predictions_names_and_no_gaps() -> None:
    records = [RequestRecord(i, i, i, (i + 1.0, i + 2.0, i + 3.0), i + 3.0, 10, 3) for i in range(4)]
    summary = summarise(records, engine={"decode_step_s": 0.5})
    measured = measured_values(summary, records)
    assert (measured["ttft_s"], measured["tpot_s"], measured["e2e_s"], measured["decode_step_s"]) == (1.0, 1.0, 3.0, 0.5)
    assert measured["concurrency"] == pytest.approx(4 * 3 / 6)
    assert measured["ttft_p99_s"] == 1.0
    one_token = [RequestRecord(0, 0.0, 0.0, (1.0,), 1.0, 10, 1)]
    assert "tpot_s" not in measured_values(summarise(one_token), one_token)


def test_quantiles_of_a_load_span_what_was_measured() -> None:
    records = [RequestRecord(i, 0.0, 0.0, (1.0 + i, 2.0 + i), 2.0 + i, 10, 2) for i in range(5)]
    kept = latency_quantiles([*records, RequestRecord(5, 0.0, 0.0, (), 1.0, 10, 0, error="http 500")])
    assert kept["percent"][0] == 0
    assert kept["percent"][-1] == 100
    assert (kept["ttft_s"][0], kept["ttft_s"][20], kept["ttft_s"][-1]) == (1.0, 3.0, 5.0)  # of 1, 2, 3, 4, 5
    assert len(kept["itl_s"]) == len(kept["percent"])
    assert latency_quantiles([]) == {}
