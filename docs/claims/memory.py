"""Claims on what each phase holds."""

from __future__ import annotations

import math
from functools import lru_cache

from claims.claim import Case, Claim, Figure, about, pick
from claims.runs import activations_over_model, adapters
from claims.subjects import (
    GB,
    LLAMA_3B,
    LLAMA_8B,
    LLAMA_70B,
    block_activations_bytes,
    device,
    n_parameters,
    state_bytes_per_parameter,
)
from twostroke.core.policy import LOSS_CHUNK_ROWS
from twostroke.core.spec import ModelSpec
from twostroke.planner.serving.strategy import GPU_MEMORY_UTILISATION
from twostroke.planner.training.plan import plan_training
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.work.weights import kv_bytes_per_token, weights_bytes

PURE, MIXED = state_bytes_per_parameter("pure_bf16"), state_bytes_per_parameter("bf16")

LARGE = 80e9
"""Bytes of the devices that the claims on 70B speak of, as they are sold."""

LORA_SHARE = 0.005
"""Trained share of a model under LoRA of rank 16 on all matrices, about."""


def training_against_inference() -> Claim:
    n = n_parameters(LLAMA_8B)
    model = 2.0 * n
    tokens, length = 8192, 8192
    activations = tokens * block_activations_bytes(LLAMA_8B, length)
    recomputed = tokens * block_activations_bytes(LLAMA_8B, length, "full")
    full, pure = MIXED * n, PURE * n
    lora = model + LORA_SHARE * n * MIXED + recomputed
    kv = kv_bytes_per_token(LLAMA_8B)
    one, busy = model + 8192 * kv, model + 64 * 8192 * kv
    n70 = n_parameters(LLAMA_70B)
    large = (MIXED * n70 + 32768 * block_activations_bytes(LLAMA_70B, length)) / GB
    served = weights_bytes(LLAMA_70B, "bf16") / GB
    four = weights_bytes(LLAMA_70B, "int4") / GB
    cases = (
        Case(
            "mixed",
            "AdamW, mixed precision, 8,192 tokens a pass, nothing recomputed",
            (full + activations) / model,
            "x",
            f"({MIXED:g}·N + {activations / GB:.3g} GB of activations) ÷ 2·N",
        ),
        Case(
            "mixed_recomputed",
            "the same, every layer recomputed",
            (full + recomputed) / model,
            "x",
            f"({MIXED:g}·N + {recomputed / GB:.3g} GB) ÷ 2·N",
        ),
        Case(
            "pure",
            "everything in bf16, Adam's moments too, every layer recomputed",
            (pure + recomputed) / model,
            "x",
            f"({PURE:g}·N + activations) ÷ 2·N",
        ),
        Case(
            "lora",
            f"LoRA with {100 * LORA_SHARE:g}% of the parameters, every layer recomputed",
            lora / model,
            "x",
            f"(2·N + {MIXED:g}·{LORA_SHARE:g}·N + activations) ÷ 2·N",
        ),
        Case("one_request", "inference, one request of 8,192 tokens", one / model, "x", f"(2·N + 8,192·{kv:,.0f} bytes) ÷ 2·N"),
        Case("few", "inference, 4 requests of 8,192 tokens", (model + 4 * 8192 * kv) / model, "x", "the same with 4"),
        Case("some", "inference, 16 requests of 8,192 tokens", (model + 16 * 8192 * kv) / model, "x", "the same with 16"),
        Case("busy", "inference, 64 requests of 8,192 tokens", busy / model, "x", f"(2·N + 64·8,192·{kv:,.0f} bytes) ÷ 2·N"),
        Case(
            "ratio_70b_bf16",
            f"70B: training ({MIXED:g}·N, 32,768 tokens a pass) against bf16 weights",
            large / served,
            "x",
            f"{large / 1000:.3g} TB ÷ {served:.3g} GB",
        ),
        Case(
            "ratio_70b_int4", "70B: the same against int4 weights", large / four, "x", f"{large / 1000:.3g} TB ÷ {four:.3g} GB"
        ),
    )
    return Claim(
        "training_against_inference",
        "Memory of training against inference",
        ("Llama 3.1 8B where nothing else is said", "a model's size is 2·N bytes", "flash attention, chunked loss"),
        cases,
        (
            Figure(
                "training 3–10× the model's size",
                "times the size",
                3,
                10,
                pick(cases, "mixed", "mixed_recomputed", "pure", "lora"),
            ),
            Figure("inference about 2×", "times the size", 1.5, 2.5, pick(cases, "one_request", "few", "some", "busy")),
            Figure("training 4–8×", "times the size", 4, 8, pick(cases, "mixed", "mixed_recomputed", "pure", "lora")),
            Figure("inference 1.2×", "times the size", 1.1, 1.3, pick(cases, "one_request", "few", "some", "busy")),
            Figure("training 3–4×", "times the size", 3, 4, pick(cases, "mixed", "mixed_recomputed", "pure", "lora")),
            Figure("training 5–10×", "times the size", 5, 10, pick(cases, "mixed", "mixed_recomputed", "pure", "lora")),
            Figure("training 8–10×", "times the size", 8, 10, pick(cases, "mixed", "mixed_recomputed", "pure", "lora")),
            Figure(
                "20–60×: 2 TB against 140 or 35 GB",
                "training over weights that are served",
                20,
                60,
                pick(cases, "ratio_70b_bf16", "ratio_70b_int4"),
            ),
        ),
        f"8–10× is AdamW in mixed precision ({cases[1].value:.2g}× with recomputation, {cases[0].value:.2g}× without); 4–5× "
        f"everything in bf16; {large / four:.0f}× compares training in bf16 with serving in int4. 1.2× is some "
        "four long requests, "
        "2× sixteen.",
        f"No ratio holds for all: LoRA needs {cases[3].value:.2g}×, and a server that is full holds {busy / model:.2g}× its "
        f"weights. KV equals the weights at {model / kv:,.0f} cached tokens.",
    )


