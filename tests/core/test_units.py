"""Numbers for people."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from twostroke.core.units import (
    format_bytes,
    format_count,
    format_energy,
    format_mass,
    format_money,
    format_parameters,
    format_seconds,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (2**30 * 1.25, "1.25 GiB"), (1010 * 2**20, "1010 MiB"), (2**40, "1 TiB")],
)
def test_bytes(value: float, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (4.2e-4, "420 µs"),
        (0.25, "250 ms"),
        (59, "59 s"),
        (93, "1 min 33 s"),
        (3700, "1 h 1 min"),
        (90000, "1 d 1.0 h"),
        (1e6, "11.6 d"),
        (1e9, "11,574 d"),
        (-2, "-2 s"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert format_seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(12.2e6, "12.2M"), (999, "999"), (1e12, "1T"), (0.5, "0.5")])
def test_counts(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "$0"), (1.5, "$1.50"), (12345, "$12,345"), (0.0012, "$0.0012"), (3e-7, "$3.00e-07")]
)
def test_money(value: float, text: str) -> None:
    assert format_money(value) == text


@pytest.mark.parametrize("show", [format_bytes, format_seconds, format_count, format_energy, format_mass])
def test_what_rounds_to_a_thousand_has_no_exponent(show: Callable[[float], str]) -> None:
    for bound in (1e-6, 1e-3, 1.0, *(1000.0**n * 1024**m for n in range(1, 5) for m in range(5))):
        for value in (0.9994 * bound, 0.9996 * bound, bound, 999.6 * bound):
            assert "e+" not in show(value)


def test_energy_and_mass_are_shown_in_units_that_need_no_exponent() -> None:
    assert [format_energy(kwh) for kwh in (20_300.0, 12.0, 0.0012, 4.9e-5)] == ["20,300 kWh", "12 kWh", "1.2 Wh", "49 mWh"]
    assert [format_mass(kg) for kg in (15.6, 0.0012, 2.2e-5)] == ["15.6 kg", "1.2 g", "22 mg"]


def test_parameters_are_counted_as_models_are_called() -> None:
    assert [format_parameters(n) for n in (8_030_261_248, 1_026_408_232_448, 596_049_920)] == ["8.03B", "1.03T", "596M"]
