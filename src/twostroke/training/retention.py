"""Decides which checkpoints are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """The ``newest`` checkpoints are kept, and permanently those whose step is a multiple of ``every`` (0 for none).

    The newest one whose step is 0 or another multiple of ``anchor_every`` is kept as well. A rollback uses it, even if a signal
    caused later checkpoints.
    """

    newest: int
    every: int = 0
    anchor_every: int = 0

    def removable(self, steps: Sequence[int]) -> list[int]:
        """The ``steps`` whose checkpoints are not kept, oldest first."""
        ordered = sorted(steps)
        anchors = [step for step in ordered if self.anchor_every and step % self.anchor_every == 0]
        kept = {*ordered[-self.newest :], *anchors[-1:]}
        kept |= {step for step in ordered if self.every and step and step % self.every == 0}
        return [step for step in ordered if step not in kept]