def three_billion_training() -> Claim:
    n = 3e9
    real = n_parameters(LLAMA_3B)
    a_token = block_activations_bytes(LLAMA_3B, 2048)
    recomputed = block_activations_bytes(LLAMA_3B, 2048, "full")
    logits = 6.0 * LLAMA_3B.vocab_size
    cases = (
        Case("weights", "weights in bf16", 2 * n / GB, "GB", "2·3·10⁹"),
        Case("gradients", "gradients in bf16", 2 * n / GB, "GB", "2·3·10⁹"),
        Case("optimizer", "two Adam moments in bf16", 4 * n / GB, "GB", "2·2·3·10⁹"),
        Case("optimizer_mixed", "fp32 master weights and two fp32 moments", 12 * n / GB, "GB", "(4 + 8)·3·10⁹"),
        Case("state", "without activations", PURE * n / GB, "GB", f"{PURE:g}·3·10⁹"),
        Case("sum", "with the 8 GB of activations that are stated", PURE * n / GB + 8, "GB", "24 + 8"),
        Case(
            "mixed",
            "AdamW with fp32 master weights and fp32 moments, without activations",
            MIXED * n / GB,
            "GB",
            f"{MIXED:g}·3·10⁹",
        ),
        Case(
            "activation_tokens",
            "tokens a pass whose activations are 8 GB, nothing recomputed",
            8e9 / a_token,
            "tokens",
            f"8·10⁹ ÷ {a_token:,.0f} bytes a token (Llama 3.2 3B, 28 layers, flash attention)",
        ),
        Case(
            "recomputed_tokens",
            "the same, every layer recomputed",
            8e9 / recomputed,
            "tokens",
            f"8·10⁹ ÷ {recomputed:,.0f} bytes a token",
        ),
        Case(
            "logits_tokens",
            "tokens whose whole logits alone are 8 GB",
            8e9 / logits,
            "tokens",
            f"8·10⁹ ÷ (2 + 4)·V bytes; a chunked loss holds {LOSS_CHUNK_ROWS:,} at once",
        ),
        Case("real", "Llama 3.2 3B has more than 3·10⁹ parameters", real * PURE / GB + 8, "GB", f"{PURE:g}·{real:,} + 8 GB"),
    )
    return Claim(
        "three_billion_training",
        "Training 3B parameters in bf16",
        ("3·10⁹ parameters; weights, gradients and both moments of Adam in 16 bits, no fp32 master weights",),
        cases,
        (
            Figure("weights 6 GB", "within a tenth", *about(6), pick(cases, "weights")),
            Figure("gradients 6 GB", "within a tenth", *about(6), pick(cases, "gradients")),
            Figure("optimizer 12 GB", "within a tenth", *about(12), pick(cases, "optimizer", "optimizer_mixed")),
            Figure("at least 32 GB", "in all, with 8 GB of activations", 32, math.inf, pick(cases, "sum", "real")),
        ),
        f"The sum is {PURE:g} bytes a parameter and is right for pure bf16, where small updates are rounded away. 8 GB of "
        "activations are "
        f"{8e9 / a_token:,.0f} tokens a pass, or {8e9 / recomputed:,.0f} with every layer recomputed.",
        "With fp32 master weights and fp32 moments, which is what mixed precision means, the state alone is "
        f"{MIXED * n / GB:.3g} GB; it is "
        "no lower bound either: 8-bit moments, LoRA and recomputation all go below 32 GB.",
    )


