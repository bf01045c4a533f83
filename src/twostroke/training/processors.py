"""Keeps the threads of a run on processors that no other program has for itself."""

from __future__ import annotations

import contextlib
import os

from twostroke.core.contention import OtherPrograms, occupied


class Processors:
    """Call ``choose`` before a step, and ``close`` after the last.

    OpenMP shares work out evenly, and all threads wait for the one that shares its processor with another program, a time slice
    of some milliseconds at each of a step's hundred regions. Threads that share the remaining processors among themselves wait
    only for each other's work. The number of threads stays, because a step's last bits depend on it (docs/determinism.md).
    REPLACE
    """

    def __init__(self) -> None:
        self._others = OtherPrograms()
        self._left = len(self._others.processors)

    def choose(self) -> None:
        """Look at what runs, as often as ``OtherPrograms`` does, and move if it has changed."""
        everything = self._others.processors
        left = self._others.left(len(everything)) if everything else 0
        if left != self._left:
            self._left = left
            busy = occupied() if left < len(everything) else frozenset[int]()
            _run_on(sorted(everything, key=lambda one: (one in busy, one))[:left])

    def close(self) -> None:
        """Use all processors again."""
        if self._left != len(self._others.processors):
            self._left = len(self._others.processors)
            _run_on(self._others.processors)


def _run_on(processors: object) -> None:
    """Let every thread of this process run on ``processors`` alone."""
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended, or the system does not let it
            os.sched_setaffinity(int(task), processors)  # type: ignore[arg-type]
