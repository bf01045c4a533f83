"""Bytes that this process has allocated, as the C library counts them: what a formula about tensors is held against."""

from __future__ import annotations

import ctypes

_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def allocated_bytes() -> int:
    """Bytes in use in the heap (``uordblks``) and in mapped blocks (``hblkhd``) of glibc, 2.33 or newer (``mallinfo2(3)``).
    Untouched pages count, memory mapped from files does not."""
    library = ctypes.CDLL("libc.so.6")
    library.mallinfo2.restype = _Mallinfo2
    info = library.mallinfo2()
    return int(info.uordblks + info.hblkhd)
