"""The library for AArch64, compiled by Debian's cross-compiler and run by QEMU: the products of each target have x86's bits."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from twostroke.kernels import native_library
from twostroke.kernels.native import build as native_build

COMPILER, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
MISSING = [name for name in (COMPILER, QEMU) if shutil.which(name) is None]
library = native_library.library()

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"not installed: {', '.join(MISSING)} (Debian: apt-get install g++-aarch64-linux-gnu qemu-user)",
    ),
    pytest.mark.skipif(library is None, reason=native_library.why_absent() or "there"),
]

F32, BF16, W8A8, INT8, INT4, INT8_GROUPS, INT4_BLOCKS = range(7)
FORMATS = (
    (F32, 0), (BF16, 0), (W8A8, 0), (INT8, 0), (INT4, 32), (INT4, 64), (INT4, 128), (INT8_GROUPS, 16), (INT8_GROUPS, 32),
    (INT4_BLOCKS, 256),
)  # fmt: skip
SHAPES = [(17, 33, 1), (64, 576, 5), (33, 1000, 13), (16, 9000, 2), (150, 260, 4), (40, 64, 3)]
"""Outputs, inputs and rows: whole panels and the rests beside them."""

PROCESSORS = {"cortex-a72": ["plain"], "cortex-a76": ["plain", "neon"], "max": ["plain", "neon", "neonbf16"]}
"""By QEMU's names: without dot products, with SDOT, with everything that QEMU emulates."""


def cases() -> list[tuple[tuple[int, int, int, int, int], list[np.ndarray]]]:
    """Shape and arrays of each case; the largest sums of codes that there are among them."""
    rng, found = np.random.default_rng(0), []
    for format, group in FORMATS:
        for n, k, m in SHAPES:
            weights = {
                F32: lambda size: rng.standard_normal(size, dtype=np.float32),
                BF16: lambda size: rng.integers(0x3C00, 0x4000, size).astype(np.uint16),
                INT4: lambda size: rng.integers(0, 16, size).astype(np.uint8),
                INT4_BLOCKS: lambda size: rng.integers(0, 16, size).astype(np.uint8),
            }.get(format, lambda size: rng.integers(-127, 128, size).astype(np.int8))((n, k))
            x = rng.standard_normal((m, k), dtype=np.float32)
            x[0] = 3.0
            weights[0] = weights.max()
            groups = -(-k // group) if group else 1
            n_scales, n_zeros = (2 * groups, -(-k // 32) * 2) if format == INT4_BLOCKS else (groups, groups)
            scales, zeros = rng.uniform(1e-3, 1, (n, n_scales)).astype(np.float32), rng.integers(0, 16, (n, n_zeros))
            found.append(((format, group, n, k, m), [weights, scales, zeros.astype(np.uint8), x]))
    return found


def outputs(shape: tuple[int, int, int, int, int]) -> list[np.ndarray]:
    """Empty arrays of what a case gives: bf16, codes, scales and sums of the rows, and the products."""
    assert library is not None
    _, _, n, k, m = shape
    kinds = ((np.uint16, m * library.ts_padded(k)), (np.int8, m * library.ts_padded(k)), (np.float32, m))
    more = ((np.int32, m * library.ts_sums_per_row(k)), (np.float32, m * n))
    return [np.zeros(size, dtype) for dtype, size in (*kinds, *more)]


def here(shape: tuple[int, int, int, int, int], arrays: list[np.ndarray]) -> list[np.ndarray]:
    """The same by the library that was built for this machine, in the target that it uses."""
    assert library is not None
    format, group, n, k, m = shape
    weights, scales, zeros, x = (array.ctypes.data for array in arrays)
    packed = np.zeros(library.ts_packed_bytes(format, group, n, k), np.uint8)
    library.ts_pack(format, group, n, k, weights, scales, zeros, packed.ctypes.data)
    made = outputs(shape)
    *rows, y = (array.ctypes.data for array in made)
    library.ts_prepare_rows(format, x, m, k, *rows)
    library.ts_product(format, group, n, k, packed.ctypes.data, None, m, x, *rows, y, n, False)
    return made


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """native_products.cpp with the library for AArch64 beside it."""
    folder = tmp_path_factory.mktemp("aarch64")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CXX", COMPILER)
        native_build.build(folder / "libtwostroke.so")
    source = Path(__file__).with_name("native_products.cpp")
    command = [COMPILER, "-std=c++17", "-O1", "-Wall", "-Wextra", str(source), "-o", str(folder / "products")]
    subprocess.run([*command, f"-L{folder}", "-ltwostroke", "-Wl,-rpath,$ORIGIN"], check=True)
    return folder / "products"


@pytest.mark.parametrize("processor", PROCESSORS)
def test_the_products_of_an_aarch64_processor_have_the_bits_of_x86(driver: Path, processor: str) -> None:
    """All formats are: integers are exact, and sums of fp32 run in one order. BFDOT alone rounds in its own way."""
    given = b"".join(
        np.array([*shape, arrays[1].size, arrays[2].size], np.int64).tobytes() + b"".join(array.tobytes() for array in arrays)
        for shape, arrays in cases()
    )
    command = [QEMU, "-L", "/usr/aarch64-linux-gnu", "-cpu", processor, str(driver)]
    said = subprocess.run(command, input=given, capture_output=True, check=True).stdout
    names, _, said = said.partition(b"\n\n")
    assert names.decode().split() == PROCESSORS[processor]
    before = native_library.target()
    native_library.set_target("avx2" if "avx2" in native_library.holding() else "plain")  # fused sums, bf16 in single products
    try:
        for shape, arrays in cases():
            expected = here(shape, arrays)
            for target in PROCESSORS[processor]:
                for there, wanted in zip(outputs(shape), expected, strict=True):
                    found = np.frombuffer(said[: there.nbytes], there.dtype)
                    said = said[there.nbytes :]
                    if target == "neonbf16" and shape[0] == BF16 and wanted is expected[-1]:
                        assert np.allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
                    else:
                        assert np.array_equal(found, wanted), (target, shape)
    finally:
        native_library.set_target(before)
    assert said == b""
