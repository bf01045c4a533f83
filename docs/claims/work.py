"""Claims on what the phases do: which limit holds, and what each part of a step costs."""

from __future__ import annotations

import math
from functools import lru_cache

from claims.claim import Case, Claim, Figure, about, pick
from claims.runs import (
    LARGE,
    backward_ratios,
    backward_shares,
    cache_gains,
    losses,
    precision_memory,
    precision_peaks,
    precision_speeds,
    recomputed_backwards,
    recomputed_ratios,
    share_of,
    speed_ups,
    update_shares,
    weights_saved,
)
from claims.subjects import (
    DEVICE,
    GB,
    LLAMA_8B,
    LLAMA_70B,
    block_activations_bytes,
    device,
    n_parameters,
    state_bytes_per_parameter,
)
from twostroke.planner.choosing.comparison import component_flips
from twostroke.planner.hardware.device import ASSUMED_BANDWIDTH_EFFICIENCY
from twostroke.planner.serving.plan import ServingPlan, plan_serving
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.serving.step_time import efficiencies_of
from twostroke.planner.training.plan import TrainingPlan, plan_training
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.work.flops import attention_flops_per_token, decode_flops, prefill_flops
from twostroke.planner.work.weights import kv_bytes_per_token, weights_bytes


@lru_cache(maxsize=64)
def serving(scheme: str = "bf16", batch: int = 1, prompt: int = 1024, output: int = 256, name: str = DEVICE) -> ServingPlan:
    """Llama 3.1 8B on one device."""
    shape = ServingShape(scheme=scheme, batch=batch, prompt_tokens=prompt, output_tokens=output)
    return plan_serving(LLAMA_8B, shape, device(name))


@lru_cache(maxsize=64)
def training(dtype: str = "bf16", batch_size: int = 4) -> TrainingPlan:
    """Llama 3.1 8B on one device, whether it fits there or not: times are those of its part of a larger machine."""
    return plan_training(LLAMA_8B, TrainingShape(batch_size=batch_size, sequence_length=2048, dtype=dtype), device(DEVICE))


@lru_cache(maxsize=1)
def flips() -> dict[str, dict[str, int | None]]:
    return component_flips(training(), serving())


def every_token_reads_the_weights() -> Claim:
    w70, kv70 = weights_bytes(LLAMA_70B, "bf16"), kv_bytes_per_token(LLAMA_70B)
    hardware = device(DEVICE)
    rate = hardware.bandwidth(w70)
    cases = (
        Case("one", "70B in 16 bits, one request", w70 / GB, "GB", f"2·{n_parameters(LLAMA_70B):,}"),
        Case(
            "floor",
            "least time of such a token per H100 of memory bandwidth",
            1e3 * w70 / rate,
            "ms",
            f"2·N ÷ ({rate / 1e12:.3g} TB/s, {ASSUMED_BANDWIDTH_EFFICIENCY} of the datasheet's)",
        ),
        Case("batch", "weights read a token with 64 requests in the step", w70 / 64 / GB, "GB", "2·N ÷ 64"),
        Case("kv", "KV read a token at a context of 8,192", 8192 * kv70 / GB, "GB", f"8,192·{kv70:,.0f}"),
        Case(
            "kv_as_much",
            "requests of 8,192 tokens whose KV is read as much as the weights",
            w70 / (8192 * kv70),
            "requests",
            "2·N ÷ (8,192·KV)",
        ),
        Case("int4", "the same weights in int4", weights_bytes(LLAMA_70B, "int4") / GB, "GB", "scheme int4 of the planner"),
    )
    return Claim(
        "every_token_reads_the_weights",
        "Each generated token reads all the weights",
        ("Llama 3.1 70B; H100 SXM datasheet",),
        cases,
        (Figure("70B in fp16: 140 GB a token", "within a tenth", *about(140), pick(cases, "one", "batch")),),
        "one request decodes alone, in a dense model.",
        f"A step reads them once for all its requests: 64 share {cases[0].value:.0f} GB, {cases[2].value:.2g} GB each. From "
        f"{cases[4].value:.0f} requests of 8,192 tokens on, KV is read more than the weights. Experts: only those picked.",
        measured=(share_of("decode_1_read_share", "bandwidth reached by one request's decode, weights and cache"),),
    )


