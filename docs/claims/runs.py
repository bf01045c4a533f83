"""What committed benchmark runs say of a claim: their raw JSON, read when the page is made."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from claims.claim import Case, Unit
from measured import BENCHMARKS, CONFIGURATIONS_RUN, INFERENCE_RUNS, QUALITY_RUNS, TRAINING_RUN, Row, all_tables, number

SMALL, LARGE = "smollm-135m", "tinyllama-1.1b"
SIZES = {SMALL: "135M", LARGE: "1.1B"}

OVERLOAD_RUNS = {
    "EPYC": "robustness/runs/2026-11-22-2-core-epyc-zen4-5b16e36",
    "Xeon": "robustness/runs/2026-11-22-2-core-xeon-amx-3f2da19",
}


SPECULATION_RUN = "speculation/runs/2026-11-23-2-core-epyc-671577f"
EXITS_RUN = "speculation/runs/2026-11-24-2-core-epyc-01dfa60-early-exit"


@lru_cache(maxsize=16)
def lines(run: str) -> list[dict[str, Any]]:
    """``raw.jsonl`` of a run."""
    return [json.loads(line) for line in (BENCHMARKS / run / "raw.jsonl").read_text(encoding="utf-8").splitlines()]


def document(run: str) -> dict[str, Any]:
    """``raw.json`` of a run."""
    found: dict[str, Any] = json.loads((BENCHMARKS / run / "raw.json").read_text(encoding="utf-8"))
    return found


def _case(what: str, value: float, unit: Unit, run: str, name: str) -> Case:
    return Case(what, what, value, unit, f"[{name}](../benchmarks/{run})")


# -- inference ------------------------------------------------------------------------------------------------------------


def _median(run: str, model: str, engine: str, name: str) -> float:
    """Of quantity ``name`` of one engine ("twostroke bf16"), over all repeats of all rounds. Raises ValueError without any."""
    rows = (row for row in lines(run) if row["shape"] == model and f"{row['engine']} {row['variant']}" == engine)
    values = [value for row in rows for value in row.get(name, ())]
    if not values:
        raise ValueError(f"{run}: {engine} has no {name} of {model}. Take another cell or another run.")
    return statistics.median(values)


def speed_ups(model: str, of: str, over: str, name: str, what: str) -> tuple[Case, ...]:
    """Tokens a second of engine ``of`` ÷ those of ``over``, on each processor."""
    return tuple(
        _case(
            f"{SIZES[model]}: {what}, {machine}",
            _median(run, model, of, name) / _median(run, model, over, name),
            "x",
            run,
            machine,
        )
        for machine, run in INFERENCE_RUNS.items()
    )


def batching(model: str, batch: int) -> tuple[Case, ...]:
    """Tokens a second of ``batch`` requests ÷ those of one, of our engine in bf16, on each processor."""
    engine = "twostroke bf16"
    return tuple(
        _case(
            f"{SIZES[model]}: tokens a second of {batch} requests over one, {machine}",
            _median(run, model, engine, f"decode_{batch}_tok_per_s") / _median(run, model, engine, "decode_1_tok_per_s"),
            "x",
            run,
            machine,
        )
        for machine, run in INFERENCE_RUNS.items()
    )


def share_of(name: str, what: str) -> Case:
    """A share that the Xeon's run has of our engine in bf16."""
    run = INFERENCE_RUNS["Xeon"]
    return _case(f"{SIZES[SMALL]}: {what}", _median(run, SMALL, "twostroke bf16", name), "share", run, "Xeon")


def prefix_gain() -> Case:
    """Cold TTFT over that of a prompt of which 2,000 tokens are cached."""
    left = share_of("prefix_hit_share", "")
    return replace(
        left, name="prefix", what="135M: first token, a cached prefix of 2,000 over none", value=1 / left.value, unit="x"
    )


def cache_gains() -> tuple[Case, ...]:
    """What a token costs if its 512 tokens of context are computed again, over a decode step: 512 ÷ prefill rate · decode
    rate."""
    return tuple(
        _case(
            f"{SIZES[model]}: time saved for token 512, {machine}",
            512
            / _median(run, model, "twostroke bf16", "prefill_512_tok_per_s")
            * _median(run, model, "twostroke bf16", "decode_1_tok_per_s"),
            "x",
            run,
            machine,
        )
        for model in (SMALL, LARGE)
        for machine, run in INFERENCE_RUNS.items()
    )


def tails() -> tuple[Case, ...]:
    """p99 ÷ median of the time of an answer with 32 and 128 clients, the median over repeats."""
    return tuple(
        _case(
            f"{clients} clients of a small model: p99 over the median answer, {machine}",
            statistics.median(row["answer_p99_s"] / row["answer_p50_s"] for row in found),
            "x",
            run,
            machine,
        )
        for machine, run in OVERLOAD_RUNS.items()
        for clients in (32, 128)
        if (found := [row for row in document(run)["overload"] if row["clients"] == clients])
    )


