"""Ratios of whole measured steps are met at the anchors, lie between them in between, and end flat."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.planner.hardware.anchors import ratio_at

RATIOS = {(256, 1): 1.5, (256, 32): 1.0, (768, 1): 1.2, (768, 32): 0.9}


@pytest.mark.parametrize(("anchor", "ratio"), RATIOS.items())
def test_an_anchor_gets_its_own_ratio(anchor: tuple[int, int], ratio: float) -> None:
    assert ratio_at(RATIOS, *anchor) == pytest.approx(ratio)


def test_the_geometric_middle_gets_the_geometric_mean() -> None:
    """√(256·768) is half way in log width: √(1.5·1.2) = 1.3416…"""
    assert ratio_at(RATIOS, math.sqrt(256 * 768), 1) == pytest.approx(math.sqrt(1.5 * 1.2))


@given(st.floats(1, 1e6), st.floats(1, 1e6))
def test_no_ratio_leaves_the_range_of_the_anchors(width: float, rows: float) -> None:
    assert 0.9 - 1e-9 <= ratio_at(RATIOS, width, rows) <= 1.5 + 1e-9


def test_beyond_the_last_anchor_nothing_changes() -> None:
    assert ratio_at(RATIOS, 10**6, 10**6) == pytest.approx(0.9)
    assert ratio_at(RATIOS, 1, 1) == pytest.approx(1.5)


def test_without_anchors_a_plan_is_left_as_it_is() -> None:
    assert ratio_at({}, 512, 8) == 1.0
