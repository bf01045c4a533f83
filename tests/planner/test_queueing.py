"""Formulas of waiting agree with simulated queues and with textbook values."""

from __future__ import annotations

import heapq
import math
import random

import pytest

from twostroke.core.errors import ConfigError
from twostroke.planner.queueing import (
    closed_loop,
    erlang_c,
    largest_rate_per_s,
    several_servers_wait_s,
    single_server_wait_s,
    utilisation,
)


def simulated_wait_s(rate: float, draw_service: object, servers: int, n: int = 40_000) -> float:
    """Mean wait of ``n`` Poisson arrivals, first come first served, on a clock of events."""
    rng = random.Random(7)
    free = [0.0] * servers
    now = waited = 0.0
    for _ in range(n):
        now += rng.expovariate(rate)
        start = max(now, heapq.heappop(free))
        waited += start - now
        heapq.heappush(free, start + draw_service(rng))  # type: ignore[operator]
    return waited / n


def simulated_closed_response_s(users: int, service: float, away: float, exponential: bool, n: int = 40_000) -> float:
    """Mean time at one server of ``users`` who come back ``away`` seconds after they were served."""
    rng = random.Random(7)

    def draw(mean: float) -> float:
        return rng.expovariate(1 / mean) if exponential else mean

    arrivals = [(rng.random() * away, user) for user in range(users)]
    heapq.heapify(arrivals)
    free = total = 0.0
    for _ in range(n):
        now, user = heapq.heappop(arrivals)
        free = max(free, now) + draw(service)
        total += free - now
        heapq.heappush(arrivals, (free + draw(away), user))
    return total / n


@pytest.mark.parametrize("busy", [0.3, 0.6, 0.8])
def test_one_server_waits_as_simulated(busy: float) -> None:
    # 40,000 arrivals leave the mean within 10% at 80% load (waits are correlated over some 1/(1−ρ)² arrivals)
    constant = simulated_wait_s(busy, lambda _: 1.0, 1)
    assert single_server_wait_s(busy, 1.0, 0.0) == pytest.approx(constant, rel=0.1)
    exponential = simulated_wait_s(busy, lambda rng: rng.expovariate(1.0), 1)
    assert single_server_wait_s(busy, 1.0, 1.0) == pytest.approx(exponential, rel=0.12)


@pytest.mark.parametrize(("servers", "busy"), [(2, 0.7), (4, 0.8), (8, 0.7)])
def test_several_servers_wait_as_simulated(servers: int, busy: float) -> None:
    exponential = simulated_wait_s(busy * servers, lambda rng: rng.expovariate(1.0), servers)
    assert several_servers_wait_s(busy * servers, 1.0, servers, 1.0) == pytest.approx(exponential, rel=0.15)
    # Allen–Cunneen is an approximation away from exponential service: within a quarter at these loads
    constant = simulated_wait_s(busy * servers, lambda _: 1.0, servers)
    assert several_servers_wait_s(busy * servers, 1.0, servers, 0.0) == pytest.approx(constant, rel=0.25)


@pytest.mark.parametrize(("users", "service", "away"), [(2, 1.0, 1.0), (4, 1.0, 5.0), (16, 0.1, 2.0), (16, 0.5, 2.0)])
def test_a_closed_loop_responds_as_simulated(users: int, service: float, away: float) -> None:
    exact = simulated_closed_response_s(users, service, away, exponential=True)
    assert closed_loop(users, service, away).response_s == pytest.approx(exact, rel=0.05)
    even = simulated_closed_response_s(users, service, away, exponential=False)
    assert even - 0.02 * service <= closed_loop(users, service, away).response_s  # the safe side, for even services


def test_erlang_c_gives_textbook_values() -> None:
    assert erlang_c(0.5, 1) == pytest.approx(0.5)  # M/M/1: the probability of waiting is ρ
    assert erlang_c(2.0, 3) == pytest.approx(4 / 9)  # by hand: (8/6·3)/(1+2+2+4) = 4/9
    assert erlang_c(3.0, 3) == 1.0


def test_one_server_is_a_case_of_several() -> None:
    assert several_servers_wait_s(0.6, 1.0, 1, 0.3) == pytest.approx(single_server_wait_s(0.6, 1.0, 0.3))


def test_a_load_that_is_not_carried_waits_forever() -> None:
    assert single_server_wait_s(2.0, 0.5) == math.inf
    assert several_servers_wait_s(8.0, 0.5, 4) == math.inf


def test_the_largest_rate_gives_the_response_it_was_asked_for() -> None:
    rate = largest_rate_per_s(0.5, 0.2, 0.25)
    assert 0.2 + single_server_wait_s(rate, 0.2, 0.25) == pytest.approx(0.5)
    assert largest_rate_per_s(0.2, 0.3) == 0.0


def test_one_user_never_waits_and_many_keep_the_server_busy() -> None:
    assert closed_loop(1, 0.2, 1.0).wait_s == 0.0
    many = closed_loop(100, 0.2, 1.0)
    assert many.utilisation == pytest.approx(1.0, rel=1e-6)
    assert many.response_s == pytest.approx(100 * 0.2 - 1.0, rel=1e-6)  # n·S − Z once the server is saturated


@pytest.mark.parametrize(
    "wrong", [lambda: utilisation(-1.0, 1.0), lambda: erlang_c(1.0, 0), lambda: closed_loop(0, 1.0, 1.0),
              lambda: single_server_wait_s(float("nan"), 1.0), lambda: utilisation(1.0, 1.0, 0)],
)  # fmt: skip
def test_impossible_queues_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="at least"):
        wrong()  # type: ignore[operator]
