"""The batch at which a component stops waiting for memory, by hand: FLOP per byte = the machine's balance.

A component that does F(n) FLOP on B(n) bytes for a batch of n is bound by arithmetic from the n on where F(n)/B(n) = π/β, with
π the FLOP/s and β the bytes/s it reaches. F and B are written down here from the model alone, and the plans' own step-by-step
counts are searched for the same point (``comparison.component_flips``): they check each other (tests/planner/test_flips.py).
Which limit holds depends on component, batch and context; the rule that "decode is bound by memory" is the first line's.

Decoding, one token each of n requests with c tokens before it, w bytes a weight:

    dense MLP   2·n·P                   over  P·w                              flips at n = w/2 · π/β
    experts     2·n·k·P_e               over  E·P_e·w·(1 − (1 − k/E)^n)        flips about E/k times later
    attention   n·(2·P + 4·H·D·c)       over  P·w + n·c·2·K·D·w_kv             later for larger c, beyond some c never (a
                                                                               latent, read once for all heads: earlier)
    head        2·n·V·E                 over  V·E·w                            as the dense MLP
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from twostroke.core.dtypes import bytes_of
from twostroke.core.matrices import LayerKind, head_matrix, layer_kinds
from twostroke.core.policy import LOSS_CHUNK_ROWS
from twostroke.core.spec import ModelSpec
from twostroke.planner.work.weights import experts_touched, head_bytes, matrix_bytes

LARGEST_BATCH = 2**20
"""Batches beyond this count as never."""

Amounts = Callable[[float], tuple[float, float]]
"""n → (FLOP, bytes)."""


@dataclass(frozen=True)
class Balance:
    """FLOP/s and bytes/s that a component reaches; ``flop_per_byte`` is where arithmetic and memory take equally long."""

    flop_per_s: float
    bytes_per_s: float

    @property
    def flop_per_byte(self) -> float:
        return self.flop_per_s / self.bytes_per_s


def flip_point(amounts: Amounts, flop_per_byte: float) -> float | None:
    """The real n at which FLOP ÷ bytes reaches ``flop_per_byte``, by bisection; None beyond ``LARGEST_BATCH``. FLOP grow in
    proportion to n or faster and bytes no faster than that, so there is one such point."""

    def above(n: float) -> bool:
        flops, moved = amounts(n)
        return flops >= flop_per_byte * moved

    if not above(float(LARGEST_BATCH)):
        return None
    low, high = 0.0, float(LARGEST_BATCH)
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if above(middle) else (middle, high)
    return high


def keys_read(kind: LayerKind, context: float) -> float:
    """Keys that a new token attends to in a layer with ``context`` tokens before it."""
    return min(context, kind.window or math.inf, kind.top_keys or math.inf)


def weights_of(spec: ModelSpec, kind: LayerKind, component: str, scheme: str, tokens: float) -> float:
    """Bytes of a component's matrices that ``tokens`` tokens need in one layer: of experts those that are touched."""
    read = 0.0
    for product in kind.matrices:
        if product.component == component:
            copies = experts_touched(product.copies, product.active, tokens) if product.copies > 1 else 1.0
            read += copies * matrix_bytes(spec, product, scheme)
    return read


def multiplied(kind: LayerKind, component: str) -> float:
    """Weights of a component that one token is multiplied with in one layer."""
    return float(sum(p.active * p.weights for p in kind.matrices if p.component == component))


def decoding(spec: ModelSpec, component: str, context: float, scheme: str, w_kv: float) -> Amounts:
    """FLOP and bytes of ``component`` for one token of each of n requests, with ``w_kv`` bytes a cached element."""

    def amounts(n: float) -> tuple[float, float]:
        if component == "head":
            return 2.0 * n * head_matrix(spec).weights, head_bytes(spec, scheme)
        flops = moved = 0.0
        for kind, count in layer_kinds(spec):
            one, read = 2.0 * multiplied(kind, component), weights_of(spec, kind, component, scheme, n)
            if component == "attention":
                keys = keys_read(kind, context)
                one += kind.decode_flops_per_key * keys
                read += n * keys * kind.kv_elements * w_kv
            flops, moved = flops + count * n * one, moved + count * read
        return flops, moved

    return amounts


def prefilling(spec: ModelSpec, component: str, scheme: str) -> Amounts:
    """FLOP and bytes of ``component`` for one prompt of n tokens: causal attention multiplies n²/2 pairs. The head answers for
    the last token alone, whatever n is."""

    def amounts(n: float) -> tuple[float, float]:
        if component == "head":
            return 2.0 * head_matrix(spec).weights, head_bytes(spec, scheme)
        flops = moved = 0.0
        for kind, count in layer_kinds(spec):
            one = 2.0 * multiplied(kind, component)
            if component == "attention":
                one += kind.flops_per_key * min(n / 2, keys_read(kind, n))
            flops += count * n * one
            moved += count * weights_of(spec, kind, component, scheme, n)
        return flops, moved

    return amounts


def training(spec: ModelSpec, component: str, sequence_length: int, dtype: str) -> Amounts:
    """FLOP and bytes of ``component`` for n sequences forward and backward: three products for one, each of which reads the
    weights and reads and writes a row of its operands for each token. The head's loss also reads and writes the logits, and
    adds its weights' gradient to an fp32 sum once a chunk."""
    forward, w = prefilling(spec, component, dtype), bytes_of(dtype)

    def amounts(n: float) -> tuple[float, float]:
        tokens = n * sequence_length
        if component == "head":
            head, chunks = head_matrix(spec), max(1.0, tokens / LOSS_CHUNK_ROWS)
            summed = chunks * head.weights * (2 * w + 8)
            products = 3.0 * w * (chunks * head.weights + tokens * (head.n + head.k))
            return 6.0 * tokens * head.weights, products + 2 * w * tokens * head.n + summed
        flops, _ = forward(float(sequence_length))
        _, weights = forward(tokens)
        rows = sum(count * operand_elements(kind, component) for kind, count in layer_kinds(spec))
        return 3 * n * flops, 3 * (weights + w * tokens * rows)

    return amounts


def operand_elements(kind: LayerKind, component: str) -> float:
    """Elements that the products of a component read and write for one token in one layer: k in and n out of each."""
    return float(sum(p.active * (p.n + p.k) for p in kind.matrices if p.component == component))


def last_context(spec: ModelSpec, flop_per_byte: float, scheme: str, w_kv: float) -> int | None:
    """The longest context at which decode's attention still becomes bound by arithmetic at some batch; beyond it each request's
    keys cost more to read than its products earn: 2·P + pair·c = balance·c·KV bytes. None where no context is long enough
    to prevent it, 0 where every one is."""

    def flips(context: int) -> bool:
        return flip_point(decoding(spec, "attention", float(context), scheme, w_kv), flop_per_byte) is not None

    if flips(spec.max_positions):
        return None
    low, high = 0, spec.max_positions
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if flips(middle) else (low, middle)
    return low
