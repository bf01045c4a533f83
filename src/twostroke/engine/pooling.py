"""``pooling``: one vector of a whole prompt, from its hidden states after the final norm. Each step adds its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from torch import Tensor

from twostroke.scheduling.request import Request
from twostroke.scheduling.step import ScheduledStep

if TYPE_CHECKING:
    from jaxtyping import Float

Rows = tuple[int, int, int]
"""(index of a request in the step, first position, number) of rows that follow one another."""


class PooledStates:
    """Sums of the hidden states of requests with ``pooling``, until their prompts are complete.

    Rows are added one after another in fp64, so a sum does not depend on how steps cut the prompt.
    """

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, npt.NDArray[np.float64] | None]] = {}  # rows that were added, and their sum

    @property
    def idle(self) -> bool:
        """Whether no request is pooled."""
        return not self._open

    def open(self, request_id: str) -> None:
        self._open[request_id] = 0, None

    def forget(self, request_id: str) -> None:
        """Drop what is known of a request that has ended."""
        self._open.pop(request_id, None)

    def wanted(self, step: ScheduledStep) -> list[Rows]:
        """Rows of ``step`` that count and have not been added. A preempted request is computed again, but not added again."""
        found = []
        for i, request in enumerate(step.requests):
            if request.id not in self._open:
                continue
            least = request.n_prompt - 1 if request.params.pooling == "last" else self._open[request.id][0]
            first, end = max(step.starts[i], least), step.starts[i] + step.counts[i]
            if first < end:
                found.append((i, first, end - first))
        return found

    def add(self, step: ScheduledStep, wanted: Sequence[Rows], hidden: Float[Tensor, "n E"]) -> None:
        """Add the rows of ``wanted``, which follow one another in ``hidden``."""
        at, rows = 0, hidden.numpy()
        for i, first, n in wanted:
            name = step.requests[i].id
            total = self._open[name][1]
            for row in rows[at : at + n].astype(np.float64):
                total = row if total is None else total + row
            self._open[name] = first + n, total
            at += n

    def completed(self, step: ScheduledStep) -> dict[int, npt.NDArray[np.float32] | None]:
        """By place in ``step`` the vector of each request whose prompt is complete with it."""
        if self.idle:
            return {}
        return {i: self._vector(r) for i, r in enumerate(step.requests) if r.id in self._open and step.completes(i)}

    def _vector(self, request: Request) -> npt.NDArray[np.float32] | None:
        """The sum of a request whose prompt is complete, as a vector of length 1; None if it is not finite or has no direction.

        The length of the mean is not asked for, so nothing is divided by the number of rows.
        """
        total = self._open[request.id][1]
        assert total is not None
        length = float(np.sqrt(np.square(total).sum()))
        if not 0.0 < length < float("inf"):
            return None
        return (total / length).astype("<f4")