def decode_bound() -> Claim:
    found, hardware = flips()["decode"], device(DEVICE)
    reached = efficiencies_of(hardware)
    bandwidth = hardware.read_bandwidth[0].bytes_per_s * reached.product_bandwidth_share
    ridge = hardware.peak("bf16") * reached.arithmetic_share / bandwidth
    intensity = 2 * LLAMA_8B.queries_per_kv_head / 2.0
    attention, alone = found["attention"], serving().shape
    plan = serving(batch=64, prompt=8192, output=256)
    share = next(w.seconds for w in plan.decode if w.component == "attention") / plan.tpot_s
    cases = (
        Case(
            "ridge",
            "FLOP a byte at which this device turns from memory to arithmetic",
            ridge,
            "count",
            f"{reached.arithmetic_share:.2f}·π ÷ ({reached.product_bandwidth_share:.2f}·β), datasheet's bf16 and bandwidth",
        ),
        Case(
            "mlp",
            "requests from which the MLP is arithmetic-bound",
            float(found["mlp"] or 0),
            "requests",
            "plan of one decode step, doubled and bisected",
        ),
        Case(
            "head",
            "requests from which the output head is; 0: never, scheduling and sampling take longer",
            float(found["head"] or 0),
            "requests",
            "the same",
        ),
        Case(
            "attention",
            "requests from which attention (with its projections) is; 0: never",
            float(attention or 0),
            "requests",
            f"the same; context {alone.prompt_tokens + alone.output_tokens // 2:,}",
        ),
        Case(
            "kv_intensity",
            "FLOP a byte of attention over the cache, whatever the batch",
            intensity,
            "count",
            "4·H·D ÷ (2·K·D·w) = 2·G/w",
        ),
        Case("share", "share of a step that attention takes: 64 requests at 8,192 tokens", share, "share", "decode plan"),
    )
    return Claim(
        "decode_bound",
        "What bounds decode",
        ("Llama 3.1 8B in bf16 on one H100 SXM, datasheet rates times fitted shares", "prompt 1,024, output 256"),
        cases,
        (
            Figure("FFN is compute-bound", "within a batch of 32", 1, 32, pick(cases, "mlp")),
            Figure("attention memory-bound", "never turns", 0, 0, pick(cases, "attention")),
            Figure("memory-bound, not compute-bound", "beyond a batch of 32", 32, math.inf, pick(cases, "mlp")),
        ),
        f"Decode is memory-bound below {cases[1].value:,.0f} requests. From there on the first sentence is right: the MLP is "
        "bound by arithmetic and attention over the cache never is, since each request reads its own keys "
        f"({intensity:.2g} FLOP a byte against {ridge:.0f}).",
        f"Neither holds without the batch: interactive batches leave the MLP memory-bound; {cases[1].value:,.0f} requests "
        "turn it.",
    )


def prefill_bound() -> Claim:
    found = flips()["prefill"]
    short, long = serving(prompt=64), serving(prompt=4096)
    cases = (
        Case("mlp", "prompt tokens from which the MLP is arithmetic-bound", float(found["mlp"] or 0), "tokens", "prefill plan"),
        Case(
            "attention",
            "prompt tokens from which attention with its projections is",
            float(found["attention"] or 0),
            "tokens",
            "prefill plan",
        ),
        Case("short", "time of 64 prompt tokens", 1e3 * short.ttft_s, "ms", "prefill plan"),
        Case("one_step", "time of one decode step, one request", 1e3 * serving().tpot_s, "ms", "decode plan"),
        Case("long", "prompt tokens a second at 4,096", long.prefill_tok_per_s, "tok/s", "4,096 ÷ prefill"),
        Case(
            "attention_share",
            "causal attention's share of the FLOP at 4,096 tokens",
            4096 * attention_flops_per_token(LLAMA_8B, 4096) / prefill_flops(LLAMA_8B, 4096),
            "share",
            "2·L·H·D·s² ÷ (2·N_blocks·s + 2·L·H·D·s² + head)",
        ),
    )
    return Claim(
        "prefill_bound",
        "What bounds prefill",
        ("Llama 3.1 8B in bf16 on one H100 SXM, datasheet rates times fitted shares",),
        cases,
        (
            Figure(
                "compute-bound, parallel over tokens",
                "from at most 1,024 prompt tokens on",
                0,
                1024,
                pick(cases, "mlp", "attention"),
            ),
        ),
        f"a step has at least {cases[0].value:,.0f} prompt tokens, of one request or of several.",
        f"Below that the weights are read for too few tokens: 64 take {cases[2].value:.2g} ms, about a decode step's "
        f"{cases[3].value:.2g} ms. Norms and the embedding are bound by memory at any length.",
    )


