"""Waiting for a processor is counted where another process wants the same one, and not where nobody does."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from twostroke.core.contention import low_by, waited_s

counts = pytest.mark.skipif(waited_s() is None, reason="the system does not count waiting")


def _spin(seconds: float) -> float:
    before = waited_s()
    assert before is not None
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    after = waited_s()
    assert after is not None
    return after - before


@counts
def test_a_shared_core_shows_as_waiting() -> None:
    """Two busy loops on one core get half of it each, so that a second of one holds about half a second of waiting; a quarter
    is asked for, since the scheduler need not be fair over so short a time."""
    core = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    rival = subprocess.Popen(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"], stdout=subprocess.DEVNULL
    )
    try:
        os.sched_setaffinity(0, {core})
        time.sleep(0.3)  # until the rival runs
        assert _spin(1.0) > 0.25
    finally:
        rival.kill()
        rival.wait()
        os.sched_setaffinity(0, before)


@counts
def test_waiting_never_runs_backwards() -> None:
    assert _spin(0.05) >= 0.0


def test_what_waiting_took_from_a_rate() -> None:
    assert low_by(0.0, 1.0, 2) == 0.0
    assert low_by(0.5, 1.0, 1) == pytest.approx(0.5)  # one thread that ran half of the time
    assert low_by(1.0, 1.0, 2) == pytest.approx(0.75)  # two such: both ran at once a quarter of it
    assert low_by(0.01, 1.0, 2) == pytest.approx(0.01, abs=1e-4)  # little waiting costs what it took, however many share it
    assert low_by(9.0, 1.0, 2) == 1.0  # steal of the whole machine counts processors that we do not use


def test_what_waiting_took_rises_with_the_waiting() -> None:
    found = [low_by(0.1 * i, 1.0, 2) for i in range(21)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (0.0, 1.0)
