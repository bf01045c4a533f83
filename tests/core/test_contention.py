"""Waiting for a processor is counted where another process wants the same one, and not where nobody does."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from twostroke.core.contention import waited_s

pytestmark = pytest.mark.skipif(waited_s() is None, reason="the system does not count waiting")


def _spin(seconds: float) -> float:
    before = waited_s()
    assert before is not None
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    after = waited_s()
    assert after is not None
    return after - before


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


def test_waiting_never_runs_backwards() -> None:
    assert _spin(0.05) >= 0.0
