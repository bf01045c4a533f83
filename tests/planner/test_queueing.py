"""Formulas of waiting agree with simulated queues and with textbook values."""

from __future__ import annotations

import heapq
import math
import random

import pytest

from twostroke.core.errors import ConfigError
from twostroke.planner.serving.load import erlang_c, several_servers_wait_s, utilisation


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


@pytest.mark.parametrize("busy", [0.3, 0.6, 0.8])
def test_one_server_waits_as_simulated(busy: float) -> None:
    # 40,000 arrivals leave the mean within 10% at 80% load (waits are correlated over some 1/(1−ρ)² arrivals)
    constant = simulated_wait_s(busy, lambda _: 1.0, 1)
    assert several_servers_wait_s(busy, 1.0, 1, 0.0) == pytest.approx(constant, rel=0.1)
    exponential = simulated_wait_s(busy, lambda rng: rng.expovariate(1.0), 1)
    assert several_servers_wait_s(busy, 1.0, 1, 1.0) == pytest.approx(exponential, rel=0.12)


@pytest.mark.parametrize(("servers", "busy"), [(2, 0.7), (4, 0.8), (8, 0.7)])
def test_several_servers_wait_as_simulated(servers: int, busy: float) -> None:
    exponential = simulated_wait_s(busy * servers, lambda rng: rng.expovariate(1.0), servers)
    assert several_servers_wait_s(busy * servers, 1.0, servers, 1.0) == pytest.approx(exponential, rel=0.15)
    # Allen–Cunneen is an approximation away from exponential service: within a quarter at these loads
    constant = simulated_wait_s(busy * servers, lambda _: 1.0, servers)
    assert several_servers_wait_s(busy * servers, 1.0, servers, 0.0) == pytest.approx(constant, rel=0.25)


def test_erlang_c_gives_textbook_values() -> None:
    assert erlang_c(0.5, 1) == pytest.approx(0.5)  # M/M/1: the probability of waiting is ρ
    assert erlang_c(2.0, 3) == pytest.approx(4 / 9)  # by hand: (8/6·3)/(1+2+2+4) = 4/9
    assert erlang_c(3.0, 3) == 1.0


def test_a_load_that_is_not_carried_waits_forever() -> None:
    assert several_servers_wait_s(8.0, 0.5, 4) == math.inf


@pytest.mark.parametrize(
    "wrong", [lambda: utilisation(-1.0, 1.0), lambda: erlang_c(1.0, 0),
              lambda: several_servers_wait_s(float("nan"), 1.0, 1), lambda: utilisation(1.0, 1.0, 0)],
)  # fmt: skip
def test_impossible_queues_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"at least|not negative"):
        wrong()  # type: ignore[operator]
