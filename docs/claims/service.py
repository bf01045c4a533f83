"""Claims on latency, batches, engines, and what makes an answer cheaper."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from claims.claim import Case, Claim, Figure, pick
from claims.runs import LARGE, SMALL, batching, drafts, exits, prefix_gain, speed_ups
from claims.subjects import DEVICE, GB, LLAMA_3B, LLAMA_8B, LLAMA_70B, checkpoint_bytes_per_parameter, device, n_parameters
from claims.work import serving
from twostroke.planner.serving.plan import plan_serving
from twostroke.planner.serving.shape import ServingShape, Speculation
from twostroke.planner.serving.strategy import GPU_MEMORY_UTILISATION
from twostroke.planner.training.memory import PRECISIONS
from twostroke.planner.work.weights import kv_bytes_per_token, weights_bytes


def largest(keeps: Callable[[int], bool], most: int) -> int:
    """The largest whole number up to ``most`` for which ``keeps`` is true, where it is true below and false above; 0: none."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def span(cases: Sequence[Case]) -> str:
    """The least and the most of factors."""
    values = [case.value for case in cases]
    return f"{min(values):.2g} to {max(values):.2g}×"


def batch_sizes() -> Claim:
    def usd(batch: int) -> float:
        return serving(batch=batch).usd_per_mtok

    one, busy, full = serving(batch=1), serving(batch=32), serving(batch=128)
    memory = device(DEVICE).memory_bytes
    cases = (
        Case("tpot_1", "interactive, 1 request: time between tokens", 1e3 * one.tpot_s, "ms", "decode plan"),
        Case("tpot_32", "API, 32 requests", 1e3 * busy.tpot_s, "ms", "decode plan"),
        Case("tpot_128", "offline, 128 requests", 1e3 * full.tpot_s, "ms", "decode plan"),
        Case("usd_1", "price of output at 1 request", usd(1), "usd/Mtok", "$/h ÷ tokens"),
        Case("usd_8", "at 8", usd(8), "usd/Mtok", "the same"),
        Case("usd_32", "at 32", usd(32), "usd/Mtok", "the same"),
        Case("usd_128", "at 128", usd(128), "usd/Mtok", "the same"),
        Case("ratio_8", "price at 8 over that at 128", usd(8) / usd(128), "x", "$/Mtok ÷ $/Mtok"),
        Case("ratio_32", "price at 32 over that at 128", usd(32) / usd(128), "x", "the same"),
        Case(
            "most",
            "requests of 1,280 tokens that fit",
            float(one.largest_batch),
            "requests",
            f"⌊({GPU_MEMORY_UTILISATION:g}·{memory / GB:.3g} GB − weights) ÷ KV⌋",
        ),
        Case(
            "slo",
            "requests at which a token takes 20 ms",
            float(largest(lambda b: serving(batch=b).tpot_s <= 0.02, one.largest_batch)),
            "requests",
            "bisected decode plans",
        ),
    )
    return Claim(
        "batch_sizes",
        "Batch sizes",
        ("Llama 3.1 8B in bf16 on one H100 SXM (datasheet), prompt 1,024, output 256",),
        cases,
        (
            Figure("training 32–512 and up to tens of thousands", "the loss decides it, which no plan knows", 0, 0, ()),
            Figure("interactive 1–4", "what a limit of 20 ms a token allows", 1, 4, pick(cases, "slo")),
            Figure("API 8–32", "price at most 1.5 times that of 128", 0, 1.5, pick(cases, "ratio_8", "ratio_32")),
            Figure("offline 32–128", "what the memory holds", 32, 128, pick(cases, "most")),
        ),
        f"a token may take some milliseconds: 1 to 32 requests cost {cases[0].value:.2g} to {cases[1].value:.2g} ms a "
        "token and "
        f"{cases[3].value / cases[5].value:.0f}× less money. Small interactive batches come from few users, not from latency.",
        f"Memory would hold {one.largest_batch:,} such requests and a limit of 20 ms allows {cases[-1].value:,.0f}: "
        "batches of 8–32 "
        "leave most of this device unused. How many sequences training may take is decided by its loss (the critical batch), "
        "which no plan of time and memory knows.",
        decided_by="twostroke plan search (batch under an SLO); training runs at several batch sizes",
        measured=(*batching(SMALL, 16), *batching(SMALL, 32), *batching(LARGE, 16)),
    )


