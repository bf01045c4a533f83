"""A measurement waits for quiet, each so long and all together so long."""

from __future__ import annotations

import pytest

from twostroke.calibration import timing
from twostroke.calibration.timing import PATIENCE, Clock


def _measured_s(clock: Clock, monkeypatch: pytest.MonkeyPatch, clean_after_s: float) -> float:
    """How long a measurement of one second goes on that looks every eighth of a second."""
    now = [1000.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    elapsed = 0.0
    while True:
        elapsed += 0.125
        now[0] += 0.125
        if clock.is_over(elapsed, 1.0, elapsed >= clean_after_s):
            return elapsed


def test_a_quiet_measurement_takes_its_usual_time_and_no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(patience_s=10.0)
    assert _measured_s(clock, monkeypatch, 0.5) == pytest.approx(1.0)
    assert clock.patience_s == 10.0


def test_a_disturbed_one_waits_for_quiet_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(patience_s=10.0)
    assert _measured_s(clock, monkeypatch, 2.0) == pytest.approx(2.0)
    assert clock.patience_s == pytest.approx(9.0, abs=0.13)
    assert _measured_s(clock, monkeypatch, 1e9) == pytest.approx(PATIENCE, abs=0.13)


def test_all_together_wait_no_longer_than_their_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(patience_s=10.0)
    took = [_measured_s(clock, monkeypatch, 1e9) for _ in range(20)]
    assert sum(took) == pytest.approx(20 + 10, abs=0.5)
    assert took[-1] == pytest.approx(1.0)
