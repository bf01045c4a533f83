from __future__ import annotations

import pytest
import torch

from twostroke.core.spec import ModelSpec
from twostroke.core.train_settings import TrainSettings
from twostroke.model.decoder import Decoder
from twostroke.training import stochastic_rounding
from twostroke.training.optimizers import Optimizers
from twostroke.training.precision import MasterWeights
from twostroke.training.stochastic_rounding import Noise, round_stochastically

SPEC = ModelSpec("llama", 40, 2, 16, 4, 2, 4, 24, 32)
CPU = torch.device("cpu")


def _rounded(value: float, n: int, update: int = 1) -> torch.Tensor:
    noise = Noise(CPU)
    noise.begin(update, "a")
    target = torch.empty(n, dtype=torch.bfloat16)
    round_stochastically(target, torch.full((n,), value), noise.take(n))
    return target.double()


@pytest.mark.parametrize("value", [1.001, -1.001, 0.0037, -3e-5, 123.4])
def test_a_number_becomes_one_of_its_neighbours_and_itself_on_average(value: float) -> None:
    n = 200_000
    found = _rounded(value, n)
    cut = torch.tensor(value).view(torch.int32).bitwise_and(-(2**16))
    neighbours = sorted(t.view(torch.float32).item() for t in (cut, cut + 2**16))
    assert found.unique().tolist() == neighbours
    # the mean of n numbers that are one of two: four standard errors of at most half their distance/√n
    assert abs(found.mean().item() - value) < 4 * (neighbours[1] - neighbours[0]) / 2 / n**0.5


def test_a_number_that_bf16_holds_is_kept() -> None:
    for value in (0.0, 1.0, -0.5, 3.140625):
        assert _rounded(value, 1000).unique().tolist() == [value]


def test_noise_is_that_of_the_update_and_differs_between_updates() -> None:
    assert torch.equal(_rounded(1.001, 5000, 3), _rounded(1.001, 5000, 3))
    same = (_rounded(1.001, 50_000, 3) == _rounded(1.001, 50_000, 4)).double().mean().item()
    p = 0.001 / 2**-7
    assert same == pytest.approx(p * p + (1 - p) ** 2, abs=0.02)  # independent draws; 50,000 of them: ±0.01


def test_rounding_of_one_element_over_time_is_unbiased() -> None:
    noise = Noise(CPU)
    target, total = torch.empty(64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.float64)
    for update in range(2000):
        noise.begin(update, "a")
        round_stochastically(target, torch.full((64,), 1.003), noise.take(64))
        total += target.double()
    # 64 elements, each the mean of 2,000: five standard errors of at most 2⁻⁸/√2000
    assert (total / 2000 - 1.003).abs().max() < 5 * 2**-8 / 2000**0.5


def test_more_numbers_than_the_table_holds_are_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stochastic_rounding, "_TABLE", 1000)
    assert Noise(CPU).take(2500).shape == (2500,)


def _pure(optimizer: str, **changes: object) -> tuple[MasterWeights, Optimizers]:
    settings = TrainSettings(steps=10, optimizer=optimizer, dtype="pure_bf16", learning_rate=1e-3, **changes)  # type: ignore[arg-type]
    masters = MasterWeights.of(Decoder(SPEC), "pure_bf16")
    return masters, Optimizers(masters, SPEC, settings)


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "muon", "lamb"])
def test_steps_over_bf16_are_the_fp32_ones_rounded(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stochastic_rounding, "PIECE", 100)  # so that most parameters are cut, none of them evenly
    masters, optimizers = _pure(optimizer)
    exact = MasterWeights(Decoder(SPEC), torch.float32)
    exact.load({name: weight.float() for name, weight in masters.weights.items()})
    reference = Optimizers(exact, SPEC, TrainSettings(steps=10, optimizer=optimizer, learning_rate=1e-3))
    generator = torch.Generator().manual_seed(0)
    for name, gradient in masters.gradients.items():
        gradient.normal_(generator=generator)
        exact.gradients[name].copy_(gradient)
    optimizers.step(1.0)
    reference.step(1.0)
    for name, weight in masters.weights.items():
        # one rounding, to one of the two neighbours: less than 2⁻⁷ of the value
        torch.testing.assert_close(weight.float(), exact.weights[name], rtol=2**-7, atol=1e-9, msg=name)
    for key, value in reference.state().items():
        found = optimizers.state()[key]
        assert found.dtype == (torch.bfloat16 if value.dim() else value.dtype)
        torch.testing.assert_close(found.float(), value, rtol=2**-7, atol=1e-9, msg=key)


def test_updates_below_bf16s_resolution_arrive_on_average() -> None:
    masters, optimizers = _pure("sgd", momentum=0.0, weight_decay=0.0)
    weight = masters.weights["embed.weight"]
    weight.fill_(1.0)
    nearest = weight.clone()
    for _ in range(200):
        masters.gradients["embed.weight"].fill_(-0.1)  # 10⁻⁴ an update, a thirtieth of what lies half-way to the next number
        optimizers.step(1.0)
        nearest += 1e-4
    assert torch.all(nearest == 1.0)
    # 640 elements, each after 200 coin throws of one in 78 for a step of 2⁻⁷: the mean's standard error is 0.0005
    assert weight.float().mean().item() == pytest.approx(1.02, abs=0.002)


def test_state_of_pure_bf16_takes_two_bytes_an_element_and_restores_bit_for_bit() -> None:
    first, trained = _pure("adamw", ema_decay=0.9)
    second, fresh = _pure("adamw", ema_decay=0.9)
    for seed in range(3):
        for gradient in first.gradients.values():
            gradient.normal_(generator=torch.Generator().manual_seed(seed))
        trained.step(0.5)
    n, n_weights = sum(w.numel() for w in first.weights.values()), len(first.weights)
    assert trained.state_bytes == n * (2 + 2 + 4) + 4 * n_weights  # two moments, the average, a count of steps a weight
    assert first.weights_bytes == first.gradients_bytes == 2 * n
    second.load(first.weights)
    fresh.load_state({key: value.clone() for key, value in trained.state().items()})
    for masters, optimizers in ((first, trained), (second, fresh)):
        for gradient in masters.gradients.values():
            gradient.normal_(generator=torch.Generator().manual_seed(9))
        optimizers.step(0.7)
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)
    assert trained.state().keys() == fresh.state().keys()
    assert all(torch.equal(value, fresh.state()[key]) for key, value in trained.state().items())
