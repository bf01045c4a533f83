"""What the native library reaches on this machine: reading by working set, its matrix products by format, rows and shape."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from twostroke.calibration.timing import Clock
from twostroke.core.profile import BandwidthPoint, MatmulPoint
from twostroke.core.schemes import NATIVE_FORMATS, NATIVE_PRODUCTS, NATIVE_STEPS, scheme_of
from twostroke.core.units import MIB
from twostroke.kernels.native_library import library
from twostroke.kernels.native_matrix import FORMATS as LIBRARY_FORMATS
from twostroke.kernels.native_matrix import CMatrix, CRows
from twostroke.planner.serving.native_products import MANY_ROWS

NATIVE_ROWS = (1, 4, 16, 64, 512)
NATIVE_CLASSES: tuple[tuple[int, int], ...] = ((512, 512), (2048, 512), (512, 2048), (2048, 2048), (8192, 1024))
"""(n, k): attention's matrices of a small model, widening, narrowing, those of a larger model, and a head."""

FEW_CLASSES = ((512, 512), (2048, 2048))
MEASURED_WHOLE = tuple(scheme_of(name).native_product for name in NATIVE_STEPS)
"""Products that are measured in every class; the others, like them but for their scales, or slow, in ``FEW_CLASSES``."""

NATIVE_WORKING_SET_BYTES = 128 * MIB
"""Weights that a pass walks through: a model's matrices follow one another, and none is in a near cache in its turn."""

MANY_ROWS_BYTES = 8 * MIB
"""From ``MANY_ROWS`` on, passes over fewer weights say the same sooner."""

PEAK_SIDE = 4096
SLOW_PEAK_ROWS = 512
SLOW = tuple(name for name, (packed, _) in NATIVE_PRODUCTS.items() if not NATIVE_FORMATS[packed].matrix_unit)
"""Formats that have no matrix unit and whose 4096³ would take long: they get fewer rows, which are enough for the same rate."""

FILLING = 0x3C
"""A byte of which every format makes ordinary numbers: times depend on none, and packing real weights would take longer."""


