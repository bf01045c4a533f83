"""Products of the native library as profiles and plans name them: bytes of their packed weights, seconds at measured rates."""

from __future__ import annotations

from functools import lru_cache

from twostroke.core.dtypes import bytes_of
from twostroke.core.matrices import Matrix, block_kinds, has_norm_bias, head_matrix, head_norms
from twostroke.core.named import largest, letter, named
from twostroke.core.schemes import BLOCK_GROUP, NATIVE_FORMATS, NATIVE_PRODUCTS, Scheme, scheme_of
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import Hardware, RateTable
from twostroke.planner.work.params import count_parameters
from twostroke.planner.work.weights import experts_touched

MANY_ROWS = 512
"""From so many rows on, arithmetic binds whatever the cache: the rate of so many is that of all."""

ROUTER_PRODUCT = scheme_of("fp32").native_product

TILE = 16
INPUTS = 32


def packed_bytes(name: str, n: int, k: int) -> float:
    """Bytes of an (n, k) matrix packed for the product ``name``: outputs in tiles of 16, inputs (not fp32's) filled up to 32s,
    and what the format has beside an output and a group of its inputs.

    It is what the library's ``ts_packed_bytes`` says (tests/calibration/test_native_rates.py)."""
    format, group = NATIVE_PRODUCTS[name]
    packed = NATIVE_FORMATS[format]
    outputs = -(-n // TILE) * TILE
    inputs = k if format == "fp32" else -(-k // INPUTS) * INPUTS
    total = outputs * inputs * bytes_of(packed.element) + float(packed.output_bytes) * outputs
    if group:
        of_tile = (-(-k // group) * packed.group_bytes + -(-k // BLOCK_GROUP) * packed.inner_bytes) * TILE
        total += outputs / TILE * (-(-of_tile // 64) * 64)
    return total


def native_matrices(product: Matrix) -> tuple[tuple[int, int], ...]:
    """(n, k) of the matrices that the native step makes of ``product``: gate and up are two. Of experts, of one of them."""
    apart = product.parts if product.name.endswith("gate_up") else ((product.name, product.n),)
    return tuple((n, product.k) for _, n in apart)


def native_product_bytes(product: Matrix, name: str) -> float:
    """Packed bytes of ``product``'s matrices and their fp32 biases, of experts of one of them: what one step reads."""
    biases = product.n if product.bias else 0
    packed = sum(packed_bytes(name, n, k) for n, k in native_matrices(product)) + 4.0 * biases
    source = f"of a layer, packed by the library as {name.removeprefix('native_')}: in tiles of {TILE} outputs, {INPUTS} inputs"
    return named(f"{product.name}_bytes", packed, "bytes", source)


def native_name(product: Matrix, how: Scheme) -> str:
    """The library's product of ``product`` under the scheme ``how``: routers stay in fp32, and what rebuilds keys and values
    from a latent, absorbed head by head, plain."""
    if product.chooses:
        return ROUTER_PRODUCT
    return scheme_of(how.kept).native_product if product.name == "kv_b" else how.native_product


@lru_cache(maxsize=1024)
def _blocks_bytes(spec: ModelSpec, scheme: str) -> tuple[float, float]:
    """Packed bytes of all blocks' matrices: those that one row passes, and all."""
    how, read, held = scheme_of(scheme), 0.0, 0.0
    for matrices, layers in block_kinds(spec):
        for p in matrices:
            each = len(layers) * native_product_bytes(p, native_name(p, how))
            read, held = read + p.active * each, held + p.copies * each
    return read, held


@lru_cache(maxsize=1024)
def native_read_bytes(spec: ModelSpec, scheme: str, head: str, others: tuple[tuple[str, str], ...] = ()) -> float:
    """Bytes of weights that one step of the native engine reads: packed matrices, of experts those of one row, ``others``
    ("<layer>.<product>", scheme) in their own, biases and norms in fp32, and the head, which is held as ``head``.

    It is the engine's own ``Plan.step_bytes`` (tests/planner/test_native_plans.py)."""
    blocks = _blocks_bytes(spec, scheme)[0] + _others_more_bytes(spec, scheme, others)[0]
    parameters = count_parameters(spec)
    if spec.moe is not None and spec.moe.correction_bias:
        blocks += 4.0 * spec.moe.n_experts * sum(map(spec.has_experts, range(spec.n_layers)))
    norms = 4.0 * (parameters.norms + parameters.final_norm)
    if spec.norm == "layernorm" and not has_norm_bias(spec):
        norms *= 2  # the library's LayerNorm has a bias, here of zeros
    if spec.mla is not None:
        norms += 4.0 * spec.n_layers * ((spec.mla.q_lora_rank or 0) + spec.mla.kv_lora_rank)
    if spec.qk_norm:
        norms += 4.0 * spec.n_layers * sum(norm.n for norm in head_norms(spec))
    return blocks + norms + native_product_bytes(head_matrix(spec), scheme_of(head).native_product)


def _others_more_bytes(spec: ModelSpec, scheme: str, others: tuple[tuple[str, str], ...]) -> tuple[float, float]:
    """What ``others`` take more than they would in ``scheme``: of those that one row passes, and of all."""
    products = {p.name: p for matrices, _ in block_kinds(spec) for p in matrices}
    usual, read, held = scheme_of(scheme), 0.0, 0.0
    for name, how in others:
        product = products[name.partition(".")[2]]
        own, instead = (native_product_bytes(product, native_name(product, each)) for each in (scheme_of(how), usual))
        more = own - instead
        read, held = read + product.active * more, held + product.copies * more
    return read, held


@lru_cache(maxsize=1024)
def native_weights_bytes(spec: ModelSpec, scheme: str, head: str, others: tuple[tuple[str, str], ...] = ()) -> float:
    """Bytes of weights that the native engine holds: ``native_read_bytes``, the other experts, learned positions and an untied
    embedding, of which a step reads a few rows. A tied one stays in its file, beside the packed head."""
    parameters, (read, held) = count_parameters(spec), _blocks_bytes(spec, scheme)
    more_read, more_held = _others_more_bytes(spec, scheme, others)
    looked_up = parameters.positions + (0 if spec.tied_embeddings else parameters.embedding)
    rest = held + more_held - read - more_read + scheme_of(scheme).kept_bytes * looked_up
    return native_read_bytes(spec, scheme, head, others) + rest


def native_reuse_bytes(spec: ModelSpec, scheme: str, head: str, rows: int, others: tuple[tuple[str, str], ...] = ()) -> float:
    """Different bytes of weights that steps of ``rows`` rows read between two uses of one matrix: ``native_read_bytes`` of a
    dense model.

    A step touches an expert with probability p, so it is used again after g steps with p·(1 − p)^(g − 1), and another is
    touched meanwhile with 1 − (1 − p)^g: 1/(2 − p) of all experts on average, half of them where few are touched.
    """
    one_row = native_read_bytes(spec, scheme, head, others)
    if spec.moe is None or spec.moe.top_k == spec.moe.n_experts:
        return one_row
    n_experts, top_k = spec.moe.n_experts, spec.moe.top_k
    (read, held), (more_read, more_held) = _blocks_bytes(spec, scheme), _others_more_bytes(spec, scheme, others)
    each = (held + more_held - read - more_read) / (n_experts - top_k)  # of one expert in all layers
    touched = letter("touched", experts_touched(n_experts, top_k, rows) / n_experts)
    return one_row + each * (n_experts / (2.0 - touched) - top_k)


@lru_cache(maxsize=256)
def _passes(hardware: Hardware, name: str, one_thread: bool) -> tuple[RateTable, RateTable]:
    """Rates of the product ``name`` that were measured beside the profile's own points: (in cache, over W₀)."""
    rates = hardware.native_rates
    n_threads = 1 if one_thread else rates.n_threads
    found = [p for p in rates.passes if p.scheme == name and p.n_threads == n_threads]
    far = rates.working_set_bytes
    return RateTable(p for p in found if p.working_set_bytes < far), RateTable(p for p in found if p.working_set_bytes >= far)


def native_product_s(
    name: str, m: int, n: int, k: int, working_set_bytes: float, hardware: Hardware, one_thread: bool = False
) -> float:
    """Seconds of one packed matrix on ``m`` rows within a step that reads ``working_set_bytes``, on one thread or on all.

    Measured are t₀ in a pass over W₀ = ``NativeRates.working_set_bytes`` and t₁ in one over W₁, which the cache holds. Between
    and beyond them the time is t₁ + (t₀ − t₁)·``far_share``.
    Never less than reading its bytes. Where no pass in cache was measured, t₀ is bound by reading for the share
    s = bytes/t₀ ÷ β(W₀), at most 1, and the time is t₀·(1 + s²·(β(W₀)/β(W) − 1))."""
    near, far = _passes(hardware, name, one_thread)
    flop = 2.0 * m * n * k
    seconds = flop / (letter("R", far.at(m, n, k)) if far else hardware.product_rate(name, m, n, k))
    there = letter("β_0", hardware.bandwidth(hardware.native_rates.working_set_bytes))
    n_bytes, here = letter("bytes", packed_bytes(name, n, k)), hardware.bandwidth(working_set_bytes)
    if not near:
        share = letter("share", min(1.0, n_bytes / seconds / there))
        return largest(seconds * (1.0 + share**2 * (there / here - 1.0)), n_bytes / here)
    cached_s = flop / letter("R_1", near.at(m, n, k))
    share = letter("share", far_share(working_set_bytes, hardware))
    return largest(cached_s + share * largest(0.0, seconds - cached_s), n_bytes / here)


def far_share(working_set_bytes: float, hardware: Hardware) -> float:
    """How far reading at this working set is from cache to memory: (1/β(W) − 1/β(W₁)) ÷ (1/β(W₀) − 1/β(W₁)), where calibration
    measured passes in cache and over W₀; 1 elsewhere."""
    rates = hardware.native_rates
    near = min((p.working_set_bytes for p in rates.passes), default=rates.working_set_bytes)
    here, cached, there = (1.0 / hardware.bandwidth(size) for size in (working_set_bytes, near, rates.working_set_bytes))
    return max(0.0, (here - cached) / (there - cached)) if there > cached else 1.0
