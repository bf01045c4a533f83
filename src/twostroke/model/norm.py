"""RMSNorm and LayerNorm, chosen by ``ModelSpec.norm``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twostroke.core.matrices import has_norm_bias
from twostroke.core.spec import ModelSpec

if TYPE_CHECKING:
    from jaxtyping import Float


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · weight over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467).

    ``F.rms_norm`` computes the mean of a bf16 row in fp32, so this module casts nothing but the weight, which takes the dtype
    of ``x`` if parameters are fp32 and activations bf16. ``offset`` is added to the weight (Gemma stores it less 1).
    """

    def __init__(self, width: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Float[Tensor, "*rows E"]) -> Float[Tensor, "*rows E"]:
        weight = self.weight + self.offset if self.offset else self.weight
        return F.rms_norm(x, self.weight.shape, weight.to(x.dtype), self.eps)


class LayerNorm(nn.Module):
    """(x − mean) / √(variance + ε) · weight + bias over the last dimension, without a bias where the family has none."""

    def __init__(self, width: int, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(self, x: Float[Tensor, "*rows E"]) -> Float[Tensor, "*rows E"]:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), bias, self.eps)


def norm_offset(spec: ModelSpec) -> float:
    """What is added to the stored weight of every RMSNorm."""
    return 1.0 if spec.departures.norm_offset else 0.0


def make_norm(spec: ModelSpec) -> nn.Module:
    """The norm of ``spec`` over E."""
    if spec.norm == "rmsnorm":
        return RMSNorm(spec.d_model, spec.norm_eps, norm_offset(spec))
    return LayerNorm(spec.d_model, spec.norm_eps, has_norm_bias(spec))
