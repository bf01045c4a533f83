"""Threads leave a processor to a program that takes it, and come back."""

from __future__ import annotations

import os

import pytest

from twostroke.core.contention import processors
from twostroke.training import processors as module
from twostroke.training.processors import Processors

pytestmark = pytest.mark.skipif(len(processors()) < 2, reason="one processor alone is never left")


def test_threads_stay_on_the_processors_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    everything, taken = processors(), [0.0]
    monkeypatch.setattr(module, "occupied", lambda: frozenset({min(everything)}))
    kept = Processors()
    monkeypatch.setattr(type(kept._others), "used", property(lambda self: taken[0]))
    try:
        kept.choose()
        assert os.sched_getaffinity(0) == everything
        taken[0] = 1.0
        kept.choose()
        assert os.sched_getaffinity(0) == everything - {min(everything)}
        taken[0] = 0.0
        kept.choose()
        assert os.sched_getaffinity(0) == everything
        taken[0] = 1.0
        kept.choose()
    finally:
        kept.close()
    assert os.sched_getaffinity(0) == everything
