"""Four-bit codes: eight to a 32-bit word on disk, and the scales that lose least."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int32, UInt8

CODES_PER_WORD = 8
SHRINKS = tuple(1 - 0.04 * i for i in range(8))
"""Shares of a group's range that are tried: cutting off its ends a little makes all other steps finer."""


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


def group_scales(
    weight: Float[Tensor, "n k"], group: int, importance: Float[Tensor, " k"] | None = None
) -> tuple[Float[Tensor, "n groups"], UInt8[Tensor, "n groups"]]:
    """A scale and a zero point for every ``group`` inputs (the last may be short), by the least Σ importance·(w − ŵ)² of
    ``SHRINKS`` of the group's range, 0 included. ``importance``: of each input, its mean square where it is known."""
    n, k = weight.shape
    n_groups = -(-k // group)
    filled = torch.nn.functional.pad(weight.float(), (0, n_groups * group - k)).view(n, n_groups, group)
    worth = torch.ones(k) if importance is None else importance
    worth = torch.nn.functional.pad(worth, (0, n_groups * group - k)).view(n_groups, group)
    low, high = filled.amin(dim=2).clamp_max_(0.0), filled.amax(dim=2).clamp_min_(0.0)
    best_loss = torch.full(low.shape, float("inf"))
    best_scale, best_zero = torch.ones_like(low), torch.zeros_like(low)
    for shrink in SHRINKS:
        scale = (high - low) * (shrink / 15)
        scale = torch.where(scale == 0, 1.0, scale)
        zero = (-low * shrink / scale).round_().clamp_(0, 15)
        codes = ((filled / scale[:, :, None]).round_() + zero[:, :, None]).clamp_(0, 15)
        error = (codes - zero[:, :, None]) * scale[:, :, None] - filled
        loss = (error.square_() * worth).sum(dim=2)
        better = loss < best_loss
        best_loss = torch.where(better, loss, best_loss)
        best_scale = torch.where(better, scale, best_scale)
        best_zero = torch.where(better, zero, best_zero)
    return best_scale, best_zero.to(torch.uint8)


def round_to_groups(
    weight: Float[Tensor, "n k"], scale: Float[Tensor, "n groups"], zero: UInt8[Tensor, "n groups"], group: int
) -> UInt8[Tensor, "n k"]:
    """The nearest code of each weight."""
    k = weight.shape[1]
    wide, zeros = (t.repeat_interleave(group, dim=1)[:, :k] for t in (scale, zero))
    return ((weight.float() / wide).round_() + zeros).clamp_(0, 15).to(torch.uint8)


def expand(
    codes: UInt8[Tensor, "n k"], scale: Float[Tensor, "n groups"], zero: UInt8[Tensor, "n groups"]
) -> Float[Tensor, "n k"]:
    """(code − zero)·scale, fp32. The group is what the shapes say: the least of 32, 64, 128 that gives so many groups."""
    k, n_groups = codes.shape[1], scale.shape[1]
    group = next((g for g in (32, 64, 128) if -(-k // g) == n_groups), -(-k // n_groups))
    wide, zeros = (t.repeat_interleave(group, dim=1)[:, :k] for t in (scale.float(), zero.float()))
    return (codes.float() - zeros) * wide
