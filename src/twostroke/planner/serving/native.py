"""Prefill and decode in the native engine: products at the library's measured rates, what surrounds them as whole steps of the
engine showed it."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from twostroke.core.matrices import Matrix, block_matrices, head_matrix, pair_flops, qkv_rows
from twostroke.core.named import largest, letter, named, smallest
from twostroke.core.policy import TOKEN_BUDGET
from twostroke.core.schemes import scheme_of
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.anchors import PREFILL_ANCHORS, SHALLOW, NativeAnchor, Ratios, family_of, has_steps, ratio_at
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.serving.memory import touched_pages
from twostroke.planner.serving.native_products import (
    MANY_ROWS,
    native_matrices,
    native_product_bytes,
    native_product_s,
    native_read_bytes,
    native_weights_bytes,
)
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.serving.strategy import Strategy
from twostroke.planner.work.component import Work, bound_of, merge, total_seconds
from twostroke.planner.work.flops import elementwise_elements, visible_pairs
from twostroke.planner.work.weights import kv_bytes_per_token


def product_work(product: Matrix, name: str, rows: int, working_set: float, hardware: Hardware) -> Work:
    """One weight matrix (or a gated pair) on ``rows`` rows: 2·rows·n·k FLOP, packed weights read once. The limits beside its
    seconds are the rate that many rows reach, and reading."""
    n_bytes = native_product_bytes(product, name)
    seconds = sum(native_product_s(name, rows, n, k, working_set, hardware) for n, k in native_matrices(product))
    source = f"{name.removeprefix('native_')} as calibrated over W₀, of which a share is reading; β at this working set"
    seconds = named(f"{product.name}_{rows}_rows_s", seconds, "s", source, "measured")
    flop, memory_s = 2.0 * rows * product.weights, n_bytes / hardware.bandwidth(working_set)
    arithmetic_s = flop / hardware.product_rate(name, MANY_ROWS, product.n, product.k)
    return Work(product.component, flop, n_bytes, arithmetic_s, memory_s, 0.0, seconds)


def elements_of(spec: ModelSpec, rows: int) -> dict[str, float]:
    """Numbers that norms, rotary turn, writing the cache, activation (and quantising rows for the products) read and write in
    one layer, by component."""
    counts = elementwise_elements(spec, backward=False)
    counts["attention"] += 2.0 * spec.n_kv_heads * spec.head_dim
    if spec.qk_norm:
        counts["attention"] += 2.0 * (spec.n_heads + spec.n_kv_heads) * spec.head_dim
    return {component: rows * count for component, count in counts.items()}


def attention_flop(spec: ModelSpec, start: int, count: int) -> float:
    """4·H·D for each pair of a query and a key that it sees, all layers, for tokens start + 1 … start + count."""
    windows = [spec.window_of_layer(layer) or start + count for layer in range(spec.n_layers)]
    pairs = sum(visible_pairs(start, count, window) for window in windows)
    return 1.0 * pair_flops(spec) * pairs


def chunks(shape: ServingShape) -> list[tuple[int, int]]:
    """(tokens before it, tokens) of each step that computes the prompt."""
    ends = [*range(shape.hit_tokens, shape.prompt_tokens, TOKEN_BUDGET), shape.prompt_tokens]
    return [(first, last - first) for first, last in itertools.pairwise(ends)]


def prefill_unknowns(spec: ModelSpec, shape: ServingShape) -> dict[str, float]:
    """What a prompt takes beside its products, in units whose price ``calibration.native_steps`` fits: steps, layers, elements
    and FLOP of attention."""
    parts = chunks(shape)
    return {
        "step": len(parts),
        "layer": len(parts) * spec.n_layers,
        "element": spec.n_layers * sum(sum(elements_of(spec, count).values()) for _, count in parts),
        "attention": sum(attention_flop(spec, start, count) for start, count in parts),
    }


def decode_unknowns(spec: ModelSpec, shape: ServingShape) -> dict[str, float]:
    """The same of a decode step, but for attention numbers of keys and values that are walked: a key head is read once for all
    its query heads. Each request adds a row, whose token is looked for and handed on."""
    return {
        "step": 1.0,
        "row": float(shape.batch),
        "layer": float(spec.n_layers),
        "element": spec.n_layers * sum(elements_of(spec, shape.batch).values()),
        "key": 2.0 * shape.batch * spec.n_layers * _keys(spec, shape) * spec.n_kv_heads * spec.head_dim,
    }


def _keys(spec: ModelSpec, shape: ServingShape) -> float:
    """Keys that a token at the mean context sees in a layer, the mean over layers."""
    windows = [spec.window_of_layer(i) or shape.context for i in range(spec.n_layers)]
    return sum(min(shape.context, window) for window in windows) / spec.n_layers


def price(hardware: Hardware, phase: str, scheme: str, unit: str) -> float:
    """Seconds of one of ``unit``, as fitted to the steps of ``scheme``'s family (0 where the fit found none)."""
    wanted = (phase, family_of(scheme))
    rows = hardware.native.prices if hardware.native is not None else ()
    found = next((prices for prices in rows if (prices.phase, prices.scheme) == wanted), None)
    return 0.0 if found is None else float(getattr(found, f"{unit}_s"))


