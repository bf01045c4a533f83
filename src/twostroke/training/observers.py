"""Observers watch a run from inside its loop. They can add values to a step's log line and must not change the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twostroke.training.measurement import StepRecord
    from twostroke.training.run import RunState

Log = Callable[[str], None]


class Observer:
    """A base class whose methods are called at fixed places of a run. They must not change weights, optimizer or random states.

    ``run`` is what the run computes with, and ``run.inputs`` has its recipe, data and directory.
    """

    name = "an observer"
    on_all_ranks = False
    """Whether ranks that hold parts of the model call it together; if not, the first one alone does."""

    def begin(self, run: RunState) -> None:
        """Called when the run is built or restored, after ``run.step`` steps, and again when a rollback returns to an earlier
        step (``training.respond``)."""

    def after_step(self, run: RunState, record: StepRecord) -> dict[str, Any]:
        """Called after each step's update. The returned values are added to its line in ``log.jsonl``."""
        return {}

    def after_line(self, line: dict[str, Any]) -> None:
        """Called after ``line``, which is complete, was logged."""

    def close(self) -> None:
        """Called at the end of the run, even if it was interrupted."""


class Observers:
    """All observers of a run. An observer that raises is logged once and dropped, and the run goes on."""

    def __init__(self, observers: Sequence[Observer], log: Log) -> None:
        self._observers, self._log = list(observers), log

    def begin(self, run: RunState) -> None:
        self._each(lambda observer: observer.begin(run))

    def after_step(self, run: RunState, record: StepRecord) -> dict[str, Any]:
        values: dict[str, Any] = {}
        self._each(lambda observer: values.update(observer.after_step(run, record)))
        return values

    def after_line(self, line: dict[str, Any]) -> None:
        self._each(lambda observer: observer.after_line(line))

    def close(self) -> None:
        self._each(lambda observer: observer.close())

    def _each(self, call: Callable[[Observer], None]) -> None:
        for observer in tuple(self._observers):
            try:
                call(observer)
            except Exception as error:  # no error of an observer ends the run
                self._observers.remove(observer)
                first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
                self._log(f"{observer.name} failed and was dropped: {first_line:.300}. Training continues without it.")
