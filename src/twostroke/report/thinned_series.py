"""Keeps a series of any length in few points, so that a page is as fast at a million steps as at a hundred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Number = TypeVar("Number", int, float)


class ThinnedSeries:
    """Rows of ``width`` numbers, kept as means over ``bucket`` consecutive rows each, in at most ``most`` points.

    When all points are used, neighbours are merged and ``bucket`` doubles. So memory and traffic are bounded, and every row
    still counts. None does not enter a mean, and the mean without numbers is None.
    """

    def __init__(self, width: int, most: int) -> None:
        if most < 2:
            raise ValueError("most must be at least 2")
        self.width, self.most, self.bucket = width, most + most % 2, 1
        self._sums: list[list[float]] = []
        self._counts: list[list[int]] = []
        self._rows_in_last = 0

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, row: Sequence[float | None]) -> None:
        if not self._sums or self._rows_in_last == self.bucket:
            if len(self._sums) == self.most:
                self._merge_neighbours()
            self._sums.append([0.0] * self.width)
            self._counts.append([0] * self.width)
            self._rows_in_last = 0
        sums, counts = self._sums[-1], self._counts[-1]
        for place, value in enumerate(row):
            if value is not None:
                sums[place] += value
                counts[place] += 1
        self._rows_in_last += 1

    def _merge_neighbours(self) -> None:
        self._sums, self._counts = _added_in_pairs(self._sums), _added_in_pairs(self._counts)
        self.bucket *= 2
        self._rows_in_last = self.bucket

    def column(self, place: int, first: int = 0) -> list[float | None]:
        """The means of column ``place``, from point ``first`` on. The last point may still change."""
        rows = zip(self._sums[first:], self._counts[first:], strict=True)
        return [sums[place] / counts[place] if counts[place] else None for sums, counts in rows]


def _added_in_pairs(rows: list[list[Number]]) -> list[list[Number]]:
    """Row 0 + row 1, row 2 + row 3, …. The number of rows must be even."""
    return [[x + y for x, y in zip(a, b, strict=True)] for a, b in zip(rows[::2], rows[1::2], strict=True)]
