"""Measures what is done to weights outside of steps: rounding to codes, packing for the library, copying into new memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from twostroke.calibration.format_rates import measure_formats
from twostroke.calibration.timing import Clock
from twostroke.core.rates import WeightRates
from twostroke.core.schemes import NATIVE, WRITTEN, scheme_of, written_scheme
from twostroke.engine.lowering import packed_matrix
from twostroke.kernels.codes import quantize
from twostroke.kernels.native_library import library
from twostroke.quantization.gptq import round_with_compensation

SIDE = 512
"""Rows and columns of the matrix."""

COPIED_BYTES = 2**26
FIT_ROWS = 1024


@torch.inference_mode()
def measure_weights(clock: Clock, side: int = SIDE, copied_bytes: int = COPIED_BYTES) -> WeightRates:
    """Rates of a random matrix of ``side`` × ``side``, the best of a few runs each; groups of one size stand for all."""
    weight = torch.randn(side, side, generator=torch.Generator().manual_seed(0))
    inputs = torch.randn(FIT_ROWS, side, generator=torch.Generator().manual_seed(1))
    hessian, stored, size = inputs.t() @ inputs, weight.bfloat16(), float(side * side)
    group = min(side, 64)
    rounded, packed = {}, {}
    for name in families(WRITTEN):
        rounded[name] = size / clock.best_s(lambda s=written_scheme(name): quantize(weight, s).values(), least=2)  # type: ignore[misc]
    if library() is not None and clock.device == "cpu":
        for name in families(NATIVE):
            scheme = scheme_of(name).here
            packed[name] = size / clock.best_s(lambda s=scheme: packed_matrix(stored, s, None), least=2)  # type: ignore[misc]
    fitted_s = clock.best_s(lambda: round_with_compensation(weight, hessian, group, 0.01 * hessian), least=1)
    source = torch.ones(copied_bytes // 4)
    copy_s = clock.best_s(lambda: torch.empty_like(source).copy_(source), least=2)
    return WeightRates(rounded, packed, size / fitted_s, source.nbytes / copy_s, **measure_formats(clock, side))


def families(schemes: Iterable[str]) -> list[str]:
    """Those of ``schemes`` that are named without a group or a block."""
    return [name for name in schemes if name == scheme_of(name).family]
