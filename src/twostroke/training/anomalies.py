"""Steps that must not be taken: a loss or gradient that is not finite, or one far out of the run's own ordinary range.

The decision is taken after the backward pass and before the update, so an anomaly never reaches a weight. All it is taken
from is part of the checkpoint: a resumed run decides as the uninterrupted one did.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twostroke.core.errors import CorruptFileError
from twostroke.core.recipe import TrainSettings
from twostroke.training.patient_file import PatientFile

WINDOW = 64
"""Accepted steps whose median is the ordinary value."""

LEAST = 16
"""Accepted steps before a spike is looked for: the first losses of a run fall too fast to have an ordinary value."""


def anchor_every(settings: TrainSettings) -> int:
    """Steps between checkpoints that a rollback may go back to; 0 where the policy never does.

    Only those of the schedule: which others there are depends on when a run was interrupted, and what a run computes must not.
    """
    return settings.checkpoint_every if settings.anomaly_policy == "rollback" else 0


class SpikeWatch:
    """Says which steps are anomalies, and how many came one after another.

    With ``spike_factor`` f > 0 a finite step is refused where grad_norm > f · median(grad_norm), or where
    loss − median(loss) > f · median(|loss − the loss before it|), medians over the last ``WINDOW`` accepted steps. Losses are
    held against their own scatter, not their size: 2.5 after a steady 2.0 is a spike although it is only a quarter more.
    """

    def __init__(self, spike_factor: float) -> None:
        self._factor = spike_factor
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self.in_a_row = 0

    def accept(self, loss: float, grad_norm: float) -> str | None:
        """None, or why a step of this loss and gradient norm must not be taken. Changes nothing."""
        if not self._factor or len(self._losses) < LEAST:
            return None
        ordinary = statistics.median(self._norms)
        if grad_norm > self._factor * ordinary:
            return f"gradient norm {grad_norm:.4g} is more than {self._factor:g} times the median {ordinary:.4g}"
        changes = [abs(b - a) for a, b in zip(self._losses, list(self._losses)[1:], strict=False)]
        middle, change = statistics.median(self._losses), statistics.median(changes)
        if change and loss - middle > self._factor * change:
            return (
                f"loss {loss:.4f} is above the median {middle:.4f} by more than {self._factor:g} times the median change from "
                f"step to step, {change:.4g}"
            )
        return None

    def took(self, loss: float, grad_norm: float) -> None:
        """A step was taken. (``in_a_row`` is the policy's to reset: a rollback takes steps again.)"""
        self._losses.append(loss)
        self._norms.append(grad_norm)

    def state(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row, "losses": list(self._losses), "norms": list(self._norms)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` returned. Raises CorruptFileError where it is something else."""
        try:
            losses, norms = ([float(value) for value in state[name]] for name in ("losses", "norms"))
            self.in_a_row = int(state["in_a_row"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptFileError(f"the checkpoint's record of losses is not one: {error}.") from None
        if len(losses) != len(norms) or not all(map(math.isfinite, losses + norms)):
            raise CorruptFileError("the checkpoint's record of losses is not one: its numbers are not finite, or do not pair.")
        self._losses, self._norms = deque(losses, maxlen=WINDOW), deque(norms, maxlen=WINDOW)


class AnomalyLog:
    """``anomalies.jsonl``: one line an anomaly, with what it was, which text it came from, and what was done.

    Lines are numbered over the whole run. A rolled-back step's line stays, though the step is done again; what a killed run
    wrote after its checkpoint goes, because it will be written again.
    """

    def __init__(self, path: Path, log: Callable[[str], None]) -> None:
        self._file = PatientFile(path, log)
        self.count = 0

    def restart(self, count: int) -> None:
        """Continue behind the first ``count`` lines."""
        self._file.keep_lines(lambda record: int(record["number"]) <= count)
        self.count = count

    def append(self, record: dict[str, Any]) -> None:
        self.count += 1
        self._file.append((json.dumps({"number": self.count} | record) + "\n").encode())
