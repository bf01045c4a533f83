"""How long the matrix products alone of a batch-1 step take: the plan's own packed matrices, one after another, one row."""

from __future__ import annotations

import torch

from twostroke.engine.plan import Plan
from twostroke.kernels.native_library import library
from twostroke.kernels.native_matrix import CMatrix, CRows, NativeExperts, NativeMatrix, NativePair

PASSES = 10


def products_seconds(plan: Plan, n_threads: int) -> float | None:
    """The best of ``PASSES`` passes, a barrier after each matrix as in a step. Excluded: quantising the row, norms, rotary,
    attention, activations, sampling, Python. None for a plan that is not native, and for a mixture, whose tokens choose the
    matrices."""
    lib = library()
    matrices: list[NativeMatrix] = []
    for op in plan.ops:
        matrix = getattr(op, "matrix", None)
        if isinstance(matrix, NativePair):
            matrices += [matrix.gate, matrix.up]
        elif isinstance(matrix, NativeMatrix):
            matrices.append(matrix)
    mixture = any(isinstance(part, NativeExperts) for op in plan.ops for part in vars(op).values())
    if lib is None or not matrices or mixture:
        return None
    if lib.ts_threads() != n_threads:
        lib.ts_set_threads(n_threads)
    kept, rows = [], []
    for matrix in matrices:
        k = matrix.n_columns
        width = lib.ts_padded(k)
        x, scales = torch.full((1, k), 0.5), torch.zeros(1)
        bf16, codes = torch.zeros((1, width), dtype=torch.int16), torch.zeros((1, width), dtype=torch.int8)
        sums = torch.zeros((1, lib.ts_sums_per_row(k)), dtype=torch.int32)
        lib.ts_prepare_rows(matrix.c.format, x.data_ptr(), 1, k, *(t.data_ptr() for t in (bf16, codes, scales, sums)))
        kept.append((x, bf16, codes, scales, sums))
        rows.append(CRows(1, *(t.data_ptr() for t in kept[-1])))
    widest = max(matrix.n_rows for matrix in matrices)
    y, n = torch.empty(widest), len(matrices)
    c_matrices, c_rows = (CMatrix * n)(*(m.c for m in matrices)), (CRows * n)(*rows)
    return float(lib.ts_pass_seconds(c_matrices, n, c_rows, y.data_ptr(), lib.ts_prefetch_bytes(), 0, PASSES))
