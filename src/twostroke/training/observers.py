"""What watches a run from inside its loop: it may add to the log line of a step, and must not change the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from twostroke.training.loop import TrainingRun
    from twostroke.training.measurement import StepRecord


class Observer(Protocol):
    """Called after each step's update, before its line is logged. Weights, optimizer and random states are left as found."""

    def after_step(self, run: TrainingRun, record: StepRecord) -> dict[str, Any]:
        """Values that join the step's line in ``log.jsonl``. ``run`` shows ``decoder``, ``masters``, ``prepared``, ``recipe``,
        ``train_step``, ``last_batch`` (the window's last micro-batch) and ``last_result`` (what the step returned)."""
        ...

    def close(self) -> None:
        """The run is over, finished or not."""
        ...
