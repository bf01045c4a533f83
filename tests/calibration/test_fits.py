"""What calibration derives from whole steps: prices of native units, and what an adapter takes beyond its products."""

from __future__ import annotations

import dataclasses

import pytest

from machines import profile
from twostroke.calibration.adapter_rates import with_fitted_adapters
from twostroke.calibration.native_steps import Equation, least_squares_above_zero
from twostroke.core.rates import TrainingStep
from twostroke.planner.hardware.anchors import ADAPTER_ANCHOR, ADAPTER_RANK
from twostroke.planner.hardware.tables import hardware_from_profile
from twostroke.planner.training.plan import plan_training
from twostroke.planner.training.shape import TrainingShape

PRICES = {"step": 1e-4, "layer": 2e-5, "key": 1e-10}


def equation(step: float, layer: float, key: float, off: float = 1.0) -> Equation:
    units = {"step": step, "layer": layer, "key": key}
    rest = sum(PRICES[name] * count for name, count in units.items()) * off
    return Equation(2 * rest, rest, units)


STEPS = [equation(1, layers, keys) for layers in (2, 4, 8, 16) for keys in (1e4, 1e5, 1e6)]


def test_prices_that_made_the_steps_are_found() -> None:
    found = least_squares_above_zero(STEPS, tuple(PRICES))
    assert found == pytest.approx(PRICES, rel=1e-6)


def test_a_step_that_was_disturbed_does_not_bend_the_prices_of_the_others() -> None:
    disturbed = [*STEPS, equation(1, 8, 1e5, off=4.0)]
    found = least_squares_above_zero(disturbed, tuple(PRICES))
    assert found == pytest.approx(PRICES, rel=0.1)


def test_a_plan_of_the_adapters_anchor_takes_what_was_measured() -> None:
    anchor = ADAPTER_ANCHOR
    steps = tuple(
        TrainingStep(anchor.width, n, "bf16", "compiled", 0.01 + 0.02 * n, 0.02 + 0.03 * n, 0.001 * n, 9.0, method="lora")
        for n in (anchor.shallow, anchor.deep)
    )
    base = profile()
    made = dataclasses.replace(base, training=dataclasses.replace(base.training, steps=(*base.training.steps, *steps)))
    fitted = with_fitted_adapters(made)
    shape = TrainingShape(anchor.batch_size, anchor.sequence_length, method="lora", lora_rank=ADAPTER_RANK)
    specs = [anchor.spec(n) for n in (anchor.shallow, anchor.deep)]
    shallow, deep = (plan_training(spec, shape, hardware_from_profile(fitted)) for spec in specs)
    layers = anchor.deep - anchor.shallow
    assert deep.forward_s - shallow.forward_s == pytest.approx(0.02 * layers)
    assert deep.backward_s - shallow.backward_s == pytest.approx(0.03 * layers)
    assert deep.optimizer_s == pytest.approx(0.001 * anchor.deep)
    assert fitted.training.adapter_compile_s == pytest.approx(9.0 - steps[0].seconds)
    assert with_fitted_adapters(base) == base
