from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from twostroke.core.policy import loss_chunk_rows
from twostroke.planner.training.memory import EAGER_LOGITS
from twostroke.training.loss import IGNORE_INDEX, chunk_loss, chunked_cross_entropy


def _inputs(n: int = 37, width: int = 16, vocabulary: int = 61, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, width, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=generator) / 4).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (n,), generator=generator)
    targets[::5] = IGNORE_INDEX
    return hidden, weight, targets


def _plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum", ignore_index=IGNORE_INDEX)


@pytest.mark.parametrize("chunk_rows", [1, 4, 10, 36, 37, 1000])
def test_value_and_gradients_are_those_of_plain_cross_entropy(chunk_rows: int) -> None:
    hidden, weight, targets = _inputs()
    # 1e-5: the same fp32 sums in another order.
    expected = _plain(hidden, weight, targets)
    expected_gradients = torch.autograd.grad(expected * 0.25, (hidden, weight))
    loss = chunked_cross_entropy(hidden, weight, targets, chunk_rows)
    gradients = torch.autograd.grad(loss * 0.25, (hidden, weight))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_bf16_gradients_are_about_as_near_to_fp32_as_plain_bf16_ones() -> None:
    hidden, weight, targets = _inputs(n=256, width=64, vocabulary=128, dtype=torch.bfloat16)
    exact = torch.autograd.grad(
        _plain(hidden.detach().float().requires_grad_(), (w := weight.detach().float().requires_grad_()), targets), w
    )[0]
    plain = torch.autograd.grad(_plain(hidden, weight, targets), weight)[0].float()
    chunked = torch.autograd.grad(chunked_cross_entropy(hidden, weight, targets, 64), weight)[0].float()
    # Both round the logits and the result to bf16; here each chunk's product is rounded too: √2 times the error at most.
    assert (chunked - exact).norm() <= 1.45 * (plain - exact).norm()


def test_a_row_without_a_target_has_no_gradient() -> None:
    hidden, weight, targets = _inputs()
    (gradient,) = torch.autograd.grad(chunked_cross_entropy(hidden, weight, targets, 8), hidden)
    assert torch.all(gradient[targets == IGNORE_INDEX] == 0)
    assert torch.all(gradient[targets != IGNORE_INDEX].abs().sum(-1) > 0)


def test_rows_without_any_target_cost_nothing() -> None:
    hidden, weight, targets = _inputs()
    loss = chunked_cross_entropy(hidden, weight, torch.full_like(targets, IGNORE_INDEX), 8)
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad is not None
    assert torch.all(hidden.grad == 0)


class _LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


class _MostAlive(TorchDispatchMode):
    """The most bytes of tensors made meanwhile that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.most = 0, 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {a.untyped_storage()._cdata for a in args if isinstance(a, Tensor)}
        for tensor in result if isinstance(result, tuple | list) else (result,):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._known or key in given:  # a view
                continue
            self._known[key] = storage.nbytes()
            self.alive += storage.nbytes()
            self.most = max(self.most, self.alive)
            weakref.finalize(storage, self._gone, key)
        return result

    def _gone(self, key: int) -> None:
        self.alive -= self._known.pop(key)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_eager_chunk_holds_what_the_planner_counts_of_it(dtype: torch.dtype) -> None:
    n, vocabulary = 64, 512
    hidden, weight, targets = _inputs(n, 8, vocabulary, dtype)
    with torch.no_grad(), _MostAlive() as tensors:
        chunk_loss(hidden, weight, targets)
    counted = n * vocabulary * (4 * EAGER_LOGITS + 1)
    assert counted <= tensors.most <= 1.02 * counted  # rows and the numbers of the vocabulary beside them


def test_no_more_than_one_chunk_of_logits_ever_exists() -> None:
    hidden, weight, targets = _inputs(n=64, width=8, vocabulary=100)
    with _LargestTensor() as largest:
        chunked_cross_entropy(hidden, weight, targets, 16).backward()
    assert largest.elements == 16 * 100
    with _LargestTensor() as largest:
        _plain(hidden, weight, targets).backward()
    assert largest.elements == 64 * 100


def test_without_gradients_only_the_loss_is_computed() -> None:
    hidden, weight, targets = _inputs()
    with torch.no_grad():
        loss = chunked_cross_entropy(hidden, weight, targets, 8)
    torch.testing.assert_close(loss, _plain(hidden, weight, targets).detach(), rtol=1e-5, atol=1e-5)


def test_laps_tell_forward_from_backward() -> None:
    hidden, weight, targets = _inputs(n=20)
    laps: list[str] = []
    chunked_cross_entropy(hidden, weight, targets, 10, lap=laps.append)
    assert laps == ["forward", "backward", "forward", "backward"]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 100_000), st.integers(2, 4096))
def test_chunks_are_of_one_size_where_a_divisor_is_near(n_rows: int, preferred: int) -> None:
    rows = loss_chunk_rows(n_rows, preferred)
    assert 1 <= rows <= max(preferred, 1)
    if any(n_rows % r == 0 for r in range(preferred // 2 + 1, preferred + 1)) or n_rows <= preferred:
        assert n_rows % rows == 0