def backward_pass() -> Claim:
    plan, ratios, shares = training(), backward_ratios(), backward_shares()
    recomputed, again = recomputed_ratios(), recomputed_backwards()
    ratio = plan.backward_s / plan.forward_s
    share = plan.backward_s / plan.step_time_s
    accumulated = plan.backward_s * 8 / ((plan.forward_s + plan.backward_s) * 8 + plan.optimizer_s)
    cases = (
        Case("flops", "FLOP of backward over forward", 2.0, "x", "4·N + 2·attention over 2·N + attention"),
        Case(
            "time", "predicted time of backward over forward", ratio, "x", f"{plan.backward_s:.3g} s ÷ {plan.forward_s:.3g} s"
        ),
        Case("share", "share of a step of 8,192 tokens", share, "share", "backward ÷ step, update included"),
        Case("share_accumulated", "share of a step with 8 accumulated passes", accumulated, "share", "8·b ÷ (8·(f + b) + u)"),
        Case("recomputed", "FLOP of backward over forward with full recomputation", 3.0, "x", "(2 + 4)·N ÷ 2·N"),
        Case("recomputed_over", "the same over a backward pass that recomputes nothing", 1.5, "x", "(2 + 4)·N ÷ 4·N"),
    )
    return Claim(
        "backward_pass",
        "The backward pass",
        ("Llama 3.1 8B, 4 sequences of 2,048 tokens, mixed bf16, one H100 SXM's rates",),
        cases,
        (
            Figure(
                "the main cost of a step", "at least half of it", 0.5, 1, (*pick(cases, "share", "share_accumulated"), *shares)
            ),
            Figure("about twice the forward", "times its time", 1.6, 2.4, (*pick(cases, "time"), *ratios)),
            Figure(
                "as much as the forward, sometimes more",
                "at least its time",
                1,
                math.inf,
                (*pick(cases, "time", "recomputed"), *ratios, *recomputed),
            ),
        ),
        f"Two products where forward has one: {ratio:.2g}× the time, {100 * share:.0f}% of the step.",
        "With full recomputation it is three times the forward; with few tokens a step the optimizer, which does not shrink "
        "with the batch, is the main cost. Eager steps and small models with a large vocabulary come down to once the forward. "
        f"Here recomputing every layer made a small model's backward {again[-1].value:.2g}× as long.",
        measured=(*ratios, *recomputed, *again, *shares),
    )


UNFUSED_ADAMW_BYTES = 4 * (2 + 3 + 2 + 4 + 2 + 2 + 2 + 4)
"""fp32 operands read and written a parameter by AdamW as single operations: decay p (2), m.lerp(g) (3), v·β₂ (2), v + g·g (4),
√v (2), ÷ correction (2), + ε (2), p + m/d (4)."""

FUSED_ADAMW_BYTES = 4 * 7
"""Fused: p, g, m, v are read, p, m, v written."""


def optimizer_step() -> Claim:
    plan = training()
    update = plan.optimizer[0]
    moved = update.bytes / plan.parameters.total
    hardware = device(DEVICE)
    ridge = hardware.peak("fp32") / hardware.bandwidth(1e10)
    equal = plan.optimizer_s / ((plan.forward_s + plan.backward_s) / plan.shape.tokens_per_step)
    cases = (
        Case(
            "intensity",
            "FLOP a byte of an AdamW update",
            update.flops / update.bytes,
            "count",
            f"{update.flops / plan.parameters.total:.3g} FLOP ÷ bytes a parameter",
        ),
        Case(
            "ridge",
            "FLOP a byte at which fp32 arithmetic would be the limit",
            ridge,
            "count",
            f"π(fp32) ÷ ({ASSUMED_BANDWIDTH_EFFICIENCY:g}·β)",
        ),
        Case(
            "bytes",
            "bytes a parameter our engine's update moves",
            moved,
            "B/parameter",
            "gradient widened, normed, clipped; state and master read and written; copy written",
        ),
        Case(
            "unfused",
            "bytes a parameter of AdamW as eight operations",
            UNFUSED_ADAMW_BYTES,
            "B/parameter",
            f"{UNFUSED_ADAMW_BYTES // 4} fp32 operands",
        ),
        Case("fused", "bytes a parameter of fused AdamW", FUSED_ADAMW_BYTES, "B/parameter", "p, g, m, v read; p, m, v written"),
        Case(
            "saving",
            "unfused over fused",
            UNFUSED_ADAMW_BYTES / FUSED_ADAMW_BYTES,
            "x",
            f"{UNFUSED_ADAMW_BYTES} ÷ {FUSED_ADAMW_BYTES}",
        ),
        Case(
            "tokens",
            "tokens a step at which forward and backward take as long as the update",
            equal,
            "tokens",
            "update ÷ time a token",
        ),
    )
    return Claim(
        "optimizer_step",
        "The optimizer step",
        ("Llama 3.1 8B, AdamW with fp32 state, one H100 SXM's datasheet",),
        cases,
        (
            Figure("memory-bound", "FLOP a byte below the ridge", 0, ridge, pick(cases, "intensity")),
            Figure("fusing reads and writes less", "times less", 1.01, math.inf, pick(cases, "saving")),
        ),
        f"{cases[0].value:.2g} FLOP a byte against {ridge:.0f}; a fused update moves a third of the bytes of single "
        "operations.",
        f"It matters up to some thousands of tokens a step: at {equal:,.0f} it takes as long as forward and backward together. "
        "Muon is the exception: its Newton–Schulz products are arithmetic.",
        decided_by="twostroke calibrate (adamw_bytes_per_s of this machine)",
        measured=update_shares(),
    )


