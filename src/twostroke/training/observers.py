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
    runs_model = False
    """Whether it runs the model, which ranks that hold parts of it do together."""

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
    """All observers of a run. An observer that raises is logged once and dropped, and the run goes on.

    Where ranks hold parts of the model, ``together`` tells whether something is so on any of them: those that run the model are
    dropped on all.
    """

    def __init__(self, observers: Sequence[Observer], log: Log, together: Callable[[bool], bool] | None = None) -> None:
        self._observers, self._log, self._together = list(observers), log, together

    def begin(self, run: RunState) -> None:
        self._each(lambda observer: observer.begin(run), self._together)

    def after_step(self, run: RunState, record: StepRecord) -> dict[str, Any]:
        values: dict[str, Any] = {}
        self._each(lambda observer: values.update(observer.after_step(run, record)), self._together)
        return values

    def after_line(self, line: dict[str, Any]) -> None:
        self._each(lambda observer: observer.after_line(line))

    def close(self) -> None:
        self._each(lambda observer: observer.close())

    def _each(self, call: Callable[[Observer], None], together: Callable[[bool], bool] | None = None) -> None:
        for observer in tuple(self._observers):
            said = ""
            try:
                call(observer)
            except Exception as error:  # no error of an observer ends the run
                said = (str(error).strip() or type(error).__name__).splitlines()[0]
            failed = bool(said)
            if together is not None and observer.runs_model:
                failed = together(failed)
            if failed:
                self._observers.remove(observer)
                said = said or "another rank could not go on"
                self._log(f"{observer.name} failed and was dropped: {said:.300}. Training continues without it.")
