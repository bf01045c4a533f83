"""Prefill and decode in our own engine on a calibrated machine: from the rates of parts, and held to whole measured steps."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from twostroke.core.dtypes import bytes_of
from twostroke.core.matrices import Matrix, block_matrices, head_matrix, pair_flops, qkv_rows
from twostroke.core.named import letter
from twostroke.core.policy import PREFILL_QUERIES, TOKEN_BUDGET
from twostroke.core.schemes import torch_product
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import ASSUMED_ATTENTION_EFFICIENCY, Hardware
from twostroke.planner.hardware.interpolation import Ratios, interpolate_log, ratio_at
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.training.anchors import (
    DECODE_BATCHES,
    DECODE_CONTEXT,
    DECODE_LAYERS,
    PREFILL_TOKENS,
    WIDTHS,
    anchor_spec,
)
from twostroke.planner.work.component import Work, merge, total_seconds
from twostroke.planner.work.flops import attention_flops_per_token, elementwise_elements
from twostroke.planner.work.weights import kv_bytes_per_token, weights_bytes

OPERATORS = {"norms": 2, "attention": 13, "mlp": 4}
"""Torch operators of one layer of the interpreted plan, by component: two norms (sums are part of products); two products,
widening, turning, copying back, gathering and storing heads, and attention's own; two products, activation and its product."""

HEAD_NORM_OPERATORS = 3
"""Operators that QK-norm adds."""

STEP_OPERATORS = 36
"""Operators of a step outside the layers: tokens, positions, slots, pages and masks turned into tensors, rotary tables,
embedding, final norm, head, and drawing tokens."""


def layer_start_s(spec: ModelSpec, shape: ServingShape, n_requests: int, hardware: Hardware) -> float:
    """Seconds that one layer takes beyond its arithmetic and its bytes, which is what starting its operators costs inside a
    step: ``DecodeStarts.layer_s`` (measured), or operators times the launch cost. QK-norm adds its three."""
    n_operators = sum(OPERATORS.values())
    measured = hardware.torch_runner.starts(n_requests, shape.scheme)
    whole = n_operators * hardware.op_launch_s if measured is None else measured.layer_s
    return whole * (1 + HEAD_NORM_OPERATORS / n_operators) if spec.qk_norm else whole


def layer_starts(spec: ModelSpec, shape: ServingShape, n_requests: int, hardware: Hardware) -> list[Work]:
    """``layer_start_s`` shared out to the components by their operators."""
    seconds, n_operators = layer_start_s(spec, shape, n_requests, hardware), sum(OPERATORS.values())
    return [
        Work.limited(component, 0.0, 0.0, 0.0, 0.0, seconds * count / n_operators) for component, count in OPERATORS.items()
    ]


def product_work(product: Matrix, rows: int, scheme: str, w: float, working_set: float, hardware: Hardware) -> Work:
    """One weight matrix applied to ``rows`` rows: 2·rows·n·k FLOP; weights read once, activations read and written."""
    if not hardware.has_scheme(scheme):
        scheme = scheme.removeprefix("packed_")
    moved = product.weights * bytes_of(torch_product(scheme)[0]) + rows * (product.n + product.k) * w
    flops = 2.0 * rows * product.weights
    arithmetic_s = flops / hardware.product_rate(scheme, rows, product.n, product.k)
    return Work.limited(product.component, flops, moved, arithmetic_s, moved / hardware.bandwidth(working_set))


def layer_products(
    spec: ModelSpec, shape: ServingShape, rows: int, working_set: float, hardware: Hardware, names: tuple[str, ...] = ()
) -> list[Work]:
    """The products of one layer on ``rows`` rows; of ``names`` only, where given."""
    w = bytes_of(shape.compute_dtype)
    return [
        product_work(p, rows, shape.product_scheme(rows * p.weights, hardware), w, working_set, hardware)
        for p in block_matrices(spec)
        if not names or p.name in names
    ]


def layer_operations(spec: ModelSpec, shape: ServingShape, rows: int, hardware: Hardware) -> list[Work]:
    """Norms, rotary turn, cache write and activation of one layer on ``rows`` tokens: the elements of the fused count at
    the measured rate, or their bytes at the bandwidth."""
    w = bytes_of(shape.compute_dtype)
    rate = hardware.torch_runner.layer_operations_element_per_s.get(shape.compute_dtype)
    flops = elementwise_flops(spec, backward=False)
    works = []
    for component, count in elementwise_elements(spec, backward=False).items():
        elements = float(rows) * count
        if component == "attention":
            elements += rows * 2.0 * spec.n_kv_heads * spec.head_dim  # the cache's write
            if spec.qk_norm:
                elements += rows * 4.0 * (spec.n_heads + spec.n_kv_heads) * spec.head_dim
        moved = elements * w
        seconds = elements / rate if rate else moved / hardware.bandwidth(moved)
        works.append(Work.limited(component, rows * flops[component], moved, 0.0, seconds))
    return works


