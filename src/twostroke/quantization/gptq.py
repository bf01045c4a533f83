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

TOWARDS_EXACT = 0.5
"""Share of the way to the weights that bring the exact output back: the whole way fits the calibration text too closely."""

BLOCK = 128
"""Columns whose corrections are gathered before the rest of the matrix is touched: one product instead of many updates."""


@torch.inference_mode()
def round_with_compensation(
    weight: Float[Tensor, "n k"], hessian: Float[Tensor, "k k"], group: int, cross: Float[Tensor, "k k"] | None = None
) -> tuple[UInt8[Tensor, "n k"], Float[Tensor, "n groups"], UInt8[Tensor, "n groups"]]:
    """4-bit codes, scales and zero points of ``weight`` for inputs whose Σ x·xᵀ is ``hessian``.

    ``cross``: Σ (x₀ − x)·xᵀ, where x₀ are the inputs that ``weight`` is meant for; it is moved towards W·(H + cross)·H⁻¹ first,
    whose products with x come closest to those of ``weight`` with x₀.
    """
    n, k = weight.shape
    importance = torch.diag(hessian)
    order = torch.argsort(importance, descending=True, stable=True)
    factor = _inverse_factor(hessian[order][:, order])  # upper triangular, H⁻¹ = factorᵀ·factor
    if cross is not None:
        moved = torch.empty_like(weight)
        moved[:, order] = (weight @ cross)[:, order] @ factor.t() @ factor
        weight = weight + TOWARDS_EXACT * moved
    scales, zeros = group_scales(weight, group, importance)
    # A row a column of the weights, so that what a step reads and writes lies together.
    work = weight.float().t()[order].contiguous()
    step = scales.t()[order // group].contiguous()
    zero = zeros.t()[order // group].float()
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


def _inverse_factor(hessian: Float[Tensor, "k k"]) -> Float[Tensor, "k k"]:
    """Upper triangular U with Uᵀ·U the inverse of ``hessian``, damped; in fp64, where small diagonals beside large ones last.

    With rows and columns turned about H = L·Lᵀ, so in their own order H is upper times its transpose, and the upper one's
    inverse is U: a third of the arithmetic of inverting H and factoring that.
    """
    damped = hessian.double()
    diagonal = damped.diagonal()  # a view of it, which torch.diag is not
    diagonal += DAMPING * diagonal.mean().clamp_min(1e-12)
    upper = torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)
    return torch.linalg.solve_triangular(upper, torch.eye(len(upper), dtype=torch.float64), upper=True).float()
