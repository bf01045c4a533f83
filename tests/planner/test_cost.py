"""Money and energy are their formulas."""

from __future__ import annotations

import pytest

from machines import machine
from twostroke.planner.cost import cost_of, crossover_tokens, energy_kwh, rent_usd, usd_per_million_tokens


def test_formulas_by_hand() -> None:
    assert energy_kwh(3600, 700, 1.2) == pytest.approx(0.84)
    assert rent_usd(1800, 3.0) == pytest.approx(1.5)
    assert usd_per_million_tokens(1000, 3.6) == pytest.approx(1.0)
    assert usd_per_million_tokens(1000, 3.6, utilisation=0.5) == pytest.approx(2.0)


def test_crossover_is_where_both_have_cost_the_same() -> None:
    tokens = crossover_tokens(10.0, 0.5)
    assert tokens / 1e6 * 0.5 == pytest.approx(10.0)


def test_cost_names_price_and_watts() -> None:
    cost = cost_of(3600, machine())
    record = cost.to_dict()
    assert record["usd"] == pytest.approx(cost.usd_per_hour.value)
    assert record["energy_usd"] == pytest.approx(record["energy_kwh"] * cost.electricity.value)
    for key in ("watts", "usd_per_hour", "electricity_usd_per_kwh"):
        assert record[key]["source"]
        assert record[key]["kind"]