def kv_cache() -> Claim:
    def without(n: int) -> float:
        """FLOP of one new token when everything before it is computed again."""
        return prefill_flops(LLAMA_8B, n)

    kv, gains = kv_bytes_per_token(LLAMA_8B), cache_gains()
    cases = (
        Case(
            "gain_1k",
            "FLOP saved for token 1,024",
            without(1024) / decode_flops(LLAMA_8B, 1024),
            "x",
            "prefill FLOP of 1,024 ÷ decode FLOP at 1,024",
        ),
        Case(
            "gain_32k",
            "FLOP saved for token 32,768",
            without(32768) / decode_flops(LLAMA_8B, 32768),
            "x",
            "prefill FLOP of 32,768 ÷ decode FLOP at 32,768",
        ),
        Case(
            "growth",
            "work of a decoded token at 32,768 over that at 1,024, with the cache",
            decode_flops(LLAMA_8B, 32768) / decode_flops(LLAMA_8B, 1024),
            "x",
            "2·N + 4·L·H·D·n",
        ),
        Case(
            "half",
            "context at which attention is half of a decoded token's FLOP",
            decode_flops(LLAMA_8B, 1) / (4 * LLAMA_8B.n_layers * LLAMA_8B.n_heads * LLAMA_8B.head_dim),
            "tokens",
            "2·N ÷ 4·L·H·D",
        ),
        Case("bytes", "memory it costs, a token", kv / 1e3, "kB", "2·L·K·D·w"),
        Case("request", "memory of 32,768 tokens", 32768 * kv / GB, "GB", f"32,768·{kv:,.0f}"),
    )
    return Claim(
        "kv_cache",
        "The KV cache",
        ("Llama 3.1 8B in bf16",),
        cases,
        (
            Figure(
                "O(n) instead of O(n²) work a token",
                "n times less, to a quarter: 1,024 tokens",
                768,
                1280,
                pick(cases, "gain_1k"),
            ),
            Figure("the same in time", "n times less, to a quarter: 512 tokens", 384, 640, gains),
            Figure("grows with length", "work of a token at 32,768 over 1,024", 1.01, math.inf, pick(cases, "growth")),
        ),
        "attention alone is counted: with the cache a token's attention grows with n, without it with n². It fills with the "
        "prompt at once and by one token a step.",
        "A token's whole work is 2·N + 4·L·H·D·n: without the cache it is about n times a decoded token's, since the products "
        f"dominate below {cases[3].value:,.0f} tokens. In time it gains far less than in FLOP, since a decode "
        "step waits for the "
        f"weights: {min(g.value for g in gains):.2g} to {max(g.value for g in gains):.2g}× at 512 tokens. A "
        "sliding window stops "
        "the growth.",
        measured=gains,
    )


