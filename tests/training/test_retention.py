from __future__ import annotations

import pytest

from twostroke.training.retention import Retention


@pytest.mark.parametrize(
    ("retention", "steps", "removed"),
    [
        (Retention(2), [5, 1, 10, 123], [1, 5]),
        (Retention(2), [1], []),
        (Retention(1, every=100), [0, 50, 100, 150, 200, 250], [0, 50, 150]),
        (Retention(2, every=100), [100, 200, 300], []),
        # a save on a signal at 7 and 8 does not cost a rollback its checkpoint of the schedule
        (Retention(2, anchor_every=5), [0, 5, 7, 8], [0]),
        (Retention(1, anchor_every=5), [0, 3], []),
        (Retention(1, every=4, anchor_every=3), [0, 3, 4, 6, 7, 8, 9], [0, 3, 6, 7]),
    ],
)
def test_what_is_removed(retention: Retention, steps: list[int], removed: list[int]) -> None:
    assert retention.removable(steps) == removed
