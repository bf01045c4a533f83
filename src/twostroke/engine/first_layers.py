"""``FirstLayers``: the first layers of the served model, computed alone for drafts."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from twostroke.engine.native_runner import NativeRunner
from twostroke.scheduling.step import ScheduledStep


class FirstLayers:
    """``runner`` runs the served model's first layers over its pages; None while there are no weights."""

    def __init__(self, runner: NativeRunner, threads_for: Callable[[ScheduledStep], int]) -> None:
        self.runner: NativeRunner | None = runner
        self._threads_for = threads_for

    def compute(self, step: ScheduledStep) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """See ``speculation.early_exit.Compute``."""
        assert self.runner is not None
        return self.runner.run(step, n_threads=self._threads_for(step)), self.runner.best_of(len(step.requests))
