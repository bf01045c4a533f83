"""Predicts a load with the planner, and gives the measured values the same ledger names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from twostroke.bench.definitions import LoadSummary, RequestRecord
from twostroke.bench.load_spec import LoadSpec
from twostroke.core.distribution import Distribution, percentile
from twostroke.core.policy import PAGE_TOKENS
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.money.cost import bill
from twostroke.planner.serving.http import http_front_end, idle_s
from twostroke.planner.serving.memory import page_bytes
from twostroke.planner.serving.plan import ServingPlan, plan_serving
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.serving.under_load import Server
from twostroke.planner.serving.workload import Workload

QUANTILE_PERCENTS = (*(2.5 * i for i in range(40)), 99.0, 100.0)
"""Percents at which the ledger keeps the distribution of a latency. They are enough to draw it for any number of requests."""


MOST_SIMULATED = 4000
"""Requests of a load that are simulated, the first ones: a longer load goes on as it went, and would take longer than two
seconds to simulate."""


def predict_load(spec: ModelSpec, load: LoadSpec, shape: ServingShape, hardware: Hardware) -> dict[str, float]:
    """Predicted values by ledger names, for the load's lengths, arrivals and number of requests, which replace those of
    ``shape``.

    Latencies and rates come from simulating the very load (``serving.simulation``); a prompt alone and a step are those of the
    mean lengths and of the requests that are in flight on average. HTTP adds what calibration measured of it to every step and
    to every request.
    """
    workload = replace(load, n_requests=min(load.n_requests, MOST_SIMULATED)).workload
    lengths = _mean_lengths(workload)
    alone = _plan(spec, lengths, shape, 1, hardware)
    if http_front_end(hardware) is not None:
        workload = replace(workload, turnaround_s=0.0)  # a user asks again at once, and what HTTP takes is simulated
    server = Server(alone, http=True)
    found = server.serve(workload)
    users = max(1, round(found.concurrency))
    plan = _plan(spec, lengths, shape, users, hardware)
    step_s = plan.tpot_s + server.sharing_s(users)
    prefill_s = plan.ttft_s + idle_s(hardware)
    values = {
        "concurrency": found.concurrency,
        "output_tok_per_s": found.output_tok_per_s,
        "requests_per_s": found.requests_per_s,
        "prefill_s": prefill_s,
        "prefill_tok_per_s": plan.prefill_tok_per_s * plan.ttft_s / prefill_s,
        "decode_step_s": step_s,
        "decode_tok_per_s": plan.decode_tok_per_s * plan.tpot_s / step_s,
        **_latency_values({name: getattr(found, f"{name}_s") for name in LATENCIES}),
    }
    values |= bill(values, hardware, plan.devices * plan.watts, plan.devices)
    values["peak_memory_bytes"] = _peak_memory_bytes(plan, load, workload.new_share)
    return values


LATENCIES = ("ttft", "tpot", "itl", "e2e")


def _latency_values(latencies: Mapping[str, Distribution]) -> dict[str, float]:
    """Percentiles by ledger names; ``ttft_s``, ``tpot_s`` and ``e2e_s`` are medians. What is not known is left out."""
    values = {
        f"{name}_{p}_s": getattr(latency, p) for name, latency in latencies.items() for p in ("median", "p90", "p95", "p99")
    }
    values |= {f"{name}_s": values[f"{name}_median_s"] for name in ("ttft", "tpot", "e2e")}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _peak_memory_bytes(plan: ServingPlan, load: LoadSpec, new_share: float) -> float:
    """The plan's peak, with all cache pages that the load writes. Full pages keep their content for the prefix cache, so each
    request writes new pages, but for the share that earlier ones wrote, until the cache is full."""
    tokens = plan.shape.prompt_tokens + plan.shape.output_tokens - 1  # the last is never computed
    kept = (load.n_requests * new_share + load.warmup_requests) * (tokens // PAGE_TOKENS)
    written = (kept + plan.shape.batch) * page_bytes(plan.spec, plan.shape)
    held = max(plan.memory_bytes["kv_cache"], min(written, plan.kv_cache_bytes))
    return plan.peak_memory_bytes - plan.memory_bytes["kv_cache"] + held


def _mean_lengths(workload: Workload) -> tuple[int, int]:
    """Of prompts and answers, in tokens."""
    arrivals = workload.arrivals
    prompt, output = (sum(getattr(a, name) for a in arrivals) / len(arrivals) for name in ("prompt_tokens", "output_tokens"))
    return round(prompt), round(output)


def _plan(spec: ModelSpec, lengths: tuple[int, int], shape: ServingShape, batch: int, hardware: Hardware) -> ServingPlan:
    prompt, output = lengths
    return plan_serving(spec, replace(shape, batch=batch, prompt_tokens=prompt, output_tokens=output), hardware)


def measured_values(summary: LoadSummary, records: Sequence[RequestRecord]) -> dict[str, float]:
    """Measured values by the same names, as far as they are known, and the percentiles of each latency.

    ``ttft_s``, ``tpot_s`` and ``e2e_s`` are medians; ``concurrency`` is the mean number of requests in flight,
    Σ(end − sent) ÷ duration. Prefill and decode steps are those of the engine's counters, if the server has them.
    """
    duration = summary.duration_s
    values = {
        "concurrency": sum(r.ended_s - r.sent_s for r in records) / duration if duration > 0 else 0.0,
        "output_tok_per_s": summary.output_tok_per_s,
        "requests_per_s": summary.requests_per_s,
        **summary.engine,
    }
    values |= _latency_values({name: getattr(summary, f"{name}_s") for name in LATENCIES})
    return {name: value for name, value in values.items() if math.isfinite(value)}


def latency_quantiles(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """The distribution of each latency over completed requests, in seconds at the percents in "percent", for plots.
    The ledger keeps it as ``latency_quantiles``. Only single numbers are scored, so this is not."""
    done = [r for r in records if r.ok]
    values = {
        "ttft_s": [t for r in done if (t := r.ttft_s) is not None],
        "tpot_s": [t for r in done if (t := r.tpot_s) is not None],
        "itl_s": [gap for r in done for gap in r.itl_s],
        "e2e_s": [t for r in done if (t := r.e2e_s) is not None],
    }
    curves = {name: [percentile(found, p) for p in QUANTILE_PERCENTS] for name, found in values.items() if found}
    return {"percent": list(QUANTILE_PERCENTS), **curves} if curves else {}


def first_tokens(records: Sequence[RequestRecord]) -> dict[str, list[float | None]]:
    """When each request was due, and its TTFT from then and from when it was sent, None of one that failed. For plots."""
    return {
        "scheduled_s": [record.scheduled_s for record in records],
        "ttft_s": [record.ttft_s if record.ok else None for record in records],
        "ttft_from_sent_s": [record.ttft_from_sent_s if record.ok else None for record in records],
    }
