"""Products of rows with the matrices of the experts that chose them.

``torch.nn.functional.grouped_mm`` wants bf16, sizes of whole 16 bytes and gradients that are dense (torch 2.13); this is a
plain loop over experts behind one operator, so that a compiler sees no size that depends on a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twostroke.core.policy import expert_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float, Int


def _spans(ends: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, end) of each expert that has rows."""
    found, first = [], 0
    for expert, end in enumerate(ends.tolist()):
        if end > first:
            found.append((expert, first, end))
        first = end
    return found


def _window(x: Tensor, first: int, n_rows: int) -> Tensor:
    """Rows from ``first`` on, zeros after the last."""
    missing = first + n_rows - x.shape[0]
    return x[first : first + n_rows] if missing <= 0 else torch.nn.functional.pad(x[first:], (0, 0, 0, missing))


def _multiply_each(x: Tensor, of_expert: Callable[[int], Tensor], width: int, ends: Tensor) -> Tensor:
    """Each expert's rows times its matrix. What it computes beyond its rows the next expert writes again."""
    y = x.new_empty(x.shape[0], width)
    for expert, first, end in _spans(ends):
        n_rows = expert_rows(end - first)
        if first + n_rows <= len(y):
            torch.mm(x[first : first + n_rows], of_expert(expert), out=y[first : first + n_rows])
        else:
            y[first:end] = torch.mm(_window(x, first, n_rows), of_expert(expert))[: end - first]
    return y


@torch.library.custom_op("twostroke::grouped_linear", mutates_args=())
def _multiply(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return _multiply_each(x, lambda expert: weight[expert].t(), weight.shape[1], ends)


@_multiply.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("twostroke::grouped_linear_backward", mutates_args=())
def _multiply_backward(x: Tensor, weight: Tensor, ends: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x_gradient = _multiply_each(gradient, lambda expert: weight[expert], weight.shape[2], ends)
    weight_gradient = torch.zeros_like(weight)
    for expert, first, end in _spans(ends):
        n_rows = expert_rows(end - first)
        rows = _window(gradient[:end], first, n_rows)  # zeros where x has rows of others
        torch.mm(rows.t(), _window(x, first, n_rows), out=weight_gradient[expert])
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
