"""Quantised matrices: the codes that stand for weights, made of them and turned back into them, whatever the scheme."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from twostroke.core.errors import ConfigError
from twostroke.core.schemes import Scheme
from twostroke.kernels.group_scales import block_values, eight_bit_groups, eight_bit_values
from twostroke.kernels.int4 import dequantize_groups, group_of, quantize_groups
from twostroke.kernels.matrix import quantize_columns

if TYPE_CHECKING:
    from jaxtyping import Float

CODE_TYPES = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn}
"""A scheme's element → torch's type of its codes; 4-bit codes take a byte each, 0 … 15."""

LARGEST_E4M3 = 448.0


def e4m3_columns(weight: Float[Tensor, "N K"]) -> tuple[Tensor, Float[Tensor, " N"]]:
    """E4M3 of each output channel: weight ≈ codes·scale, scale = max|channel|/448; a channel of zeros has scale 1. The relative
    error of a weight is at most 2⁻⁴ down to 2⁻⁶/448 of its channel's largest."""
    scale = weight.abs().amax(dim=1).float() / LARGEST_E4M3
    scale.masked_fill_(scale == 0, 1.0)
    return (weight / scale[:, None]).clamp_(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn), scale


_BY_CHANNEL = {"int8": quantize_columns, "fp8": e4m3_columns}
"""A scheme's element → codes (N, K) and scales (N) of a matrix."""


class Codes(NamedTuple):
    """``weight ≈ codes·scale`` with a scale an output (N) or a group (N, groups), or ``(codes − zero)·scale`` with both
    (N, groups), or in blocks (``group_scales.block_values``)."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None

    def values(self) -> Float[Tensor, "N K"]:
        """The matrix that the codes stand for, fp32."""
        if self.zero is None:
            if self.scale.dim() == 2:
                return eight_bit_values(self.codes, self.scale.float())
            return self.codes.float() * self.scale[:, None]
        if self.scale.dim() == 3:
            return block_values(self.codes, self.scale.float(), self.zero)
        return dequantize_groups(self.codes, self.scale.float(), self.zero, group_of(self.codes, self.scale))

    def of_rows(self, rows: Tensor | slice) -> Codes:
        """Those of some outputs."""
        return Codes(self.codes[rows], self.scale[rows], None if self.zero is None else self.zero[rows])


def quantize(weight: Float[Tensor, "N K"], scheme: Scheme) -> Codes:
    """Every weight to its nearest code, each block of ``scheme`` with the scale that suits it best. Raises ConfigError for a
    scheme that only files come in."""
    if scheme.only_read:
        raise ConfigError(f"scheme={scheme.name!r} is what GGUF files hold, and nothing is rounded to it. Use int4.")
    if scheme.group is not None and not scheme.has_zeros:
        return Codes(*eight_bit_groups(weight, scheme.group))
    if scheme.group is not None:
        return Codes(*quantize_groups(weight, scheme.group))
    return Codes(*_BY_CHANNEL[scheme.element](weight))
