"""Keys and values in 4 bits after a Hadamard transform: the plain reference of an int4 cache in the native library."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import BFloat16, Float, UInt8

MIDDLE_CODE = 7.5
"""A code c from 0 to 15 stands for c − 7.5 scales, so that as many codes lie on either side."""

SMALLEST_SCALE = 1e-30


def hadamard(heads: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
    """heads·H over the last dimension; H is orthonormal and its own inverse, so products of two transformed heads are those of
    the heads, and what few dimensions hold is spread over all (QuaRot, arXiv 2404.00456).

    H is Sylvester's matrix over blocks of the largest power of two that divides D: of 96 three blocks of 32, of an odd D none.
    ``hadamard.h`` adds in the same order.
    """
    size = heads.shape[-1]
    block = size & -size
    mixed, step = heads * torch.tensor(float(block)).sqrt().reciprocal(), 1
    while step < block:
        first, second = mixed.unflatten(-1, (-1, 2, step)).unbind(-2)
        mixed = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        step *= 2
    return mixed


def _codes(units: Tensor) -> Tensor:
    """NaN, which a scale of NaN goes with, has any code."""
    return (units + MIDDLE_CODE).round_().clamp_(0, 15).nan_to_num_(0.0).to(torch.uint8)


def key_codes(keys: Float[Tensor, "... D"]) -> tuple[UInt8[Tensor, "... D"], BFloat16[Tensor, "... 2"]]:
    """Codes, and the scale and the middle of each key's range. They are rounded first, so that codes make up for it.

    Keys need their range more than values do: with heads of 8 (stories260K) codes on both sides of zero cost twice the KL.
    """
    high, low = keys.amax(dim=-1), keys.amin(dim=-1)
    ranges = torch.stack((high / 15 - low / 15, 0.5 * high + 0.5 * low), dim=-1).bfloat16()
    scale, middle = ranges.float().unbind(-1)
    per_scale = torch.where(scale > SMALLEST_SCALE, scale.reciprocal(), 0.0)
    return _codes((keys - middle[..., None]) * per_scale[..., None]), ranges


def keys_of(codes: UInt8[Tensor, "... D"], ranges: BFloat16[Tensor, "... 2"]) -> Float[Tensor, "... D"]:
    scale, middle = ranges.float().unbind(-1)
    return (codes.float() - MIDDLE_CODE) * scale[..., None] + middle[..., None]


def value_codes(values: Float[Tensor, "... D"]) -> tuple[UInt8[Tensor, "... D"], Float[Tensor, "*heads"]]:
    """Codes on both sides of zero, and each value's scale."""
    scales = values.abs().amax(dim=-1).clamp_min_(SMALLEST_SCALE) / MIDDLE_CODE
    return _codes(values * scales.reciprocal()[..., None]), scales


def values_of(codes: UInt8[Tensor, "... D"], scales: Float[Tensor, "*heads"]) -> Float[Tensor, "... D"]:
    return (codes.float() - MIDDLE_CODE) * scales[..., None]


def pack_neighbours(codes: UInt8[Tensor, "... D"]) -> UInt8[Tensor, "... half"]:
    """Two neighbouring codes a byte, the first in the lower bits: as keys lie in the cache. An odd D is filled up with a 0."""
    first, second = F.pad(codes, (0, codes.shape[-1] % 2)).unflatten(-1, (-1, 2)).unbind(-1)
    return first | second << 4


def unpack_neighbours(packed: UInt8[Tensor, "... half"], size: int) -> UInt8[Tensor, "... D"]:
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :size]


def pack_halves(codes: UInt8[Tensor, "... D"]) -> UInt8[Tensor, "... half"]:
    """Codes d and d + ⌈D/2⌉ a byte, the first in the lower bits: as values lie in the cache."""
    first, second = F.pad(codes, (0, codes.shape[-1] % 2)).unflatten(-1, (2, -1)).unbind(-2)
    return first | second << 4


def unpack_halves(packed: UInt8[Tensor, "... half"], size: int) -> UInt8[Tensor, "... D"]:
    return torch.cat((packed & 15, packed >> 4), dim=-1)[..., :size]
