"""The types of GGUF tensors: how many numbers a block holds, in how many bytes, and what they are.

Block formats: ggml's ``ggml-common.h`` and ``dequantize_row_*`` in ``ggml-quants.c``. Each quantised number is a small whole
code times the scale of its group, less the group's minimum where the type has one, each step rounded to fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_PIECE_VALUES = 2**17
"""Numbers that are decoded at once: half a megabyte, which stays in a core's cache from step to step."""


class Groups(NamedTuple):
    """Blocks taken apart. ``codes``: (blocks, groups, numbers of a group), of eight bits; ``scales`` and ``minima``: fp32,
    (blocks, groups)."""

    codes: np.ndarray
    scales: np.ndarray
    minima: np.ndarray | None = None


@dataclass(frozen=True)
class TensorType:
    """One row of the table. ``dtype`` where numbers are stored plainly; ``take_apart`` where they are quantised, for a uint8
    array (blocks, ``n_bytes``)."""

    name: str
    number: int
    n_values: int
    n_bytes: int
    dtype: torch.dtype | None = None
    take_apart: Callable[[np.ndarray], Groups] | None = None


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """The fp16 number at byte ``at`` of each block, as fp32 (blocks, 1)."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """(…, n) bytes as (…, 2, n) codes: all low nibbles, then all high ones."""
    codes = np.empty((*packed.shape[:-1], 2, packed.shape[-1]), dtype=np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., 0, :])
    np.right_shift(packed, 4, out=codes[..., 1, :])
    return codes


def _pairs_of_bits(packed: np.ndarray) -> np.ndarray:
    """(…, n) bytes as (…, 4, n) codes of two bits, the lowest first."""
    codes = np.empty((*packed.shape[:-1], 4, packed.shape[-1]), dtype=np.uint8)
    for i in range(4):
        np.right_shift(packed, 2 * i, out=codes[..., i, :])
    codes &= 3
    return codes


def _bits(packed: np.ndarray, value: int) -> np.ndarray:
    """(blocks, n) bytes as (blocks, 8, n): ``value`` where bit i of a byte is set, else 0."""
    codes = np.empty((len(packed), 8, packed.shape[-1]), dtype=np.uint8)
    for i in range(8):
        np.right_shift(packed, i, out=codes[:, i])
    codes &= 1
    codes *= np.uint8(value)
    return codes


def _centred(codes: np.ndarray, zero: int) -> np.ndarray:
    """``codes`` less ``zero``, signed."""
    signed = codes.view(np.int8)
    signed -= np.int8(zero)
    return signed


def _one_group(codes: np.ndarray) -> np.ndarray:
    return codes.reshape(len(codes), 1, -1)


def _q8_0(blocks: np.ndarray) -> Groups:
    return Groups(_one_group(np.ascontiguousarray(blocks[:, 2:]).view(np.int8)), _halves(blocks, 0))


def _q4_0(blocks: np.ndarray) -> Groups:
    return Groups(_one_group(_centred(_nibbles(blocks[:, 2:]), 8)), _halves(blocks, 0))


def _q4_1(blocks: np.ndarray) -> Groups:
    return Groups(_one_group(_nibbles(blocks[:, 4:])), _halves(blocks, 0), -_halves(blocks, 2))


def _five_bits(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Codes of 32 numbers from 16 bytes of low nibbles and four bytes of fifth bits."""
    fifth = np.unpackbits(high, axis=1, bitorder="little")
    fifth <<= 4
    return _nibbles(low).reshape(-1, 32) | fifth


def _q5_0(blocks: np.ndarray) -> Groups:
    return Groups(_one_group(_centred(_five_bits(blocks[:, 6:], blocks[:, 2:6]), 16)), _halves(blocks, 0))


def _q5_1(blocks: np.ndarray) -> Groups:
    return Groups(_one_group(_five_bits(blocks[:, 8:], blocks[:, 4:8])), _halves(blocks, 0), -_halves(blocks, 2))


def _q2_k(blocks: np.ndarray) -> Groups:
    codes = _pairs_of_bits(blocks[:, 16:80].reshape(-1, 2, 32)).reshape(-1, 16, 16)
    scales = _halves(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32)
    return Groups(codes, scales, _halves(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32))


def _q3_k(blocks: np.ndarray) -> Groups:
    codes = _pairs_of_bits(blocks[:, 32:96].reshape(-1, 2, 32)).reshape(-1, 8, 32)
    codes |= _bits(blocks[:, :32], 4)
    low = _nibbles(blocks[:, 96:104]).reshape(-1, 16)
    high = _pairs_of_bits(blocks[:, 104:108]).reshape(-1, 16)
    scales = _centred(low | high << 4, 32).astype(np.float32)
    return Groups(_centred(codes, 4).reshape(-1, 16, 16), _halves(blocks, 108) * scales)


def _scales_and_minima(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of Q4_K and Q5_K: eight of each a block, of six bits, in the twelve bytes from the fourth on. The first four are the low
    bits of a byte; the others a nibble, and above it the high bits of those bytes."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((first & 63, (rest & 15) | ((first >> 2) & 48)), axis=1)
    minima = np.concatenate((second & 63, (rest >> 4) | ((second >> 2) & 48)), axis=1)
    return _halves(blocks, 0) * scales.astype(np.float32), _halves(blocks, 2) * minima.astype(np.float32)


def _q4_k(blocks: np.ndarray) -> Groups:
    return Groups(_nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32), *_scales_and_minima(blocks))


def _q5_k(blocks: np.ndarray) -> Groups:
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    codes |= _bits(blocks[:, 16:48], 16)
    return Groups(codes, *_scales_and_minima(blocks))