def latency_targets() -> Claim:
    def prefill(n: int, seconds: float) -> bool:
        return serving(prompt=n).ttft_s <= seconds

    prompt = largest(lambda n: prefill(n, 1.0), 100_000)
    most = serving(prompt=1024).largest_batch
    batch = largest(lambda b: serving(batch=b).tpot_s <= 1 / 20, most)
    plan = serving(batch=32, prompt=1024, output=500)
    big = plan_serving(LLAMA_70B, ServingShape(scheme="bf16", batch=1, prompt_tokens=1024, output_tokens=500), device("mi300x"))
    four_shape = ServingShape(scheme="bf16", batch=1, prompt_tokens=1024, output_tokens=500, tensor=4)
    four = plan_serving(LLAMA_70B, four_shape, device(DEVICE))
    cases = (
        Case(
            "prompt", "longest prompt whose first token comes within 1 s, 8B", float(prompt), "tokens", "bisected prefill plans"
        ),
        Case(
            "batch",
            "requests that each get 20 tokens/s, 8B",
            float(batch),
            "requests",
            f"bisected decode plans, at most {most}",
        ),
        Case("answer", "answer of 500 tokens among 32 requests, 8B", plan.e2e_s, "s", "TTFT + 499·TPOT"),
        Case("first_70b", "first token, 70B on one MI300X, prompt 1,024", big.ttft_s, "s", "prefill plan"),
        Case("rate_70b", "tokens a second of one request, 70B on one MI300X", 1 / big.tpot_s, "tok/s", "1 ÷ TPOT"),
        Case("first_8b", "first token among 32 requests, 8B, prompt 1,024", plan.ttft_s, "s", "prefill plan"),
        Case("rate_8b", "tokens a second of each of 32 requests, 8B", 1 / plan.tpot_s, "tok/s", "1 ÷ TPOT"),
        Case("answer_70b", "answer of 500 tokens, 70B on one MI300X", big.e2e_s, "s", "TTFT + 499·TPOT"),
        Case("tokens_30s", "tokens that 20 tokens/s give in 30 s", 600.0, "tokens", "20·30"),
        Case("rate_70b_four", "the same on four H100, tensor parallel", 1 / four.tpot_s, "tok/s", "1 ÷ TPOT"),
    )
    return Claim(
        "latency_targets",
        "Latency targets",
        ("bf16, datasheet rates, an idle server: waiting comes on top (twostroke plan serve --rate)",),
        cases,
        (
            Figure("first token < 1–2 s", "seconds", 0, 2, pick(cases, "first_8b", "first_70b")),
            Figure("20–50 tokens/s", "at least 20", 20, math.inf, pick(cases, "rate_70b", "rate_70b_four", "rate_8b")),
            Figure("whole answer < 10–30 s", "seconds for 500 tokens", 0, 30, pick(cases, "answer", "answer_70b")),
        ),
        f"8B: prompts up to {prompt:,} tokens start within 1 s on an H100 and {batch:,} requests get 20 tokens/s each. "
        "The targets "
        "agree with one another up to 600 tokens of answer.",
        f"A 70B model on one device gives {1 / big.tpot_s:.2g} tokens/s at best in bf16: it needs several devices, or "
        "fewer bits, "
        f"for 50 (four H100: {1 / four.tpot_s:.2g}). At 20 tokens/s an answer of more than 600 tokens misses 30 s.",
    )


EAGER_OPERATORS, EAGER_OPERATOR_S = 20, 8e-6
"""Assumed: operators of a layer that PyTorch starts one by one from Python, and seconds of starting each."""


