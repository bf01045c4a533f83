"""Rounding with compensation: what rounding one input's weights does wrong, the weights of later inputs set right.

Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", arXiv:2210.17323:
with H = Σ x·xᵀ over a layer's inputs, columns are rounded one after another, and the error of each, divided by the diagonal of
the Cholesky factor of H⁻¹, is taken off the columns that come later along that factor's row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from twostroke.kernels.int4 import group_scales

if TYPE_CHECKING:
    from jaxtyping import Float, Int, UInt8

    from twostroke.model.decoder import Decoder

DAMPING = 0.01
"""Share of H's mean diagonal that is added to it: inputs that calibration hardly saw would otherwise be trusted blindly."""

BLOCK = 128
"""Columns whose corrections are gathered before the rest of the matrix is touched: one product instead of many updates."""


def round_with_compensation(
    weight: Float[Tensor, "n k"], hessian: Float[Tensor, "k k"], group: int
) -> tuple[UInt8[Tensor, "n k"], Float[Tensor, "n groups"], UInt8[Tensor, "n groups"]]:
    """4-bit codes, scales and zero points of ``weight`` for inputs whose Σ x·xᵀ is ``hessian``.

    A group's scales are fitted when its first column comes up, on the weights as they have been corrected until then.
    """
    work = weight.float().clone()
    n, k = work.shape
    importance = torch.diag(hessian).clone()
    factor = _inverse_factor(hessian)  # upper triangular, H⁻¹ = factorᵀ·factor
    codes = torch.empty((n, k), dtype=torch.uint8)
    n_groups = -(-k // group)
    scales, zeros = torch.empty(n, n_groups), torch.empty((n, n_groups), dtype=torch.uint8)
    scale, zero = torch.empty(n), torch.empty(n)
    for begin in range(0, k, BLOCK):
        end = min(begin + BLOCK, k)
        errors = torch.empty(n, end - begin)
        for i in range(begin, end):
            if i % group == 0:
                last = min(i + group, k)
                # Within a block the later columns are corrected at once; beyond it they wait, so a group never crosses one.
                found = group_scales(work[:, i:last], group, importance[i:last])
                scales[:, i // group : i // group + 1], zeros[:, i // group : i // group + 1] = found
                scale, zero = scales[:, i // group], zeros[:, i // group].float()
            column = work[:, i]
            code = ((column / scale).round() + zero).clamp_(0, 15)
            codes[:, i] = code.to(torch.uint8)
            error = (column - (code - zero) * scale) / factor[i, i]
            work[:, i:end] -= error[:, None] * factor[i, i:end]
            errors[:, i - begin] = error
        work[:, end:] -= errors @ factor[begin:end, end:]
    return codes, scales, zeros


def _inverse_factor(hessian: Float[Tensor, "k k"]) -> Float[Tensor, "k k"]:
    damped = hessian.double().clone()
    diagonal = torch.diag(damped)
    diagonal += DAMPING * diagonal.mean().clamp_min(1e-12)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float()


@torch.inference_mode()
def input_hessians(
    decoder: Decoder, batches: Iterable[Int[Tensor, "B T"]], progress: Callable[[int], None] | None = None
) -> dict[str, Float[Tensor, "k k"]]:
    """Σ x·xᵀ of the inputs of every matrix of the blocks, by its canonical name, over ``batches`` of tokens.

    All in one pass of the unquantised model. Memory: k² fp32 numbers a matrix (d_ff = 5,632: 127 MB a block for the last).
    """
    found: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def add(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            rows = inputs[0].flatten(0, -2).float()
            product = rows.t() @ rows
            found[name] = product if name not in found else found[name].add_(product)

        return add

    linear = [(name, module) for name, module in decoder.blocks.named_modules() if isinstance(module, nn.Linear)]
    handles = [module.register_forward_pre_hook(watch(f"blocks.{name}.weight")) for name, module in linear]
    try:
        for i, tokens in enumerate(batches):
            decoder.hidden(tokens)
            if progress is not None:
                progress(i)
    finally:
        for handle in handles:
            handle.remove()
    return found
