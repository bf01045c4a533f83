"""The hashed dropout drops as many elements as it should, independently, and repeats itself under a restored generator."""

from __future__ import annotations

import pytest
import torch

from twostroke.kernels.dropout import dropout

DRAWS, ELEMENTS = 400, 4096


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
def test_the_share_that_is_kept_is_within_five_deviations(p: float) -> None:
    torch.manual_seed(1)
    n = 1_000_000
    kept = int((dropout(torch.ones(n), p) != 0).sum())
    assert abs(kept - n * (1 - p)) < 5 * (n * p * (1 - p)) ** 0.5


def test_each_place_is_kept_equally_often_over_draws() -> None:
    torch.manual_seed(2)
    kept = torch.stack([(dropout(torch.ones(ELEMENTS), 0.3) != 0).float() for _ in range(DRAWS)])
    deviation = (0.3 * 0.7 / DRAWS) ** 0.5
    off = (kept.mean(0) - 0.7) / deviation
    assert float(off.abs().max()) < 5.5  # of 4,096 normal numbers the largest exceeds 5 once in 400 times
    assert 0.9 < float(off.std()) < 1.1


@pytest.mark.parametrize("apart", [1, 2, 16, 64, 1024])
def test_neighbours_are_dropped_independently(apart: int) -> None:
    torch.manual_seed(3)
    kept = torch.stack([(dropout(torch.ones(ELEMENTS), 0.3) != 0).float() for _ in range(DRAWS)]) - 0.7
    covariance = float((kept[:, apart:] * kept[:, :-apart]).mean()) / (0.3 * 0.7)
    assert abs(covariance) < 5 / (DRAWS * (ELEMENTS - apart)) ** 0.5


def test_draws_are_independent_of_each_other() -> None:
    torch.manual_seed(4)
    kept = torch.stack([(dropout(torch.ones(ELEMENTS), 0.5) != 0).float() for _ in range(DRAWS)])
    correlation = torch.corrcoef(kept) - torch.eye(DRAWS)
    assert float(correlation.abs().max()) < 6 / ELEMENTS**0.5


def test_a_restored_generator_repeats_the_mask_and_another_state_does_not() -> None:
    state = torch.get_rng_state()
    first, second = dropout(torch.ones(1000), 0.5), dropout(torch.ones(1000), 0.5)
    torch.set_rng_state(state)
    assert torch.equal(dropout(torch.ones(1000), 0.5), first)
    assert not torch.equal(first, second)


def test_what_is_kept_is_scaled_and_has_the_same_gradient() -> None:
    x = torch.full((64, 64), 2.0, requires_grad=True)
    y = dropout(x, 0.25)
    y.sum().backward()
    assert sorted(y.unique().tolist()) == pytest.approx([0.0, 2.0 / 0.75])
    assert x.grad is not None
    assert torch.allclose(x.grad, y.detach() / 2.0)


def test_outside_of_training_and_at_zero_nothing_is_drawn() -> None:
    x, state = torch.randn(8), torch.get_rng_state()
    assert dropout(x, 0.5, training=False) is x
    assert dropout(x, 0.0) is x
    assert torch.equal(torch.get_rng_state(), state)
