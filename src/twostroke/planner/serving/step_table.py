"""Step times that were worked out once: a load has many steps and few kinds of them."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.planner.serving.strategy import Chunk, StepSeconds

SAME_UP_TO = 32
"""Requests and tokens up to which every number is worked out; above, as many in each doubling, and between them linearly. Steps
grow linearly in both but for corners, where half a step between knots is 1.5% of the batch."""


class StepTable:
    """``step_seconds`` between knots. A chunk adds to the step at the knot below what it adds there; without decoding requests
    steps are exact."""

    def __init__(self, step_seconds: StepSeconds) -> None:
        self._exact = step_seconds
        self._knots: dict[tuple[int, int], float] = {}
        self._rows: dict[int, dict[int, tuple[float, float]]] = {}
        self._added: dict[tuple[int, int, tuple[Chunk, ...]], float] = {}

    def __call__(self, decoding: int, context: float, chunks: Sequence[Chunk]) -> float:
        seconds = self._decode(decoding, context) if decoding else 0.0
        return seconds + self._add(decoding, context, tuple(chunks)) if chunks else seconds

    def _decode(self, decoding: int, context: float) -> float:
        low, high = _knots(decoding)
        seconds = self._line(low, context)
        return seconds if decoding == low else seconds + (decoding - low) / (high - low) * (self._line(high, context) - seconds)

    def _line(self, decoding: int, context: float) -> float:
        """Linear in the context between two knots."""
        whole = int(context)
        row = self._rows.setdefault(decoding, {})
        if whole not in row:
            low, high = _knots(whole)
            at_low = self._knot(decoding, low)
            slope = (self._knot(decoding, high) - at_low) / (high - low)
            row[whole] = (at_low - low * slope, slope)
        at_zero, slope = row[whole]
        return at_zero + context * slope

    def _knot(self, decoding: int, context: int) -> float:
        key = (decoding, context)
        if key not in self._knots:
            self._knots[key] = self._exact(decoding, context, ())
        return self._knots[key]

    def _add(self, decoding: int, context: float, chunks: tuple[Chunk, ...]) -> float:
        n, tokens = _knots(decoding)[0] if decoding else 0, _knots(int(context))[0] if decoding else 0
        key = (n, tokens, chunks)
        if key not in self._added:
            without = self._knot(n, tokens) if n else 0.0
            self._added[key] = self._exact(n, tokens, chunks) - without
        return self._added[key]


def _knots(value: int) -> tuple[int, int]:
    """The knot at or below ``value`` and the next: every number up to ``SAME_UP_TO``, then so many in each doubling."""
    shift = max(0, value.bit_length() - SAME_UP_TO.bit_length())
    low = value >> shift << shift
    return low, low + (1 << shift)
