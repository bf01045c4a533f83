"""The size from which all threads are worth it."""

from __future__ import annotations

import math

import pytest

from twostroke.calibration.thread_limits import NO_FASTER, last_no_faster

LESS, MORE = NO_FASTER - 0.1, NO_FASTER + 0.1


@pytest.mark.parametrize(
    ("gains", "limit"),
    [
        ([(10.0, LESS), (1000.0, MORE)], 100.0),
        ([(1000.0, MORE), (10.0, LESS)], 100.0),
        ([(10.0, LESS), (20.0, NO_FASTER)], 20.0),
        ([(10.0, MORE), (20.0, MORE)], 0.0),
        ([(10.0, LESS), (40.0, MORE), (80.0, LESS)], math.sqrt(10.0 * 40.0)),
        ([], 0.0),
    ],
)
def test_the_limit_lies_between_the_last_size_without_a_gain_and_the_next(
    gains: list[tuple[float, float]], limit: float
) -> None:
    assert last_no_faster(gains) == pytest.approx(limit)
