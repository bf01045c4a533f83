"""Products of rows with the matrices of the experts that chose them.

``torch.nn.functional.grouped_mm`` wants bf16, sizes of whole 16 bytes and gradients that are dense (torch 2.13); this is a
plain loop over experts behind one operator, so that a compiler sees no size that depends on a value. Rows are sorted by expert
before and put back after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def multiply_each(x: Tensor, of_expert: Callable[[int], Tensor], width: int, ends: Tensor) -> Tensor:
    """Each expert's rows times its matrix (inputs, ``width``). What it computes beyond its rows the next one writes again."""
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
    return multiply_each(x, lambda expert: weight[expert].t(), weight.shape[1], ends)


@_multiply.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("twostroke::grouped_linear_input_gradient", mutates_args=())
def _input_gradient(weight: Tensor, ends: Tensor, gradient: Tensor) -> Tensor:
    return multiply_each(gradient, lambda expert: weight[expert], weight.shape[2], ends)


@_input_gradient.register_fake
def _(weight: Tensor, ends: Tensor, gradient: Tensor) -> Tensor:
    return gradient.new_empty(gradient.shape[0], weight.shape[2])


@torch.library.custom_op("twostroke::grouped_linear_weight_gradient", mutates_args=())
def _weight_gradient(x: Tensor, weight: Tensor, ends: Tensor, gradient: Tensor) -> Tensor:
    weight_gradient, last = torch.empty_like(weight), 0
    for expert, first, end in _spans(ends):
        weight_gradient[last:expert].zero_()  # of experts without rows; clearing all took a tenth of a step
        n_rows, last = expert_rows(end - first), expert + 1
        rows = _window(gradient[:end], first, n_rows)  # zeros where x has rows of others
        torch.mm(rows.t(), _window(x, first, n_rows), out=weight_gradient[expert])
    weight_gradient[last:].zero_()
    return weight_gradient


@_weight_gradient.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, gradient: Tensor) -> Tensor:
    return torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    x, weight, ends = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, ends)  # frozen experts keep no rows


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, ends = ctx.saved_tensors
    of_x = _input_gradient(weight, ends, gradient) if ctx.needs_input_grad[0] else None
    return of_x, None if x is None else _weight_gradient(x, weight, ends, gradient), None


_multiply.register_autograd(_backward, setup_context=_keep)


def grouped_linear(x: Float[Tensor, "m k"], weight: Float[Tensor, "X n k"], ends: Int[Tensor, " X"]) -> Float[Tensor, "m n"]:
    """Rows up to ``ends[0]`` times the first matrix, those from there to ``ends[1]`` times the second, and so on; ``ends[-1]``
    is m. Gradients reach ``x`` and ``weight``."""
    result: Tensor = _multiply(x, weight, ends)
    return result


@torch.library.custom_op("twostroke::sorted_rows", mutates_args=())
def _sorted_rows(x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
    return x[order // k]


@_sorted_rows.register_fake
def _(x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
    return x.new_empty(order.shape[0], x.shape[1])


def _keep_inverse(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, inverse, ctx.k = inputs
    ctx.save_for_backward(inverse)


def _gather_sums(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (inverse,) = ctx.saved_tensors
    return gradient[inverse].unflatten(0, (-1, ctx.k)).sum(dim=1), None, None, None


_sorted_rows.register_autograd(_gather_sums, setup_context=_keep_inverse)


def sorted_rows(x: Float[Tensor, "n E"], order: Int[Tensor, " m"], inverse: Int[Tensor, " m"], k: int) -> Float[Tensor, "m E"]:
    """Row ``order[i] // k`` of ``x`` at place i, m = n·k. ``order`` is a permutation, ``inverse`` says where each went.

    The gradient is gathered as well and added up a row at a time. That of a plain ``x[order // k]`` is scattered with one
    atomic addition a number, because torch does not know a permutation."""
    result: Tensor = _sorted_rows(x, order, inverse, k)
    return result


@torch.library.custom_op("twostroke::rows_in_order", mutates_args=())
def _rows_in_order(y: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    return y[inverse]


@_rows_in_order.register_fake
def _(y: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    return torch.empty_like(y)


def _keep_order(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _gather(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (order,) = ctx.saved_tensors
    return gradient[order], None, None


_rows_in_order.register_autograd(_gather, setup_context=_keep_order)


def rows_in_order(y: Float[Tensor, "m E"], order: Int[Tensor, " m"], inverse: Int[Tensor, " m"]) -> Float[Tensor, "m E"]:
    """``y[inverse]``: sorted rows where they came from. Its gradient is gathered by ``order``, for the same reason."""
    result: Tensor = _rows_in_order(y, order, inverse)
    return result
