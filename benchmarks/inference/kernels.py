"""How near are the native products to what the machine can do?

``python benchmarks/inference/kernels.py [--formats w8a8 int4 ...] [--models 135M 1.1B] [--rows 1 4 16 32 512]``

For each model shape: the time of all its matrices in turn, two threads, weights read from memory (a pass walks through all
bytes, more than the caches hold), rows prepared beforehand, no attention and no norms. As in the engine, few rows share out
every matrix by its outputs, with a barrier after each; many are cut into chunks of rows (``--chunk-rows``). Printed beside it:
bytes of weights, GB/s, the share of the best rate at which the same threads read a buffer of that size, and GFLOP/s
(2·rows·weights). Best of several passes: other programs only ever slow a pass down.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from twostroke.kernels import native_library
from twostroke.kernels.native_matrix import CMatrix, CRows

FORMATS = {
    "f32": (0, 0),
    "bf16": (1, 0),
    "w8a8": (2, 0),
    "int8": (3, 0),
    "int4-32": (4, 32),
    "int4-64": (4, 64),
    "int4-128": (4, 128),
}


@dataclass(frozen=True)
class Shape:
    layers: int
    d_model: int
    kv: int  # KV heads × head dim
    d_ff: int
    vocab: int

    def matrices(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of qkv, o, gate + up, down of each layer, and the head."""
        d = self.d_model
        return self.layers * [(d + 2 * self.kv, d), (d, d), (2 * self.d_ff, d), (d, self.d_ff)] + [(self.vocab, d)]


SHAPES = {"135M": Shape(30, 576, 192, 1536, 49152), "1.1B": Shape(22, 2048, 256, 5632, 32000)}


class Bench:
    def __init__(self, library: ctypes.CDLL, shape: Shape, format_name: str) -> None:
        self.library = library
        self.format, self.group = FORMATS[format_name]
        self.shapes = shape.matrices()
        self.weights = sum(n * k for n, k in self.shapes)
        sizes = [library.ts_packed_bytes(self.format, self.group, n, k) for n, k in self.shapes]
        self.bytes = sum(sizes)
        self.memory = library.ts_allocate(sum(size + 64 for size in sizes))
        rng = np.random.default_rng(0)
        n_most, k_most = max(n for n, _ in self.shapes), max(k for _, k in self.shapes)
        plain = {
            0: lambda: rng.standard_normal(n_most * k_most, dtype=np.float32),
            1: lambda: rng.integers(0x3C00, 0x3D00, n_most * k_most, dtype=np.uint16),
            4: lambda: rng.integers(0, 16, n_most * k_most, dtype=np.uint8),
        }.get(self.format, lambda: rng.integers(-127, 128, n_most * k_most, dtype=np.int8))()
        scales = np.full(n_most * max(1, k_most // 32), 0.01, np.float32)
        matrices, at = [], self.memory
        for (n, k), size in zip(self.shapes, sizes, strict=True):
            library.ts_pack(self.format, self.group, n, k, plain.ctypes.data, scales.ctypes.data, None, at)
            matrices.append(CMatrix(self.format, self.group, n, k, at, None))
            at += (size + 63) // 64 * 64
        self.matrices = (CMatrix * len(matrices))(*matrices)
        self.arrays: list[int] = []

    def seconds(self, m: int, repeats: int, prefetch_bytes: int, chunk_rows: int) -> float:
        library, rows = self.library, []
        x = np.random.default_rng(1).standard_normal((m, max(k for _, k in self.shapes)), dtype=np.float32)
        made: dict[int, CRows] = {}
        for _, k in self.shapes:
            if k not in made:
                inputs = self.zeros(m * k * 4)
                ctypes.memmove(inputs, np.ascontiguousarray(x[:, :k]).ctypes.data, m * k * 4)
                width, n_sums = library.ts_padded(k), library.ts_sums_per_row(k)
                pointers = [inputs, *map(self.zeros, (m * width * 2, m * width, m * 4, m * n_sums * 4))]
                library.ts_prepare_rows(self.format, pointers[0], m, k, *pointers[1:])
                made[k] = CRows(m, *pointers)
            rows.append(made[k])
        y = self.zeros((m + library.ts_threads() * chunk_rows) * max(n for n, _ in self.shapes) * 4)
        array = (CRows * len(rows))(*rows)
        seconds = float(library.ts_pass_seconds(self.matrices, len(rows), array, y, prefetch_bytes, chunk_rows, repeats))
        while self.arrays:
            library.ts_release(self.arrays.pop())
        return seconds

    def zeros(self, n_bytes: int) -> int:
        """The address of so many zeros, at a multiple of 64 as the engine's, until the next `seconds`."""
        self.arrays.append(self.library.ts_allocate(n_bytes))
        return self.arrays[-1]

    def close(self) -> None:
        self.library.ts_release(self.memory)


def read_rate(library: ctypes.CDLL) -> Callable[[int], float]:
    """bytes/s at which all threads read a buffer of so many bytes, best of several."""

    def rate(n_bytes: int) -> float:
        memory = library.ts_allocate(n_bytes)
        ctypes.memset(memory, 1, n_bytes)
        seconds = library.ts_read_seconds(memory, n_bytes, max(5, int(2e9 // n_bytes)))
        library.ts_release(memory)
        return n_bytes / seconds

    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=["bf16", "w8a8", "int8", "int4-64"])
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 32, 512])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--target", choices=native_library.holding())
    parser.add_argument("--prefetch-bytes", type=int, default=0)
    parser.add_argument("--chunk-rows", type=int, help="rows of a chunk; 0: none; as the engine if absent")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each cell, about")
    options = parser.parse_args()
    library = native_library.library()
    if library is None:
        raise SystemExit(native_library.why_absent())
    library.ts_set_threads(options.threads)
    if options.target:
        native_library.set_target(options.target)
    print(f"target {native_library.target()}, {options.threads} threads, ", end="")
    print(f"barrier {library.ts_barrier_seconds(100000) * 1e9:.0f} ns")
    rate = read_rate(library)
    for model in options.models:
        for name in options.formats:
            bench = Bench(library, SHAPES[model], name)
            limit = rate(bench.bytes)
            for m in options.rows:
                chunk = library.ts_chunk_rows(m, options.threads) if options.chunk_rows is None else options.chunk_rows
                how = (options.prefetch_bytes, chunk)
                once = bench.seconds(m, 2, *how)
                limit = max(limit, rate(bench.bytes))  # asked beside each cell: neighbours of the machine change it
                seconds = min(once, bench.seconds(m, max(3, min(200, int(options.seconds / once))), *how))
                gbps, gflops = bench.bytes / seconds / 1e9, 2 * m * bench.weights / seconds / 1e9
                print(
                    f"{model:5} {name:9} rows {m:4}: {seconds * 1e3:8.2f} ms  {bench.bytes / 1e6:7.1f} MB  {gbps:5.1f} GB/s "
                    f"= {gbps / limit * 1e11:5.1f}% of {limit / 1e9:.1f}  {gflops:7.0f} GFLOP/s",
                    flush=True,
                )
            bench.close()


if __name__ == "__main__":
    main()
