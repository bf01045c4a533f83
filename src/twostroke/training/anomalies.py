"""Finds anomalies: steps with a loss or gradient that is not finite or far outside the run's usual range.

The decision is made after the backward pass and before the update, so an anomaly never changes a weight. Everything that it
depends on is in the checkpoint, so a resumed run decides as the uninterrupted one.
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
from twostroke.core.train_settings import TrainSettings
from twostroke.training.retrying_file import RetryingFile

WINDOW = 64
"""Number of accepted steps whose median is the usual value."""

MIN_ACCEPTED = 16
"""Accepted steps before the search for spikes begins. The first losses of a run fall too fast to have a usual value."""


def anchor_every(settings: TrainSettings) -> int:
    """Steps between the checkpoints that a rollback may use; 0 if the policy never rolls back.

    Only scheduled checkpoints count. Others exist because a run was interrupted, and what a run computes must not depend on
    that.
    """
    return settings.checkpoint_every if settings.anomaly_policy == "rollback" else 0


class SpikeWatch:
    """Decides which steps are anomalies, and counts how many came in a row.

    With ``spike_factor`` f > 0, a finite step is refused if grad_norm > f · median(grad_norm), or if
    loss − median(loss) > f · median(|loss − the loss before it|), medians over the last ``WINDOW`` accepted steps. Losses are
    held against their own scatter, not their size: 2.5 after a steady 2.0 is a spike although it is only a quarter more.
    """

    def __init__(self, spike_factor: float) -> None:
        self._factor = spike_factor
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self.in_a_row = 0

    def accept(self, loss: float, grad_norm: float) -> str | None:
        """The reason why a step with this loss and gradient norm is refused; None if it is accepted."""
        if not self._factor or len(self._losses) < MIN_ACCEPTED:
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
        """Record an accepted step. The policy resets ``in_a_row``, because a rollback accepts steps again on its way."""
        self._losses.append(loss)
        self._norms.append(grad_norm)

    def state(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row, "losses": list(self._losses), "norms": list(self._norms)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what ``state`` returned. Raises CorruptFileError if it is damaged."""
        try:
            losses, norms = ([float(value) for value in state[name]] for name in ("losses", "norms"))
            self.in_a_row = int(state["in_a_row"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptFileError(f"the checkpoint's record of losses is damaged: {error}.") from None
        if len(losses) != len(norms) or not all(map(math.isfinite, losses + norms)):
            raise CorruptFileError(
                "the checkpoint's record of losses is damaged: its numbers are not finite, or losses and norms differ in "
                "number."
            )
        self._losses, self._norms = deque(losses, maxlen=WINDOW), deque(norms, maxlen=WINDOW)


class AnomalyLog:
    """``anomalies.jsonl`` has one line for each anomaly: the reason, the text of the step, and the action.

    Lines are numbered over the whole run. The line of a rolled-back step stays, though the step is repeated. Lines that a
    killed run wrote after its last checkpoint are removed, because the resumed run writes them again.
    """

    def __init__(self, path: Path, log: Callable[[str], None]) -> None:
        self._file = RetryingFile(path, log)
        self.count = 0

    def restart(self, count: int) -> None:
        """Keep the first ``count`` lines and continue after them."""
        self._file.keep_lines(lambda record: int(record["number"]) <= count)
        self.count = count

    def append(self, record: dict[str, Any]) -> None:
        self.count += 1
        self._file.append((json.dumps({"number": self.count} | record) + "\n").encode())