def inference_engines() -> Claim:
    hardware, spec = device(DEVICE), LLAMA_8B
    one, eager_s = serving(), EAGER_OPERATORS * EAGER_OPERATOR_S
    eager = max(one.tpot_s, eager_s * spec.n_layers)
    small = plan_serving(LLAMA_3B, ServingShape(batch=1, prompt_tokens=1024, output_tokens=256), hardware)
    small_eager = max(small.tpot_s, eager_s * LLAMA_3B.n_layers)
    int8_eager = max(serving("int8").tpot_s, eager_s * spec.n_layers)
    batched = serving(batch=8).output_tok_per_s / one.output_tok_per_s
    mean, longest = 256, 1024
    measured = (
        *speed_ups(
            SMALL, "twostroke bf16", "transformers bf16", "decode_1_tok_per_s", "one request, Twostroke over transformers"
        ),
        *speed_ups(SMALL, "vllm bf16", "transformers bf16", "decode_1_tok_per_s", "one request, vLLM over transformers"),
        *speed_ups(
            SMALL, "twostroke bf16", "transformers bf16", "decode_32_tok_per_s", "32 requests, Twostroke over transformers"
        ),
        *speed_ups(SMALL, "vllm bf16", "transformers bf16", "decode_32_tok_per_s", "32 requests, vLLM over transformers"),
    )
    cases = (
        Case(
            "launches",
            "one request, 8B: eager operators against captured ones",
            eager / one.tpot_s,
            "x",
            f"max(step, {EAGER_OPERATORS}·L·{1e6 * EAGER_OPERATOR_S:g} µs = {1e3 * eager_s * spec.n_layers:.2g} ms) ÷ step",
        ),
        Case("launches_3b", "the same, 3B", small_eager / small.tpot_s, "x", "the same"),
        Case(
            "int8",
            "one request: int8 with captured operators against bf16 eager",
            eager / serving("int8").tpot_s,
            "x",
            f"int8 eager would be {int8_eager / serving('int8').tpot_s:.2g}×",
        ),
        Case("batching", "8 requests at once against one after another", batched, "x", "output tokens/s of the plans"),
        Case(
            "static",
            f"static batch: answers of {mean} tokens on average, the longest {longest:,}",
            longest / mean,
            "x",
            "steps until the longest is done ÷ steps that were needed",
        ),
    )
    return Claim(
        "inference_engines",
        "Inference engines over naive PyTorch",
        (
            f"H100 SXM datasheet; {EAGER_OPERATORS} operators a layer, {1e6 * EAGER_OPERATOR_S:g} µs each when started from "
            "Python (assumed)",
        ),
        cases,
        (Figure("2–5× over naive PyTorch", "times as fast as transformers", 2, 5, measured),),
        "The gain is a product of three: operators started one by one, answers waiting for the longest of a static batch, and "
        f"requests served one at a time. 2–5× is the static batch alone ({cases[4].value:.0f}× here).",
        f"One request of a large model gains little ({cases[0].value:.2g}×: reading the weights is the time); many requests "
        f"against a loop over them gain more ({cases[3].value:.2g}× with 8).",
        decided_by="twostroke bench offline, and benchmarks/ beside other engines",
        measured=measured,
    )


def quicker_answers() -> Claim:
    gamma, alpha, cost, reused = 4, 0.8, 0.05, 1536
    speculation = Speculation(gamma, alpha, cost)
    break_even = largest(lambda n: Speculation(gamma, n / 1000, cost).speed_up < 1, 1000) / 1000

    def loaded(batch: int) -> float:
        """Speed-up in a step of ``batch`` requests: products of γ + 1 tokens each, but every cache is read once."""
        step = serving(batch=batch, prompt=128, output=128).tpot_s
        products, more = (serving(batch=n, prompt=1, output=1).tpot_s for n in (batch, (gamma + 1) * batch))
        return speculation.speed_up_of(step, step + more - products)

    slower = largest(lambda batch: loaded(batch) > 1, 2048)
    big = plan_serving(LLAMA_70B, ServingShape(batch=8, prompt_tokens=1024, output_tokens=256), device("mi300x"))
    small = plan_serving(LLAMA_8B, ServingShape(batch=8, prompt_tokens=1024, output_tokens=256), device("mi300x"))
    prefix = serving(prompt=2048).ttft_s / serving(prompt=2048 - reused).ttft_s
    layer_share = 0.75
    cases = (
        Case(
            "speculation",
            f"speculative decoding, {gamma} tokens drafted, {100 * alpha:g}% accepted, a draft of {100 * cost:g}%",
            speculation.speed_up,
            "x",
            f"(1 − α^(γ+1)) ÷ (1 − α) ÷ (γ·{cost:g} + 1)",
        ),
        Case("break_even", "acceptance below which it slows down", break_even, "share", "speed-up = 1, bisected"),
        Case(
            "loaded",
            "the same with 256 requests of 192 tokens, where checking five tokens is arithmetic",
            loaded(256),
            "x",
            "tokens a step · step ÷ (drafts + check); each cache is read once",
        ),
        Case("loaded_limit", "requests from which it slows down", float(slower), "requests", "speed-up = 1, bisected"),
        Case(
            "distillation",
            "8B in place of 70B on one MI300X: money a token",
            big.usd_per_mtok / small.usd_per_mtok,
            "x",
            "plans at 8 requests",
        ),
        Case("distillation_latency", "the same: time between tokens", big.tpot_s / small.tpot_s, "x", "plans at 8 requests"),
        Case(
            "caching",
            f"first token of 2,048 prompt tokens of which {reused:,} are cached",
            prefix,
            "x",
            f"prefill 2,048 ÷ prefill {2048 - reused}",
        ),
        Case(
            "whole_answer",
            "the same for a whole answer of 256 tokens",
            serving(prompt=2048).e2e_s / (serving(prompt=2048 - reused).ttft_s + 255 * serving(prompt=2048).tpot_s),
            "x",
            "E2E ÷ E2E",
        ),
        Case(
            "early_exit",
            f"tokens that leave after {layer_share:g} of the layers, all of them",
            1 / layer_share,
            "x",
            f"at most: 1 ÷ {layer_share:g}, the head unchanged",
        ),
    )
    drafted, left = drafts(), exits()
    found = (prefix_gain(), *drafted, *left)
    return Claim(
        "quicker_answers",
        "Speculation, distillation, caching, early exit",
        ("Llama 3.1 8B on one H100 SXM where nothing else is said; acceptance and draft cost assumed",),
        cases,
        (
            Figure(
                "lower latency and cost a request",
                "times as fast or as cheap",
                1.01,
                math.inf,
                (
                    *pick(
                        cases,
                        "speculation",
                        "loaded",
                        "distillation",
                        "distillation_latency",
                        "caching",
                        "whole_answer",
                        "early_exit",
                    ),
                    *found,
                ),
            ),
        ),
        f"Speculation: few requests and at least {100 * break_even:.0f}% accepted. Distillation: always, by the ratio of "
        "weights "
        f"({cases[4].value:.2g}×), if the small model is good enough. Caching: prompts share a prefix "
        f"({cases[6].value:.2g}× to the "
        "first token).",
        f"Speculation costs throughput under load: above {slower:,} short requests on one device it is slower. Caching takes "
        f"{100 * (1 - 1 / cases[7].value):.2g}% off the whole answer. Early exit saves at most the layers left out; what "
        f"it does to quality must be measured. Here drafts gave {span(drafted)} and early exits {span(left)}.",
        decided_by="twostroke bench serve with and without speculation; twostroke compare TEACHER STUDENT for quality",
        measured=found,
    )


