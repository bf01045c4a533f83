"""RMSNorm and LayerNorm, chosen by ``ModelSpec.norm``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twostroke.core.spec import ModelSpec

if TYPE_CHECKING:
    from jaxtyping import Float


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · weight over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467).

    ``F.rms_norm`` computes the mean of a bf16 row in fp32, so this module casts nothing but the weight, which takes the dtype
    of ``x`` if parameters are fp32 and activations bf16.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Float[Tensor, "*rows E"]) -> Float[Tensor, "*rows E"]:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class LayerNorm(nn.Module):
    """(x − mean) / √(variance + ε) · weight + bias over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Float[Tensor, "*rows E"]) -> Float[Tensor, "*rows E"]:
        return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


def make_norm(spec: ModelSpec) -> nn.Module:
    """The norm of ``spec`` over E."""
    kind = RMSNorm if spec.norm == "rmsnorm" else LayerNorm
    return kind(spec.d_model, spec.norm_eps)