def three_billion_inference() -> Claim:
    kv = kv_bytes_per_token(LLAMA_3B)
    weights, four = weights_bytes(LLAMA_3B, "bf16"), weights_bytes(LLAMA_3B, "int4")
    context = LLAMA_3B.max_positions
    cases = (
        Case("weights", "weights in bf16", weights / GB, "GB", f"2·{n_parameters(LLAMA_3B):,}"),
        Case("int4", "weights in int4 with their scales", four / GB, "GB", "scheme int4 of the planner"),
        Case("kv_tokens", "cached tokens in 2 GB of KV", 2e9 / kv, "tokens", f"2·10⁹ ÷ {kv:,.0f} bytes a token"),
        Case("least", "int4 and 2 GB of KV", (four + 2e9) / GB, "GB", "sum"),
        Case("most", "bf16 and 2 GB of KV", (weights + 2e9) / GB, "GB", "sum"),
        Case("full_context", f"KV of one request of {context:,} tokens", context * kv / GB, "GB", f"{context:,}·{kv:,.0f}"),
    )
    return Claim(
        "three_billion_inference",
        "Serving 3B parameters",
        ("Llama 3.2 3B; KV cache in bf16, 8 key heads of 24",),
        cases,
        (
            Figure("weights 6 GB", "within a tenth", *about(6), pick(cases, "weights")),
            Figure("int4 2 GB", "within a tenth", *about(2), pick(cases, "int4")),
            Figure("KV 2 GB", "at most", 0, 2, pick(cases, "full_context")),
            Figure("4–8 GB", "weights and 2 GB of KV", 4, 8, pick(cases, "least", "most")),
        ),
        f"up to {cases[2].value:,.0f} cached tokens, all requests together.",
        f"One request of the model's whole context takes {cases[5].value:.3g} GB of KV, "
        f"{context * kv / weights:.2g}× the weights.",
    )


