"""Measures the native library on this machine: reading by working set, and its products by format, rows and shape."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from twostroke.calibration.timing import Clock
from twostroke.core.profile import BandwidthPoint, MatmulPoint
from twostroke.core.rates import NativePass
from twostroke.core.schemes import NATIVE_FORMATS, NATIVE_PRODUCTS, NATIVE_STEPS, scheme_of
from twostroke.core.units import MIB
from twostroke.kernels.native_library import library
from twostroke.kernels.native_matrix import FORMATS as LIBRARY_FORMATS
from twostroke.kernels.native_matrix import CMatrix, CRows
from twostroke.planner.serving.native_products import MANY_ROWS

NATIVE_ROWS = (1, 4, 16, 64, 512)
NATIVE_CLASSES: tuple[tuple[int, int], ...] = ((512, 512), (2048, 512), (512, 2048), (2048, 2048), (8192, 1024))
"""(n, k): attention's matrices of a small model, its MLP's up and down, matrices of a larger model, and a head."""

FEW_CLASSES = ((512, 512), (2048, 2048))
MEASURED_WHOLE = tuple(scheme_of(name).native_product for name in NATIVE_STEPS)
"""Products that are measured in every class. The others are slow, or differ only in their scales: they get ``FEW_CLASSES``."""

NATIVE_WORKING_SET_BYTES = 128 * MIB
"""Weights that a pass walks through. In a model other matrices come between, so none is in a near cache when it is used."""

MANY_ROWS_BYTES = 8 * MIB
"""The same from ``MANY_ROWS`` on, where arithmetic is the limit and fewer weights give the same rate sooner."""

PEAK_SIDE = 4096
SLOW_PEAK_ROWS = 512
SLOW = tuple(name for name, (packed, _) in NATIVE_PRODUCTS.items() if not NATIVE_FORMATS[packed].matrix_unit)
"""Formats without a matrix unit, whose 4096³ would take long. They get fewer rows, which are enough for the same rate."""

FILLING = 0x3C
"""A byte of ordinary numbers in every format. Times do not depend on values, and packing real weights would take longer."""


class Memory:
    """``n_bytes`` of the library's memory. Every page has been written."""

    def __init__(self, lib: ctypes.CDLL, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self.address: int = lib.ts_allocate(n_bytes)
        if not self.address:
            raise MemoryError(f"not enough memory for {n_bytes} bytes to measure with. Free some.")
        weakref.finalize(self, lib.ts_release, self.address)
        # With all threads, because the system hands out pages as they are first written: half a second for each GB.
        torch.frombuffer((ctypes.c_uint8 * n_bytes).from_address(self.address), dtype=torch.uint8).fill_(FILLING)


def _ready() -> ctypes.CDLL | None:
    """The library with as many threads as torch has, as an engine sets it; None if it was not built."""
    lib = library()
    if lib is not None and lib.ts_threads() != torch.get_num_threads():
        lib.ts_set_threads(torch.get_num_threads())
    return lib


def read_bytes_per_s(n_bytes: float, clock: Clock | None = None) -> float | None:
    """The best rate at which all threads read a buffer of ``n_bytes`` again and again: no step that reads so much can be
    faster. Measured now, in less than a second. None without the native library."""
    points = list(measure_native_bandwidth(clock or Clock(), [max(64, int(n_bytes) // 64 * 64)]))
    return points[0].bytes_per_s if points else None


def measure_native_bandwidth(clock: Clock, sizes_bytes: Sequence[int]) -> Iterator[BandwidthPoint]:
    """One point for each size, in bytes/s, from the first bytes of one buffer. No points without the library."""
    lib = _ready()
    if lib is None:
        return
    memory = Memory(lib, max(sizes_bytes))
    for size in sizes_bytes:
        repeats = max(1, int(1e8 // size))  # 100 MB a run: a shorter one would measure the clock

        def read(size: int = size, repeats: int = repeats) -> float:
            return float(lib.ts_read_seconds(memory.address, size, repeats))

        read()
        yield BandwidthPoint(working_set_bytes=size, bytes_per_s=size / clock.least_s(read, seconds=0.15, least=4))


def product_pass(scheme: str, m: int, n: int, k: int, memory: Memory, working_set_bytes: int) -> Callable[[], float]:
    """A call that returns the seconds of one (n, k) product of ``m`` prepared rows, without the quantising of the rows.

    It applies as many matrices, one after another, as ``working_set_bytes`` of ``memory`` hold. As in the engine, threads share
    the outputs of each matrix if the rows are few, with a barrier after each matrix; of many rows each thread takes chunks
    through all matrices.
    """
    lib = library()
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
    kept = (memory, x, bf16, codes, scales, sums)  # the pointers' targets have to live as long as the call

    def run() -> float:
        assert kept
        return float(lib.ts_pass_seconds(matrices, count, rows, y.data_ptr(), prefetch_bytes, chunk, 1)) / count

    return run


CACHED_BYTES = 4 * MIB
"""A working set that the last cache holds, and much of it the cache of each core."""

CACHED_CLASSES = ((128, 128), *NATIVE_CLASSES[:-1])
FEW_CACHED_CLASSES = ((128, 128), (512, 512))
CACHED_ROWS = (1, 2, 4, 16, 64, 512)
ONE_THREAD_ROWS = (1, 2, 4, 16, 64)
SECONDS = 0.004
"""Of one product at one moment."""


def measure_native_passes(clock: Clock, schemes: Sequence[str]) -> Iterator[NativePass]:
    """What plans of small models stand on: products in cache on all threads, and those of one thread in cache and over
    ``NATIVE_WORKING_SET_BYTES``. No points without the library."""
    lib = _ready()
    if lib is None:
        return
    memory, everything = Memory(lib, NATIVE_WORKING_SET_BYTES), lib.ts_threads()
    sets: list[tuple[int, int, tuple[int, ...]]] = [(everything, CACHED_BYTES, CACHED_ROWS)]
    if everything > 1:
        sets += [(1, CACHED_BYTES, ONE_THREAD_ROWS), (1, NATIVE_WORKING_SET_BYTES, ONE_THREAD_ROWS)]
    try:
        for n_threads, working_set, rows in sets:
            lib.ts_set_threads(n_threads)
            for scheme, (n, k), m in itertools.product(schemes, CACHED_CLASSES, rows):
                if scheme not in MEASURED_WHOLE and (n, k) not in FEW_CACHED_CLASSES:
                    continue
                run = product_pass(scheme, m, n, k, memory, working_set)
                run()
                seconds = clock.least_s(run, seconds=SECONDS, least=3)
                yield NativePass(scheme, n_threads, float(working_set), m, n, k, 2.0 * m * n * k / seconds)
    finally:
        lib.ts_set_threads(everything)


def measure_native_products(
    clock: Clock,
    schemes: Sequence[str],
    classes: Sequence[tuple[int, int]],
    rows: Sequence[int],
) -> Iterator[MatmulPoint]:
    """A rate for each format, class and number of rows. No points without the library."""
    lib = _ready()
    if lib is None:
        return
    memory = Memory(lib, min(NATIVE_WORKING_SET_BYTES, max(MANY_ROWS_BYTES, int(NATIVE_WORKING_SET_BYTES * clock.effort))))
    for scheme in schemes:
        for n, k in classes:
            if scheme not in MEASURED_WHOLE and len(classes) > len(FEW_CLASSES) and (n, k) not in FEW_CLASSES:
                continue
            for m in rows:
                run = product_pass(scheme, m, n, k, memory, MANY_ROWS_BYTES if m >= MANY_ROWS else NATIVE_WORKING_SET_BYTES)
                run()
                seconds = clock.least_s(run, seconds=SECONDS, least=3)
                yield MatmulPoint(scheme=scheme, m=m, n=n, k=k, flop_per_s=2.0 * m * n * k / seconds)


def measure_native_peak(clock: Clock, scheme: str, side: int = PEAK_SIDE) -> float | None:
    """FLOP/s of a format's product of side³, the denominator of its MFU, without the quantising of the rows. A slow format gets
    ``SLOW_PEAK_ROWS`` rows. None without the native library."""
    lib = _ready()
    if lib is None:
        return None
    name, group = NATIVE_PRODUCTS[scheme]
    n_bytes = lib.ts_packed_bytes(LIBRARY_FORMATS[name], group, side, side)
    m = min(side, SLOW_PEAK_ROWS) if scheme in SLOW else side
    run = product_pass(scheme, m, side, side, Memory(lib, n_bytes + 64), n_bytes)
    return 2.0 * m * side * side / clock.least_s(run, seconds=0.2, least=2)
