"""Products of experts' rows, against one product an expert."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from twostroke.core.policy import LEAST_EXPERT_ROWS, expert_rows, numbers_of_expert_rows
from twostroke.kernels.grouped import grouped_linear, rows_in_order, sorted_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_meets_its_experts_matrix_forward_and_backward(dtype: torch.dtype) -> None:
    """Experts without rows, at the beginning, between and at the end, get a gradient of zero."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor([0, 5, 0, 1, 7, 0])
    x, weight = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in ((13, 12), (6, 10, 12)))
    y = grouped_linear(x, weight, counts.cumsum(0))
    upstream = torch.randn(y.shape, generator=generator).to(dtype)
    found = torch.autograd.grad(y, (x, weight), upstream)
    plain = torch.cat([rows @ matrix.t() for rows, matrix in zip(x.split(counts.tolist()), weight, strict=True)])
    expected = torch.autograd.grad(plain, (x, weight), upstream)
    for ours, theirs in zip((y, *found), (plain, *expected), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not found[1][[0, 2, 5]].any()


def test_the_operator_has_what_a_compiler_asks_of_it() -> None:
    x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(2, 3, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.twostroke.grouped_linear, (x, weight, torch.tensor([2, 5])))


def test_numbers_of_rows_are_few_and_hardly_more() -> None:
    rounded = {n: expert_rows(n) for n in range(1, 2049)}
    assert all(n <= m <= max(1.125 * n + 1, n + LEAST_EXPERT_ROWS - 1) for n, m in rounded.items())
    assert len({rounded[n] for n in range(1024, 2048)}) <= 9
    for most in (1, 16, 17, 100, 1024, 2048):
        assert numbers_of_expert_rows(most) == len({rounded[n] for n in range(1, most + 1)})


def test_each_row_meets_its_experts_matrix_where_rows_are_many() -> None:
    """Some experts have more rows than are rounded up to the least, some reach into the rows of the next, one is the last."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor([300, 3, 17, 129])
    x, weight = torch.randn(449, 12, generator=generator), torch.randn(4, 10, 12, generator=generator)
    plain = torch.cat([rows @ matrix.t() for rows, matrix in zip(x.split(counts.tolist()), weight, strict=True)])
    torch.testing.assert_close(grouped_linear(x, weight, counts.cumsum(0)), plain)


def test_frozen_matrices_keep_no_rows_and_get_no_gradient() -> None:
    x, weight, ends = torch.randn(5, 4, requires_grad=True), torch.randn(2, 3, 4), torch.tensor([2, 5])
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (kept.append(tensor), tensor)[1], lambda tensor: tensor):
        y = grouped_linear(x, weight, ends)
    assert sorted(tensor.numel() for tensor in kept) == [2, 24]  # the ends and the matrices themselves
    (found,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(found, torch.cat([weight[0].sum(0).expand(2, 4), weight[1].sum(0).expand(3, 4)]))
    torch.library.opcheck(torch.ops.twostroke.grouped_linear, (x.detach(), weight.requires_grad_(), ends))


def test_rows_sorted_by_expert_and_back_have_the_gradients_of_plain_indexing() -> None:
    """Gathered gradients beside torch's scattered ones, of rows that several experts take and of those that come back."""
    generator = torch.Generator().manual_seed(0)
    n, k, width = 13, 3, 8
    order = torch.randperm(n * k, generator=generator)
    inverse = order.argsort()
    x, weight = torch.randn(n, width, generator=generator), torch.randn(n * k, width, generator=generator)

    def grown(rows: Tensor, back: Callable[[Tensor], Tensor], of: Tensor) -> Tensor:
        (back(rows * weight) * weight.flip(0)).sum().backward()
        assert of.grad is not None
        return of.grad

    fast, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    given = sorted_rows(fast, order, inverse, k)
    assert torch.equal(given, plain[order // k])
    by_gathering = grown(given, lambda y: rows_in_order(y, order, inverse), fast)
    torch.testing.assert_close(by_gathering, grown(plain[order // k], lambda y: y[inverse], plain))