def seventy_billion_inference() -> Claim:
    bf16, four = weights_bytes(LLAMA_70B, "bf16"), weights_bytes(LLAMA_70B, "int4")
    kv = kv_bytes_per_token(LLAMA_70B)
    usable = GPU_MEMORY_UTILISATION
    consumer, two = device("rtx-5090").memory_bytes, 2 * LARGE * usable
    left = max(0.0, 2 * LARGE - bf16)
    cases = (
        Case("bf16", "weights in 16 bits", bf16 / GB, "GB", f"2·{n_parameters(LLAMA_70B):,}"),
        Case(
            "half_byte",
            "half a byte a parameter",
            n_parameters(LLAMA_70B) / 2 / GB,
            "GB",
            "0.5·N: no scales, nothing kept in bf16",
        ),
        Case(
            "int4",
            "int4 as it is stored: groups of 128 with scales, embedding and head in bf16",
            four / GB,
            "GB",
            "scheme int4 of the planner",
        ),
        Case("consumer", "memory of the largest consumer GPU here (RTX 5090)", consumer / GB, "GB", "datasheet"),
        Case(
            "consumer_bits",
            "bits a weight that would fill it, with no KV cache",
            8 * consumer / n_parameters(LLAMA_70B),
            "count",
            "8·memory ÷ N",
        ),
        Case(
            "two_80",
            f"two 80 GB GPUs, {100 * usable:g}% usable, less the weights",
            (two - bf16) / GB,
            "GB",
            f"{usable:g}·160 − 2·N",
        ),
        Case(
            "two_80_tokens",
            "cached tokens in what two leave when all of it may be used",
            left / kv,
            "tokens",
            f"(160 GB − 2·N) ÷ {kv:,.0f}",
        ),
        Case(
            "four_80_tokens",
            f"cached tokens with four of them, {100 * usable:g}% usable",
            (usable * 4 * LARGE - bf16) / kv,
            "tokens",
            f"({usable:g}·320 GB − 2·N) ÷ {kv:,.0f}",
        ),
    )
    return Claim(
        "seventy_billion_inference",
        "Serving 70B parameters",
        ("Llama 3.1 70B; KV cache in bf16",),
        cases,
        (
            Figure("140 GB in fp16", "within a tenth", *about(140), pick(cases, "bf16")),
            Figure("35 GB in int4", "within a tenth", *about(35), pick(cases, "half_byte", "int4")),
            Figure("on a single consumer GPU?", "weights within its memory", 0, consumer / GB, pick(cases, "int4")),
            Figure("two 80 GB GPUs", "weights within their memory", 0, 2 * LARGE / GB, pick(cases, "bf16")),
        ),
        f"140 GB is right ({cases[0].value:.3g} GB), and 35 GB is half a byte a parameter. Two 80 GB GPUs do hold the weights.",
        f"No consumer GPU holds int4: {cases[2].value:.3g} GB with scales, {consumer / GB:.3g} GB there, before any KV. "
        "Two 80 GB "
        f"GPUs have {cases[5].value:.2g} GB left for KV at {100 * usable:g}% use, "
        f"{cases[5].value * 1e9 / kv:,.0f} tokens of all requests "
        "together: enough to start, not to serve.",
    )


def seventy_billion_training() -> Claim:
    n = 70e9
    real = n_parameters(LLAMA_70B)
    a_token = block_activations_bytes(LLAMA_70B, 8192)
    cases = (
        Case("twelve", "bf16 weights and gradients, fp32 moments, no master weights", 12 * n / GB, "GB", "(2 + 2 + 8)·70·10⁹"),
        Case("sixteen", "with fp32 master weights", 16 * n / GB, "GB", "(2 + 2 + 4 + 8)·70·10⁹"),
        Case("twenty", "with an fp32 gradient beside the bf16 one", 20 * n / GB, "GB", "(2 + 2 + 4 + 4 + 8)·70·10⁹"),
        Case(
            "planner",
            "what the planner counts for several devices",
            MIXED,
            "B/parameter",
            "working + master + gradient + 2 moments",
        ),
        Case(
            "devices",
            f"80 GB devices that hold {MIXED:g} bytes a parameter, without activations",
            math.ceil(MIXED * real / (GPU_MEMORY_UTILISATION * LARGE)),
            "count",
            f"⌈{MIXED:g}·{real:,} ÷ ({GPU_MEMORY_UTILISATION:g}·80 GB)⌉",
        ),
        Case(
            "activations",
            "activations of 32,768 tokens, nothing recomputed",
            32768 * a_token / GB,
            "GB",
            f"32,768·{a_token:,.0f} bytes (80 layers, flash attention)",
        ),
        Case(
            "two_terabytes",
            f"tokens in flight at which {MIXED:g} bytes a parameter and activations make 2 TB",
            (2e12 - MIXED * real) / a_token,
            "tokens",
            f"(2 TB − {MIXED:g}·N) ÷ {a_token:,.0f}",
        ),
    )
    return Claim(
        "seventy_billion_training",
        "Training 70B parameters",
        ("70·10⁹ parameters, AdamW, summed over all devices",),
        cases,
        (
            Figure("140 + 140 + 560 = 840 GB", "within a tenth", *about(840), pick(cases, "twelve", "sixteen")),
            Figure("12 bytes a parameter", "what the planner counts", *about(12), pick(cases, "planner")),
            Figure("16 to 20 bytes a parameter", "what the planner counts", 16, 20, pick(cases, "planner")),
            Figure("1–2 TB", "weights, gradients and optimizer", 1000, 2000, pick(cases, "sixteen", "twenty")),
        ),
        "840 GB is bf16 weights without fp32 masters. 16 bytes is mixed precision (1.12 TB), 20 adds gradients summed in fp32 "
        f"(1.4 TB); with activations up to {cases[6].value:,.0f} tokens in flight it stays within 2 TB.",
        "12 bytes leaves out the master weights that make small updates count; only with stochastic rounding or a fp32 sum "
        "elsewhere does training in it converge as well. More tokens in flight than that break 2 TB.",
    )


