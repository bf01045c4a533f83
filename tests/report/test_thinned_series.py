from __future__ import annotations

import pytest

from twostroke.report.thinned_series import ThinnedSeries


@pytest.mark.parametrize("n_rows", [1, 9, 10, 11, 1000, 1023])
def test_it_stays_small_and_every_row_still_counts(n_rows: int) -> None:
    series = ThinnedSeries(1, most=10)
    for row in range(n_rows):
        series.add([float(row)])
    assert len(series) <= 10
    means = series.column(0)
    full = [sum(range(i, i + series.bucket)) / series.bucket for i in range(0, n_rows - n_rows % series.bucket, series.bucket)]
    assert means[: len(full)] == full
    left = list(range(len(full) * series.bucket, n_rows))
    assert means[len(full) :] == ([sum(left) / len(left)] if left else [])


def test_what_is_missing_enters_no_mean() -> None:
    series = ThinnedSeries(2, most=2)
    for a, b in ((1.0, None), (3.0, None), (5.0, 7.0), (None, None)):
        series.add([a, b])
    assert series.bucket == 2
    assert series.column(0) == [2.0, 5.0]
    assert series.column(1) == [None, 7.0]
    assert series.column(1, first=1) == [7.0]
