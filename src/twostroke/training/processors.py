"""Keeps the threads of a run on processors that no other program has for itself."""

from __future__ import annotations

import contextlib
import os
import threading

from twostroke.core.contention import LOOK_S, OtherPrograms, occupied, recently


class Processors:
    """Call ``choose`` before a step, and ``close`` after the last; as a context it chooses by itself until the end.

    OpenMP shares work out evenly, and all threads wait for the one that shares its processor with another program, a time slice
    of some milliseconds at each of a step's hundred regions. Threads that share the remaining processors among themselves wait
    only for each other's work. The number of threads stays, because a step's last bits depend on it (docs/determinism.md).
    REPLACE
    """

    def __init__(self) -> None:
        self._others = OtherPrograms()
        self._left = len(self._others.processors)
        self._ended = threading.Event()

    def choose(self) -> None:
        """Look at what runs, as often as ``OtherPrograms`` does, and move if it has changed."""
        everything = self._others.processors
        left = self._others.left(len(everything)) if everything else 0
        if left != self._left:
            self._left = left
            busy = occupied() if left < len(everything) else frozenset[int]()
            _run_on(sorted(everything, key=lambda one: (one in busy, one))[:left])

    def __enter__(self) -> Processors:
        self._others = recently()  # what a plan has just found holds for work of a moment too
        self.choose()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._watcher.join()
        self.close()

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.choose()

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
