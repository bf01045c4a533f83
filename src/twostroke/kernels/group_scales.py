"""Codes in groups without integer zero points, as GGUF's types have them: plain references of what they stand for.

Blocks of 256 inputs have a unit of scales and one of minima, and each of their groups of 32 a whole number of either (Q4_K).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.core.schemes import BLOCK, BLOCK_GROUP, INT8_GROUPS

if TYPE_CHECKING:
    from jaxtyping import Float, Int8, UInt8


def eight_bit_values(codes: Int8[Tensor, "N K"], scales: Float[Tensor, "N G"]) -> Float[Tensor, "N K"]:
    """code·scale of each input's group, the last of which may be short."""
    k = codes.shape[1]
    group = next(group for group in INT8_GROUPS if -(-k // group) == scales.shape[1])
    return codes.float().mul_(scales.repeat_interleave(group, dim=1)[:, :k])


def eight_bit_groups(weight: Float[Tensor, "N K"], group: int) -> tuple[Int8[Tensor, "N K"], Float[Tensor, "N G"]]:
    """Nearest codes of groups of ``group`` inputs, scale = max|group|/127 in fp16's 11 bits; a group of zeros has scale 1."""
    n, k = weight.shape
    values = F.pad(weight.float(), (0, -k % group)).view(n, -1, group)
    mantissa, exponent = torch.frexp(values.abs().amax(dim=2).div_(127.0))
    scales = torch.ldexp((mantissa * 2**11).ceil_() / 2**11, exponent)  # upwards: no code passes 127
    scales.masked_fill_(scales == 0, 1.0)
    return (values / scales[..., None]).round_().to(torch.int8).view(n, -1)[:, :k].contiguous(), scales


def block_values(
    codes: UInt8[Tensor, "N K"], units: Float[Tensor, "N blocks 2"], counts: UInt8[Tensor, "N groups 2"]
) -> Float[Tensor, "N K"]:
    """code·(unit·count) − (unit of minima·count of minima), each step rounded to fp32, as ``ggml-quants.c`` does."""
    k = codes.shape[1]
    of_groups = units.repeat_interleave(BLOCK // BLOCK_GROUP, dim=1)[:, : counts.shape[1]] * counts.float()
    scales, minima = (part.repeat_interleave(BLOCK_GROUP, dim=1)[:, :k] for part in of_groups.unbind(dim=2))
    return codes.float().mul_(scales).sub_(minima)
