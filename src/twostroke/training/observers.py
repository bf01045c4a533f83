"""What watches a run from inside its loop: it may add to the log line of a step, and must not change the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from twostroke.core.recipe import TrainRecipe

if TYPE_CHECKING:
    from twostroke.training.loop import TrainingRun
    from twostroke.training.measurement import StepRecord

Log = Callable[[str], None]


class Observer:
    """Called at fixed places of a run. Weights, optimizer and random states are left as found.

    ``run`` shows ``decoder``, ``masters``, ``prepared``, ``recipe``, ``train_step``, ``last_batch`` (the window's last
    micro-batch) and ``last_result`` (what the step returned).
    """

    name = "an observer"

    def begin(self, run: TrainingRun) -> None:
        """``run.step`` steps are done: the run is built, and restored where it resumes. Called again where it went back to an
        earlier step (``training.respond``)."""

    def after_step(self, run: TrainingRun, record: StepRecord) -> dict[str, Any]:
        """After each step's update: values that join its line in ``log.jsonl``."""
        return {}

    def after_line(self, line: dict[str, Any]) -> None:
        """``line`` was logged, whole."""

    def close(self) -> None:
        """The run is over, finished or not."""


class Observers:
    """The observers of a run as one. An observer that raises is said so of, once, and left out from then on: seeing must not
    cost the run."""

    def __init__(self, observers: Sequence[Observer], log: Log) -> None:
        self._observers, self._log = list(observers), log

    def begin(self, run: TrainingRun) -> None:
        self._each(lambda observer: observer.begin(run))

    def after_step(self, run: TrainingRun, record: StepRecord) -> dict[str, Any]:
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
            except Exception as error:  # whatever it is: the run goes on
                self._observers.remove(observer)
                first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
                self._log(f"{observer.name} ended: {first_line:.300}. Training continues without.")


def requested(recipe: TrainRecipe, log: Log) -> list[Observer]:
    """The observers that ``recipe`` asks for. Raises InputError where TensorBoard is asked for and not installed."""
    from twostroke.training.diagnostics import Diagnostics
    from twostroke.training.samples import Samples
    from twostroke.training.tensorboard import TensorBoard

    settings = recipe.train
    found: list[Observer] = []
    if settings.diagnostics_every:
        found.append(Diagnostics(settings.diagnostics_every))
    if settings.sample_every:
        found.append(Samples(settings.sample_every, settings.sample_prompts, log))
    if settings.tensorboard:
        found.append(TensorBoard(log))
    return found
