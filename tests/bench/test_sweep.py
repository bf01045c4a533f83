"""Rising rates, and where their knee is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twostroke.bench.sweep import Sweep, SweepPoint, auto_rates, rates_of
from twostroke.core.described import plain
from twostroke.core.errors import ConfigError


def queue(rate: float, capacity: float = 10.0) -> SweepPoint:
    """An M/M/1 queue: response time 1 ÷ (capacity − rate), until it is full."""
    response = 1 / (capacity - rate) if rate < capacity else 100.0
    share = 1.0 if response < 0.5 else 0.5
    return SweepPoint(rate, min(rate, capacity), 64 * rate, response / 2, response, 0.01, 0.02, response, share, None)


def test_the_knee_of_a_simple_queue_is_half_its_capacity() -> None:
    """M/M/1's power, λ(μ − λ), is greatest at μ/2."""
    sweep = Sweep(tuple(queue(rate) for rate in (1.0, 3.0, 5.0, 7.0, 9.0, 9.9)))
    assert sweep.knee_per_s == 5.0
    assert sweep.within_slo_per_s == 7.0  # 1 ÷ 3 s at 7, 1 s at 9
    assert plain(sweep)["knee_per_s"] == 5.0


def test_refused_points_do_not_count() -> None:
    points = [queue(rate) for rate in (3.0, 5.0, 7.0)]
    sweep = Sweep((points[0], replace(points[1], refusal="late"), replace(points[2], refusal="late")))
    assert sweep.knee_per_s == 3.0
    assert "refused" in sweep.text()
    none = Sweep((replace(points[0], refusal="late"),))
    assert (none.knee_per_s, none.within_slo_per_s) == (None, None)
    assert "no point counts" in none.text()


def test_a_server_that_falls_behind_is_saturated() -> None:
    assert not queue(9.0).saturated
    assert queue(20.0).saturated


def test_rates_are_read_and_sorted() -> None:
    assert rates_of("4,1,2") == (1.0, 2.0, 4.0)
    assert rates_of("auto") == ()
    assert auto_rates(10.0)[0] < 10.0 < auto_rates(10.0)[-1]
    for text in ("", "fast", "1,,2", "0", "-1,2", "nan", "inf"):
        with pytest.raises(ConfigError, match="--sweep"):
            rates_of(text)
