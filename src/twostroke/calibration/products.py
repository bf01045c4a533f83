"""Rates of matrix products by scheme, rows and shape class, and the 4096³ peaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F

from twostroke.calibration.timing import Clock
from twostroke.core.profile import MatmulPoint

ROWS = (1, 4, 16, 64, 256, 1024, 4096)

CLASSES: tuple[tuple[int, int], ...] = ((384, 384), (1536, 384), (4096, 384), (384, 1024), (2048, 2048), (4096, 4096))
"""(n, k) of weights: small square, wide, vocabulary-like, narrow with a longer sum, and two that leave the cache."""

DEEP_CLASSES: tuple[tuple[int, int], ...] = ((384, 8192), (1024, 8192))
"""(n, k) where k is a number of tokens: the product of a weight's gradient, whose left operand is transposed."""

LONGEST_S = 0.25
"""A point predicted to take longer than this per run is left out; the planner takes the nearest smaller one."""

PEAK_SIDE = 4096
SMALLER_PEAK_SIDE = 2048
PEAK_LONGEST_S = 3.0

Run = Callable[[], object]


def make_product(scheme: str, m: int, n: int, k: int, device: str) -> Run | None:
    """A callable that computes one (m, k) × (k, n) product as training or the engine would; None where this build cannot."""
    generator = torch.Generator(device=device).manual_seed(0)
    if scheme in ("fp32", "bf16"):
        dtype = torch.float32 if scheme == "fp32" else torch.bfloat16
        if (n, k) in DEEP_CLASSES:
            left = torch.randn(k, m, generator=generator, device=device).to(dtype)
            right = torch.randn(k, n, generator=generator, device=device).to(dtype)
            return lambda: left.t() @ right
        x = torch.randn(m, k, generator=generator, device=device).to(dtype)
        weight = torch.randn(n, k, generator=generator, device=device).to(dtype)
        return lambda: F.linear(x, weight)
    weight8 = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
    if scheme == "w8":
        half = torch.randn(m, k, generator=generator, device=device).to(torch.bfloat16)
        scale = torch.rand(n, generator=generator, device=device).to(torch.bfloat16)
        run: Run = lambda: torch.ops.aten._weight_int8pack_mm(half, weight8, scale)  # noqa: E731
    else:
        x8 = torch.randint(-127, 128, (m, k), dtype=torch.int8, device=device)
        right8 = weight8.t()
        run = lambda: torch._int_mm(x8, right8)  # noqa: E731
    try:
        run()
    except (RuntimeError, AttributeError, NotImplementedError):
        return None  # this torch or this device lacks the kernel, or wants other shapes
    return run


def measure_class(
    clock: Clock, scheme: str, n: int, k: int, rows: Sequence[int], largest_m: int | None = None
) -> Iterator[MatmulPoint]:
    """Points of one class in rising m, ending before a run would take ``LONGEST_S``."""
    last_s, last_m = 0.0, 1
    for m in rows:
        if (largest_m and m > largest_m) or last_s * m / last_m > LONGEST_S:
            return
        run = make_product(scheme, m, n, k, clock.device)
        if run is None:
            continue
        last_s, last_m = clock.best_s(run, seconds=0.025, least=4), m
        yield MatmulPoint(scheme=scheme, m=m, n=n, k=k, flop_per_s=2.0 * m * n * k / last_s)


def measure_peak(clock: Clock, scheme: str, side: int = PEAK_SIDE) -> float | None:
    """FLOP/s of the side³ product, the best of three; None where the scheme cannot run. On a machine where it would take more
    than ``PEAK_LONGEST_S`` a smaller cube stands in."""
    small = make_product(scheme, SMALLER_PEAK_SIDE // 4, SMALLER_PEAK_SIDE // 4, SMALLER_PEAK_SIDE // 4, clock.device)
    if small is None:
        return None
    expected = clock.best_s(small, seconds=0.02, least=2) * (side / (SMALLER_PEAK_SIDE // 4)) ** 3
    if expected > PEAK_LONGEST_S:
        side = min(side, SMALLER_PEAK_SIDE)
    run = make_product(scheme, side, side, side, clock.device)
    return None if run is None else 2.0 * side**3 / clock.best_s(run, seconds=0.5, least=3)
