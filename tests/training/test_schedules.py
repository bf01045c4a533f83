from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.core.errors import ConfigError
from twostroke.core.train_settings import TrainSettings
from twostroke.training.schedules import learning_rate_factor, scheduled_factor, warmup_steps

SCHEDULES = ("cosine", "linear", "constant", "wsd")


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


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
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


def _transformers(schedule: str, steps: int, warm: int, ratio: float, decay: int) -> list[float]:
    """The factor that transformers' scheduler gives at each step from 0 to ``steps``."""
    import torch
    from transformers import optimization

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    made = {
        "constant": lambda: optimization.get_constant_schedule_with_warmup(optimizer, warm),
        "linear": lambda: optimization.get_linear_schedule_with_warmup(optimizer, warm, steps),
        "cosine": lambda: optimization.get_cosine_with_min_lr_schedule_with_warmup(optimizer, warm, steps, min_lr_rate=ratio),
        "wsd": lambda: optimization.get_wsd_schedule(
            optimizer, warm, decay, num_training_steps=steps, min_lr_ratio=ratio, decay_type="1-sqrt"
        ),
    }[schedule]()
    found = []
    for _ in range(steps + 1):
        found.append(made.get_last_lr()[0])
        optimizer.step()
        made.step()
    return found


@pytest.mark.parametrize(
    ("schedule", "ratio"), [("constant", 0.0), ("linear", 0.0), ("cosine", 0.1), ("wsd", 0.1), ("wsd", 0.0)]
)
def test_transformers_gives_the_same_but_for_where_it_counts_from(schedule: str, ratio: float) -> None:
    """Theirs spends its first step on 0 (on the minimum in wsd); ours begins at 1/w. Ours reaches the minimum in the
    last step, their cosine and line only after it."""
    steps, warm, decay = 60, 6, 12
    ours = [learning_rate_factor(step, steps, schedule, warm / steps, ratio, decay / steps) for step in range(steps)]
    if schedule != "wsd" or ratio == 0:
        assert ours[:warm] == pytest.approx(_transformers(schedule, steps, warm, ratio, decay)[1 : warm + 1])
    if schedule == "wsd":
        assert ours[warm:] == pytest.approx(_transformers(schedule, steps, warm, ratio, decay)[warm + 1 :])
    else:
        assert ours[warm:] == pytest.approx(_transformers(schedule, steps - 1, warm, ratio, decay)[warm:])


def test_wsd_stays_until_its_decay_and_ends_at_the_minimum() -> None:
    factors = _factors("wsd", 100, 0.05, 0.02)
    assert factors[5:80] == [1.0] * 75
    assert factors[80] == pytest.approx(0.02 + 0.98 * (1 - (1 / 20) ** 0.5))
    assert factors[84] == pytest.approx(0.02 + 0.98 * 0.5)
    assert factors[-1] == pytest.approx(0.02)


def test_settings_give_the_same_factor_as_their_numbers() -> None:
    settings = TrainSettings(steps=40, schedule="wsd", decay_fraction=0.5, warmup_fraction=0.1, min_lr_ratio=0.3)
    assert [scheduled_factor(settings, s, 40) for s in range(40)] == [
        learning_rate_factor(s, 40, "wsd", 0.1, 0.3, 0.5) for s in range(40)
    ]
