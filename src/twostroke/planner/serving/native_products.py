"""Products of the native library as profiles and plans name them: bytes of their packed weights, seconds at measured rates."""

from __future__ import annotations

from functools import lru_cache

from twostroke.core.dtypes import bytes_of
from twostroke.core.matrices import Matrix, block_matrices, head_matrix, head_norms
from twostroke.core.named import largest, letter, named
from twostroke.core.schemes import NATIVE_FORMATS, NATIVE_PRODUCTS, scheme_of
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.work.params import count_parameters

MANY_ROWS = 512
"""From so many rows on, arithmetic binds whatever the cache: the rate of so many is that of all."""

TILE = 16
INPUTS = 32


def packed_bytes(name: str, n: int, k: int) -> float:
    """Bytes of an (n, k) matrix packed for the product ``name``: outputs in tiles of 16, inputs (not fp32's) filled up to 32s,
    an fp32 number an output in int8 and int4, and in int4 an fp16 scale and a byte of zero point a group and output.

    It is what the library's ``ts_packed_bytes`` says (tests/calibration/test_native_rates.py)."""
    format, group = NATIVE_PRODUCTS[name]
    packed = NATIVE_FORMATS[format]
    outputs = -(-n // TILE) * TILE
    inputs = k if format == "fp32" else -(-k // INPUTS) * INPUTS
    total = outputs * inputs * bytes_of(packed.element) + (4.0 * outputs if packed.coded else 0.0)
    if group:
        total += outputs / TILE * (-(-(-(-k // group) * 3 * TILE) // 64) * 64)
    return total


def native_matrices(product: Matrix) -> tuple[tuple[int, int], ...]:
    """(n, k) of the matrices that the native step makes of ``product``: gate and up are two."""
    apart = product.parts if product.name == "gate_up" else ((product.name, product.n),)
    return tuple((n, product.k) for _, n in apart)


def native_product_bytes(product: Matrix, name: str) -> float:
    """Packed bytes of ``product``'s matrices and their fp32 biases: what one step reads."""
    packed = sum(packed_bytes(name, n, k) for n, k in native_matrices(product)) + 4.0 * product.biases
    source = f"of a layer, packed by the library as {name.removeprefix('native_')}: in tiles of {TILE} outputs, {INPUTS} inputs"
    return named(f"{product.name}_bytes", packed, "bytes", source)


@lru_cache(maxsize=1024)
def native_read_bytes(spec: ModelSpec, scheme: str, head: str, in_int8: tuple[str, ...] = ()) -> float:
    """Bytes of weights that one step of the native engine reads: packed matrices, those ``in_int8`` ("<layer>.<product>") so,
    biases and norms in fp32, and the head, which is held as ``head``.

    It is the engine's own ``Plan.step_bytes`` (tests/planner/test_native_plans.py)."""
    how = scheme_of(scheme)
    each = {p.name: native_product_bytes(p, how.native_product) for p in block_matrices(spec)}
    blocks = spec.n_layers * sum(each.values()) + in_int8_more_bytes(spec, scheme, in_int8)
    parameters = count_parameters(spec)
    norms = 4.0 * (parameters.norms + parameters.final_norm)
    if spec.qk_norm:
        norms += 4.0 * spec.n_layers * sum(norm.n for norm in head_norms(spec))
    return blocks + norms + native_product_bytes(head_matrix(spec), scheme_of(head).native_product)


def in_int8_more_bytes(spec: ModelSpec, scheme: str, in_int8: tuple[str, ...]) -> float:
    """What the matrices ``in_int8`` take more than they would in ``scheme``."""
    how = scheme_of(scheme)
    beside = how if how.beside is None else scheme_of(how.beside)
    more = {
        p.name: native_product_bytes(p, beside.native_product) - native_product_bytes(p, how.native_product)
        for p in block_matrices(spec)
    }
    return sum(more[name.partition(".")[2]] for name in in_int8)


@lru_cache(maxsize=1024)
def native_weights_bytes(spec: ModelSpec, scheme: str, head: str, in_int8: tuple[str, ...] = ()) -> float:
    """Bytes of weights that the native engine holds: ``native_read_bytes``, learned positions and an untied embedding, of which
    a step reads a few rows. A tied one stays in its file, beside the packed head."""
    parameters = count_parameters(spec)
    looked_up = parameters.positions + (0 if spec.tied_embeddings else parameters.embedding)
    return native_read_bytes(spec, scheme, head, in_int8) + scheme_of(scheme).kept_bytes * looked_up


def native_product_s(name: str, m: int, n: int, k: int, working_set_bytes: float, hardware: Hardware) -> float:
    """Seconds of one packed matrix on ``m`` rows within a step that reads ``working_set_bytes``.

    t = 2·m·n·k / rate as measured in a pass over W₀ = ``NativeRates.working_set_bytes``; the share s = bytes/t ÷ read rate at
    W₀ (at most 1) of it was bound by reading: t·(1 + s²·(read rate at W₀ ÷ read rate at this working set − 1)). Where reading
    binds (s = 1) the time follows the bandwidth, where arithmetic does (s ≈ 0) it stays; never less than reading its bytes."""
    seconds = 2.0 * m * n * k / hardware.product_rate(name, m, n, k)
    there = letter("β_0", hardware.bandwidth(hardware.native_rates.working_set_bytes))
    n_bytes, here = letter("bytes", packed_bytes(name, n, k)), hardware.bandwidth(working_set_bytes)
    share = letter("share", min(1.0, n_bytes / seconds / there))
    return largest(seconds * (1.0 + share**2 * (there / here - 1.0)), n_bytes / here)
