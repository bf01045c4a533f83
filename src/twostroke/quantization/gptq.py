"""Rounding with compensation: what rounding one input's weights does wrong, the weights of inputs not yet rounded set right.

Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", arXiv:2210.17323:
with H = Σ x·xᵀ over a layer's inputs, columns are rounded one after another, and the error of each, divided by the diagonal of
the Cholesky factor of H⁻¹, is taken off the columns that come later along that factor's row. The inputs that are largest come
first, while there are still columns to make up for them; groups stay where they are, their scales fitted beforehand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twostroke.kernels.int4 import LARGEST_CODE, group_scales

if TYPE_CHECKING:
    from jaxtyping import Float, UInt8

DAMPING = 0.01
"""Share of H's mean diagonal that is added to it: inputs that calibration hardly saw would otherwise be trusted blindly."""

BLOCK = 128
"""Columns whose corrections are gathered before the rest of the matrix is touched: one product instead of many updates."""


@torch.inference_mode()
def round_with_compensation(
    weight: Float[Tensor, "n k"], hessian: Float[Tensor, "k k"], group: int
) -> tuple[UInt8[Tensor, "n k"], Float[Tensor, "n groups"], UInt8[Tensor, "n groups"]]:
    """4-bit codes, scales and zero points of ``weight`` for inputs whose Σ x·xᵀ is ``hessian``."""
    n, k = weight.shape
    importance = torch.diag(hessian)
    scales, zeros = group_scales(weight, group, importance)
    order = torch.argsort(importance, descending=True, stable=True)
    # A row a column of the weights, so that what a step reads and writes lies together.
    work = weight.float().t()[order].contiguous()
    step = scales.t()[order // group].contiguous()
    zero = zeros.t()[order // group].float()
    factor = _inverse_factor(damped(hessian)[order][:, order])  # upper triangular, H⁻¹ = factorᵀ·factor
    codes = torch.empty((k, n), dtype=torch.uint8)
    for begin in range(0, k, BLOCK):
        end = min(begin + BLOCK, k)
        errors = torch.empty(end - begin, n)
        for i in range(begin, end):
            code = (work[i] / step[i]).round_().add_(zero[i]).clamp_(0, LARGEST_CODE)
            codes[order[i]] = code.to(torch.uint8)
            error = (work[i] - (code - zero[i]) * step[i]) / factor[i, i]
            work[i + 1 : end].addr_(factor[i, i + 1 : end], error, alpha=-1)
            errors[i - begin] = error
        work[end:].addmm_(factor[begin:end, end:].t(), errors, alpha=-1)
    return codes.t().contiguous(), scales, zeros


def damped(hessian: Float[Tensor, "k k"]) -> Float[Tensor, "k k"]:
    """``hessian`` with ``DAMPING``, fp64: small diagonals beside large ones are lost in fp32."""
    result = hessian.double()
    diagonal = result.diagonal()  # a view of it, which torch.diag is not
    diagonal += DAMPING * diagonal.mean().clamp_min(1e-12)
    return result


def _inverse_factor(hessian: Float[Tensor, "k k"]) -> Float[Tensor, "k k"]:
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    return torch.linalg.cholesky(inverse, upper=True).float()
