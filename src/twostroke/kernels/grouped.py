"""Products of rows with the matrices of the experts that chose them.

``torch.nn.functional.grouped_mm`` wants bf16, sizes of whole 16 bytes and gradients that are dense (torch 2.13); this is a
plain loop over experts behind one operator, so that a compiler sees no size that depends on a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def _spans(ends: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, end) of each expert that has rows."""
    found, first = [], 0
    for expert, end in enumerate(ends.tolist()):
        if end > first:
            found.append((expert, first, end))
        first = end
    return found


@torch.library.custom_op("twostroke::grouped_linear", mutates_args=())
def _multiply(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    y = x.new_empty(x.shape[0], weight.shape[1])
    for expert, first, end in _spans(ends):
        torch.mm(x[first:end], weight[expert].t(), out=y[first:end])
    return y


@_multiply.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("twostroke::grouped_linear_backward", mutates_args=())
def _multiply_backward(x: Tensor, weight: Tensor, ends: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x_gradient, weight_gradient = torch.empty_like(x), torch.zeros_like(weight)
    for expert, first, end in _spans(ends):
        rows = gradient[first:end]
        torch.mm(rows, weight[expert], out=x_gradient[first:end])
        torch.mm(rows.t(), x[first:end], out=weight_gradient[expert])
    return x_gradient, weight_gradient


@_multiply_backward.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return *_multiply_backward(*ctx.saved_tensors, gradient), None  # type: ignore[attr-defined]


_multiply.register_autograd(_backward, setup_context=_keep)


def grouped_linear(x: Float[Tensor, "m k"], weight: Float[Tensor, "X n k"], ends: Int[Tensor, " X"]) -> Float[Tensor, "m n"]:
    """Rows up to ``ends[0]`` times the first matrix, those from there to ``ends[1]`` times the second, and so on; ``ends[-1]``
    is m. Gradients reach ``x`` and ``weight``."""
    result: Tensor = _multiply(x, weight, ends)
    return result
