"""The library on processors that are not here, emulated by QEMU, which has AVX2 and no AVX-512."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from twostroke.kernels import native_library

QEMU = shutil.which("qemu-x86_64")

pytestmark = [
    pytest.mark.skipif(QEMU is None, reason="qemu-x86_64 is not installed (Debian: apt-get install qemu-user)"),
    pytest.mark.skipif(native_library.library() is None, reason=native_library.why_absent() or "there"),
]

PRODUCT = """
import ctypes, struct
from twostroke.kernels import native_library as n
l = n.library()
held = n.holding()
assert n.target() == held[-1]
for refused in set(n.targets()) - set(held):
    assert n.targets()[refused] and list(n.targets())[l.ts_set_target(list(n.targets()).index(refused))] == held[-1]
def floats(*values): return (ctypes.c_float * len(values))(*values)
found = []
k, outputs = 40, 19
for target in held:
    n.set_target(target)
    weights = floats(*(((7 * i) % 13 - 6) / 4 for i in range(k * outputs)))
    x = floats(*(((5 * i) % 11 - 5) / 2 for i in range(2 * k)))
    packed = (ctypes.c_char * l.ts_packed_bytes(0, 0, outputs, k))()
    l.ts_pack(0, 0, outputs, k, weights, None, None, packed)
    y = floats(*[0.0] * (2 * outputs))
    l.ts_product(0, 0, outputs, k, packed, None, 2, x, None, None, None, None, y, outputs, 0)
    assert list(y) == [sum(x[r * k + i] * weights[o * k + i] for i in range(k)) for r in range(2) for o in range(outputs)]
    top, norms, ids = floats(*[0.0] * 3), (ctypes.c_double * 1)(), (ctypes.c_int64 * 3)()
    assert l.ts_top(y, 2 * outputs, (ctypes.c_int64 * 1)(0), 1, 3, norms, top, ids, 2) == 0
    assert list(top) == sorted(y, reverse=True)[:3]
print(*held)
"""
"""Exact numbers: each is a small multiple of 1/8, so that any order of sums gives the same."""


def emulated(processor: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert QEMU is not None
    return subprocess.run([QEMU, "-cpu", processor, sys.executable, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("processor", "expected"), [("qemu64", "plain"), ("Haswell", "plain avx2"), ("EPYC-Rome", "plain avx2")]
)
def test_each_processor_computes_by_the_targets_that_hold_for_it(processor: str, expected: str) -> None:
    done = emulated(processor, "-c", PRODUCT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == expected.split()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_products_tests_pass_on_a_haswell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without guard pages: QEMU 7.2 reads all lanes of a masked load, where a processor reads only those of the mask."""
    monkeypatch.setenv("TWOSTROKE_TESTS_WITHOUT_GUARD_PAGES", "1")
    test = os.path.join(os.path.dirname(__file__), "test_native_products.py")
    done = emulated("Haswell", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=3000", test)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert " passed" in done.stdout
