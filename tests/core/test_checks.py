"""Checks of numbers name what they refuse, and let everything else pass."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from twostroke.core.checks import check_amount, check_count, check_limit, check_positive, check_share, check_whole
from twostroke.core.errors import ConfigError


@pytest.mark.parametrize(
    ("check", "passes", "refused"),
    [
        (check_whole, [1, 7], [0, -1, 1.0, True, "1", None, 10**16]),
        (check_limit, [None, 1e-9, 5], [0, -1.0, math.inf, math.nan, 1e300]),
        (check_share, [1e-9, 1], [0, 1.01, math.nan]),
        (check_amount, [0, 2.5], [-1e-9, math.inf, math.nan, 1e300]),
        (check_positive, [1e-9, 3], [0, -1, math.inf, math.nan, 1e300]),
        (check_count, [1, 9], [0, -3]),
    ],
)
def test_a_number_passes_or_is_named(
    check: Callable[[str, object], object], passes: list[object], refused: list[object]
) -> None:
    for value in passes:
        check("some_name", value)
    for value in refused:
        with pytest.raises(ConfigError, match=r"some_name=.* must be "):
            check("some_name", value)


def test_the_least_of_a_whole_number_is_asked_for() -> None:
    check_whole("steps", 0, least=0)
    with pytest.raises(ConfigError, match=r"steps=-1 must be a whole number of at least 0\."):
        check_whole("steps", -1, least=0)
