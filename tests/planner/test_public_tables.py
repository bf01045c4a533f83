"""The stored efficiencies are what public measured tables give, and hold for models that a fit has not seen."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import pytest

from scripts import script
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.serving.step_time import efficiencies, efficiencies_table


@pytest.fixture(scope="module")
def fit() -> ModuleType:
    return script("planner/public_tables/fit.py")


@pytest.fixture(scope="module")
def dense(fit: ModuleType, assets: Path) -> list[Any]:
    rows, left_out = fit.read_rows(assets)
    assert len(rows) + sum(left_out.values()) == 1972
    return [r for r in rows if r.dense and r.mode == "agg"]


@pytest.fixture(scope="module")
def expected(fit: ModuleType, assets: Path) -> Any:
    return fit.priors(fit.vidur_shares(assets, "h100", load_hardware("h100")))


def test_the_stored_constants_are_the_fitted_ones(fit: ModuleType, dense: list[Any], expected: Any) -> None:
    of = fit.constants(fit.fit(dense, expected), [p.name for p in expected])
    for engine in fit.ENGINES:
        for system, device in fit.SYSTEMS.items():
            fitted, stored = of(engine, system), efficiencies(engine, device)
            for name in fit.NAMES:
                # the fit stops where its cost moves by less than a ten-thousandth; four digits are stored
                assert getattr(stored, name) == pytest.approx(getattr(fitted, name), rel=0.02), (engine, device, name)


def test_models_that_a_fit_has_not_seen_are_predicted_within_nine_percent(
    fit: ModuleType, dense: list[Any], expected: Any
) -> None:
    """Median error of dense decode TPOT without the row's model: at most 9% on H100 and H200, and as ``plan serve`` says."""
    unseen = fit.held_out(dense, lambda r: r.model, expected, None)
    for system in ("h100_sxm", "h200_sxm"):
        error = median(abs(unseen[r.id] / r.tpot_s - 1) for r in dense if r.system == system)
        assert error <= 0.09
        assert efficiencies_table()["unseen_model_error"][fit.SYSTEMS[system]] == pytest.approx(error, abs=0.005)


def test_rows_of_one_architecture_are_held_out_together(dense: list[Any]) -> None:
    checkpoints = {(r.model, r.precision) for r in dense if r.model == "Llama-3.1-8B"}
    assert len(checkpoints) == 2  # bf16 and fp8: neither may tell of the other
