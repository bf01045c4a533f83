"""Threads take pieces of each other's work, stay where they are pinned, and change no bit by either."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from twostroke.kernels import native_library
from twostroke.kernels.native_matrix import NativeMatrix

library = native_library.library()
pytestmark = pytest.mark.skipif(library is None, reason=native_library.why_absent() or "there")

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src" / "twostroke" / "kernels" / "native"


def test_pieces_are_taken_once_and_a_stalled_thread_keeps_one(tmp_path: Path) -> None:
    program = tmp_path / "pieces"
    sources = [HERE / "native_pieces.cpp", SOURCES / "pool.cpp"]
    subprocess.run(["g++", "-std=c++17", "-O1", "-pthread", f"-I{SOURCES}", *sources, "-o", program], check=True, timeout=300)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "done\n"
    assert done.returncode == 0


def in_a_process(code: str) -> list[str]:
    """Pins are a process's, so what pins has one of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.split("\n")[:-1]


WHERE = """
import ctypes, os
import numpy as np
from twostroke.kernels.native_library import library
native, found = library(), np.full({n}, -9, np.int32)
native.ts_set_threads({n})
def pin(*to):
    native.ts_pin_threads(np.asarray(to, np.int32).ctypes.data, len(to))
    seen = set()
    for _ in range(50):
        native.ts_processors(found.ctypes.data, {n})
        seen.add(tuple(found.tolist()))
    print(sorted(seen), sorted(os.sched_getaffinity(0)))
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux pins threads")
def test_threads_run_where_they_are_pinned_and_the_caller_is_free_between_regions() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    first, last = allowed[0], allowed[-1]
    code = WHERE.format(n=2) + f"pin({last}, {first})\npin({first}, {first})\npin({first}, {last})\npin()\n"
    lines = in_a_process(code)
    for line, pins in zip(lines, ((last, first), (first, first), (first, last)), strict=False):
        assert line == f"{[pins]} {allowed}"
    assert lines[3].endswith(f" {allowed}")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux pins threads")
def test_a_processor_that_there_is_not_leaves_threads_where_they_are() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    (line,) = in_a_process(WHERE.format(n=2) + "pin(-1, 100000)\n")
    assert line.endswith(f" {allowed}")


def test_memory_that_is_placed_beforehand_is_still_zeros_and_packs_alike() -> None:
    code = """
import ctypes, os, torch, numpy as np
from twostroke.kernels.native_library import library
from twostroke.kernels.native_matrix import NativeMatrix
native, allowed = library(), sorted(os.sched_getaffinity(0))
native.ts_set_threads(2)
pins = np.asarray([allowed[0], allowed[-1]], np.int32)
native.ts_pin_threads(pins.ctypes.data, 2)
for n in (1, 17, 4097):
    made = NativeMatrix.empty("bf16", 0, n, 333)
    held = bytes((ctypes.c_uint8 * made.packed_bytes).from_address(made.address))
    print(held.count(0) == made.packed_bytes)
"""
    assert in_a_process(code) == ["True"] * 3


def test_collapsing_and_turning_large_pages_off_change_no_number() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(3000, 700), torch.randn(3, 700)
    assert library is not None
    before = NativeMatrix(weight, "bf16")
    expected = before(x)
    assert library.ts_collapse() >= 0
    try:
        library.ts_set_huge_pages(0)
        other = NativeMatrix(weight, "bf16")
    finally:
        library.ts_set_huge_pages(1)
    assert torch.equal(before(x), expected)
    assert torch.equal(other(x), expected)
    held = [bytes((ctypes.c_uint8 * m.packed_bytes).from_address(m.address)) for m in (before, other)]
    assert held[0] == held[1]
    assert np.frombuffer(held[0], np.uint8).any()
