"""Percentiles of measured or simulated times, by one definition."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

PERCENTILES = (50.0, 90.0, 95.0, 99.0)


def percentile(values: Iterable[float], percent: float) -> float:
    """The percentile by linear interpolation between order statistics, at rank (n − 1)·percent/100 as numpy's default. NaN
    without values."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass(frozen=True)
class Distribution:
    """Mean and percentiles of one latency, in seconds, over ``n`` values."""

    n: Annotated[int, "values"]
    mean: Annotated[float, float | None, "s", "mean; null without values"]
    median: Annotated[float, float | None, "s", "half are below it"]
    p90: Annotated[float, float | None, "s", "90% are below it"]
    p95: Annotated[float, float | None, "s", "95% are below it"]
    p99: Annotated[float, float | None, "s", "99% are below it"]

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        mean = sum(values) / len(values) if values else math.nan
        ordered = sorted(values)
        return cls(len(values), mean, *(percentile(ordered, p) for p in PERCENTILES))

    def later(self, seconds: float) -> Distribution:
        """The same with ``seconds`` more of each value."""
        return Distribution(self.n, *(value + seconds for value in (self.mean, self.median, self.p90, self.p95, self.p99)))

    @classmethod
    def of_counted(cls, counts: Iterable[tuple[float, int]]) -> Distribution:
        """The same of values that come several times, each with its count."""
        ordered = sorted(counts)
        n = sum(count for _, count in ordered)
        if not n:
            return cls.of(())
        mean = sum(value * count for value, count in ordered) / n
        return cls(n, mean, *(_counted_percentile(ordered, n, p) for p in PERCENTILES))


def _counted_percentile(ordered: Sequence[tuple[float, int]], n: int, percent: float) -> float:
    rank = (n - 1) * percent / 100
    low = math.floor(rank)
    before, found = 0, math.nan
    for value, count in ordered:
        before += count
        if math.isnan(found) and before > low:
            found = value
        if before > low + 1 or before == n:
            return found + (value - found) * (rank - low)
    return found
