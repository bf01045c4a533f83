"""The types of GGUF tensors: how many numbers a block holds, in how many bytes, and what they are.

Block formats: ggml's ``ggml-common.h`` and ``dequantize_row_*`` in ``ggml-quants.c``. Each quantised number is a small whole
code times the scale of its group, less the group's minimum where the type has one, each step rounded to fp32.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from twostroke.core.schemes import BLOCK, BLOCK_GROUP, SCHEMES
from twostroke.kernels.codes import CODE_TYPES, Codes
from twostroke.model.published.gguf_blocks import BLOCKS
from twostroke.model.published.storage import four_bit_codes

_PIECE_VALUES = 2**19
"""Numbers that are decoded at once: two megabytes, which stay in the last cache from step to step. In fewer, starting each step
takes longer than computing it."""


class Groups(NamedTuple):
    """Blocks taken apart. ``codes``: (blocks, groups, numbers of a group), of eight bits; ``scales`` and ``minima``: fp32,
    (blocks, groups)."""

    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None


@dataclass(frozen=True)
class TensorType:
    """One row of the table. ``dtype`` where numbers are stored plainly; ``take_apart`` where they are quantised, for a uint8
    tensor (blocks, ``n_bytes``)."""

    name: str
    number: int
    n_values: int
    n_bytes: int
    dtype: torch.dtype | None = None
    take_apart: Callable[[Tensor], Groups] | None = None


def _halves(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at byte ``at`` of each block, as fp32 (blocks, 1)."""
    return blocks.view(torch.float16)[:, at // 2 : at // 2 + 1].float()


def _fields(packed: Tensor, width: int) -> Tensor:
    """(…, n) bytes as (…, 8 / width, n) codes of ``width`` bits, the lowest first. Eight bytes are taken as one number where
    they can be: steps over whole numbers in a row are several times as fast as over short runs of bytes."""
    whole = packed.clone(memory_format=torch.contiguous_format)
    n_bytes = 1 if whole.numel() % 8 else 8
    numbers = whole.view(-1) if n_bytes == 1 else whole.view(-1).view(torch.int64)
    mask = int.from_bytes(bytes([2**width - 1]) * n_bytes, "little")
    codes = (numbers >> shift & mask for shift in range(0, 8, width))
    return torch.stack([code.view(torch.uint8).view(packed.shape) for code in codes], dim=-2)


def _nibbles(packed: Tensor) -> Tensor:
    """(…, n) bytes as (…, 2, n) codes: all low nibbles, then all high ones."""
    return _fields(packed, 4)


def _pairs_of_bits(packed: Tensor) -> Tensor:
    """(…, n) bytes as (…, 4, n) codes of two bits, the lowest first."""
    return _fields(packed, 2)


def _bits(packed: Tensor) -> Tensor:
    """(…, n) bytes as (…, 8, n) bits, the lowest first."""
    return _fields(packed, 1)


def _centred(codes: Tensor, zero: int) -> Tensor:
    """``codes`` less ``zero``, signed."""
    return codes.view(torch.int8).sub_(zero)


def _one_group(codes: Tensor) -> Tensor:
    return codes.reshape(len(codes), 1, -1)


def _q8_0(blocks: Tensor) -> Groups:
    return Groups(_one_group(blocks[:, 2:].view(torch.int8)), _halves(blocks, 0))


def _q4_0(blocks: Tensor) -> Groups:
    return Groups(_one_group(_centred(_nibbles(blocks[:, 2:]), 8)), _halves(blocks, 0))


def _q4_1(blocks: Tensor) -> Groups:
    return Groups(_one_group(_nibbles(blocks[:, 4:])), _halves(blocks, 0), -_halves(blocks, 2))


_FIFTH_BITS = torch.tensor([sum((byte >> i & 1) << 8 * i + 4 for i in range(8)) for byte in range(256)])
"""The bits of a byte, the lowest first, each as the fifth bit of a byte of its own."""


def _five_bits(low: Tensor, high: Tensor) -> Tensor:
    """Codes of 32 numbers from 16 bytes of low nibbles and four bytes of fifth bits."""
    return _nibbles(low).view(-1, 32).bitwise_or_(_FIFTH_BITS[high.long()].view(torch.uint8))


def _q5_0(blocks: Tensor) -> Groups:
    return Groups(_one_group(_centred(_five_bits(blocks[:, 6:], blocks[:, 2:6]), 16)), _halves(blocks, 0))


def _q5_1(blocks: Tensor) -> Groups:
    return Groups(_one_group(_five_bits(blocks[:, 8:], blocks[:, 4:8])), _halves(blocks, 0), -_halves(blocks, 2))


def _q2_k(blocks: Tensor) -> Groups:
    codes = _pairs_of_bits(blocks[:, 16:80].unflatten(1, (2, 32))).view(-1, 16, 16)
    scales = _halves(blocks, 80) * (blocks[:, :16] & 15).float()
    return Groups(codes, scales, _halves(blocks, 82) * (blocks[:, :16] >> 4).float())


def _q3_k(blocks: Tensor) -> Groups:
    codes = _pairs_of_bits(blocks[:, 32:96].unflatten(1, (2, 32))).view(-1, 8, 32)
    codes |= _bits(blocks[:, :32]) << 2
    low = _nibbles(blocks[:, 96:104]).view(-1, 16)
    high = _pairs_of_bits(blocks[:, 104:108]).view(-1, 16)
    scales = _centred(low | high << 4, 32).float()
    return Groups(_centred(codes, 4).view(-1, 16, 16), _halves(blocks, 108) * scales)


def _counts(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of Q4_K and Q5_K: the (8, blocks) scales and minima in their units, of six bits, in the twelve bytes from the fourth on.
    The first four are the low bits of a byte; the others a nibble, and above it the high bits of those bytes. A step takes one
    byte of all blocks."""
    first, second, rest = blocks[:, 4:16].T.contiguous().view(3, 4, -1)
    scales = torch.cat((first & 63, (rest & 15) | ((first >> 2) & 48)))
    minima = torch.cat((second & 63, (rest >> 4) | ((second >> 2) & 48)))
    return scales, minima


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    scales, minima = _counts(blocks)
    return (_halves(blocks, 0).T * scales.float()).T, (_halves(blocks, 2).T * minima.float()).T


def _q4_k(blocks: Tensor) -> Groups:
    return Groups(_nibbles(blocks[:, 16:].unflatten(1, (4, 32))).view(-1, 8, 32), *_scales_and_minima(blocks))


def _q5_k(blocks: Tensor) -> Groups:
    codes = _nibbles(blocks[:, 48:].unflatten(1, (4, 32))).view(-1, 8, 32)
    codes |= _bits(blocks[:, 16:48]) << 4
    return Groups(codes, *_scales_and_minima(blocks))


def _q6_k(blocks: Tensor) -> Groups:
    codes = _nibbles(blocks[:, :128].unflatten(1, (2, 64))).view(-1, 2, 4, 32)
    codes |= _pairs_of_bits(blocks[:, 128:192].unflatten(1, (2, 32))) << 4
    scales = blocks[:, 192:208].view(torch.int8).float()
    return Groups(_centred(codes, 32).view(-1, 16, 16), _halves(blocks, 208) * scales)


_NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What IQ4's codes stand for (``kvalues_iq4nl``)."""
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice what E2M1's codes stand for (OCP Microscaling Formats 1.0, table 5)."""


def _looked_up(codes: Tensor, values: tuple[int, ...]) -> Tensor:
    """``values`` of ``codes``, which are below 16. ``bytes.translate`` reads no wide indices, as an indexed tensor does."""
    table = bytes(value % 256 for value in values).ljust(256, b"\0")
    return torch.frombuffer(bytearray(codes.numpy().tobytes().translate(table)), dtype=torch.int8).view(codes.shape)


def _iq4_nl(blocks: Tensor) -> Groups:
    return Groups(_one_group(_looked_up(_nibbles(blocks[:, 2:]), _NON_LINEAR)), _halves(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Groups:
    codes = _looked_up(_nibbles(blocks[:, 8:].unflatten(1, (8, 16))), _NON_LINEAR).view(-1, 8, 32)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=2).view(-1, 8)
    high = _pairs_of_bits(blocks[:, 2:4, None]).view(-1, 8)
    return Groups(codes, _halves(blocks, 0) * _centred(low | high << 4, 32).float())


def _mxfp4(blocks: Tensor) -> Groups:
    """The scale is a power of two, 2^(e − 127), here halved because the codes are doubled; the lowest two are subnormal."""
    exponents = blocks[:, :1].int()
    bits = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), (exponents - 1).clamp(min=0) << 23)
    return Groups(_one_group(_looked_up(_nibbles(blocks[:, 1:]), _FP4)), bits.int().view(torch.float32))


def _quantised(name: str, number: int, take_apart: Callable[[Tensor], Groups]) -> TensorType:
    return TensorType(name, number, BLOCKS[name].n_values, BLOCKS[name].n_bytes, None, take_apart)


TYPES: dict[str, TensorType] = {
    t.name: t
    for t in (
        TensorType("F32", 0, 1, 4, torch.float32),
        TensorType("F16", 1, 1, 2, torch.float16),
        TensorType("BF16", 30, 1, 2, torch.bfloat16),
        _quantised("Q8_0", 8, _q8_0),
        _quantised("Q4_0", 2, _q4_0),
        _quantised("Q4_1", 3, _q4_1),
        _quantised("Q5_0", 6, _q5_0),
        _quantised("Q5_1", 7, _q5_1),
        _quantised("Q2_K", 10, _q2_k),
        _quantised("Q3_K", 11, _q3_k),
        _quantised("Q4_K", 12, _q4_k),
        _quantised("Q5_K", 13, _q5_k),
        _quantised("Q6_K", 14, _q6_k),
        _quantised("IQ4_NL", 20, _iq4_nl),
        _quantised("IQ4_XS", 23, _iq4_xs),
        _quantised("MXFP4", 39, _mxfp4),
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


def in_pieces(work: Callable[[int], None], n_blocks: int, n: int) -> None:
    """``work(first)`` for every ``n``-th of ``n_blocks``, on as many threads as torch has. Each works alone: a piece has a
    dozen short steps, and threads that wait for each other after every one are slower than one where others use the cores."""
    n_threads = torch.get_num_threads()
    if n_threads == 1 or n_blocks <= n:
        for first in range(0, n_blocks, n):
            work(first)
        return
    inference = torch.is_inference_mode_enabled()  # a thread's own

    def piece(first: int) -> None:
        with torch.inference_mode(inference):
            work(first)

    try:
        with ThreadPoolExecutor(n_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            deque(pool.map(piece, range(0, n_blocks, n)), maxlen=0)
    finally:
        torch.set_num_threads(n_threads)  # what threads that start later take


def dequantise(kind: TensorType, raw: np.ndarray, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that ``raw``, bytes of whole blocks of the quantised ``kind``, stand for: exactly in fp32, or rounded to
    another ``dtype``.

    Works in pieces (``in_pieces``), beside the result five megabytes a thread.
    """
    assert kind.take_apart is not None
    n_blocks, n = len(raw) // kind.n_bytes, _PIECE_VALUES // kind.n_values
    result = torch.empty((n_blocks, kind.n_values), dtype=dtype)

    def decode(first: int) -> None:
        piece = raw[first * kind.n_bytes : (first + n) * kind.n_bytes]
        blocks = torch.from_numpy(piece.copy()).view(-1, kind.n_bytes)  # a mapped file is read-only, which torch does not know
        codes, scales, minima = kind.take_apart(blocks)  # type: ignore[misc]
        values = codes.float().mul_(scales[..., None])
        if minima is not None:
            values.sub_(minima[..., None])
        result[first : first + n].copy_(values.view(-1, kind.n_values))

    in_pieces(decode, n_blocks, n)
    return result.view(-1)


def halves_are_finite(kind: TensorType, raw: np.ndarray) -> bool:
    """Whether the fp16 numbers of ``raw``, blocks of the quantised ``kind``, are all finite; codes always are."""
    blocks = raw.reshape(-1, kind.n_bytes)
    halves = (blocks[:, at : at + 2].copy().view(np.uint16) for at in BLOCKS[kind.name].halves)
    return all(bool(((part & 0x7C00) != 0x7C00).all()) for part in halves)


def codes_of(kind: TensorType, raw: np.ndarray, n: int) -> Codes:
    """The codes of ``n`` outputs in ``raw``, blocks of a quantised ``kind`` that one of our schemes holds. They stand for the
    numbers that ``dequantise`` gives. Works in pieces, as that does."""
    assert kind.take_apart is not None
    scheme = SCHEMES[str(BLOCKS[kind.name].scheme)]
    n_blocks, piece_blocks = len(raw) // kind.n_bytes, _PIECE_VALUES // kind.n_values
    codes = torch.empty((n_blocks, kind.n_values), dtype=CODE_TYPES[scheme.element])
    in_units = scheme.group == BLOCK
    n_groups = kind.n_values // (BLOCK_GROUP if in_units else int(scheme.group or 0))
    scales = torch.empty((n_blocks, 1, 2) if in_units else (n_blocks, n_groups))
    counts = torch.empty((n_blocks, n_groups, 2) if in_units else 0, dtype=torch.uint8)

    def take(first: int) -> None:
        some = slice(first, first + piece_blocks)
        piece = raw[first * kind.n_bytes : some.stop * kind.n_bytes]
        blocks = torch.from_numpy(piece.copy()).view(-1, kind.n_bytes)
        if in_units:
            codes[some] = _nibbles(blocks[:, 16:].unflatten(1, (4, 32))).view(-1, BLOCK)
            scales[some, 0] = torch.cat((_halves(blocks, 0), _halves(blocks, 2)), dim=1)
            counts[some] = torch.stack(_counts(blocks), dim=-1).transpose(0, 1)
            return
        found = kind.take_apart(blocks)  # type: ignore[misc]
        signed = found.codes.reshape(-1, kind.n_values)
        codes[some] = signed.add_(8) if scheme.has_zeros else signed
        scales[some] = found.scales

    in_pieces(take, n_blocks, piece_blocks)
    codes = codes.view(n, -1)
    if in_units:
        return Codes(codes, scales.view(n, -1, 2), counts.view(n, -1, 2))
    scales = scales.view(n, -1)
    if scheme.has_zeros:
        return four_bit_codes(codes, scales, torch.full_like(scales, 8, dtype=torch.uint8), int(scheme.group or 0))
    return Codes(codes, scales)