ENGINE_BYTES = 18e6
"""What an engine keeps beside weights and cache: code imported with it, plans, tables (measured with the 135M shape)."""

FAULT_BYTES = 65536
"""Bytes of a mapped file that the system brings in when one of them is asked for: sixteen pages."""


def embedding_in_memory_bytes(spec: ModelSpec, n_tokens: float) -> float:
    """Of the embedding table, which stays in its file, what looking up ``n_tokens`` different tokens brings into memory:
    c·(1 − (1 − 1/c)^n) pieces of ``FAULT_BYTES``, c of them in the table. The file holds 16 bits an element."""
    pieces = max(1.0, 2.0 * spec.vocab_size * spec.d_model / FAULT_BYTES)
    return pieces * (1.0 - (1.0 - 1.0 / pieces) ** n_tokens) * FAULT_BYTES


def tokens_seen(shape: ServingShape) -> int:
    """Tokens that are looked up while the batch is answered."""
    return shape.prompts * shape.prompt_tokens + shape.batch * shape.output_tokens


def step_rows(shape: ServingShape) -> int:
    """Rows of the largest step."""
    tokens = shape.prompts * (shape.prompt_tokens - shape.hit_tokens)
    return largest(shape.batch, smallest(letter("budget", TOKEN_BUDGET), tokens))


def step_memory_bytes(spec: ModelSpec, shape: ServingShape) -> float:
    """Working memory of the largest step: the residual stream, its norm, packed heads, what attention mixes, the MLP's inside,
    in fp32 and in what products read (half as much), and the looked-up part of a tied embedding."""
    row = 6.0 * (2 * spec.d_model + qkv_rows(spec) + spec.n_heads * spec.head_dim + 2 * spec.d_ff)
    looked_up = 0.0
    if spec.tied_embeddings:
        looked_up = letter("looked_up", embedding_in_memory_bytes(spec, tokens_seen(shape)))
    return step_rows(shape) * row + looked_up


class Use(NamedTuple):
    """A weight matrix (or gated pair) held for the product ``name``, applied ``times`` over to ``rows`` rows."""

    product: Matrix
    name: str
    rows: int
    times: int


def _uses(spec: ModelSpec, shape: ServingShape, rows: int, last_rows: int) -> list[Use]:
    """Every matrix of a step; after the last layer's attention only ``last_rows`` rows go on, and through the head."""
    found, in_int8, how = [], set(shape.in_int8), scheme_of(shape.scheme)
    beside = how if how.beside is None else scheme_of(how.beside)
    for product in block_matrices(spec):
        n_whole = spec.n_layers if product.name == "qkv" or last_rows == rows else spec.n_layers - 1
        layers = ((rows, range(n_whole)), (last_rows, range(n_whole, spec.n_layers)))
        for n_rows, those in layers:
            n_int8 = sum(f"{layer}.{product.name}" in in_int8 for layer in those) if in_int8 else 0
            found.append(Use(product, how.native_product, n_rows, len(those) - n_int8))
            found.append(Use(product, beside.native_product, n_rows, n_int8))
    found.append(Use(head_matrix(spec), scheme_of(shape.head).native_product, last_rows, 1))
    return [use for use in found if use.rows and use.times]