def twice_the_billions() -> Claim:
    kv8, kv70 = kv_bytes_per_token(LLAMA_8B), kv_bytes_per_token(LLAMA_70B)
    w8, w70 = weights_bytes(LLAMA_8B, "bf16"), weights_bytes(LLAMA_70B, "bf16")
    cases = (
        Case("weights_8b", "8B weights", w8 / GB, "GB", f"2·{n_parameters(LLAMA_8B):,}"),
        Case("weights_70b", "70B weights", w70 / GB, "GB", f"2·{n_parameters(LLAMA_70B):,}"),
        Case("tenth_8b", "8B: cached tokens that add a tenth", 0.1 * w8 / kv8, "tokens", f"0.1·2·N ÷ {kv8:,.0f}"),
        Case("tenth_70b", "70B: cached tokens that add a tenth", 0.1 * w70 / kv70, "tokens", f"0.1·2·N ÷ {kv70:,.0f}"),
        Case("double_8b", "8B: cached tokens that double it", w8 / kv8, "tokens", f"2·N ÷ {kv8:,.0f}"),
        Case("double_70b", "70B: cached tokens that double it", w70 / kv70, "tokens", f"2·N ÷ {kv70:,.0f}"),
        Case("per_billion_8b", "8B: GB of weights per billion parameters", w8 / n_parameters(LLAMA_8B), "count", "weights ÷ N"),
        Case("per_billion_70b", "70B: the same", w70 / n_parameters(LLAMA_70B), "count", "weights ÷ N"),
        Case(
            "busy_8b",
            "8B: the same with 8 requests of 8,192 tokens",
            (w8 + 65536 * kv8) / n_parameters(LLAMA_8B),
            "count",
            "(weights + 65,536·KV) ÷ N",
        ),
        Case("busy_70b", "70B: the same", (w70 + 65536 * kv70) / n_parameters(LLAMA_70B), "count", "the same"),
    )
    return Claim(
        "twice_the_billions",
        "Inference memory from parameters",
        ("Llama 3.1 8B and 70B; KV cache in bf16; all requests' cached tokens together",),
        cases,
        (
            Figure(
                "2 × billions of parameters GB in fp16",
                "weights, within a tenth",
                1.8,
                2.2,
                pick(cases, "per_billion_8b", "per_billion_70b"),
            ),
            Figure(
                "that is inference memory",
                "with 8 requests of 8,192 tokens, within a tenth",
                1.8,
                2.2,
                pick(cases, "busy_8b", "busy_70b"),
            ),
        ),
        f"for weights exactly, and within a tenth up to {cases[2].value:,.0f} cached tokens (8B) or {cases[3].value:,.0f} "
        "(70B).",
        f"KV has doubled it at {cases[4].value:,.0f} and {cases[5].value:,.0f} cached tokens: "
        f"{cases[4].value / 8192:.0f} and {cases[5].value / 8192:.0f} requests of 8,192 tokens.",
    )


