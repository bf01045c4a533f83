"""Measures what a process costs before it does anything, and how fast files reach the disk."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from twostroke.core.paths import home
from twostroke.core.rates import PAGE_BYTES, Process
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


_TRAIN = """
import twostroke.cli.main, twostroke.cli.train_verb, twostroke.training.start
import psutil, time
print(time.time() - psutil.Process().create_time())
"""
"""A run's start is counted from its process's."""

_SERVE = """
import time
begin = time.perf_counter()
import twostroke.engine.llm
print(time.perf_counter() - begin)
"""


def measure_fresh_process() -> Process:
    """Seconds of ``import torch``, of a start of ``twostroke train`` with all that it imports and of importing the inference
    engine, and resident bytes after a first product, each in a new process. If that fails, or /proc is missing, they are the
    assumed ones."""
    try:
        import_s, resident = _new_process(_FRESH)
        train_s, serve_s = (min(_new_process(program)[0] for _ in range(2)) for program in (_TRAIN, _SERVE))
    except (OSError, ValueError, subprocess.SubprocessError):
        return Process()
    return Process(import_s, resident, train_s, serve_s, measure_page_fault())


def measure_page_fault(n_pages: int = 8192) -> float | None:
    """Seconds of the first touch of a page by one thread, the best of three times ``n_pages``; None where large pages cannot be
    left out."""
    if not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return None
    best_s = math.inf
    for _ in range(3):
        mapped = mmap.mmap(-1, n_pages * PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without large pages
            mapped.madvise(mmap.MADV_NOHUGEPAGE)
        pages = torch.frombuffer(mapped, dtype=torch.uint8).view(n_pages, PAGE_BYTES)[:, 0]
        begin = time.perf_counter()
        pages.fill_(1)
        best_s = min(best_s, time.perf_counter() - begin)
    return best_s / n_pages


def _new_process(program: str) -> list[float]:
    """The numbers that ``program`` prints."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return [float(word) for word in done.stdout.split()]


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
