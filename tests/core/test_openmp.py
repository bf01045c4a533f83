"""Idle threads sleep soon, unless the user has said otherwise."""

from __future__ import annotations

import pytest

from twostroke.core.openmp import SPIN_COUNT, limit_spinning


def test_spinning_is_limited_where_nobody_has_chosen() -> None:
    environment: dict[str, str] = {"OMP_NUM_THREADS": "2"}
    limit_spinning(environment)
    assert environment == {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": SPIN_COUNT}


@pytest.mark.parametrize("chosen", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}])
def test_a_choice_of_the_users_own_is_left_alone(chosen: dict[str, str]) -> None:
    environment = dict(chosen)
    limit_spinning(environment)
    assert environment == chosen
