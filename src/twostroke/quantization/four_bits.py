"""Four-bit codes on disk: eight to a 32-bit word."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Int32, UInt8

CODES_PER_WORD = 8


def pack_words(codes: UInt8[Tensor, "n k"]) -> Int32[Tensor, "n words"]:
    """Codes 0…15 along the last dimension, the first in the lowest bits; short ends are filled with 0."""
    n, k = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -k % CODES_PER_WORD)).view(n, -1, CODES_PER_WORD).to(torch.int64)
    words = (padded << torch.arange(0, 32, 4)).sum(dim=2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_words(words: Int32[Tensor, "n words"], k: int) -> UInt8[Tensor, "n k"]:
    """The inverse of ``pack_words``."""
    codes = (words[:, :, None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
    return codes.reshape(words.shape[0], -1)[:, :k].to(torch.uint8).contiguous()