def _http() -> list[dict[str, Any]]:
    return [row for row in lines(CONFIGURATIONS_RUN) if row["phase"] == "http"]


def http_tails(latency: str, what: str) -> tuple[Case, ...]:
    """p99 ÷ median of one latency of each server under a closed loop of users, the median over its repeats."""
    found: dict[str, list[float]] = {}
    for row in _http():
        users = row["case"]["batch"]
        ratio = row["measured"][f"{latency}_p99_s"] / row["measured"][f"{latency}_median_s"]
        found.setdefault(f"{row['case']['sizes']['name']}, {users} user{'s' * (users != 1)}", []).append(ratio)
    return tuple(
        _case(f"{name}: p99 over the median {what}", statistics.median(ratios), "x", CONFIGURATIONS_RUN, "EPYC")
        for name, ratios in found.items()
    )


def _speed_up(row: Row, what: str, run: str) -> Case:
    value = number(row["of decoding"])
    assert value is not None
    return _case(f"13.9M: {what}", value, "x", run, "EPYC")


def drafts() -> tuple[Case, ...]:
    """Tokens a second of decoding with drafts from the text itself over those without, by text and requests."""
    return tuple(
        _speed_up(row, f"n-gram drafts on {row['text']}, {_requests(row)}", SPECULATION_RUN)
        for row in _table(SPECULATION_RUN, "text")
        if not row["text"].startswith(("code again", "noise"))
    )


def exits() -> tuple[Case, ...]:
    """The same of early exits after the first layer that the whole model checks, greedy, and of exits that nothing checks."""
    checked = tuple(
        _speed_up(row, f"exits that the model checks, {row['weights']}, greedy, {_requests(row)}", EXITS_RUN)
        for row in _table(EXITS_RUN, "right of drafted")
        if row["drafts"] == "exit:1" and number(row["temperature"]) == 0
    )
    unchecked = tuple(
        _speed_up(row, f"unchecked exits that may change {row['may change']} of tokens, 1 request", EXITS_RUN)
        for row in _table(EXITS_RUN, "may change")
    )
    return checked + unchecked


def _requests(row: Row) -> str:
    return f"{row['requests']} request{'s' * (row['requests'] != '1')}"


def _table(run: str, column: str) -> list[Row]:
    """The first table of a run's summary that has ``column``."""
    return next(rows for rows in all_tables(run) if rows and column in rows[0])


# -- quality --------------------------------------------------------------------------------------------------------------


def losses(scheme: str, what: str) -> tuple[Case, ...]:
    """Perplexity over bf16's, less one, of each judged model."""
    return tuple(
        _case(
            f"perplexity lost by {what}, {model}",
            next(row["perplexity_ratio"] for row in document(run)["schemes"] if row["scheme"] == scheme) - 1,
            "share",
            run,
            "run",
        )
        for model, run in QUALITY_RUNS.items()
    )


SIZE_LADDER = {
    "llama-384": ("llama-384-bf16-b1-p256", "llama-384-int8-b64-p64", "llama-384-int4-b1-p128"),
    "llama-1024": ("llama-1024-bf16-b1-p128", "llama-1024-int8-b8-p128", "llama-1024-int4-b1-p128"),
    "135M": ("smollm-135m-bf16-b1-p128", "smollm-135m-int8-b1-p256", "smollm-135m-int4-b16-p64-lora-8,16,q_proj,v_proj"),
}
"""Served in bf16, int8 and int4, embedding and head in bf16."""


def weights_saved(which: int, what: str) -> tuple[Case, ...]:
    """Bytes of the weights that the engine holds in bf16 over those in int8 (``which`` 1) or int4 (2)."""
    held = {row["name"]: row["measured"]["weights_bytes"] for row in lines(CONFIGURATIONS_RUN) if row["phase"] == "serve"}
    return tuple(
        _case(f"{model}: {what} against bf16, held", held[names[0]] / held[names[which]], "x", CONFIGURATIONS_RUN, "EPYC")
        for model, names in SIZE_LADDER.items()
    )


# -- training -------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _trained() -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in lines(CONFIGURATIONS_RUN) if row["phase"] == "train"}


def trained(name: str, what: str, unit: Unit, of: Callable[[dict[str, float]], float]) -> Case:
    """``of`` what was measured of one training configuration."""
    return _case(f"{what} ({name})", of(_trained()[name]["measured"]), unit, CONFIGURATIONS_RUN, "EPYC")


FULL_STEPS = ("llama-384", "grouped-576-v16k", "llama-1024", "grouped-512", "deep-192")
"""Compiled steps with AdamW, of models from 6 to 47 M parameters."""


