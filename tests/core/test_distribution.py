"""Percentiles against numpy's, and of values that are counted against the same values one by one."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.core.distribution import Distribution, percentile


def test_percentiles_interpolate_between_neighbours() -> None:
    assert [percentile([4, 1, 3, 2], p) for p in (0, 50, 90, 100)] == pytest.approx([1, 2.5, 3.7, 4])
    assert percentile([7.0], 99) == 7.0
    assert math.isnan(percentile([], 50))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_agree_with_numpy(values: list[float], percent: float) -> None:
    import numpy

    # Both interpolate in float64; the difference is rounding of the last operation.
    assert percentile(values, percent) == pytest.approx(numpy.percentile(values, percent), rel=1e-9, abs=1e-9)


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 7)), max_size=20))
def test_counted_values_are_so_many_equal_ones(counts: list[tuple[float, int]]) -> None:
    found = Distribution.of_counted(counts)
    expected = Distribution.of([value for value, n in counts for _ in range(n)])
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(expected), rel=1e-9, abs=1e-6, nan_ok=True)


def test_a_later_distribution_has_its_seconds_more() -> None:
    found = Distribution.of([1.0, 2.0, 4.0]).later(0.5)
    assert found == Distribution.of([1.5, 2.5, 4.5])
    assert math.isnan(Distribution.of([]).later(1.0).mean)
