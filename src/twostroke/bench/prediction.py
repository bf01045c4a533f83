"""What the planner expects of a load, and the measured values by the same ledger names."""

from __future__ import annotations

import math
from collections.abc import Sequence

from twostroke.bench.definitions import Distribution, LoadSummary, RequestRecord, percentile
from twostroke.bench.load import LoadSpec
from twostroke.core.spec import ModelSpec
from twostroke.planner.engine_passes import TOKEN_BUDGET
from twostroke.planner.hardware import Hardware
from twostroke.planner.queueing import stepped_server_wait_s
from twostroke.planner.serving import ServingPlan, ServingShape, plan_serving

MAX_BATCH = 1024

QUANTILE_PERCENTS = (*(2.5 * i for i in range(40)), 99.0, 100.0)
"""Where the curve of a latency is kept in the ledger: enough to draw it, whatever the number of requests."""


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
    """Ledger names → predicted values, at the load's mean lengths and expected concurrency B.

    With P the prefill of one prompt alone, T a decode step of B requests and n output tokens, a request that has B − 1 others
    beside it takes B·P + n·T: its own prefill, one of each of the others, and its steps. So for B > 1 E2E = B·P + n·T; alone
    TTFT = P, E2E = P + (n − 1)·T. TPOT = (E2E − TTFT)/(n − 1), output tokens/s = B·n/(B·P + n·T). TTFT beside others:
    ``first_token_s``. HTTP itself is not in it.
    """
    batch = expected_concurrency(spec, load, scheme, hardware)
    plan = _plan(spec, load, scheme, batch, hardware)
    n, prefill, step = plan.shape.output_tokens, plan.ttft_s, plan.tpot_s
    ttft, e2e = prefill, plan.e2e_s
    if batch > 1:
        ttft, e2e = first_token_s(load, plan), batch * prefill + n * step
    values = {
        "concurrency": float(batch),
        "ttft_s": ttft,
        "e2e_s": e2e,
        "output_tok_per_s": plan.output_tok_per_s,
        "prefill_s": prefill,
        "prefill_tok_per_s": plan.prefill_tok_per_s,
        "decode_step_s": step,
        "decode_tok_per_s": plan.decode_tok_per_s,
    }
    return values | ({"tpot_s": (e2e - ttft) / (n - 1)} if n > 1 else {})


def first_token_s(load: LoadSpec, plan: ServingPlan) -> float:
    """Median TTFT of a request beside B − 1 others in flight, P a prefill alone, T a decode step, n output tokens.

    A step takes the prompts that wait, as far as the token budget goes: g = min(B, budget ÷ prompt) of them, which get their
    first tokens together. In a closed loop a request comes when another has ended. Where all answers are equally long, those
    g end together again: g·P, and for the share that has others decoding beside it the step it comes in and its own, 2T. At
    random it finds q = (B − 1)/n others ending in its own and in the last step: 2T + P·(1 + 2q). Answers of W different lengths
    end together with probability 1/W. In a load of less than two waves most come at once, and half of them go first:
    (B/g + 1)/2 groups of g·P. In an open loop they come by chance: ``stepped_server_wait_s``.
    """
    batch, prefill, step, n = plan.shape.batch, plan.ttft_s, plan.tpot_s, plan.shape.output_tokens
    if load.users is None and load.request_rate not in (None, math.inf):
        rate = batch / (batch * prefill + n * step)
        return stepped_server_wait_s(rate, step, prefill) + step + prefill
    together = max(1, min(batch, TOKEN_BUDGET // plan.shape.prompt_tokens))
    if load.n_requests < 2 * batch:
        return (batch / together + 1) / 2 * together * prefill
    in_step = together * prefill + 2 * step * (1 - together / batch)
    by_chance = 2 * step + prefill * (1 + 2 * (batch - 1) / n)
    return by_chance + (in_step - by_chance) / (load.output_tokens[1] - load.output_tokens[0] + 1)


def _plan(spec: ModelSpec, load: LoadSpec, scheme: str, batch: int, hardware: Hardware) -> ServingPlan:
    prompt, output = (round(sum(bounds) / 2) for bounds in (load.prompt_tokens, load.output_tokens))
    return plan_serving(spec, ServingShape(scheme=scheme, batch=batch, prompt_tokens=prompt, output_tokens=output), hardware)


def measured_values(summary: LoadSummary, records: Sequence[RequestRecord]) -> dict[str, float]:
    """The same names measured, those that have a value, and the percentiles of each latency.

    ``ttft_s``, ``tpot_s`` and ``e2e_s`` are medians; ``concurrency`` is the mean number of requests in flight,
    Σ(end − sent) ÷ duration; the engine's own counters tell of prefill and decode steps where the server has them.
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
    """The whole distribution of each latency over completed requests, in seconds at ``percent``, as a report draws it.
    The ledger keeps it as ``latency_quantiles``, which is no number and therefore not scored."""
    done = [r for r in records if r.ok]
    values = {
        "ttft_s": [t for r in done if (t := r.ttft_s) is not None],
        "tpot_s": [t for r in done if (t := r.tpot_s) is not None],
        "itl_s": [gap for r in done for gap in r.itl_s],
        "e2e_s": [t for r in done if (t := r.e2e_s) is not None],
    }
    curves = {name: [percentile(found, p) for p in QUANTILE_PERCENTS] for name, found in values.items() if found}
    return {"percent": list(QUANTILE_PERCENTS), **curves} if curves else {}
