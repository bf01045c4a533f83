"""Reads what the engine of a Twostroke server counted during a load from ``/metrics``: times of whole steps, without HTTP."""

from __future__ import annotations

from collections.abc import Mapping

from twostroke.bench.http_stream import Address, HttpError, exchange
from twostroke.planner.truth.drafts import DRAFTS_A_STEP, TOKENS_A_STEP, draft_values

PREFIX = "twostroke_engine_"
HTTP_MEMORY = "twostroke_http_peak_memory_bytes"

FORMULAS: dict[str, str] = {
    "prefill_s": "engine time of the prefill steps of one prompt on an idle server, mean of the warm-up requests but the first",
    "prefill_tok_per_s": "tokens computed in those steps / their time",
    "decode_step_s": "engine time of one step in which every request decodes, mean over the load",
    "decode_tok_per_s": "tokens computed in such steps / their time, without wrong drafts",
    "draft_acceptance": "drafted tokens that were right / those that steps checked",
    DRAFTS_A_STEP: "drafted tokens that steps checked / requests that decoded, summed over decode steps",
    TOKENS_A_STEP: "tokens that decode steps gave / the same",
    "peak_memory_bytes": "most memory that the engine process has held, at the end of the load",
    "http_peak_memory_bytes": "the same of the HTTP process",
    "decode_read_bytes_per_s": "weights and KV cache that such steps had to read / their time",
}

Counters = Mapping[str, float]

COUNTERS = (
    "prefill_seconds", "prefill_tokens", "decode_seconds", "decode_steps", "decode_tokens", "decode_bytes", "decode_requests",
    "draft_tokens", "accepted_draft_tokens",
)  # fmt: skip
"""What is read of an engine's counters. All else may fall as it runs, as the requests that wait do."""


async def read_counters(address: Address, headers: Mapping[str, str]) -> Counters:
    """The engine's counters now; empty if the server has no such counters."""
    try:
        answer = await exchange(address, "GET", "/metrics", headers=headers, timeout_s=10.0)
    except HttpError:
        return {}
    return parse_counters(answer.body.decode(errors="replace")) if answer.status == 200 else {}


def parse_counters(text: str) -> Counters:
    """The samples of Prometheus' text format with names that begin with ``PREFIX`` (which is removed), and the HTTP process's
    memory."""
    counters = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name.startswith(PREFIX) or name == HTTP_MEMORY:
            try:
                counters[name.removeprefix(PREFIX).removeprefix("twostroke_")] = float(value)
            except ValueError:
                continue
    return counters


def engine_values(warm: Counters, before: Counters, after: Counters, n_idle: int) -> dict[str, float]:
    """The values of ``FORMULAS`` that the counters give. ``warm`` is read after the first warm-up request, ``before`` after the
    ``n_idle`` that follow it, ``after`` at the end of the load. Counters of a span in which the engine restarted are left
    out."""
    values = {name: after[name] for name in ("peak_memory_bytes", "http_peak_memory_bytes") if name in after}
    idle, load = _growth(warm, before), _growth(before, after)
    if n_idle > 0 and idle.get("prefill_seconds", 0) > 0:
        values["prefill_s"] = idle["prefill_seconds"] / n_idle
        values["prefill_tok_per_s"] = idle["prefill_tokens"] / idle["prefill_seconds"]
    if load.get("decode_seconds", 0) > 0 and load["decode_steps"] > 0:
        values["decode_step_s"] = load["decode_seconds"] / load["decode_steps"]
        values["decode_tok_per_s"] = load["decode_tokens"] / load["decode_seconds"]
        values["decode_read_bytes_per_s"] = load["decode_bytes"] / load["decode_seconds"]
    counted = (load.get(name, 0.0) for name in ("decode_requests", "decode_tokens", "draft_tokens", "accepted_draft_tokens"))
    values |= draft_values(*counted)
    return values


def _growth(earlier: Counters, later: Counters) -> dict[str, float]:
    growth = {name: later[name] - earlier[name] for name in COUNTERS if name in earlier and name in later}
    return {} if any(value < 0 for value in growth.values()) else growth
