"""Records an evaluation in the ledger: model and settings before the work, results after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twostroke.core.errors import TwostrokeError
from twostroke.evaluation.results import TaskResult
from twostroke.ledger.store import Ledger


class EvaluationEntry:
    """An evaluation's run in the ledger. If the ledger cannot be written, ``run_id`` is None and ``problem`` is a sentence, and
    the evaluation goes on."""

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
    """The metrics of all tasks in one table, with names such as ``copa_acc``."""
    return {f"{r.task}_{name}": metric.value for r in results for name, metric in r.metrics().items()}
