"""How long this process waited for a processor that others were using: what tells a busy machine from a slow one.

Linux counts for every thread the nanoseconds it was ready to run and did not (``/proc/<pid>/task/<tid>/schedstat``, second
field), and for every virtual processor the time that the host gave to others (``steal`` in ``/proc/stat``, hundredths of a
second). Neither sees a neighbour that shares only a cache or memory bandwidth.
"""

from __future__ import annotations

import os
from pathlib import Path

_TASKS = Path("/proc/self/task")
_STAT = Path("/proc/stat")


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
