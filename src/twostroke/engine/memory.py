"""Asks the system for memory: how much is free, zeros for the KV cache, and freed memory given back."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twostroke.core.errors import CapacityError


def available_bytes() -> int:
    """Memory that this process may still take: what the system calls available, within the control group's limit if any."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            available = min(available, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return max(available, 0)


def held_bytes() -> int:
    """Memory that this process holds now; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def forget(address: int, n_bytes: int) -> None:
    """Give the memory of ``untouched_zeros`` at ``address`` back: its whole pages are zeros again, and take memory as they are
    touched. Does nothing where the system cannot."""
    page = os.sysconf("SC_PAGE_SIZE")
    first, last = -(-address // page) * page, (address + n_bytes) // page * page
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None and first < last and hasattr(mmap, "MADV_DONTNEED"):
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


def untouched_zeros(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeros that take memory as they are touched, 4 KiB at a time. Raises CapacityError if the system refuses.

    Numpy asks for pages of 2 MiB. A prompt of a few tokens touches a place in each layer and head, so with numpy it took 360 MB
    of the cache of SmolLM-135M's shape (measured), and the system cleared all of it before the first token.
    """
    try:
        if not hasattr(mmap, "MADV_NOHUGEPAGE"):
            return np.zeros(n_bytes, np.uint8)
        mapped = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (MemoryError, OSError, OverflowError):
        raise CapacityError(f"a KV cache of {n_bytes} bytes does not fit in memory. Lower kv_cache_bytes.") from None
    with contextlib.suppress(OSError):  # a kernel without large pages
        mapped.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(mapped, np.uint8)
