"""What is predicted of a load, and what is measured under the same names."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from machines import native, small_llama
from twostroke.bench.definitions import RequestRecord, summarise
from twostroke.bench.load import plan_requests
from twostroke.bench.load_spec import LoadSpec
from twostroke.bench.prediction import MOST_SIMULATED, latency_quantiles, measured_values, predict_load
from twostroke.core.crossovers import Crossovers
from twostroke.core.rates import HttpRates
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.serving.plan import plan_serving
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.serving.under_load import Server
from twostroke.planner.serving.workload import TURNAROUND_S

SPEC = ModelSpec("llama", 32_000, 16, 1024, 16, 4, 64, 4096, 4096)
HARDWARE = load_hardware("a100-sxm-80gb")


def load(**changes: Any) -> LoadSpec:
    return LoadSpec(**{"prompt_tokens": (100, 300), "output_tokens": (50, 50), "n_requests": 1000} | changes)


def test_a_lone_user_is_the_planners_idle_server() -> None:
    plan = plan_serving(SPEC, ServingShape(batch=1, prompt_tokens=200, output_tokens=50), HARDWARE)
    lone = load(users=1, prompt_tokens=(200, 200))
    predicted = predict_load(SPEC, lone, ServingShape("bf16"), HARDWARE)
    for name in ("ttft_s", "tpot_s", "e2e_s", "prefill_tok_per_s", "decode_tok_per_s"):
        assert predicted[name] == pytest.approx(getattr(plan, name), rel=1e-3), name
    assert predicted["output_tok_per_s"] == pytest.approx(50 / (plan.e2e_s + TURNAROUND_S), rel=1e-3)


def test_times_of_a_closed_loop_are_consistent() -> None:
    p = predict_load(SPEC, load(users=8), ServingShape("bf16"), HARDWARE)
    assert p["concurrency"] == pytest.approx(8, rel=0.03)  # users come again after a millisecond, and stop at the end
    assert p["e2e_s"] == pytest.approx(p["ttft_s"] + 49 * p["tpot_s"], rel=0.02)
    # Little's law: requests in flight = rate · time in the system.
    assert p["output_tok_per_s"] / 50 * p["e2e_s"] == pytest.approx(8, rel=0.05)


def test_plan_and_bench_expect_the_same_of_the_same_users() -> None:
    """The plan once had 2.5 ms where bench had 7.2 and 7.1 were measured."""
    plan = plan_serving(SPEC, ServingShape(batch=8, prompt_tokens=64, output_tokens=64), HARDWARE)
    p = predict_load(SPEC, load(users=8, prompt_tokens=(64, 64), output_tokens=(64, 64)), ServingShape("bf16"), HARDWARE)
    server = Server(plan)
    found = server.serve(server.closed_loop())
    assert (p["ttft_s"], p["tpot_s"], p["e2e_s"]) == pytest.approx(
        (found.ttft_s.median, found.tpot_s.median, found.e2e_s.median), rel=0.01
    )


def test_what_is_simulated_is_what_is_sent() -> None:
    for own in ({"users": 4}, {"request_rate": 20.0, "turns": 3}, {"request_rate": 5.0, "shared_prefix": 64}):
        spec = load(n_requests=30, prompt_tokens=(80, 300), **own)
        sent = plan_requests(spec)[spec.warmup_requests :]
        arrivals = spec.workload.arrivals
        assert [(p.at_s, p.max_tokens, p.after) for p in sent] == [(a.at_s, a.output_tokens, a.after) for a in arrivals]


def test_a_long_load_is_simulated_by_its_beginning() -> None:
    """Its first requests are those of a shorter one, so that what is simulated is what is sent."""
    long = load(request_rate=5.0, n_requests=200, output_tokens="exponential:40,500")
    assert replace(long, n_requests=50).workload.arrivals == long.workload.arrivals[:50]
    found = predict_load(SPEC, load(users=2, n_requests=MOST_SIMULATED * 100), ServingShape("bf16"), HARDWARE)
    assert found["concurrency"] == pytest.approx(2, rel=0.03)


def test_known_prefixes_and_conversations_are_predicted_faster() -> None:
    alone, shared = (
        predict_load(
            SPEC, load(users=4, n_requests=100, prompt_tokens=(1000, 1000), shared_prefix=n), ServingShape("bf16"), HARDWARE
        )
        for n in (0, 960)
    )
    assert shared["ttft_s"] < 0.5 * alone["ttft_s"]
    once = predict_load(SPEC, load(users=1, n_requests=40, prompt_tokens=(1000, 1000)), ServingShape("bf16"), HARDWARE)
    talk = load(users=1, n_requests=40, prompt_tokens=(1000, 1000), turns=4)
    talked = predict_load(SPEC, talk, ServingShape("bf16"), HARDWARE)
    assert talked["ttft_s"] < 1.6 * once["ttft_s"]  # the third turn has 3,100 tokens, of which 1,000 are new


def test_percentiles_are_predicted_by_the_names_that_are_measured() -> None:
    predicted = predict_load(SPEC, load(users=8, n_requests=100), ServingShape("bf16"), HARDWARE)
    records = [RequestRecord(i, i, i, (i + 1.0, i + 2.0, i + 3.0), i + 3.0, 10, 3) for i in range(4)]
    measured = measured_values(summarise(records), records)
    assert set(measured) <= set(predicted)
    for name in ("ttft", "tpot", "itl", "e2e"):
        assert predicted[f"{name}_median_s"] <= predicted[f"{name}_p90_s"] <= predicted[f"{name}_p99_s"]


def test_a_longer_load_brings_more_of_the_cache_into_memory_until_it_is_full() -> None:
    few, more, most, beyond = (
        predict_load(small_llama(), load(users=2, n_requests=n, prompt_tokens=(200, 200)), ServingShape("bf16"), native())[
            "peak_memory_bytes"
        ]
        for n in (10, 100, 10**6, 10**7)
    )
    assert few < more < most == beyond
    # 248 of 200 + 50 tokens are whole pages that stay; 6 layers · 2 · 256 · 2 bytes a token
    assert more - few == pytest.approx(90 * (249 // 16) * 16 * 6 * 2 * 256 * 2)


def test_more_users_mean_longer_waits_and_more_tokens() -> None:
    predictions = [predict_load(SPEC, load(users=n), ServingShape("bf16"), HARDWARE) for n in (1, 2, 8, 32)]
    for fewer, more in itertools.pairwise(predictions):
        assert more["tpot_s"] > fewer["tpot_s"]
        assert more["output_tok_per_s"] > fewer["output_tok_per_s"]


def test_an_open_loops_concurrency_follows_littles_law_within_its_cap() -> None:
    def predicted(**changes: Any) -> dict[str, float]:
        return predict_load(SPEC, load(**changes), ServingShape("bf16"), HARDWARE)

    alone = predicted(users=1)["e2e_s"]
    assert predicted(request_rate=0.1 / alone)["concurrency"] == pytest.approx(0.1, rel=0.1)
    assert 4 <= predicted(request_rate=4 / alone)["concurrency"] < 64
    assert predicted(request_rate=math.inf, max_concurrency=16)["concurrency"] == pytest.approx(16, rel=0.03)
    at_once = predicted(request_rate=math.inf, n_requests=5, prompt_tokens=(200, 200))
    assert at_once["concurrency"] == pytest.approx(5)


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


def test_http_is_in_each_step_and_before_the_first_token() -> None:
    beside = HttpRates(request_s=0.5, step_s=1e-3, answer_s=1e-4)
    engine, served = (
        predict_load(small_llama(), load(users=4, n_requests=200), ServingShape("bf16"), machine)
        for machine in (native(), native(http=beside))
    )
    # Without HTTP the four ask at once and wait for each other's prompts; half of that at most is one prompt.
    assert served["ttft_s"] > engine["ttft_s"] / 2 + 0.5
    assert served["concurrency"] == pytest.approx(4.0, rel=0.05)  # a request is in flight from being sent
    assert served["tpot_s"] == pytest.approx(engine["tpot_s"] + 1.4e-3, rel=0.3)
    assert served["decode_step_s"] < served["tpot_s"]


def test_http_lengthens_only_steps_on_all_threads() -> None:
    def added_s(crossovers: Crossovers) -> float:
        found = []
        for step_s in (0.0, 2e-4):
            machine = native(http=HttpRates(1e-3, 0.0, 0.0, shared_step_s=step_s), crossovers=crossovers)
            machine = replace(machine, native=replace(machine.native_rates, n_threads=2))
            found.append(predict_load(small_llama(), load(users=1, n_requests=50), ServingShape("bf16"), machine))
        return found[1]["decode_step_s"] - found[0]["decode_step_s"]

    assert added_s(Crossovers(one_thread_max_flop=0.0, server_row_flop=0.0)) == pytest.approx(2e-4)
    assert added_s(Crossovers(one_thread_max_flop=1e15, one_thread_max_bytes=1e15)) == 0.0
