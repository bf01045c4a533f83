"""Measures torch's matrix products: rates by scheme, rows and shape, and the peaks of 4096³."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F

from twostroke.calibration.timing import Clock
from twostroke.core.dtypes import TORCH_NAMES
from twostroke.core.policy import WEIGHT_ONLY_MULTIPLE
from twostroke.core.profile import MatmulPoint, input_gradient, weight_gradient
from twostroke.core.schemes import W8, W8A8
from twostroke.core.units import MIB
from twostroke.kernels.features import has_int8_weight_only, has_w8a8_linear
from twostroke.kernels.matrix import Int8Matrix

TRAINING_ROWS = (8, 256, 4096)
ENGINE_ROWS = (1, 4, 16, 64, 256, 1024)

TRAINING_SCHEMES = ("fp32", "bf16")
FP16, FP16_ROWS = "fp16", (8, 256)
FP16_LAYOUTS = (FP16, input_gradient(FP16), weight_gradient(FP16))
"""A CPU without fp16 arithmetic multiplies it far slower than bf16, and not alike in all layouts. A Zen 4 reaches 26 to 34
GFLOP/s forward, 6.8 in the weight's gradient and 2.7 to 4.4 in the input's, of any size. One class of each shows it. A GPU's
fp16 is as fast as its bf16."""

CLASSES: tuple[tuple[int, int], ...] = ((384, 384), (1536, 384), (4096, 384), (384, 1024), (2048, 2048), (4096, 4096))
"""(n, k) of weights: small and square, wide, a small vocabulary, narrow with a long sum, and two larger than the cache."""

SMALL_CLASSES: tuple[tuple[int, int], ...] = ((128, 128), (8, 128), (128, 8))
"""The same of a narrow model, and of adapters: what starting a product costs is in their rates."""

DEEP_CLASSES: tuple[tuple[int, int], ...] = ((384, 8192), (1024, 8192))
"""(n, k) where k is a number of tokens: the product that makes a weight's gradient, with the left operand transposed."""

LONGEST_S = 0.25
"""A point is left out if one run of it would take longer. The planner then takes the nearest smaller one."""

CYCLED_BYTES = 16 * MIB
MOST_COPIES = 12
"""In a model other layers come between, so a small weight is not in the nearest cache when it is used again. Runs therefore
take turns among as many copies of it as ``CYCLED_BYTES`` hold."""

PEAK_SIDE = 4096
SMALLER_PEAK_SIDE = 2048
PEAK_LONGEST_S = 3.0

Run = Callable[[], object]


def _filled(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same number everywhere: times do not depend on values, and drawing 4096² numbers takes longer than most products."""
    return torch.full(shape, 0.5, dtype=dtype, device=device)


def _training_product(scheme: str, m: int, n: int, k: int, device: str) -> Run:
    dtype = getattr(torch, TORCH_NAMES[FP16 if scheme in FP16_LAYOUTS else scheme])
    if scheme == input_gradient(FP16):
        upstream, weight = _filled(m, k, device=device, dtype=dtype), _filled(k, n, device=device, dtype=dtype)
        return lambda: upstream @ weight
    if (n, k) in DEEP_CLASSES:
        left, right = _filled(k, m, device=device, dtype=dtype), _filled(k, n, device=device, dtype=dtype)
        return lambda: left.t() @ right
    x, weight = _filled(m, k, device=device, dtype=dtype), _filled(n, k, device=device, dtype=dtype)
    return lambda: F.linear(x, weight)


def _int8_product(scheme: str, m: int, n: int, k: int, device: str) -> Run | None:
    """A product with the torch runner's own matrices (``kernels.matrix``), quantising activations included. None if this
    machine or this torch lacks the kernel."""
    if device != "cpu" or not (has_int8_weight_only() if scheme == W8 else has_w8a8_linear()):
        return None
    if scheme == W8 and k % WEIGHT_ONLY_MULTIPLE:
        return None
    copies = max(1, min(MOST_COPIES, CYCLED_BYTES // (n * k)))
    codes, scale = torch.full((n, k), 7, dtype=torch.int8), torch.full((n,), 0.5)
    # Weight-only products read the plain codes, which are kept only without ``integers``.
    matrices = [Int8Matrix(codes, scale, integers=scheme == W8A8) for _ in range(copies)]
    copy = itertools.cycle([matrix.weight_only if scheme == W8 else matrix.w8a8 for matrix in matrices])
    x = _filled(m, k, device=device).to(torch.bfloat16)
    return lambda: next(copy)(x)


def make_product(scheme: str, m: int, n: int, k: int, device: str) -> Run | None:
    """A call that computes one (m, k) × (k, n) product as training or the torch runner does; None if this build cannot."""
    if scheme in (*TRAINING_SCHEMES, *FP16_LAYOUTS):
        return _training_product(scheme, m, n, k, device)
    return _int8_product(scheme, m, n, k, device)


def measure_class(clock: Clock, scheme: str, n: int, k: int, rows: Sequence[int]) -> Iterator[MatmulPoint]:
    """Points of one class in rising m, up to the last whose run is expected to take at most ``LONGEST_S``."""
    last_s, last_m = 0.0, 1
    for m in rows:
        if last_s * m / last_m > LONGEST_S:
            return
        run = make_product(scheme, m, n, k, clock.device)
        if run is None:
            return
        last_s, last_m = clock.best_s(run, seconds=0.02, least=4), m
        yield MatmulPoint(scheme=scheme, m=m, n=n, k=k, flop_per_s=2.0 * m * n * k / last_s)


def measure_launch(clock: Clock, scheme: str) -> float | None:
    """Seconds of a product of one row and a 64×64 weight, which has next to nothing to compute."""
    run = make_product(scheme, 1, 64, 64, clock.device)
    return None if run is None else clock.best_s(run, seconds=0.02, least=50)


def weight_only_limit(points: Sequence[MatmulPoint]) -> float | None:
    """Up to so many multiply-adds, int8 weights with bf16 activations are faster than quantising the activations too. This
    limit minimises the sum of log times over all measured shapes. None if one of the two was not measured."""
    rates: dict[tuple[int, int, int], dict[str, float]] = {}
    for p in points:
        if p.scheme in (W8, W8A8):
            rates.setdefault((p.m, p.n, p.k), {})[p.scheme] = p.flop_per_s
    # (multiply-adds, log of how many times weight-only is faster), small shapes first
    faster = sorted((m * n * k, math.log(pair[W8] / pair[W8A8])) for (m, n, k), pair in rates.items() if len(pair) == 2)
    if not faster:
        return None
    best_limit, best_gain, gain = 0.0, 0.0, 0.0
    for macs, log_ratio in faster:
        gain += log_ratio  # if this shape, and every smaller one, runs weight-only
        if gain > best_gain:
            best_limit, best_gain = float(macs), gain
    return best_limit


def measure_peak(clock: Clock, scheme: str, side: int = PEAK_SIDE) -> float | None:
    """FLOP/s of the product of side³, the best of two; None if the scheme cannot run. If it would take more than
    ``PEAK_LONGEST_S``, a smaller cube is taken."""
    tenth = max(64, side // 8)
    small = make_product(scheme, tenth, tenth, tenth, clock.device)
    if small is None:
        return None
    expected = clock.best_s(small, seconds=0.02, least=2) * (side / tenth) ** 3
    if expected > PEAK_LONGEST_S:
        side = min(side, SMALLER_PEAK_SIDE)
    run = make_product(scheme, side, side, side, clock.device)
    return None if run is None else 2.0 * side**3 / clock.best_s(run, seconds=0.3, least=2)
