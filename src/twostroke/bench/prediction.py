"""Predicts a load with the planner, and gives the measured values the same ledger names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from twostroke.bench.definitions import LoadSummary, RequestRecord
from twostroke.bench.load import LoadSpec
from twostroke.core.distribution import Distribution, percentile
from twostroke.core.policy import PAGE_TOKENS
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.serving.http import added_by_http
from twostroke.planner.serving.load import closed_loop
from twostroke.planner.serving.memory import page_bytes
from twostroke.planner.serving.plan import ServingPlan, plan_serving
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.serving.under_load import AtRate, at_rate

MAX_BATCH = 1024

QUANTILE_PERCENTS = (*(2.5 * i for i in range(40)), 99.0, 100.0)
"""Percents at which the ledger keeps the distribution of a latency. They are enough to draw it for any number of requests."""


def _in_flight(load: LoadSpec, found: AtRate | None) -> int:
    """Requests in flight at once. In a closed loop they are its users, in an open loop rate · E2E (Little's law), but at least
    1 and at most the cap and the number of requests."""
    return _most(load) if found is None else max(1, round(found.rate_per_s * found.e2e_s))


def _most(load: LoadSpec) -> int:
    return min(load.n_requests, load.users or load.max_concurrency or MAX_BATCH, MAX_BATCH)


def _at_rate(spec: ModelSpec, load: LoadSpec, shape: ServingShape, hardware: Hardware) -> AtRate | None:
    """The server at the rate of an open loop. None for a closed loop, for a load that sends all at once, and if requests come
    faster than the server or the load's cap can take them: then as many as allowed are always in flight, as in a closed
    loop."""
    if load.users is not None or load.request_rate is None or math.isinf(load.request_rate):
        return None
    found = at_rate(_plan(spec, load, shape, 1, hardware), load.request_rate)
    return found if found is not None and found.rate_per_s * found.e2e_s <= _most(load) else None


def predict_load(spec: ModelSpec, load: LoadSpec, shape: ServingShape, hardware: Hardware) -> dict[str, float]:
    """Predicted values by ledger names, for the load's mean lengths and expected concurrency B,
    which replace those of ``shape``.

    TTFT, TPOT and E2E are those of the planner's model of waiting (``serving.load``); output tokens/s = B·n ÷ E2E with n output
    tokens. HTTP adds to each what calibration measured of it.
    """
    found = _at_rate(spec, load, shape, hardware)
    batch = _in_flight(load, found)
    plan = _plan(spec, load, shape, batch, hardware)
    n, http = plan.shape.output_tokens, added_by_http(hardware, batch)
    if found is None:
        lengths = load.output_tokens[1] - load.output_tokens[0] + 1
        steps = plan.steps._replace(step_s=plan.steps.step_s + http.step_s)
        ttft, tpot, e2e = closed_loop(steps, batch, lengths, load.n_requests)
        output_tok_per_s = batch * n / (e2e + http.request_s)
    else:
        ttft, tpot, e2e = found.ttft_s, found.tpot_s, found.e2e_s
        output_tok_per_s = found.rate_per_s * n
    values = {
        "concurrency": float(batch),
        "ttft_s": ttft + http.request_s,
        "e2e_s": e2e + http.request_s,
        "output_tok_per_s": output_tok_per_s,
        "prefill_s": plan.ttft_s,
        "prefill_tok_per_s": plan.prefill_tok_per_s,
        "decode_step_s": plan.tpot_s,
        "decode_tok_per_s": plan.decode_tok_per_s,
    }
    values["peak_memory_bytes"] = _peak_memory_bytes(plan, load)
    return values | ({"tpot_s": tpot} if n > 1 else {})


def _peak_memory_bytes(plan: ServingPlan, load: LoadSpec) -> float:
    """The plan's peak, with all cache pages that the load writes. Full pages keep their content for the prefix cache, so each
    request writes new pages until the cache is full."""
    tokens = plan.shape.prompt_tokens + plan.shape.output_tokens - 1  # the last is never computed
    kept = (load.n_requests + load.warmup_requests) * (tokens // PAGE_TOKENS)
    written = (kept + plan.shape.batch) * page_bytes(plan.spec, plan.shape)
    held = max(plan.memory_bytes["kv_cache"], min(written, plan.kv_cache_bytes))
    return plan.peak_memory_bytes - plan.memory_bytes["kv_cache"] + held


def _plan(spec: ModelSpec, load: LoadSpec, shape: ServingShape, batch: int, hardware: Hardware) -> ServingPlan:
    prompt, output = (round(sum(bounds) / 2) for bounds in (load.prompt_tokens, load.output_tokens))
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
    for name in ("ttft", "tpot", "itl", "e2e"):
        latency: Distribution = getattr(summary, f"{name}_s")
        values |= {f"{name}_{p}_s": getattr(latency, p) for p in ("median", "p90", "p95", "p99")}
    values |= {f"{name}_s": values[f"{name}_median_s"] for name in ("ttft", "tpot", "e2e")}
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
