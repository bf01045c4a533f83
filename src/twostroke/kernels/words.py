"""Codes of a few bits on disk: several to a 32-bit word, the first in the lowest bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Int32, UInt8


def pack_words(codes: UInt8[Tensor, "n k"], bits: int = 4) -> Int32[Tensor, "n words"]:
    """Codes 0…2^bits − 1 along the last dimension, 32/bits to a word; short ends are filled with 0."""
    n, k = codes.shape
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -k % per_word)).view(n, -1, per_word).to(torch.int64)
    words = (padded << torch.arange(0, 32, bits)).sum(dim=2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_words(words: Int32[Tensor, "n words"], k: int, bits: int = 4) -> UInt8[Tensor, "n k"]:
    """The inverse of ``pack_words``, for 4 and 8 bits."""
    return unpack_bytes(words.contiguous().view(torch.uint8), bits)[:, :k].contiguous()


def unpack_bytes(packed: UInt8[Tensor, "n bytes"], bits: int = 4) -> UInt8[Tensor, "n k"]:
    """Codes of 4 bits two to a byte, the first in its low half; bytes themselves for 8 bits."""
    if bits == 8:
        return packed
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
