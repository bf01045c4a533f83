"""The terms of a serving plan: memory, the largest batch, work, latency, throughput, money."""

from __future__ import annotations

from twostroke.core.dtypes import bytes_of
from twostroke.planner.explain.attention import kinds_of, numbers_of_kinds
from twostroke.planner.explain.model import cached_elements, explain_model, total
from twostroke.planner.explain.money import explain_prices
from twostroke.planner.explain.term import Explanation
from twostroke.planner.params import count_parameters
from twostroke.planner.serving import (
    CPU_MEMORY_UTILISATION,
    GPU_MEMORY_UTILISATION,
    PAGE_TOKENS,
    ServingPlan,
    memory_for_kv,
    request_kv_bytes,
)


def explain_serving(plan: ServingPlan) -> Explanation:
    """Every number of ``plan``, in the order in which one follows from another."""
    terms = Explanation()
    explain_model(terms, plan.spec)
    _memory(terms, plan)
    _time(terms, plan)
    _money(terms, plan)
    return terms


def _weights(terms: Explanation, plan: ServingPlan) -> None:
    scheme, value = plan.shape.scheme, plan.memory_bytes["weights"]
    if scheme == "int8":
        rows = value - count_parameters(plan.spec).block_matrices
        rows = (rows - 2.0 * (count_parameters(plan.spec).total - count_parameters(plan.spec).block_matrices)) / 4
        terms.add(
            "memory", "weights_bytes", value, "bytes", "1·N_matrices + 4·rows + 2·(N − N_matrices)",
            "int8: one byte an element and an fp32 scale an output row; the rest stays bf16", rows=rows,
        )  # fmt: skip
    else:
        terms.add("memory", "weights_bytes", value, "bytes", "w·N", f"every parameter in {scheme}", w=bytes_of(scheme))


def _memory(terms: Explanation, plan: ServingPlan) -> None:
    spec, shape, hardware = plan.spec, plan.shape, plan.hardware
    _weights(terms, plan)
    parts = [f"L{suffix}·{cached_elements(spec, kind, suffix)}" for suffix, kind, _ in kinds_of(spec)]
    numbers = numbers_of_kinds(spec) | {"w": bytes_of(shape.cache_dtype)}
    terms.add(
        "memory", "kv_bytes_per_token", plan.kv_bytes_per_token, "bytes", f"({total(parts)})·w",
        f"keys and values of every layer in {shape.cache_dtype}; K key heads, not H", **numbers,
    )  # fmt: skip
    terms.add(
        "memory", "kv_request_bytes", request_kv_bytes(spec, shape), "bytes",
        "⌈(prompt + output)/page⌉·page·kv_bytes_per_token", "a request's last page is counted whole",
        prompt=shape.prompt_tokens, output=shape.output_tokens, page=PAGE_TOKENS,
    )  # fmt: skip
    share = GPU_MEMORY_UTILISATION if hardware.kind == "gpu" else CPU_MEMORY_UTILISATION
    process = plan.memory_bytes["process"]
    terms.add(
        "memory", "room_for_kv_bytes", memory_for_kv(spec, shape, hardware), "bytes", "share·memory − weights_bytes − process",
        f"{hardware.label}: memory {hardware.basis}, share assumed", "assumed",
        share=share, memory=hardware.memory_bytes, process=process,
    )  # fmt: skip
    terms.add(
        "memory", "largest_batch", plan.largest_batch, "requests", "⌊room_for_kv_bytes/kv_request_bytes⌋", "whole requests"
    )
    terms.add(
        "memory", "kv_cache_bytes", plan.memory_bytes["kv_cache"], "bytes", "pages·page·kv_bytes_per_token",
        "whole pages of the cache the engine takes", pages=plan.pages, page=PAGE_TOKENS,
    )  # fmt: skip
    terms.add(
        "memory", "activations_bytes", plan.memory_bytes["activations"], "bytes", "min(prompt, 8192)·(4·E + 3·F)·w",
        "one layer of the longest prefill", prompt=shape.prompt_tokens, E=spec.d_model, F=spec.d_ff,
        w=bytes_of(shape.compute_dtype),
    )  # fmt: skip
    terms.add(
        "memory", "peak_memory_bytes", plan.peak_memory_bytes, "bytes",
        "weights_bytes + kv_cache_bytes + activations_bytes + process", "all are held while serving", process=process,
    )  # fmt: skip


def _time(terms: Explanation, plan: ServingPlan) -> None:
    shape, basis = plan.shape, f"rates {plan.hardware.basis}"
    for symbol, works, what in (
        ("ttft_s", plan.prefill, "one prompt alone"), ("tpot_s", plan.decode, f"one step of {shape.batch} requests")
    ):  # fmt: skip
        terms.add(
            "time", symbol, sum(w.seconds for w in works), "s", " + ".join(w.component for w in works), f"{what}; {basis}",
            **{w.component: w.seconds for w in works},
        )  # fmt: skip
    terms.add(
        "time", "e2e_s", plan.e2e_s, "s", "ttft_s + (output − 1)·tpot_s", "the first token is the prefill's",
        output=shape.output_tokens,
    )  # fmt: skip
    numbers = {"B": shape.batch, "prompt": shape.prompt_tokens, "output": shape.output_tokens}
    terms.add("time", "prefill_tok_per_s", plan.prefill_tok_per_s, "tok/s", "prompt/ttft_s", "one prompt alone", **numbers)
    terms.add("time", "decode_tok_per_s", plan.decode_tok_per_s, "tok/s", "B/tpot_s", "all requests together", **numbers)
    terms.add(
        "time", "output_tok_per_s", plan.output_tok_per_s, "tok/s", "B·output/(B·ttft_s + output·tpot_s)",
        "a batch kept full, prefills one after another", **numbers,
    )  # fmt: skip


def _money(terms: Explanation, plan: ServingPlan) -> None:
    explain_prices(terms, plan.hardware)
    terms.add(
        "money", "usd_per_mtok", plan.usd_per_mtok, "usd", "usd_per_hour·1e6/(3600·output_tok_per_s)",
        "per million output tokens, prefill included, never idle",
    )  # fmt: skip
    terms.add(
        "money", "kwh_per_mtok", plan.kwh_per_mtok, "kWh", "watts·PUE/1000·1e6/(3600·output_tok_per_s)",
        "per million output tokens",
    )  # fmt: skip
