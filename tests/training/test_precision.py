from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from twostroke.training.precision import MasterWeights


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.linspace(1, 2, 12).view(3, 4))
        self.b = nn.Parameter(torch.ones(4))

    def loss(self) -> Tensor:
        return (self.a.float().sum(0) * self.b.float()).sum()


def test_with_fp32_compute_the_parameters_are_the_masters() -> None:
    model = _Two()
    masters = MasterWeights(model, torch.float32)
    masters.weights["a"].add_(1.0)
    assert torch.equal(model.a, masters.weights["a"])
    assert not masters.has_working_copy


def test_with_bf16_compute_updates_below_its_resolution_add_up() -> None:
    model = _Two()
    masters = MasterWeights(model, torch.bfloat16)
    before = model.b.detach().clone()
    for _ in range(100):  # 100 · 10⁻⁴, each less than half of bf16's 2⁻⁷ above 1
        masters.weights["b"].add_(1e-4)
        masters.update_working_copy()
    assert model.b.dtype == torch.bfloat16
    assert torch.all(model.b > before)
    assert torch.allclose(masters.weights["b"], torch.full((4,), 1.01), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_micro_batches_add_up_in_fp32(dtype: torch.dtype) -> None:
    model = _Two()
    masters = MasterWeights(model, dtype)
    for _ in range(2):  # the second window must not see the first one's
        masters.zero_gradients()
        for scale in (1.0, 1e-3):  # in bf16 the second would vanish beside the first
            (model.loss() * scale).backward()
            masters.accumulate()
    expected = model.a.detach().float().sum(0)
    # fp32 sums; each bf16 gradient is rounded once, to 2⁻⁹ of itself
    tolerance = 1e-6 if dtype == torch.float32 else 2**-9
    torch.testing.assert_close(masters.gradients["b"], expected * 1.001, rtol=tolerance, atol=0)
    assert masters.gradients["b"].dtype == torch.float32


def test_a_parameter_that_took_no_part_has_a_gradient_of_zero() -> None:
    model = _Two()
    masters = MasterWeights(model, torch.bfloat16)
    model.loss().backward()
    masters.accumulate()
    masters.zero_gradients()
    model.a.float().sum().backward()
    masters.accumulate()
    assert torch.all(masters.gradients["b"] == 0)
    assert torch.all(masters.gradients["a"] == 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_weights_reach_the_working_copy(dtype: torch.dtype) -> None:
    model = _Two()
    masters = MasterWeights(model, dtype)
    fresh = {name: torch.full_like(weight, 3.0) for name, weight in masters.weights.items()}
    masters.load(fresh)
    assert all(torch.all(p == 3) for p in model.parameters())
    assert all(masters.weights[name] is not fresh[name] for name in fresh)


def test_pure_bf16_keeps_nothing_in_fp32() -> None:
    model = _Two()
    masters = MasterWeights.of(model, "pure_bf16")
    assert not masters.has_working_copy
    assert {t.dtype for t in (*masters.weights.values(), *masters.gradients.values(), *model.parameters())} == {torch.bfloat16}
    assert model.a.data_ptr() == masters.weights["a"].data_ptr()
    model.loss().backward()
    masters.accumulate()
    assert torch.all(masters.gradients["a"] == 1)
    masters.load({"a": torch.full((3, 4), 3.0), "b": torch.full((4,), 5.0)})
    assert torch.all(model.b == 5)


def test_a_frozen_parameter_computes_in_the_type_of_the_rest() -> None:
    for dtype, computes in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        model = _Two()
        model.a.requires_grad_(False)
        masters = MasterWeights.of(model, dtype)
        assert list(masters.weights) == ["b"]
        assert model.a.dtype == model.b.dtype == computes
    model = _Two()
    model.a.requires_grad_(False)
    assert MasterWeights.of(model, "pure_bf16").frozen_bytes == 12 * 2
    assert model.a.dtype == torch.bfloat16


def test_masters_are_not_taken_from_rounded_weights() -> None:
    with pytest.raises(TypeError, match="bfloat16"):
        MasterWeights(_Two().to(torch.bfloat16), torch.bfloat16)


def test_bytes_are_those_of_the_tensors() -> None:
    assert MasterWeights(_Two(), torch.float32).weights_bytes == 16 * 4
    masters = MasterWeights(_Two(), torch.bfloat16)
    assert masters.weights_bytes == masters.gradients_bytes == 16 * (4 + 2)
    pure = MasterWeights.of(_Two(), "pure_bf16")
    assert pure.weights_bytes == pure.gradients_bytes == 16 * 2
