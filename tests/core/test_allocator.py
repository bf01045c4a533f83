"""Blocks that a step frees and takes again stay in the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from twostroke.core.allocator import keep_freed_memory

_FAULTS = """
import ctypes, resource, sys
from twostroke.core.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def take():
    block = libc.malloc(2**20)
    ctypes.memset(block, 1, 2**20)
    libc.free(block)
take()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    take()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not keep_freed_memory(), reason="the C library has no mallopt")
def test_a_block_taken_again_costs_no_page_faults() -> None:
    """50 blocks of 256 pages: all of them fault again where they are mapped afresh, next to none where they are kept."""
    run = subprocess.run([sys.executable, "-c", _FAULTS, "kept"], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 500
