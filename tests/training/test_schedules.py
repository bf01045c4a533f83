from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.core.errors import ConfigError
from twostroke.training.schedules import learning_rate_factor, warmup_steps

SCHEDULES = ("cosine", "linear", "constant")


def _factors(schedule: str, steps: int, warmup: float, ratio: float) -> list[float]:
    return [learning_rate_factor(step, steps, schedule, warmup, ratio) for step in range(steps)]


@given(st.sampled_from(SCHEDULES), st.integers(1, 300), st.floats(0, 0.99), st.floats(0, 0.99))
def test_rises_to_one_then_never_rises_and_never_falls_below_the_minimum(
    schedule: str, steps: int, warmup: float, ratio: float
) -> None:
    factors = _factors(schedule, steps, warmup, ratio)
    warm = warmup_steps(steps, warmup)
    assert factors[:warm] == sorted(factors[:warm])
    assert factors[warm:] == sorted(factors[warm:], reverse=True)
    assert max(factors) == pytest.approx(1)
    assert min(factors[warm:]) >= ratio - 1e-12
    assert all(factor > 0 for factor in factors[:warm])


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_last_step_is_at_the_minimum(schedule: str) -> None:
    assert _factors(schedule, 100, 0.05, 0.02)[-1] == pytest.approx(0.02)


def test_warm_up_is_linear() -> None:
    assert _factors("cosine", 10, 0.4, 0.1)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_half_way_cosine_and_linear_are_between_the_ends() -> None:
    for schedule in ("cosine", "linear"):
        assert learning_rate_factor(50, 101, schedule, 0.0, 0.2) == pytest.approx(0.6)


def test_constant_stays() -> None:
    assert set(_factors("constant", 50, 0.0, 0.02)) == {1.0}


def test_an_unknown_schedule_is_named() -> None:
    with pytest.raises(ConfigError, match="'triangle' is not known"):
        learning_rate_factor(5, 10, "triangle", 0.0, 0.1)
