"""Which checkpoints are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """The ``newest`` checkpoints stay, and those whose step is a multiple of ``every`` for good (0: none).

    ``anchor_every`` keeps the newest whose step is a multiple of it, 0 included, beside them: a run that may be rolled back
    goes back to that one, whatever else was saved since on a signal.
    """

    newest: int
    every: int = 0
    anchor_every: int = 0

    def removable(self, steps: Sequence[int]) -> list[int]:
        """Those of ``steps`` that nothing keeps, oldest first."""
        ordered = sorted(steps)
        anchors = [step for step in ordered if self.anchor_every and step % self.anchor_every == 0]
        kept = {*ordered[-self.newest :], *anchors[-1:]}
        kept |= {step for step in ordered if self.every and step and step % self.every == 0}
        return [step for step in ordered if step not in kept]