def _q6_k(blocks: np.ndarray) -> Groups:
    codes = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    codes |= _pairs_of_bits(blocks[:, 128:192].reshape(-1, 2, 32)) << 4
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return Groups(_centred(codes, 32).reshape(-1, 16, 16), _halves(blocks, 208) * scales)


_NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What IQ4's codes stand for (``kvalues_iq4nl``)."""
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice what E2M1's codes stand for (OCP Microscaling Formats 1.0, table 5)."""


def _looked_up(codes: np.ndarray, values: tuple[int, ...]) -> np.ndarray:
    """``values`` of ``codes``, which are below 16. ``bytes.translate`` is six times as fast as an indexed array."""
    table = bytes(value % 256 for value in values).ljust(256, b"\0")
    return np.frombuffer(codes.tobytes().translate(table), dtype=np.int8).reshape(codes.shape)


def _iq4_nl(blocks: np.ndarray) -> Groups:
    return Groups(_one_group(_looked_up(_nibbles(blocks[:, 2:]), _NON_LINEAR)), _halves(blocks, 0))


def _iq4_xs(blocks: np.ndarray) -> Groups:
    codes = _looked_up(_nibbles(blocks[:, 8:].reshape(-1, 8, 16)), _NON_LINEAR).reshape(-1, 8, 32)
    low = np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), axis=2).reshape(-1, 8)
    high = _pairs_of_bits(blocks[:, 2:4, None]).reshape(-1, 8)
    return Groups(codes, _halves(blocks, 0) * _centred(low | high << 4, 32).astype(np.float32))


def _mxfp4(blocks: np.ndarray) -> Groups:
    """The scale is a power of two, 2^(e − 127), here halved because the codes are doubled; the lowest two are subnormal."""
    exponents = blocks[:, :1].astype(np.uint32)
    bits = np.where(exponents < 2, np.uint32(0x00200000) << np.minimum(exponents, 1), (np.maximum(exponents, 1) - 1) << 23)
    return Groups(_one_group(_looked_up(_nibbles(blocks[:, 1:]), _FP4)), bits.astype(np.uint32).view(np.float32))


TYPES: dict[str, TensorType] = {
    t.name: t
    for t in (
        TensorType("F32", 0, 1, 4, torch.float32),
        TensorType("F16", 1, 1, 2, torch.float16),
        TensorType("BF16", 30, 1, 2, torch.bfloat16),
        TensorType("Q8_0", 8, 32, 34, None, _q8_0),
        TensorType("Q4_0", 2, 32, 18, None, _q4_0),
        TensorType("Q4_1", 3, 32, 20, None, _q4_1),
        TensorType("Q5_0", 6, 32, 22, None, _q5_0),
        TensorType("Q5_1", 7, 32, 24, None, _q5_1),
        TensorType("Q2_K", 10, 256, 84, None, _q2_k),
        TensorType("Q3_K", 11, 256, 110, None, _q3_k),
        TensorType("Q4_K", 12, 256, 144, None, _q4_k),
        TensorType("Q5_K", 13, 256, 176, None, _q5_k),
        TensorType("Q6_K", 14, 256, 210, None, _q6_k),
        TensorType("IQ4_NL", 20, 32, 18, None, _iq4_nl),
        TensorType("IQ4_XS", 23, 256, 136, None, _iq4_xs),
        TensorType("MXFP4", 39, 32, 17, None, _mxfp4),
    )
}
"""The types that are read, by name."""

OTHER_NAMES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip
"""Types that are only named, when a file is refused."""

_BY_NUMBER = {t.number: t for t in TYPES.values()}


def type_of(number: int) -> TensorType | str:
    """The type of a tensor table's ``number``, or the name of one that is not read."""
    return _BY_NUMBER.get(number) or OTHER_NAMES.get(number, f"type {number}")


def dequantise(kind: TensorType, raw: np.ndarray, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that ``raw``, bytes of whole blocks of the quantised ``kind``, stand for: exactly in fp32, or rounded to
    bf16.

    Works in pieces on as many threads as torch has: beside the result it takes three megabytes a thread.
    """
    assert kind.take_apart is not None
    blocks = raw.reshape(-1, kind.n_bytes)
    result = torch.empty(len(blocks) * kind.n_values, dtype=dtype)
    held = result.view(torch.int16).numpy().view(np.uint16) if dtype == torch.bfloat16 else result.numpy()
    n = _PIECE_VALUES // kind.n_values

    def decode(first: int) -> None:
        piece = blocks[first : first + n]
        with np.errstate(all="ignore"):  # a damaged scale; the importer refuses numbers that are not finite
            codes, scales, minima = kind.take_apart(piece)  # type: ignore[misc]
            target = held[first * kind.n_values : (first + len(piece)) * kind.n_values].reshape(codes.shape)
            values = target if dtype == torch.float32 else np.empty(codes.shape, dtype=np.float32)
            values[...] = codes
            values *= scales[..., None]
            if minima is not None:
                values -= minima[..., None]
        if dtype != torch.float32:
            target[...] = _rounded_to_bf16(values)

    starts = range(0, len(blocks), n)
    if len(starts) == 1 or torch.get_num_threads() == 1:
        for first in starts:
            decode(first)
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for _ in pool.map(decode, starts):
                pass
    return result


def _rounded_to_bf16(values: np.ndarray) -> np.ndarray:
    """The upper halves of ``values`` after rounding to nearest, ties to even; overwrites ``values``. An infinity or a NaN stays
    one of them."""
    bits = values.view(np.uint32)
    special = (bits & np.uint32(0x7F800000)) == 0x7F800000
    tie = (bits >> 16) & 1
    bits += np.uint32(0x7FFF)
    bits += tie
    if special.any():
        bits[special] = 0x7FC00000
    return bits.view(np.uint16).reshape(*bits.shape, 2)[..., 1]
