"""One component's share of a pass: operations, bytes, seconds; and which of the three limits its time comes from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated

from twostroke.core.described import As
from twostroke.core.named import Mark, largest, named, records

COMPONENTS = ("attention", "mlp", "norms", "embedding", "head", "optimizer")
"""Rows of the comparison table, in order. ``attention`` includes its projections and rotation, ``head`` loss or sampling."""


@dataclass(frozen=True)
class Work:
    """One component's share of a pass.

    ``seconds`` is the prediction: max(arithmetic, memory) + launch for one operation (``Work.limited``), or what a measured
    rate says; for several operations in a row, the sum of theirs.
    """

    DOCUMENT = "component flops bytes seconds arithmetic_s memory_s launch_s intensity_flop_per_byte bound"

    component: Annotated[str, "attention, mlp, norms, embedding, head, optimizer, communication …"]
    flops: Annotated[float, "FLOP"]
    bytes: Annotated[float, "bytes", "moved"]
    arithmetic_s: Annotated[float, "s", "at the product rate alone"]
    memory_s: Annotated[float, "s", "at the bandwidth alone"]
    launch_s: Annotated[float, "s", "of starting operations"]
    seconds: Annotated[float, "s", "predicted"]

    @classmethod
    def limited(
        cls, component: str, flops: float, n_bytes: float, arithmetic_s: float, memory_s: float, launch_s: float = 0.0
    ) -> Work:
        """The roofline with a launch term: max(arithmetic, memory) + launch."""
        return cls(component, flops, n_bytes, arithmetic_s, memory_s, launch_s, largest(arithmetic_s, memory_s) + launch_s)

    @property
    def intensity(self) -> Annotated[float, "FLOP", "a byte", As("intensity_flop_per_byte")]:
        """Arithmetic intensity in FLOP per byte; 0 where nothing is moved."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def bound(self) -> Annotated[str, "arithmetic, memory or launch: the largest of the three"]:
        """ "arithmetic", "memory" or "launch": the limit that takes longest."""
        times = {"arithmetic": self.arithmetic_s, "memory": self.memory_s, "launch": self.launch_s}
        return max(times, key=lambda name: times[name])

    @property
    def numbers(self) -> tuple[float, float, float, float, float, float]:
        """All but the component, in the order of the fields."""
        return self.flops, self.bytes, self.arithmetic_s, self.memory_s, self.launch_s, self.seconds

    def times(self, n: float) -> Work:
        """The same work done ``n`` times over."""
        return Work(self.component, *(n * number for number in self.numbers))

    def called(self, name: str, source: str, mark: Mark = "predicted") -> Work:
        """The same work, its seconds a line of the explanation."""
        if not records():
            return self
        return replace(self, seconds=named(f"{name}_s", self.seconds, "s", source, mark))

    def stretched(self, ratio: float) -> Work:
        """The same work in ``ratio`` times the time, every limit with it."""
        flops, n_bytes, *times = self.numbers
        return Work(self.component, flops, n_bytes, *(ratio * seconds for seconds in times))


def merge(works: Iterable[Work]) -> tuple[Work, ...]:
    """One ``Work`` per component, in the order of ``COMPONENTS``: sums of everything, since operations run in a row."""
    found: dict[str, list[Work]] = {}
    for work in works:
        found.setdefault(work.component, []).append(work)
    return tuple(
        Work(component, *map(sum, zip(*(work.numbers for work in parts), strict=True)))
        for component in COMPONENTS
        if (parts := found.get(component))
    )


def shown(works: tuple[Work, ...], of: str) -> tuple[Work, ...]:
    """``works`` of a pass, each component's seconds a line of the explanation."""
    if not records():
        return works
    return tuple(replace(w, seconds=named(f"{w.component}_s", w.seconds, "s", f"of {of}; {w.bound}-bound")) for w in works)


def total_seconds(works: Iterable[Work]) -> float:
    return sum(work.seconds for work in works)


def bound_of(works: Iterable[Work]) -> str:
    """What most of the time of ``works`` is bound by."""
    totals: dict[str, float] = {}
    for work in works:
        totals[work.bound] = totals.get(work.bound, 0.0) + work.seconds
    return max(totals, key=lambda name: totals[name])