def prefill_uses(spec: ModelSpec, shape: ServingShape) -> list[Use]:
    """The matrices of a prompt, in as many steps as the token budget makes of it; only its last token is sampled from."""
    parts, found = chunks(shape), Counter[Use]()
    for i, (_, count) in enumerate(parts):
        for use in _uses(spec, shape, count, 1 if i == len(parts) - 1 else 0):
            found[use] += 1
    return [use._replace(times=use.times * n) for use, n in found.items()]


def decode_uses(spec: ModelSpec, shape: ServingShape) -> list[Use]:
    """The matrices of a decode step."""
    return _uses(spec, shape, shape.batch, shape.batch)


def _product_works(uses: list[Use], working_set: float, hardware: Hardware) -> list[Work]:
    works = [product_work(use.product, use.name, use.rows, working_set, hardware).times(use.times) for use in uses]
    sampled = sum(use.rows for use in uses if use.product.name == "head")
    logits = logit_bytes(sampled, uses[-1].product.n)
    return [*works, Work.limited("head", 0.0, logits, 0.0, logits / hardware.bandwidth(logits))]


def logit_bytes(rows: int, vocab_size: int) -> float:
    """fp32, written and read."""
    return 8.0 * rows * vocab_size


def _around(
    units: dict[str, float],
    phase: str,
    spec: ModelSpec,
    shape: ServingShape,
    flop: float,
    kv_bytes: float,
    working_set: float,
    hardware: Hardware,
) -> list[Work]:
    """What a step takes beside its products, at the fitted prices."""

    def seconds(unit: str) -> float:
        if unit not in units:
            return 0.0
        return letter(f"n_{unit}", units[unit]) * letter(f"{unit}_s", price(hardware, phase, shape.scheme, unit))

    def around(what: str, seconds: float, source: str) -> float:
        return named(
            f"{what}_s", seconds, "s", f"{source}; fitted to whole steps of the engine, products taken off", "measured"
        )

    shares = elements_of(spec, 1)
    whole = letter("all_elements", sum(shares.values()))
    layers_s = around("layers", seconds("element") + seconds("layer"), "barriers, numbers that norms and activations pass")
    works = [
        Work.limited(component, 0.0, 0.0, 0.0, 0.0, layers_s * letter("elements", count) / whole)
        for component, count in shares.items()
    ]
    reading_s = kv_bytes / hardware.bandwidth(working_set)
    attention_s = seconds("attention") + seconds("key")
    walking_s = around(
        "walking", largest(attention_s, reading_s), "attention: visible pairs or keys at their price, or reading"
    )
    works.append(Work("attention", flop, kv_bytes, attention_s, reading_s, 0.0, walking_s))
    sampling_s = around("scheduling", seconds("step") + seconds("row"), "scheduling and sampling, rows handed on")
    works.append(Work.limited("head", 0.0, 0.0, 0.0, 0.0, sampling_s))
    return works