def mixed_precision() -> Claim:
    fp32, bf16, speeds, kept = training("fp32"), training("bf16"), precision_speeds(), precision_memory()
    peaks = precision_peaks()
    a32 = fp32.memory_bytes["activations"]
    a16 = bf16.memory_bytes["activations"]
    mixed, full = state_bytes_per_parameter("bf16"), state_bytes_per_parameter("fp32")
    state = mixed / full
    hardware = device(DEVICE)
    tokens = bf16.shape.tokens_per_step
    n, a_token = n_parameters(LLAMA_8B), block_activations_bytes(LLAMA_8B, 2048)
    pure = state_bytes_per_parameter("pure_bf16")
    cases = (
        Case(
            "speed",
            "step time of fp32 over bf16 (H100 datasheet)",
            fp32.step_time_s / bf16.step_time_s,
            "x",
            f"{fp32.step_time_s:.3g} s ÷ {bf16.step_time_s:.3g} s",
        ),
        Case(
            "peaks",
            "product rate of bf16 over fp32 outside the tensor cores",
            hardware.peak("bf16") / hardware.peak("fp32"),
            "x",
            "datasheet",
        ),
        Case("activations", "activations against fp32", a16 / a32, "share", f"{tokens:,} tokens"),
        Case(
            "state",
            "weights, gradient, masters and moments against fp32",
            state,
            "share",
            f"{mixed:g} B ÷ {full:g} B a parameter",
        ),
        Case("pure", "the same with everything in bf16", pure / full, "share", f"{pure:g} B ÷ {full:g} B a parameter"),
        Case(
            "total",
            f"both against fp32 at {tokens:,} tokens a pass",
            (mixed * n + tokens * a_token) / (mixed * n + tokens * 2 * a_token),
            "share",
            f"({mixed:g}·N + A) ÷ ({mixed:g}·N + 2·A)",
        ),
    )
    return Claim(
        "mixed_precision",
        "Mixed precision",
        ("Llama 3.1 8B, 4 sequences of 2,048 tokens, AdamW with fp32 masters; fp32 outside the tensor cores",),
        cases,
        (
            Figure("2× speed against fp32", "times", 1.7, 2.3, (*pick(cases, "speed"), *speeds)),
            Figure("50% memory", "share of fp32's", 0.45, 0.55, (*pick(cases, "activations", "state", "total"), *kept, *peaks)),
        ),
        f"Activations halve ({100 * a16 / a32:.0f}%), and so does everything in pure bf16. Two cores with bf16 products take "
        f"{', '.join(f'{s.value:.2g}×' for s in speeds)} as long in fp32.",
        f"Weights, masters, gradients and moments do not shrink: {100 * state:.0f}%. On a device with tensor cores the "
        "products are "
        f"{cases[1].value:.2g}× faster and the step {cases[0].value:.2g}×. Of a small process, interpreter and libraries "
        f"included, {', '.join(f'{100 * p.value:.0f}%' for p in peaks)} stay.",
        decided_by="twostroke calibrate (fp32 and bf16 rates), then twostroke plan train with --dtype fp32 and bf16",
        measured=(*speeds, *kept, *peaks),
    )