class Memory:
    """``n_bytes`` of the library's memory, every page of it written."""

    def __init__(self, lib: ctypes.CDLL, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self.address: int = lib.ts_allocate(n_bytes)
        if not self.address:
            raise MemoryError(f"{n_bytes} bytes to measure with")
        weakref.finalize(self, lib.ts_release, self.address)
        # By all threads: the system hands out its pages as they are first written, half a second a GB.
        torch.frombuffer((ctypes.c_uint8 * n_bytes).from_address(self.address), dtype=torch.uint8).fill_(FILLING)


def _ready() -> ctypes.CDLL | None:
    """The library with as many threads as torch has, which is what an engine gives it; None without it."""
    lib = library()
    if lib is not None and lib.ts_threads() != torch.get_num_threads():
        lib.ts_set_threads(torch.get_num_threads())
    return lib


def read_bytes_per_s(n_bytes: float, clock: Clock | None = None) -> float | None:
    """The best rate at which all threads read a buffer of ``n_bytes`` again and again, which no step that reads so much can
    beat; measured now, in less than a second. None without the native library."""
    points = list(measure_native_bandwidth(clock or Clock(), [max(64, int(n_bytes) // 64 * 64)]))
    return points[0].bytes_per_s if points else None


def measure_native_bandwidth(clock: Clock, sizes_bytes: Sequence[int]) -> Iterator[BandwidthPoint]:
    """One point a size, in bytes/s: the first so many bytes of one buffer. Nothing without the library."""
    lib = _ready()
    if lib is None:
        return
    memory = Memory(lib, max(sizes_bytes))
    for size in sizes_bytes:
        repeats = max(1, int(1e8 // size))  # short runs would time the clock

        def read(size: int = size, repeats: int = repeats) -> float:
            return float(lib.ts_read_seconds(memory.address, size, repeats))

        read()
        yield BandwidthPoint(working_set_bytes=size, bytes_per_s=size / clock.least_s(read, seconds=0.15, least=4))


def product_pass(scheme: str, m: int, n: int, k: int, memory: Memory, working_set_bytes: int) -> Callable[[], float]:
    """A call that applies matrices of the class one after another to ``m`` prepared rows, as many as ``working_set_bytes`` of
    ``memory`` hold, and returns the seconds of one of them, quantising rows not in it. As in the engine, few rows share out
    every matrix by its outputs, with a barrier after each; of many each thread takes chunks through all matrices."""
    lib = _ready()
    assert lib is not None
    name, group = NATIVE_PRODUCTS[scheme]
    code = LIBRARY_FORMATS[name]
    size = lib.ts_packed_bytes(code, group, n, k)
    step = -(-size // 64) * 64
    count = max(1, min(working_set_bytes, memory.n_bytes) // step)
    matrices = (CMatrix * count)(*(CMatrix(code, group, n, k, memory.address + i * step, None) for i in range(count)))
    x, width = torch.full((m, k), 0.5), lib.ts_padded(k)
    bf16, codes = torch.zeros((m, width), dtype=torch.int16), torch.zeros((m, width), dtype=torch.int8)
    scales, sums = torch.zeros(m), torch.zeros((m, lib.ts_sums_per_row(k)), dtype=torch.int32)
    threads = lib.ts_threads()
    chunk, prefetch_bytes = lib.ts_chunk_rows(m, threads), lib.ts_prefetch_bytes()
    y = torch.empty((m + threads * chunk, n))
    buffers = [t.data_ptr() for t in (x, bf16, codes, scales, sums)]
    lib.ts_prepare_rows(code, buffers[0], m, k, *buffers[1:])
    rows = (CRows * count)(*(CRows(m, *buffers) for _ in range(count)))
    kept = (memory, x, bf16, codes, scales, sums)  # what the pointers point to lives as long as the call

    def run() -> float:
        assert kept
        return float(lib.ts_pass_seconds(matrices, count, rows, y.data_ptr(), prefetch_bytes, chunk, 1)) / count

    return run


def measure_native_products(
    clock: Clock,
    schemes: Sequence[str],
    classes: Sequence[tuple[int, int]],
    rows: Sequence[int],
    tell: Callable[[float, str], None],
) -> Iterator[MatmulPoint]:
    """Rates of every format, class and number of rows."""
    lib = _ready()
    if lib is None:
        return
    memory = Memory(lib, min(NATIVE_WORKING_SET_BYTES, max(MANY_ROWS_BYTES, int(NATIVE_WORKING_SET_BYTES * clock.effort))))
    for i, scheme in enumerate(schemes):
        tell(i / len(schemes), f"{scheme.replace('_', ' ')} products")
        for n, k in classes:
            if scheme not in MEASURED_WHOLE and len(classes) > len(FEW_CLASSES) and (n, k) not in FEW_CLASSES:
                continue
            for m in rows:
                run = product_pass(scheme, m, n, k, memory, MANY_ROWS_BYTES if m >= MANY_ROWS else NATIVE_WORKING_SET_BYTES)
                run()
                seconds = clock.least_s(run, seconds=0.02, least=3)
                yield MatmulPoint(scheme=scheme, m=m, n=n, k=k, flop_per_s=2.0 * m * n * k / seconds)


def measure_native_peak(clock: Clock, scheme: str, side: int = PEAK_SIDE) -> float | None:
    """FLOP/s of the side³ product of a format, the denominator of its MFU, quantising rows not in it; of a slow one with
    ``SLOW_PEAK_ROWS`` rows. None without the native library."""
    lib = _ready()
    if lib is None:
        return None
    name, group = NATIVE_PRODUCTS[scheme]
    n_bytes = lib.ts_packed_bytes(LIBRARY_FORMATS[name], group, side, side)
    m = min(side, SLOW_PEAK_ROWS) if scheme in SLOW else side
    run = product_pass(scheme, m, side, side, Memory(lib, n_bytes + 64), n_bytes)
    return 2.0 * m * side * side / clock.least_s(run, seconds=0.2, least=2)
