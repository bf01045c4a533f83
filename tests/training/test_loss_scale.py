from __future__ import annotations

import pytest
import torch

from twostroke.core.spec import ModelSpec
from twostroke.core.train_settings import TrainSettings
from twostroke.data.loader import Batch
from twostroke.model.decoder import Decoder
from twostroke.training import loss_scale
from twostroke.training.clock import StepClock
from twostroke.training.loss_scale import FIRST_SCALE, DynamicLossScale
from twostroke.training.optimizers import Optimizers
from twostroke.training.precision import MasterWeights
from twostroke.training.step import StepResult, TrainStep

SPEC = ModelSpec("llama", 50, 2, 32, 4, 2, 8, 48, 64)


def _batch(seed: int = 1) -> Batch:
    tokens = torch.randint(1, 50, (2, 25), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(24).expand(2, 24).contiguous()
    return Batch(tokens[:, :-1], tokens[:, 1:], positions, torch.zeros(2, 24, dtype=torch.int32), 48)


class _Run:
    def __init__(self, dtype: str = "fp16") -> None:
        self.lines: list[str] = []
        decoder = Decoder(SPEC).train()
        self.masters = MasterWeights.of(decoder, dtype)
        self.optimizers = Optimizers(self.masters, SPEC, TrainSettings(steps=9, learning_rate=1e-3))
        self.step = TrainStep(decoder, self.masters, self.optimizers, 1e9, False, self.lines.append)
        self.clock = StepClock(torch.device("cpu"))

    def run(self, batch: Batch) -> StepResult:
        return self.step([batch], 1.0, self.clock)

    @property
    def scaler(self) -> DynamicLossScale:
        assert self.optimizers.loss_scale is not None
        return self.optimizers.loss_scale


def test_steps_in_fp16_are_those_in_fp32_up_to_its_rounding() -> None:
    half, single = _Run("fp16"), _Run("fp32")
    for seed in range(3):
        found, expected = half.run(_batch(seed)), single.run(_batch(seed))
        # fp16 rounds each of some ten operations in a row by 2⁻¹¹
        assert found.loss == pytest.approx(expected.loss, rel=5e-3)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-2)
        assert found.block_grad_norms["blocks.1"] == pytest.approx(expected.block_grad_norms["blocks.1"], rel=1e-2)
    assert half.step.decoder.embed.weight.dtype == torch.float16
    assert all(weight.dtype == torch.float32 for weight in half.masters.weights.values())


def test_an_overflow_halves_the_scale_and_the_step_is_taken_all_the_same() -> None:
    run, calm = _Run(), _Run()
    run.scaler.scale = 2.0**24 * 2**8  # far above what fp16 bears
    result, expected = run.run(_batch()), calm.run(_batch())
    assert result.skipped is None
    assert run.scaler.scale < 2.0**32
    assert "loss scale of" in run.lines[0]
    assert result.loss == expected.loss
    # scales are powers of two, but where gradients reach down to fp16's smallest numbers they round otherwise
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-2)
    for name, weight in run.masters.weights.items():
        torch.testing.assert_close(weight, calm.masters.weights[name], rtol=0, atol=2e-3)  # AdamW's first step: ±rate


def test_a_loss_that_is_not_finite_is_no_matter_of_the_scale() -> None:
    run = _Run()
    run.masters.weights["blocks.0.mlp.down.weight"][0, 0] = float("nan")
    run.masters.update_working_copy()
    result = run.run(_batch())
    assert result.skipped == "loss is nan"
    assert run.scaler.scale == FIRST_SCALE


def test_gradients_that_overflow_by_themselves_are_an_anomaly(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _Run()
    before = {name: weight.clone() for name, weight in run.masters.weights.items()}
    accumulate = run.masters.accumulate

    def accumulate_infinity() -> None:
        accumulate()
        run.masters.gradients["final_norm.weight"][0] = float("inf")

    monkeypatch.setattr(run.masters, "accumulate", accumulate_infinity)
    result = run.run(_batch())
    assert result.skipped == "gradient norm is inf"
    assert run.scaler.scale == 1.0
    assert all(torch.equal(before[name], weight) for name, weight in run.masters.weights.items())


def test_small_gradients_survive_by_the_scale() -> None:
    """Gradients of a model whose loss moves little lie below 6·10⁻⁸, where fp16 ends."""
    norms = {}
    for scale in (1.0, FIRST_SCALE):
        run = _Run()
        run.scaler.scale = scale
        step = run.step
        total = step.forward_backward(_batch(), 1e-7 * scale, run.clock)
        assert total > 0
        run.masters.accumulate()
        norms[scale] = torch.stack([g.norm() for g in run.masters.gradients.values()]).norm().item() / scale
    single = _Run("fp32")
    single.step.forward_backward(_batch(), 1e-7, single.clock)
    expected = torch.stack([g.norm() for g in single.masters.gradients.values()]).norm().item()
    assert norms[FIRST_SCALE] == pytest.approx(expected, rel=1e-2)
    assert norms[1.0] != pytest.approx(expected, rel=1e-2)


def test_the_scale_grows_after_good_steps_and_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "GROWTH_STEPS", 3)
    scale = DynamicLossScale()
    scale.halve()
    for _ in range(2):
        scale.count_good_step()
    other = DynamicLossScale()
    other.load_state(scale.state())
    for each in (scale, other):
        each.count_good_step()
        assert each.scale == FIRST_SCALE
    for _ in range(100):
        scale.count_good_step()
    assert scale.scale == loss_scale.LARGEST_SCALE
    while scale.halve():
        pass
    assert scale.scale == 1.0


def test_state_with_and_without_a_scale_do_not_mix() -> None:
    half, single = _Run("fp16"), _Run("fp32")
    half.run(_batch())
    single.run(_batch())
    assert "scaler::scale" in half.optimizers.state()
    with pytest.raises(Exception, match="holds 'scaler'"):
        single.optimizers.load_state(half.optimizers.state())
    with pytest.raises(Exception, match="lacks 'scaler'"):
        half.optimizers.load_state(single.optimizers.state())
