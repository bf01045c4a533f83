"""A function as an observer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twostroke.training.measurement import StepRecord
from twostroke.training.observers import Observer
from twostroke.training.run import RunState


class EachStep(Observer):
    """Calls ``call(run, record)`` after each step."""

    def __init__(self, call: Callable[[RunState, StepRecord], object]) -> None:
        self._call = call

    def after_step(self, run: RunState, record: StepRecord) -> dict[str, Any]:
        self._call(run, record)
        return {}
