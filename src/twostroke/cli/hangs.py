"""Finds ranks of this machine that hang, by their marks and by what the kernel says of their threads."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from twostroke.training.progress import Marks, Phase

STOPPED_S = 0.5
"""A rank that was stopped (SIGSTOP) for longer hangs; a debugger's stop has another state."""

FILE_CALLS = {
    "x86_64": {0, 1, 2, 3, 17, 18, 19, 20, 26, 40, 73, 74, 75, 76, 77, 82, 83, 84, 87, 162, 217, 257, 262, 285, 306, 316, 326,
               332},
    "aarch64": {32, 34, 35, 38, 46, 47, 56, 57, 61, 63, 64, 65, 66, 67, 68, 71, 79, 81, 82, 83, 227, 267, 276, 285, 291},
}  # fmt: skip
"""Numbers of Linux' system calls that read, write, flush and rename files: a rank that sleeps in one waits for its disk."""


MOST_A_LOOK_S = 0.25
"""What may pass between two looks counts for no more than this. A machine that stands still (a virtual one is paused, or its
processors are given to others) stops the launcher as well as the ranks, and the time is charged to whichever thread ran: ranks
that were well had "computed for 3.1 s" between two looks that are 0.05 s apart. A rank that hangs is seen by many looks."""


@dataclass
class _Seen:
    """What the looks since the last mark have seen, in seconds. ``at`` and ``cpu_s`` are of the last look."""

    marks: Marks = field(default_factory=Marks)
    at: float = field(default_factory=time.monotonic)
    cpu_s: float = 0.0
    stopped_s: float = 0.0
    idle_s: float = 0.0
    busy_s: float = 0.0


class HangFinder:
    """Three signs of a hang, of which none depends on how fast the machine is: a stopped process; a rank that waits for no
    other rank, disk or child and whose threads all sleep; a main thread that has computed for several times its longest
    stretch without a mark.

    The first rank may sleep while it prepares data, which may be downloaded. In its first steps a rank may sleep as long as
    another one of this machine works: torch has one of them compile what all need, behind a lock of a file. The last two need
    Linux.
    """

    def __init__(self, pids: Mapping[int, int], first_rank: int) -> None:
        self._pids, self._first_rank = pids, first_rank
        self._seen = {local: _Seen() for local in pids}

    def look(self, local: int, marks: Marks) -> str | None:
        """How local rank ``local`` hangs; None if it does not."""
        seen, pid = self._seen[local], self._pids[local]
        states, now, cpu_s = _thread_states(pid), time.monotonic(), _main_thread_s(pid)
        passed_s = min(now - seen.at, MOST_A_LOOK_S)
        computed_s = min(cpu_s - max(seen.cpu_s, marks.cpu_s), MOST_A_LOOK_S)
        goes_on = marks.count != seen.marks.count
        may_sleep = marks.waiting or marks.phase == Phase.JOINING or self._may_download(local, marks)
        seen.marks, seen.at, seen.cpu_s = marks, now, cpu_s
        seen.stopped_s = seen.stopped_s + passed_s if states.get(pid) == "T" else 0.0
        seen.idle_s = 0.0 if may_sleep or goes_on or _any_runs(states) else seen.idle_s + passed_s
        seen.busy_s = max(computed_s, 0.0) + (0.0 if goes_on else seen.busy_s)
        if seen.stopped_s > STOPPED_S:
            return "is stopped (SIGSTOP)"
        if seen.idle_s > marks.idle_limit_s:
            if not _waits_for_disk(pid) and not _children_work(pid) and not self._waits_for_a_compiler(local, marks):
                return f"has slept for {seen.idle_s:.1f} s"
            seen.idle_s = 0.0
        if not marks.waiting and seen.busy_s > marks.busy_limit_s:
            return f"has computed for {seen.busy_s:.1f} s without progress"
        return None

    def _waits_for_a_compiler(self, local: int, marks: Marks) -> bool:
        others = (pid for other, pid in self._pids.items() if other != local)
        return marks.phase == Phase.FIRST_STEPS and any(_any_runs(_thread_states(pid)) or _children_work(pid) for pid in others)

    def _may_download(self, local: int, marks: Marks) -> bool:
        return local + self._first_rank == 0 and marks.phase == Phase.PREPARING


def _any_runs(states: Mapping[int, str]) -> bool:
    return not set(states.values()) <= {"S", "T"}


def _thread_states(pid: int) -> dict[int, str]:
    """The kernel's letter for the state of each thread of process ``pid``; empty where the kernel does not tell."""
    states = {}
    with contextlib.suppress(OSError):
        for tid in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, IndexError):
                states[int(tid)] = _fields(pid, int(tid))[0]
    return states


def _fields(pid: int, tid: int) -> list[str]:
    """The fields of a thread's stat after its name, which may contain blanks."""
    return Path(f"/proc/{pid}/task/{tid}/stat").read_text().rpartition(")")[2].split()


def _main_thread_s(pid: int) -> float:
    try:
        fields = _fields(pid, pid)
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _waits_for_disk(pid: int) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return int(Path(f"/proc/{pid}/syscall").read_text().split()[0]) in FILE_CALLS.get(platform.machine(), ())
    return False


def _children_work(pid: int) -> bool:
    """Whether a process that ``pid`` started, such as a compiler, runs or waits for a disk."""
    import psutil

    with contextlib.suppress(psutil.Error):
        children = psutil.Process(pid).children(recursive=True)
        return any(child.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP) for child in children)
    return False
