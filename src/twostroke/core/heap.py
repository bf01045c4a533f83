"""What this process has freed: when its C library gives it back to the system, and when it keeps it for the next step."""

from __future__ import annotations

import ctypes
import gc

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGEST_KEPT = 32 << 20
"""Bytes of the largest block that glibc can be asked to keep. A larger one comes from the system each time, page by page."""


def return_freed_memory() -> None:
    """Give freed memory back to the system. glibc keeps blocks below 32 MB, and packing a model or
    training a tokenizer frees hundreds of megabytes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def settle_memory() -> None:
    """Give back what the first of many steps has freed, and keep what the others free for the steps after them.

    A first step compiles. What the compiler freed stayed in holes between the steps' blocks, and they went elsewhere: a run of
    1.4M parameters took 683 MB where it compiled and 582 where it found its graphs in the cache."""
    gc.collect()
    return_freed_memory()
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Keep what steps free for the steps after them. A page that comes back from the system is cleared at its first touch.

    Eager steps of 4 × 192 took 190 ms instead of 230 (medians of five pairs, two cores), compiled ones as long as before; the
    peak stayed the same. Other C libraries than glibc are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_MMAP_THRESHOLD, LARGEST_KEPT)
