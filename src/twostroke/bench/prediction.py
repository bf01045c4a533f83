"""What the planner expects of a load, and the measured values by the same ledger names."""

from __future__ import annotations

import math
from collections.abc import Sequence

from twostroke.bench.definitions import LoadSummary, RequestRecord
from twostroke.bench.load import LoadSpec
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware import Hardware
from twostroke.planner.serving import ServingPlan, ServingShape, plan_serving

NAMES = ("ttft_s", "tpot_s", "e2e_s", "decode_tok_per_s", "output_tok_per_s")
MAX_BATCH = 1024


def expected_concurrency(spec: ModelSpec, load: LoadSpec, scheme: str, hardware: Hardware) -> int:
    """Requests in flight at once: the users of a closed loop; of an open one, Little's law, concurrency =
    rate · E2E(concurrency), iterated from 1 until it stays, within the cap and the number of requests."""
    most = min(load.n_requests, load.users or load.max_concurrency or MAX_BATCH, MAX_BATCH)
    if load.users is not None or load.request_rate is None:
        return most
    batch = 1
    for _ in range(20):
        wanted = min(
            most, max(1, round(min(float(MAX_BATCH), load.request_rate * _plan(spec, load, scheme, batch, hardware).e2e_s)))
        )
        if wanted == batch:
            break
        batch = wanted
    return batch


def predict_load(spec: ModelSpec, load: LoadSpec, scheme: str, hardware: Hardware) -> dict[str, float]:
    """Ledger names → predicted values, at the load's mean lengths and expected concurrency. ``ttft_s`` is that of a prompt
    which finds the engine free: waiting behind other prompts is not in it."""
    batch = expected_concurrency(spec, load, scheme, hardware)
    plan = _plan(spec, load, scheme, batch, hardware)
    return {"concurrency": float(batch), **{name: float(getattr(plan, name)) for name in NAMES}}


def _plan(spec: ModelSpec, load: LoadSpec, scheme: str, batch: int, hardware: Hardware) -> ServingPlan:
    prompt, output = (round(sum(bounds) / 2) for bounds in (load.prompt_tokens, load.output_tokens))
    return plan_serving(spec, ServingShape(scheme=scheme, batch=batch, prompt_tokens=prompt, output_tokens=output), hardware)


def measured_values(summary: LoadSummary, records: Sequence[RequestRecord]) -> dict[str, float]:
    """The same names measured, those that have a value: medians of the latencies; ``concurrency`` the mean number of
    requests in flight, Σ(end − sent) ÷ duration; ``decode_tok_per_s`` = concurrency ÷ median TPOT (the plan: batch ÷ TPOT)."""
    duration = summary.duration_s
    concurrency = sum(r.ended_s - r.sent_s for r in records) / duration if duration > 0 else 0.0
    tpot = summary.tpot_s.median
    values = {
        "concurrency": concurrency,
        "ttft_s": summary.ttft_s.median,
        "tpot_s": tpot,
        "e2e_s": summary.e2e_s.median,
        "decode_tok_per_s": concurrency / tpot if tpot > 0 else float("nan"),
        "output_tok_per_s": summary.output_tok_per_s,
        "requests_per_s": summary.requests_per_s,
        "ttft_p99_s": summary.ttft_s.p99,
        "tpot_p99_s": summary.tpot_s.p99,
        "e2e_p99_s": summary.e2e_s.p99,
    }
    return {name: value for name, value in values.items() if math.isfinite(value)}