def prefill_attention(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> Work:
    """softmax(QKᵀ)V of one layer over one prompt: time from the keys that blocks of queries walk, FLOP from the causal part."""
    tokens, w = shape.prompt_tokens - shape.hit_tokens, bytes_of(shape.compute_dtype)
    pair = pair_flops(spec)
    cached = float(pair * tokens * shape.hit_tokens)
    walked = pair * tokens * keys_of_prefill(tokens) + cached
    causal = attention_flops_per_token(spec, tokens) * tokens / spec.n_layers + cached
    moved = tokens * w * (qkv_rows(spec) + spec.n_heads * spec.head_dim)
    rate = prefill_attention_rate(hardware, shape.compute_dtype, tokens)
    return Work.limited("attention", causal, moved, walked / rate, moved / hardware.bandwidth(moved))


def decode_attention(
    spec: ModelSpec, shape: ServingShape, layer: int, context: int, working_set: float, hardware: Hardware
) -> Work:
    """One token of each request against its cache in one layer: 4·H·D·keys FLOP and 2·K·D·keys·w bytes a request.

    Measured: requests · KV heads · keys · D/64 over ``DecodeStarts.key_per_s``; bandwidth at the working set bounds it.
    """
    keys = min(context, spec.window_of_layer(layer) or context)
    flops = float(shape.batch * pair_flops(spec) * keys)
    pairs = float(shape.batch) * spec.n_kv_heads * keys * spec.head_dim / 64
    moved = shape.batch * 2.0 * spec.n_kv_heads * spec.head_dim * keys * bytes_of(shape.cache_dtype)
    memory_s = moved / hardware.bandwidth(working_set)
    measured = hardware.torch_runner.starts(shape.batch, shape.scheme)
    if measured is None:
        arithmetic_s = flops / hardware.product_rate(shape.compute_dtype, 1, spec.head_dim, max(keys, 1))
        return Work.limited("attention", flops, moved, arithmetic_s, memory_s)
    return Work.limited("attention", flops, moved, 0.0, max(pairs / measured.key_per_s, memory_s))


def around_layers(
    spec: ModelSpec, shape: ServingShape, rows: int, sampled: int, working_set: float, hardware: Hardware
) -> list[Work]:
    """A step outside its layers: embedding, final norm, the head of ``sampled`` rows, and as the head's start what scheduling,
    preparing the batch and drawing tokens take, ``DecodeStarts.step_s`` or operators times the launch cost."""
    dtype = shape.compute_dtype
    w = bytes_of(dtype)
    embedding = 2.0 * rows * spec.d_model * w
    copying_s = embedding / hardware.bandwidth(embedding)
    measured = hardware.torch_runner.starts(sampled, shape.scheme)
    start_s = STEP_OPERATORS * hardware.op_launch_s if measured is None else measured.step_s
    logits = 8.0 * sampled * spec.vocab_size  # fp32, written and read
    return [
        Work.limited("embedding", 0.0, embedding, 0.0, copying_s),
        Work.limited("norms", 0.0, embedding, 0.0, copying_s),
        # The head keeps the activations' type under every scheme, and only rows that are sampled pass through it.
        product_work(head_matrix(spec), sampled, f"packed_{dtype}", w, working_set, hardware),
        Work.limited("head", 0.0, logits, 0.0, logits / hardware.bandwidth(logits), start_s),
    ]


def prefill_ratio(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> float:
    """Measured ÷ planned of the prompts that calibration computed (``planner.anchors``), at this width and so many tokens."""
    ratios = _anchor_ratios(type(shape)(scheme=shape.scheme, output_tokens=1), hardware)[0]
    return ratio_at(ratios, spec.d_model, max(1, shape.prompt_tokens - shape.hit_tokens))


def decode_ratio(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> float:
    """The same of decode steps, at this width and this many requests."""
    ratios = _anchor_ratios(type(shape)(scheme=shape.scheme, output_tokens=1), hardware)[1]
    return ratio_at(ratios, spec.d_model, shape.batch)


@lru_cache(maxsize=64)
def _anchor_ratios(like: ServingShape, hardware: Hardware) -> tuple[Ratios, Ratios]:
    """Of prompts by (width, tokens) and of decode steps by (width, requests), under the scheme of ``like``: every plan of a
    machine asks for the same few."""
    prompts, steps = {}, {}
    for width in WIDTHS:
        anchor = anchor_spec(width, DECODE_LAYERS[width])
        for n_tokens in PREFILL_TOKENS:
            measured = hardware.torch_runner.step_s("prefill", width, like.scheme, n_tokens)
            if measured is not None:
                works = engine_prefill_works(anchor, replace(like, prompt_tokens=n_tokens), hardware)
                prompts[width, n_tokens] = measured / total_seconds(works)
        for batch in DECODE_BATCHES:
            measured = hardware.torch_runner.step_s("decode", width, like.scheme, batch)
            if measured is not None:
                works = engine_decode_works(anchor, replace(like, batch=batch, prompt_tokens=DECODE_CONTEXT), hardware)
                steps[width, batch] = measured / total_seconds(works)
    return prompts, steps


def engine_prefill_works(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> tuple[Work, ...]:
    """A prompt in our own engine from the rates of its parts, in as many steps as the token budget makes of it. After the last
    layer's attention only the last token goes on."""
    rows = shape.prompt_tokens - shape.hit_tokens
    working_set = weights_bytes(spec, shape.scheme)
    n_steps = -(-rows // TOKEN_BUDGET)
    whole = [*layer_products(spec, shape, rows, working_set, hardware), *layer_operations(spec, shape, rows, hardware)]
    works = [work.times(spec.n_layers - 1) for work in whole]
    works += layer_products(spec, shape, rows, working_set, hardware, ("qkv",))
    works += layer_products(spec, shape, 1, working_set, hardware, ("out", "gate_up", "up", "down"))
    works += layer_operations(spec, shape, 1, hardware)
    works.append(prefill_attention(spec, shape, hardware).times(spec.n_layers))
    works += [work.times(n_steps * spec.n_layers) for work in layer_starts(spec, shape, 1, hardware)]
    return merge([*works, *around_layers(spec, shape, rows, 1, working_set, hardware)])


def engine_decode_works(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> tuple[Work, ...]:
    """A decode step in our own engine from the rates of its parts."""
    rows = shape.batch
    context = shape.context
    cache = shape.batch * context * kv_bytes_per_token(spec, shape.cache_dtype)
    working_set = weights_bytes(spec, shape.scheme) + cache
    layer = [*layer_products(spec, shape, rows, working_set, hardware), *layer_operations(spec, shape, rows, hardware)]
    layer += layer_starts(spec, shape, rows, hardware)
    works = [work.times(spec.n_layers) for work in layer]
    works += [decode_attention(spec, shape, i, context, working_set, hardware) for i in range(spec.n_layers)]
    return merge([*works, *around_layers(spec, shape, rows, rows, working_set, hardware)])


def keys_of_prefill(n_tokens: int) -> float:
    """Keys an average query of a prompt is multiplied with, in blocks of ``PREFILL_QUERIES``: Σ queries·last key / T."""
    ends = [min(start + PREFILL_QUERIES, n_tokens) for start in range(0, n_tokens, PREFILL_QUERIES)]
    starts = range(0, n_tokens, PREFILL_QUERIES)
    return letter("keys", sum((end - start) * end for start, end in zip(starts, ends, strict=True)) / n_tokens)


def prefill_attention_rate(hardware: Hardware, dtype: str, n_tokens: int) -> float:
    """FLOP/s of a prompt's attention in the engine, counted over the keys walked: measured at a few lengths and interpolated in
    log T; datasheets get an assumed share of peak, for the causal half of the keys."""
    measured = hardware.torch_runner.prompt_attention
    points = [(float(point.tokens), point.flop_per_s) for point in measured if point.dtype == dtype]
    if points:
        return letter("rate", interpolate_log(points, n_tokens))
    return ASSUMED_ATTENTION_EFFICIENCY * hardware.peak(dtype) * keys_of_prefill(n_tokens) * 2 / n_tokens


def elementwise_flops(spec: ModelSpec, backward: bool) -> dict[str, float]:
    """FLOP per token and block of the same work, by component, for its arithmetic intensity: 4 per element normed and 1 per
    residual sum (10E), 3 per element turned, 5 per activation (an exponential counted as 1); backward twice that. Model FLOP
    (``flops.py``) exclude all of it."""
    heads = (spec.n_heads + spec.n_kv_heads) * spec.head_dim
    times = 2 if backward else 1
    return {
        "norms": times * 10 * spec.d_model,
        "attention": times * 3 * heads if spec.positions == "rope" else 0.0,
        "mlp": times * 5 * spec.d_ff,
    }
