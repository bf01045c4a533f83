"""What this process has freed, and its C library still holds."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Give freed memory back to the system. glibc keeps blocks below 32 MB, and packing a model or
    training a tokenizer frees hundreds of megabytes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