def disk_contents() -> Claim:
    model = weights_bytes(LLAMA_8B, "bf16")
    kept = checkpoint_bytes_per_parameter("bf16")
    moments = 2 * PRECISIONS["bf16"].state
    checkpoint = kept * n_parameters(LLAMA_8B)
    kv = kv_bytes_per_token(LLAMA_8B)
    disk = device(DEVICE).disk_write_bytes_per_s
    plan = serving(prompt=2048)
    prefill_rate = plan.prefill_tok_per_s * kv
    cases = (
        Case("checkpoint", "a training checkpoint: fp32 masters and two moments", checkpoint / GB, "GB", f"{kept:g}·N"),
        Case("state", "optimizer's share of it", moments / kept, "share", f"{moments:g} ÷ {kept:g}"),
        Case("model", "the finished model in bf16", model / GB, "GB", "2·N"),
        Case("kv", "KV of a prefix of 8,192 tokens, kept for reuse", 8192 * kv / GB, "GB", f"8,192·{kv:,.0f}"),
        Case("write", "time to write the checkpoint to one disk", checkpoint / disk, "s", f"÷ {disk / 1e9:.2g} GB/s assumed"),
        Case(
            "break_even",
            "GB/s a store must read for cached KV to come sooner than prefill",
            prefill_rate / GB,
            "count",
            "prompt tokens/s · KV bytes a token ÷ 10⁹",
        ),
        Case("as_model", "cached tokens whose KV is as large as the model", model / kv, "tokens", "2·N ÷ KV"),
    )
    return Claim(
        "disk_contents",
        "Disk",
        ("Llama 3.1 8B; KV in bf16; one H100 SXM",),
        cases,
        (
            Figure("training: optimizer state", "most of a checkpoint", 0.5, 1, pick(cases, "state")),
            Figure(
                "inference: KV for reuse",
                "GB/s at most what one disk is assumed to give",
                0,
                disk / GB,
                pick(cases, "break_even"),
            ),
        ),
        f"a run may fail: {100 * moments / kept:.0f}% of a checkpoint are the optimizer's state, "
        f"{checkpoint / model:.2g}× the model in all.",
        f"KV on disk pays only where the store reads more than {cases[5].value:.2g} GB/s a device: below, computing the "
        "prompt again "
        "is quicker, though not cheaper in energy. One NVMe drive is near that line.",
    )
