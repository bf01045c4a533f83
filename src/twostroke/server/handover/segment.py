"""The memory into which pages of one connection arrive: records in slots, shared with the other engine where it is near."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading

import numpy as np

from twostroke.engine.tiers.images import Bytes

_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)


class Segment:
    """``n_slots`` records of ``record_bytes``. Pages of it take memory once they are written. ``fd`` is of a memory file that
    another process can map, or None where it is not ``shared`` or the system has none."""

    def __init__(self, n_slots: int, record_bytes: int, shared: bool) -> None:
        self.n_slots, self.record_bytes = n_slots, record_bytes
        self.fd: int | None = None
        size = n_slots * record_bytes
        if shared and hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("twostroke-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)  # who maps it can rely on its size
        memory = mmap.mmap(-1 if self.fd is None else self.fd, size)
        self._records = np.frombuffer(memory, np.uint8).reshape(n_slots, record_bytes)
        self._free = list(range(n_slots - 1, -1, -1))
        self._lock = threading.Lock()

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int] | None:
        """``n`` slots, or None if fewer are free."""
        with self._lock:
            return None if n > len(self._free) else [self._free.pop() for _ in range(n)]

    def give_back(self, slot: int) -> None:
        with self._lock:
            self._free.append(slot)

    def record(self, slot: int) -> Bytes:
        return self._records[slot]

    def close_fd(self) -> None:
        """The other engine has it now. The memory itself goes with the last record that is looked at."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def mapped(fd: int, n_slots: int, record_bytes: int) -> Bytes:
    """The records in another engine's shared memory; closes ``fd``. Raises ValueError if it could shrink, which would end this
    process, or has another size."""
    try:
        size = n_slots * record_bytes
        seals = 0
        with contextlib.suppress(OSError, AttributeError):
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size != size:
            raise ValueError("its shared memory is not sealed, or has another size than it says")
        return np.frombuffer(mmap.mmap(fd, size), np.uint8).reshape(n_slots, record_bytes)
    finally:
        os.close(fd)