def prefill_products(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> list[Work]:
    """What a prompt's matrices take."""
    return _product_works(prefill_uses(spec, shape), native_read_bytes(spec, shape.scheme, shape.head, shape.in_int8), hardware)


def prefill_works(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> tuple[Work, ...]:
    """A prompt alone."""
    weights, token = (
        native_read_bytes(spec, shape.scheme, shape.head, shape.in_int8),
        kv_bytes_per_token(spec, shape.cache_dtype),
    )
    kv_bytes = sum(start + count for start, count in chunks(shape)) * token
    units = prefill_unknowns(spec, shape)
    around = _around(units, "prefill", spec, shape, units["attention"], kv_bytes, weights, hardware)
    return merge([*prefill_products(spec, shape, hardware), *around])


def decode_cache_bytes(spec: ModelSpec, shape: ServingShape) -> float:
    """Keys and values that one decode step of the batch attends to."""
    read = shape.batch * _keys(spec, shape) * kv_bytes_per_token(spec, shape.cache_dtype)
    return named("step_cache_bytes", read, "bytes", "keys and values that a decode step attends to")


def decode_products(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> list[Work]:
    """What a decode step's matrices take; between two uses of one it reads all weights and the cache."""
    return _product_works(decode_uses(spec, shape), decode_working_set(spec, shape), hardware)


def decode_working_set(spec: ModelSpec, shape: ServingShape) -> float:
    return native_read_bytes(spec, shape.scheme, shape.head, shape.in_int8) + decode_cache_bytes(spec, shape)


def decode_works(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> tuple[Work, ...]:
    """One decode step of the batch at the mean context of an answer."""
    kv_bytes = decode_cache_bytes(spec, shape)
    working_set = decode_working_set(spec, shape)
    flop = shape.batch * attention_flop(spec, shape.context, 1)
    around = _around(decode_unknowns(spec, shape), "decode", spec, shape, flop, kv_bytes, working_set, hardware)
    return merge([*decode_products(spec, shape, hardware), *around])


# -- held to whole steps --------------------------------------------------------------------------------------------------


def prefill_ratio(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> float:
    """Measured ÷ planned of calibration's prompts, at this width and so many tokens. Decode steps are not held so: where they
    are off, weights came from the last cache or did not, which is a matter of the model's size and not of its width (held to
    the wide anchor, the 135M shape's bf16 step came out a quarter short; as planned it is right within 5%)."""
    ratios = anchor_ratios(type(shape)(scheme=shape.scheme), hardware)
    return ratio_at(ratios, spec.d_model, max(1, shape.prompt_tokens - shape.hit_tokens))


@lru_cache(maxsize=64)
def anchor_ratios(like: ServingShape, hardware: Hardware) -> Ratios:
    """Of the prompts of the two deeper models by (width, tokens), under the scheme of ``like``."""
    found: dict[tuple[int, int], float] = {}
    for anchor in PREFILL_ANCHORS:
        measured = anchor.measured_s(hardware.native_rates, like.scheme) if has_steps(like.scheme) else None
        if measured is not None and (anchor.width, anchor.n_layers) != SHALLOW:
            planned = prefill_works(anchor.spec, anchor_shape(anchor, like), hardware)
            found[anchor.width, anchor.rows] = measured / total_seconds(planned)
    return found


def anchor_shape(anchor: NativeAnchor, like: ServingShape) -> ServingShape:
    """The anchor as a shape to plan."""
    if anchor.phase == "prefill":
        return replace(like, prompt_tokens=anchor.rows, output_tokens=1, batch=1)
    return replace(like, prompt_tokens=anchor.context, output_tokens=1, batch=anchor.rows)


# -- what a plan asks -----------------------------------------------------------------------------------------------------


class Native(Strategy):
    """The native engine."""

    def weights_bytes(self) -> float:
        shape = self.shape
        packed = native_weights_bytes(self.spec, shape.scheme, shape.head, shape.in_int8)
        multiplied = scheme_of(shape.scheme).multiplied("native")
        source = f"packed by the native library in {multiplied}, the head in {shape.head}; an embedding of its own"
        return named("weights_bytes", packed, "bytes", source)

    @property
    def stored_scheme(self) -> str:
        return scheme_of(self.shape.scheme).here.name

    def touched_cache_bytes(self, set_aside: float) -> float:
        touched = smallest(set_aside, touched_pages(self.spec, self.shape) * self.page_bytes())
        source = "the cache takes memory as its pages are touched; a server that runs on fills all of it"
        return named("kv_touched_bytes", touched, "bytes", source)

    def working_bytes(self) -> float:
        source = "working memory of the largest step; the parts of a tied embedding that are looked up in its file"
        return named("activations_bytes", step_memory_bytes(self.spec, self.shape), "bytes", source)

    def process_bytes(self) -> float:
        return super().process_bytes() + letter("engine", ENGINE_BYTES)

    def prefill(self) -> tuple[Work, ...]:
        ratio = prefill_ratio(self.spec, self.shape, self.hardware)
        return tuple(work.stretched(ratio) for work in prefill_works(self.spec, self.shape, self.hardware))

    def decode(self, batch: int | None = None) -> tuple[Work, ...]:
        shape = self.shape if batch is None else replace(self.shape, batch=batch)
        return decode_works(self.spec, shape, self.hardware)

    def step(self, batch: int) -> tuple[float, float, str]:
        works = self.decode(batch)
        return total_seconds(works), 0.0, bound_of(works)

    def added_s(self, prefill_s: float, step_s: float, batch: int | None = None) -> float:
        """A prompt is computed in steps of its own rows beside one row of each other request: its whole prefill."""
        return prefill_s

    def check_s(self) -> float | None:
        """The rows of γ + 1 times as many requests. Their cache is read once a row, so this is the slower side."""
        if self.shape.speculation is None:
            return None
        return total_seconds(self.decode((self.shape.speculation.draft_tokens + 1) * self.shape.batch))
