"""Group-wise 4-bit weights: the quantiser, and a plain reference of the product with 8-bit rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.core.errors import ConfigError
from twostroke.core.schemes import GROUPS

if TYPE_CHECKING:
    from jaxtyping import Float, UInt8

LARGEST_CODE = 15
SCALE_BITS = 11
"""Mantissa bits of a scale, as in fp16: the packed form holds no more."""


def quantize_groups(
    weight: Float[Tensor, "N K"], group: int, searched: bool = True
) -> tuple[UInt8[Tensor, "N K"], Float[Tensor, "N G"], UInt8[Tensor, "N G"]]:
    """Codes 0..15, scales and zero points of groups of ``group`` inputs, the last may be short: weight ≈ (code − zero)·scale.

    A group's range is [min(w, 0), max(w, 0)], so that 0 is a code; ``searched``: the one of several narrower ranges with the
    least squared error. Root of the mean squared error on normally distributed weights, in σ, by group::

                                            32       64      128
        whole range                       0.081    0.091    0.101
        searched                          0.079    0.088    0.096
        no zero point, searched           0.083    0.091    0.097

    A zero point costs 8/group bits a weight, and gains more where a group's values are not centred. Raises ConfigError.
    """
    scales, zeros = group_scales(weight, group, searched=searched)
    return round_to_groups(weight, scales, zeros, group), scales, zeros


def group_scales(
    weight: Float[Tensor, "N K"], group: int, importance: Float[Tensor, " K"] | None = None, searched: bool = True
) -> tuple[Float[Tensor, "N G"], UInt8[Tensor, "N G"]]:
    """Scales and zero points of ``quantize_groups``. ``importance`` weighs the squared error of each input: its mean square,
    where that is known."""
    if group not in GROUPS:
        raise ConfigError(f"group={group} must be one of {', '.join(map(str, GROUPS))}.")
    n, k = weight.shape
    n_groups = -(-k // group)
    values = F.pad(weight.float(), (0, n_groups * group - k)).view(n, n_groups, group)
    worth = None if importance is None else F.pad(importance, (0, n_groups * group - k)).view(n_groups, group)
    low, high = values.amin(dim=2).clamp_max_(0.0), values.amax(dim=2).clamp_min_(0.0)
    best_error = torch.full_like(low, torch.inf)
    best_scale, best_zero = torch.ones_like(low), torch.zeros_like(low)
    for share in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75) if searched else (1.0,):
        scale = _round_mantissa((high - low) * (share / LARGEST_CODE))
        scale.masked_fill_(scale == 0, 1.0)
        zero = (-low * share / scale).round_().clamp_(0, LARGEST_CODE)
        codes = (values / scale[..., None]).round_().add_(zero[..., None]).clamp_(0, LARGEST_CODE)
        squares = codes.sub_(zero[..., None]).mul_(scale[..., None]).sub_(values).square_()
        error = (squares if worth is None else squares.mul_(worth)).sum(dim=2)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale, best_zero = torch.where(better, scale, best_scale), torch.where(better, zero, best_zero)
    return best_scale, best_zero.to(torch.uint8)


def round_to_groups(weight: Float[Tensor, "N K"], scales: Tensor, zeros: Tensor, group: int) -> UInt8[Tensor, "N K"]:
    """The nearest code of each weight."""
    k = weight.shape[1]
    codes = (weight.float() / _spread(scales, group, k)).round_().add_(_spread(zeros.float(), group, k))
    return codes.clamp_(0, LARGEST_CODE).to(torch.uint8)


def group_of(codes: Tensor, scales: Tensor) -> int:
    """How many inputs share a scale: the one of ``GROUPS`` that gives so many groups."""
    return next(group for group in GROUPS if -(-codes.shape[1] // group) == scales.shape[1])


def _round_mantissa(values: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp((mantissa * 2**SCALE_BITS).round_() / 2**SCALE_BITS, exponent)


def dequantize_groups(codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Float[Tensor, "N K"]:
    """The matrix that the codes stand for, fp32."""
    k = codes.shape[1]
    return (codes.float() - _spread(zeros.float(), group, k)) * _spread(scales, group, k)


def _spread(values: Tensor, group: int, k: int) -> Tensor:
    return values.repeat_interleave(group, dim=1)[:, :k]
