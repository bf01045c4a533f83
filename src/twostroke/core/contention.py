"""Other programs on the processors of this process: how long its threads waited for them, and how many processors they use.

Linux counts for every thread the nanoseconds it was ready to run and did not (``/proc/<pid>/task/<tid>/schedstat``, second
field), and for every virtual processor the time that the host gave to others (``steal`` in ``/proc/stat``, hundredths of a
second). Neither sees a neighbour that shares only a cache or memory bandwidth. What other programs use is the time that
processors were busy less that of this process and those that it started: a server that a command has just begun is no other
program.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

_TASKS = Path("/proc/self/task")
_STAT = Path("/proc/stat")
_PROC = Path("/proc")


def waited_s() -> float | None:
    """Seconds that the threads of this process have waited for a processor so far, summed over its living threads, and seconds
    stolen by the host. Only differences mean something. None where the system does not tell."""
    try:
        waited_ns = 0
        for task in os.listdir(_TASKS):
            try:
                waited_ns += int((_TASKS / task / "schedstat").read_bytes().split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # a thread that ended meanwhile
        stolen = int(_STAT.read_bytes().split(b"\n", 1)[0].split()[8])
    except (OSError, ValueError, IndexError):
        return None
    return waited_ns / 1e9 + stolen / os.sysconf("SC_CLK_TCK")


def low_by(waited: float, elapsed: float, n_threads: int) -> float:
    """Share, 0 to 1, by which a rate measured over ``elapsed`` seconds may read too low, where ``n_threads`` threads that work
    together waited ``waited`` seconds in all.

    Threads that meet at barriers get on only while all of them run. With waits that are independent of each other that is
    (1 − waited / (n·elapsed))ⁿ of the time, and the rest is lost. Waits that coincide lose less, so this errs to the low side.
    """
    if elapsed <= 0 or waited <= 0:
        return 0.0
    n = max(1, n_threads)
    return 1.0 - max(0.0, 1.0 - waited / (n * elapsed)) ** n


TAKEN_SHARE = 0.75
"""From this share of its time on, a processor counts as taken. A program that never pauses used 1.00 of two processors beside a
process on one thread, and 0.86 beside one whose two threads shared both with it."""

LONGEST_LOOK_S = 5.0
"""What ran longer ago than this says little of the next minute."""

LOOK_S = 0.2
"""Least time between two looks: ``/proc/stat`` counts in hundredths of a second."""


def processors() -> frozenset[int]:
    """Those that this process may use; none where the system does not tell."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def _busy_s(which: frozenset[int]) -> float | None:
    """Seconds that ``which`` have been busy so far. None where the system does not tell."""
    try:
        rows = [line.split() for line in _STAT.read_bytes().split(b"\n", max(which) + 2)[1:-1]]
        # user, nice and system, without idle and iowait, then irq and softirq; what the host gave to others is no program here
        ticks = sum(int(n) for name, *row in rows if int(name[3:]) in which for n in (*row[0:3], *row[5:7]))
    except (OSError, ValueError, IndexError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Seconds of processor time of this process and of all that it started, ended ones included."""
    ended = os.times()
    return time.process_time() + ended.children_user + ended.children_system + sum(map(_tree_s, _children(_TASKS)))


def _children(tasks: Path) -> list[str]:
    """Processes that these threads started; none where the system does not list them."""
    found: list[str] = []
    with contextlib.suppress(OSError):  # a process that ended meanwhile
        for task in os.listdir(tasks):  # by name: a glob took three times as long, and an engine looks five times a second
            with contextlib.suppress(OSError):  # a thread
                with open(f"{tasks}/{task}/children", encoding="ascii") as stream:
                    found += stream.read().split()
    return found


def _tree_s(process: str) -> float:
    """Seconds of ``process``, of those that it waited for, and of those that it started and that still run."""
    try:
        fields = (_PROC / process / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(map(_tree_s, _children(_PROC / process / "task")))


class OtherPrograms:
    """How many of this process's processors other programs use, looked at every ``LOOK_S`` at most. ``busy_s``, ``own_s`` and
    ``clock`` are the system's, for tests."""

    def __init__(
        self,
        busy_s: Callable[[frozenset[int]], float | None] = _busy_s,
        own_s: Callable[[], float] = _own_s,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._busy_s, self._own_s, self._clock = busy_s, own_s, clock
        self.processors = processors()
        self._began, self._busy, self._own = clock(), busy_s(self.processors), own_s()
        self._used = 0.0
        self.n_looks = 1

    @property
    def age_s(self) -> float:
        """Since the last look."""
        return self._clock() - self._began

    @property
    def used(self) -> float:
        """Processors that they used between the last two looks; 0 before the second, and where the system does not tell."""
        self.look_again()
        return self._used

    def look_again(self) -> None:
        """Look, unless the last look was less than ``LOOK_S`` ago."""
        if self._busy is not None and self.age_s >= LOOK_S:
            self.look()

    def look(self) -> None:
        """Look now."""
        now = self._clock()
        busy, own = self._busy_s(self.processors), self._own_s()
        if busy is not None:
            self._used = max(0.0, (busy - (self._busy or 0.0) - (own - self._own)) / max(now - self._began, 1e-9))
            self._began, self._busy, self._own, self.n_looks = now, busy, own, self.n_looks + 1

    def left(self, n_threads: int) -> int:
        """Of ``n_threads``, as many as have a processor that no other program takes for itself; at least one."""
        taken = whole(self.used)
        return max(1, min(n_threads, len(self.processors) - taken)) if taken else n_threads


@cache
def looking() -> OtherPrograms:
    """The one of this process. It makes its first look when it is first asked for: a command asks as it starts, so that a plan
    or an engine does not wait for the second."""
    return OtherPrograms()


def recently() -> OtherPrograms:
    """With what other programs used in the last moments. It waits for ``LOOK_S`` at most."""
    others = looking()
    if others.age_s > LONGEST_LOOK_S:
        others.look()
        time.sleep(LOOK_S)
    elif others.n_looks == 1:
        time.sleep(max(0.0, LOOK_S - others.age_s))
    others.look_again()
    return others


def whole(used: float) -> int:
    """How many processors are taken, where other programs use ``used``."""
    return int(used + 1.0 - TAKEN_SHARE)
