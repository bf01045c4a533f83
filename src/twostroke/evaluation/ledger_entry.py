"""An evaluation in the ledger: what was asked of which model, frozen before the work, and what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twostroke.core.errors import TwostrokeError
from twostroke.evaluation.results import TaskResult
from twostroke.ledger.store import Ledger


class EvaluationEntry:
    """``run_id`` is None, and ``problem`` a sentence, where the ledger cannot be written: no evaluation is lost to that."""

    def __init__(self, directory: Path, inputs: Mapping[str, Any], prediction: Mapping[str, Any] | None = None) -> None:
        self.run_id: str | None = None
        self.problem: str | None = None
        try:
            subject = directory.resolve().name
            self.run_id = Ledger().freeze("evaluate", subject, {"model": str(directory), **inputs}, prediction or {})
        except (TwostrokeError, OSError) as error:
            self.problem = f"the ledger could not be written: {error}"

    def measure(self, values: Mapping[str, Any], status: str = "finished") -> None:
        if self.run_id is None:
            return
        try:
            Ledger().measure(self.run_id, values, status)
        except (TwostrokeError, OSError) as error:
            self.problem = f"the ledger could not be written: {error}"


def task_values(results: Sequence[TaskResult]) -> dict[str, float]:
    """``copa_acc`` and so on: the metrics of all tasks by names of their own."""
    return {f"{r.task}_{name}": metric.value for r in results for name, metric in r.metrics().items()}
