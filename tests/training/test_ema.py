from __future__ import annotations

import pytest
import torch

from twostroke.core.errors import CorruptFileError
from twostroke.core.spec import ModelSpec
from twostroke.core.train_settings import TrainSettings
from twostroke.model.decoder import Decoder
from twostroke.training.ema import WeightAverage
from twostroke.training.optimizers import Optimizers
from twostroke.training.precision import MasterWeights

SPEC = ModelSpec("llama", 40, 1, 16, 4, 2, 4, 24, 32)


def test_it_is_the_average_written_out() -> None:
    weight = torch.tensor([1.0, -2.0])
    average = WeightAverage({"w": weight}, 0.9)
    expected = weight.double().clone()
    for update in range(1, 201):
        weight.add_(torch.tensor([0.01, 0.03]))
        average.update()
        share = min(0.9, update / (update + 9))
        expected = share * expected + (1 - share) * weight.double()
    torch.testing.assert_close(average.averages["w"].double(), expected, rtol=1e-5, atol=0)  # fp32 over 200 updates
    # of a straight line, an average with decay d lags d/(1 − d) steps: nothing is left of where the weights began
    assert average.averages["w"][0].item() == pytest.approx(1.0 + 0.01 * (200 - 9), rel=1e-3)


def test_an_average_of_bf16_weights_is_kept_in_fp32() -> None:
    weight = torch.ones(4, dtype=torch.bfloat16)
    average = WeightAverage({"w": weight}, 0.999)
    weight.fill_(2.0)
    for _ in range(2000):
        average.update()
    assert average.averages["w"].dtype == torch.float32
    assert average.bytes == 16
    assert 1.8 < average.averages["w"][0].item() <= 2.0


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "pure_bf16"])
def test_the_decoder_shows_the_average_and_then_its_own_weights_again(dtype: str) -> None:
    decoder = Decoder(SPEC)
    masters = MasterWeights.of(decoder, dtype)
    optimizers = Optimizers(masters, SPEC, TrainSettings(steps=5, learning_rate=0.1, dtype=dtype, ema_decay=0.5))  # type: ignore[arg-type]
    assert optimizers.average is not None
    for gradient in masters.gradients.values():
        gradient.fill_(1.0)
    optimizers.step(1.0)
    masters.update_working_copy()
    own = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    with optimizers.average.swapped_into(masters):
        for name, parameter in decoder.named_parameters():
            assert torch.equal(parameter, optimizers.average.averages[name].to(parameter.dtype))
            assert not torch.equal(parameter, own[name])
    assert all(torch.equal(parameter, own[name]) for name, parameter in decoder.named_parameters())


def test_state_restores_it_bit_for_bit_and_must_be_there() -> None:
    settings = TrainSettings(steps=5, learning_rate=0.1, ema_decay=0.9)
    made = [MasterWeights.of(Decoder(SPEC), "fp32") for _ in range(2)]
    first, second = (Optimizers(masters, SPEC, settings) for masters in made)
    for _ in range(3):
        first.step(1.0)
    second.load_state({key: value.clone() for key, value in first.state().items()})
    made[1].load(made[0].weights)
    for optimizers in (first, second):
        optimizers.step(1.0)
    assert first.average is not None
    assert second.average is not None
    assert first.average.updates == second.average.updates == 4
    assert all(torch.equal(a, second.average.averages[name]) for name, a in first.average.averages.items())
    without = {key: value for key, value in first.state().items() if not key.startswith("ema::")}
    with pytest.raises(CorruptFileError, match="lacks 'ema'"):
        second.load_state(without)
