"""Places and bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from twostroke.server.admission import MAX_RETRY_AFTER_S, MAX_STRETCH, MIN_RETRY_AFTER_S, Admission, ByteBudget
from twostroke.server.errors import ApiError


def test_more_than_the_limit_is_429_with_a_time_to_come_back() -> None:
    admission = Admission(3)
    admission.enter(2)
    with pytest.raises(ApiError) as caught:
        admission.enter(2)
    assert caught.value.status == 429
    assert int(caught.value.headers["retry-after"]) >= 1
    assert admission.active == 2, "who is turned away holds nothing"
    admission.leave(2, 9.0)
    admission.enter(3)
    assert admission.full
    assert float(admission.refusal().headers["retry-after-ms"]) == pytest.approx(4500, abs=5), "half an answer's time"


def waits_s(admission: Admission, n: int) -> list[float]:
    return [float(admission.refusal().headers["retry-after-ms"]) / 1000 for _ in range(n)]


def test_a_crowd_comes_back_one_by_one_and_as_fast_as_places_come_free() -> None:
    admission = Admission(4, clock=lambda: 100.0)
    admission.enter(4)
    admission.leave(1, 2.0)  # two seconds each: two places a second
    admission.enter(1)
    waits = waits_s(admission, 40)
    gaps = [later - sooner for sooner, later in itertools.pairwise(waits)]
    assert gaps == pytest.approx([0.5] * 39)
    assert max(waits_s(admission, 500)) <= MAX_RETRY_AFTER_S
    assert len(set(waits_s(admission, 50))) > 40, "beyond the longest wait they still do not meet"


def test_returns_slow_down_while_callers_are_refused_and_quicken_while_places_are_free() -> None:
    now = 0.0
    admission = Admission(100, clock=lambda: now)
    admission.enter(100)
    admission.leave(1, 1.0)
    admission.enter(1)

    def gap_s() -> float:
        nonlocal now
        now += 1000  # nobody who was told to come back is awaited any more
        sooner, later = waits_s(admission, 2)
        return later - sooner

    quick = gap_s()
    for _ in range(20):
        now += 2
        admission.refusal()
    assert gap_s() == pytest.approx(MAX_STRETCH * quick, rel=0.01)
    admission.leave(50)
    for _ in range(20):
        now += 2
        admission.leave(1)
        admission.enter(1)
    assert gap_s() == pytest.approx(quick, rel=0.6), "at most one step of slowing for the refusals that were asked for here"


def test_the_queue_of_returns_passes_with_time() -> None:
    now = 0.0
    admission = Admission(1, clock=lambda: now)
    waits_s(admission, 20)
    now = 1000.0
    assert waits_s(admission, 1)[0] < 1.0


def test_whole_seconds_are_near_the_milliseconds_and_never_zero() -> None:
    admission = Admission(1, clock=lambda: 0.0)
    for _ in range(200):
        headers = admission.refusal().headers
        assert int(headers["retry-after"]) >= 1
        assert abs(int(headers["retry-after"]) - float(headers["retry-after-ms"]) / 1000) <= 1
        assert float(headers["retry-after-ms"]) >= 1000 * MIN_RETRY_AFTER_S


def test_a_request_that_could_never_fit_is_the_callers_fault() -> None:
    with pytest.raises(ApiError) as caught:
        Admission(3).enter(4)
    assert caught.value.status == 400


def test_bytes_over_the_budget_are_taken_from_who_stood_still_longest() -> None:
    budget = ByteBudget(100)
    cut: list[str] = []

    def cutter(name: str) -> Callable[[], None]:
        return lambda: cut.append(name)

    still, moving, late = (budget.hold(cutter(name)) for name in ("still", "moving", "late"))
    moving.grow(30)
    still.grow(60)
    moving.grow(5)
    late.grow(10)
    assert (cut, budget.total) == (["still"], 45)
    still.grow(1000)  # a piece that was on its way
    assert budget.total == 45
    late.grow(200)
    assert (cut, budget.total) == (["still", "moving"], 210), "one alone may hold more than all together may"
    for held in (still, moving, late):
        held.release()
        held.release()
    assert budget.total == 0


def test_bytes_that_were_sent_are_free_again() -> None:
    budget = ByteBudget(100)
    first = budget.hold(lambda: pytest.fail("within the budget"))
    first.grow(90)
    first.shrink(80)
    budget.hold(lambda: pytest.fail("within the budget")).grow(90)
    assert budget.total == 100