def backward_ratios() -> tuple[Case, ...]:
    return tuple(
        trained(name, "backward over forward", "x", lambda m: m["backward_s"] / m["forward_s"])
        for name in (*FULL_STEPS, "head-heavy", "eager-320")
    )


RECOMPUTED = {"recompute-selective": "products recomputed", "recompute-full": "every layer recomputed"}


def recomputed_ratios() -> tuple[Case, ...]:
    return tuple(
        trained(name, f"backward over forward, {what}", "x", lambda m: m["backward_s"] / m["forward_s"])
        for name, what in RECOMPUTED.items()
    )


def recomputed_backwards() -> tuple[Case, ...]:
    """Backward with recomputation over that of the same model and batch without."""
    kept = _trained()["method-full"]["measured"]["backward_s"]
    return tuple(
        trained(name, f"backward over that without recomputation, {what}", "x", lambda m: m["backward_s"] / kept)
        for name, what in RECOMPUTED.items()
    )


def backward_shares() -> tuple[Case, ...]:
    return tuple(
        trained(name, "backward's share of a step", "share", lambda m: m["backward_s"] / m["step_time_s"])
        for name in FULL_STEPS
    )


def update_shares() -> tuple[Case, ...]:
    return tuple(
        trained(name, "the update's share of a step", "share", lambda m: m["optimizer_s"] / m["step_time_s"])
        for name in (*FULL_STEPS, "demo-muon")
    )


def activations_over_model() -> tuple[Case, ...]:
    """(bf16 weights + what backward keeps) ÷ bf16 weights."""
    return tuple(
        trained(name, "weights and kept activations over weights", "x", lambda m: 1 + m["activations_bytes"] / m["model_bytes"])
        for name in FULL_STEPS
    )


PRECISION_PAIRS = (("eager-320", "eager-fp32"),)
"""The same model and sequence in bf16 and in fp32, eager; twice the sequences in bf16, so a token is compared."""


def _tokens(name: str) -> float:
    case = _trained()[name]["case"]
    return float(case["batch_size"] * case["sequence_length"] * case["grad_accumulation"])


def _per_token(name: str, quantity: str) -> float:
    return float(_trained()[name]["measured"][quantity]) / _tokens(name)


def precision_speeds() -> tuple[Case, ...]:
    return tuple(
        _case(
            f"time of a token in fp32 over bf16 ({low})",
            _per_token(high, "step_time_s") / _per_token(low, "step_time_s"),
            "x",
            CONFIGURATIONS_RUN,
            "EPYC",
        )
        for low, high in PRECISION_PAIRS
    )


def precision_memory() -> tuple[Case, ...]:
    return tuple(
        _case(
            f"activations of a token in bf16 over fp32 ({low})",
            _per_token(low, "activations_bytes") / _per_token(high, "activations_bytes"),
            "share",
            CONFIGURATIONS_RUN,
            "EPYC",
        )
        for low, high in PRECISION_PAIRS
    )


def precision_peaks() -> tuple[Case, ...]:
    """Peak memory in bf16 over that in fp32, without the activations of the tokens that the bf16 run has more."""
    found = []
    for low, high in PRECISION_PAIRS:
        fewer, more = (_trained()[name]["measured"] for name in (high, low))
        surplus = more["activations_bytes"] * (1 - _tokens(high) / _tokens(low))
        ratio = (more["peak_memory_bytes"] - surplus) / fewer["peak_memory_bytes"]
        found.append(_case(f"peak memory of the process in bf16 over fp32 ({low})", ratio, "share", CONFIGURATIONS_RUN, "EPYC"))
    return tuple(found)


def _peer_row(row: str, engine: str) -> dict[str, Any]:
    return next(one for one in lines(TRAINING_RUN) if one.get("row") == row and one.get("engine") == engine)


def _rate(one: dict[str, Any]) -> float:
    return statistics.median(n / s for n, s in zip(one["tokens"], one["step_time_s"], strict=True))


def adapters() -> tuple[Case, ...]:
    """LoRA and QLoRA beside full training of the same 50M model: time of a token and peak memory beyond the process."""
    full, found = _peer_row("50M-fixed", "twostroke"), []
    for engine in ("LoRA", "QLoRA"):
        one = _peer_row("lora", f"twostroke {engine}")
        held = [row["peak_bytes"] - row["baseline_bytes"] for row in (one, full)]
        found.append(
            _case(f"50M: time of a token, {engine} over full", _rate(full) / _rate(one), "share", TRAINING_RUN, "EPYC")
        )
        found.append(_case(f"50M: memory, {engine} over full", held[0] / held[1], "share", TRAINING_RUN, "EPYC"))
    return tuple(found)