def low_precision_weights() -> Claim:
    base = weights_bytes(LLAMA_8B, "bf16")
    int8, int4 = weights_bytes(LLAMA_8B, "int8"), weights_bytes(LLAMA_8B, "int4")
    n = n_parameters(LLAMA_8B)
    seventy = weights_bytes(LLAMA_70B, "bf16")
    lost_8, lost_4 = losses("int8 (W8A8)", "int8 (W8A8)"), losses("int4, nearest, groups of 64", "int4, rounded to the nearest")
    lost_4 += losses("int4 alone, fitted, groups of 64", "int4 alone, fitted")
    lost_4 += losses("int4 as `quantize` makes it", "int4 as `quantize` makes it, some matrices in int8")
    held_8, held_4 = weights_saved(1, "int8"), weights_saved(2, "int4")
    cases = (
        Case("int8", "int8 against bf16", base / int8, "x", f"{base / GB:.3g} GB ÷ {int8 / GB:.3g} GB"),
        Case("int4", "int4 against bf16", base / int4, "x", f"{base / GB:.3g} GB ÷ {int4 / GB:.3g} GB"),
        Case("int8_70b", "70B: int8 against bf16", seventy / weights_bytes(LLAMA_70B, "int8"), "x", "the same"),
        Case("int4_70b", "70B: int4 against bf16", seventy / weights_bytes(LLAMA_70B, "int4"), "x", "the same"),
        Case("int8_bits", "bits a parameter of int8 as stored", 8 * int8 / n, "count", "8·bytes ÷ N"),
        Case("int4_bits", "bits a parameter of int4 as stored", 8 * int4 / n, "count", "8·bytes ÷ N"),
        Case(
            "tpot", "decode step of one request, bf16 over int8", serving().tpot_s / serving("int8").tpot_s, "x", "decode plans"
        ),
        Case(
            "tpot_busy",
            "decode step of 64 requests at 8,192 tokens, bf16 over int8",
            serving(batch=64, prompt=8192).tpot_s / serving("int8", 64, 8192).tpot_s,
            "x",
            "decode plans",
        ),
    )
    return Claim(
        "low_precision_weights",
        "int8 and int4 weights",
        ("Llama 3.1 8B; scales counted; embedding and head stay in bf16", "one H100 SXM, datasheet"),
        cases,
        (
            Figure("int8: 2× less memory", "within a tenth", *about(2), (*pick(cases, "int8", "int8_70b"), *held_8)),
            Figure("int4: 4× less memory", "within a tenth", *about(4), (*pick(cases, "int4", "int4_70b"), *held_4)),
            Figure("int8: < 1% perplexity loss", "share lost", -1, 0.01, lost_8),
            Figure("int4: 2–5% perplexity loss", "share lost", 0.02, 0.05, lost_4),
        ),
        f"Memory: {cases[0].value:.3g}× and {cases[1].value:.3g}× with scales and the layers that stay in 16 bits; the larger "
        "the model, the nearer to 2 and 4.",
        f"Speed follows only while weights are what is read: {cases[6].value:.2g}× for one request, {cases[7].value:.2g}× "
        "for 64 "
        "long ones, whose KV is read in full. int4 loses what the model and the rounding make of it: "
        f"{100 * min(c.value for c in lost_4):.2g} to {100 * max(c.value for c in lost_4):.2g}% here.",
        decided_by="twostroke quantize, then twostroke compare MODEL QUANTISED (bits per byte on held-out text, pass or fail)",
        measured=(
            *held_8,
            *held_4,
            *lost_8,
            *lost_4,
            *speed_ups(
                LARGE, "twostroke int8", "twostroke bf16", "decode_1_tok_per_s", "decode of one request, int8 over bf16"
            ),
            *speed_ups(
                LARGE, "twostroke int4-head8", "twostroke bf16", "decode_1_tok_per_s", "the same, int4 with its head in int8"
            ),
            *speed_ups(
                LARGE, "twostroke int8", "twostroke bf16", "decode_16_tok_per_s", "decode of 16 requests, int8 over bf16"
            ),
        ),
    )


def training_bandwidth() -> Claim:
    plan, hardware = training(), device(DEVICE)
    rate, passes = hardware.peak("bf16") * 0.4, plan.forward_s + plan.backward_s
    moved = plan.bytes_per_token * plan.shape.tokens_per_step
    update, tokens = plan.optimizer[0], plan.shape.tokens_per_step

    def needed(n: float) -> float:
        """Bytes a second that keep 40% of the arithmetic busy with ``n`` tokens a step: the update's bytes, and a token's."""
        seconds = n * plan.flops_per_token / rate
        return (update.bytes + n * (moved - update.bytes) / tokens) / seconds / 1e12

    cases = (
        Case(
            "large",
            "TB/s for 65,536 tokens a step at 40% MFU",
            needed(65536),
            "count",
            "(update + tokens · bytes) ÷ time of the FLOP",
        ),
        Case("middle", "the same, 8,192 tokens a step", needed(8192), "count", "the same"),
        Case("small", "the same, 1,024 tokens a step", needed(1024), "count", "the same"),
        Case("device", "TB/s of an H100", hardware.read_bandwidth[0].bytes_per_s / 1e12, "count", "datasheet"),
        Case(
            "update",
            "the update's share of a step of 8,192 tokens",
            plan.optimizer_s / plan.step_time_s,
            "share",
            f"{passes:.3g} s are passes",
        ),
    )
    return Claim(
        "training_bandwidth",
        "Memory bandwidth that training needs",
        ("Llama 3.1 8B on one H100's rates, AdamW with fp32 state; bytes as the plan counts them",),
        cases,
        (Figure("training needs > 3 TB/s", "TB/s", 3, math.inf, pick(cases, "large", "middle", "small")),),
        f"a device takes few tokens a step: at 1,024 the update alone asks for {cases[2].value:.2g} TB/s.",
        f"With 8,192 tokens {cases[1].value:.2g} TB/s keep up with 40% of the arithmetic, with 65,536 {cases[0].value:.2g}.",
        decided_by="twostroke plan train MODEL (bytes moved a token)",
    )