def no_gradient_graph() -> Claim:
    model = weights_bytes(LLAMA_8B, "bf16")
    a_token = block_activations_bytes(LLAMA_8B, 2048)
    boundary = model / a_token
    cases = (
        Case("per_token", "kept for backward, a token", a_token / 1e3, "kB", "32 layers, bf16, flash attention"),
        Case(
            "half_at",
            "tokens in one forward at which the graph is half of all memory",
            boundary,
            "tokens",
            f"2·N ÷ {a_token:,.0f}",
        ),
        Case("one_request", "share saved at 512 tokens", 512 * a_token / (model + 512 * a_token), "share", "A ÷ (2·N + A)"),
        Case("some", "share saved at 4,096 tokens", 4096 * a_token / (model + 4096 * a_token), "share", "A ÷ (2·N + A)"),
        Case("batch", "share saved at 16,384 tokens", 16384 * a_token / (model + 16384 * a_token), "share", "A ÷ (2·N + A)"),
        Case(
            "decode",
            "share saved in a decode step of 32 requests",
            32 * a_token / (model + 32 * a_token),
            "share",
            "A ÷ (2·N + A)",
        ),
    )
    return Claim(
        "no_gradient_graph",
        "Inference without a gradient graph",
        ("Llama 3.1 8B in bf16; what is saved are the activations that backward would read; gradients are not counted",),
        cases,
        (Figure("saves about 50% of memory", "share", 0.4, 0.6, pick(cases, "one_request", "some", "batch", "decode")),),
        f"at {boundary:,.0f} tokens in one forward.",
        f"It grows with tokens, not with the model: {100 * cases[2].value:.2g}% at 512 tokens, {100 * cases[4].value:.2g}% at "
        f"16,384, {100 * cases[5].value:.2g}% in a decode step of 32 requests.",
    )


def kept_activations() -> Claim:
    model = weights_bytes(LLAMA_8B, "bf16")
    a_token = block_activations_bytes(LLAMA_8B, 2048)
    recomputed = block_activations_bytes(LLAMA_8B, 2048, "full")

    def times(tokens: int, each: float = a_token) -> float:
        return 1 + tokens * each / model

    measured = activations_over_model()
    cases = (
        Case("short", "8B: weights and what backward needs of 2,048 tokens, over weights", times(2048), "x", "(2·N + A) ÷ 2·N"),
        Case("middle", "the same of 4,096", times(4096), "x", "the same"),
        Case("long", "the same of 32,768", times(32768), "x", "the same"),
        Case("recomputed", "the same of 32,768, every layer recomputed", times(32768, recomputed), "x", "the same"),
        Case("double", "tokens at which it doubles", model / a_token, "tokens", f"2·N ÷ {a_token:,.0f}"),
        Case("triple", "tokens at which it triples", 2 * model / a_token, "tokens", "twice that"),
    )
    return Claim(
        "kept_activations",
        "Keeping activations for backward",
        ("a forward pass alone holds weights and one layer's activations; Llama 3.1 8B in bf16, flash attention",),
        cases,
        (
            Figure(
                "keeping activations doubles or triples memory against a forward pass alone", "times", 1.8, 3.3,
                (*pick(cases, "short", "middle", "long", "recomputed"), *measured),
            ),
        ),
        f"a pass of 8B has {cases[4].value:,.0f} to {cases[5].value:,.0f} tokens.",
        "It is tokens over parameters: small models on many tokens keep "
        f"{min(c.value for c in measured):.2g} to {max(c.value for c in measured):.2g} times their weights; recomputing "
        "every layer "
        f"leaves {cases[3].value:.2g}× at 32,768 tokens.",
        measured=measured,
    )  # fmt: skip


