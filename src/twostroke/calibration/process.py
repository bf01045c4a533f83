"""Measures what a process costs before it does anything, and how fast files reach the disk."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from twostroke.core.paths import home
from twostroke.core.rates import Process
from twostroke.core.units import MIB

_FRESH = """
import os, time
begin = time.perf_counter()
import torch
imported = time.perf_counter() - begin
torch.set_grad_enabled(True)
x = torch.ones(256, 256, dtype=torch.bfloat16, requires_grad=True)
torch.nn.functional.linear(x, x).sum().backward()
pages = int(open("/proc/self/statm").read().split()[1])
print(imported, pages * os.sysconf("SC_PAGE_SIZE"))
"""


def measure_fresh_process() -> Process:
    """Seconds of ``import torch``, and resident bytes after a first product, both in a new process. If that fails, or /proc is
    missing, they are the assumed ones."""
    try:
        done = subprocess.run([sys.executable, "-c", _FRESH], capture_output=True, text=True, timeout=60, check=True)
        import_s, resident = done.stdout.split()
    except (OSError, ValueError, subprocess.SubprocessError):
        return Process()
    return Process(float(import_s), float(resident))


def measure_disk(n_bytes: int = 128 * MIB) -> tuple[float, float]:
    """Bytes/s of writing a file in Twostroke's home until it is on the disk (fsync), and of reading it back, the best of two.
    Reading comes from the page cache, as with a model that was just written.

    Each file is a new one beside those before: over the pages that an overwritten file has just freed, the page cache takes
    3 to 4 GB/s of processor time, over others 0.5 to 0.6 (a virtual EPYC), and a model is written over others."""
    block = os.urandom(4 * MIB)
    folder = home()
    folder.mkdir(parents=True, exist_ok=True)
    write_s = read_s = float("inf")
    with tempfile.TemporaryDirectory(dir=folder, prefix="calibrate-") as temporary:
        for number in range(2):
            path = Path(temporary) / f"block-{number}"
            begin = time.perf_counter()
            with path.open("wb") as file:
                for _ in range(max(1, n_bytes // len(block))):
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
            write_s = min(write_s, time.perf_counter() - begin)
            begin = time.perf_counter()
            with path.open("rb") as file:
                while file.read(4 * MIB):
                    pass
            read_s = min(read_s, time.perf_counter() - begin)
        size = path.stat().st_size
    return size / write_s, size / read_s