METHODS = {"full": "full fine-tuning, AdamW", "lora": "LoRA of rank 16", "qlora": "QLoRA of rank 16"}


@lru_cache(maxsize=8)
def fine_tuning_bytes(spec: ModelSpec, method: str) -> float:
    """Peak of a pass of 2,048 tokens on one device, every layer recomputed, as it is planned."""
    shape = TrainingShape(batch_size=1, sequence_length=2048, method=method, checkpointing="full")
    return plan_training(spec, shape, device("h100-sxm")).peak_memory_bytes


def card_to_fine_tune() -> Claim:
    card, large = 16 * 2**30 / GB, 80 * 2**30 / GB
    found: list[Case] = []
    for size, spec in (("3b", LLAMA_3B), ("8b", LLAMA_8B)):
        served = weights_bytes(spec, "int8") + 2e9
        label = size.upper()
        found.append(Case(f"served_{size}", f"{label} served in int8 with 2 GB of KV", served / GB, "GB", "scheme int8 + 2 GB"))
        found += [
            Case(f"{method}_{size}", f"{label}: {words}", fine_tuning_bytes(spec, method) / GB, "GB", "training plan, peak")
            for method, words in METHODS.items()
        ]
    cases = tuple(found)
    by_name = {case.name: case.value for case in cases}
    return Claim(
        "card_to_fine_tune",
        "A card to serve and a card to fine-tune",
        ("2,048 tokens a pass, every layer recomputed; adapters on all matrices",),
        cases,
        (
            Figure("served on a 16 GB card", "GB, at most 16 GiB", 0, card, pick(cases, "served_3b", "served_8b")),
            Figure(
                "it may need an 80 GB card to fine-tune", "GB, more than 16 and at most 80 GiB", card, large,
                pick(cases, "full_3b", "full_8b", "lora_3b", "lora_8b", "qlora_3b", "qlora_8b"),
            ),
        ),
        f"all of 3B is trained: {by_name['full_3b']:.3g} GB.",
        f"Full fine-tuning of 8B takes {by_name['full_8b']:.3g} GB, more than 80; LoRA takes "
        f"{by_name['lora_8b']:.2g} and QLoRA "
        f"{by_name['qlora_8b']:.2g} GB, the card that serves it.",
        decided_by="twostroke plan train MODEL --method full, lora and qlora",
    )  # fmt: skip


def adapters_save() -> Claim:
    measured = adapters()
    full = fine_tuning_bytes(LLAMA_8B, "full")
    lora, qlora = (fine_tuning_bytes(LLAMA_8B, method) / full for method in ("lora", "qlora"))
    cases = (
        Case("lora", "8B: memory of LoRA over full fine-tuning", lora, "share", "peak ÷ peak of the training plans"),
        Case("qlora", "8B: memory of QLoRA over full", qlora, "share", "the same"),
        Case("flops", "FLOP of a token, adapters over full", 4 / 6, "share", "no gradient of frozen weights: (2 + 2)·N ÷ 6·N"),
    )
    return Claim(
        "adapters_save",
        "What LoRA and QLoRA save",
        ("Llama 3.1 8B, 2,048 tokens a pass, every layer recomputed",),
        cases,
        (
            Figure("LoRA and QLoRA cut the cost of fine-tuning: memory", "at least a tenth less", 0, 0.9,
                   (*pick(cases, "lora", "qlora"), *(case for case in measured if "memory" in case.what))),
            Figure("LoRA and QLoRA cut the cost of fine-tuning: time and money", "at least a tenth less", 0, 0.9,
                   (*pick(cases, "flops"), *(case for case in measured if "time" in case.what))),
        ),
        f"memory is what is short: {lora:.0%} and {qlora:.0%} of full fine-tuning for 8B.",
        "Time and the money that goes with it fall by a third of the arithmetic at most: every token still passes forward and "
        "backward through all layers.",
        decided_by="twostroke train with method full, lora and qlora",
        measured=measured,
    )  # fmt: skip
