"""Waiting before the first token: queues in front of one or several servers, open (a rate) and closed (a number of users).

Times are seconds, rates requests a second. ``scv`` is a squared coefficient of variation, variance ÷ mean²: 0 for constant
times, 1 for exponential ones. Every formula is held against a discrete-event simulation in tests/planner/test_queueing.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from twostroke.core.errors import ConfigError

POISSON_SCV = 1.0
"""Gaps between requests of many people who do not know of each other."""


def _check(**values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not value >= 0 or math.isinf(value):
            raise ConfigError(f"{name}={value!r} must be a finite number of at least 0.")


def utilisation(rate_per_s: float, service_s: float, servers: int = 1) -> float:
    """rate · service ÷ servers: the share of time that a server is busy; 1 and more means that the queue never ends."""
    _check(rate_per_s=rate_per_s, service_s=service_s)
    if servers < 1:
        raise ConfigError(f"servers={servers} must be at least 1.")
    return rate_per_s * service_s / servers


def single_server_wait_s(rate_per_s: float, service_s: float, service_scv: float = 0.0) -> float:
    """Mean wait of a Poisson arrival at one server, M/G/1 (Pollaczek–Khinchine): ρ·S·(1 + scv) ÷ 2(1 − ρ); ∞ for ρ ≥ 1."""
    _check(service_scv=service_scv)
    busy = utilisation(rate_per_s, service_s)
    return math.inf if busy >= 1 else busy * service_s * (1 + service_scv) / (2 * (1 - busy))


def erlang_c(offered_load: float, servers: int) -> float:
    """Probability that an arrival has to wait in M/M/c, from Erlang's B by its recursion: B_k = a·B_{k−1} ÷ (k + a·B_{k−1}),
    C = B ÷ (1 − ρ(1 − B)); 1 where the load is not carried. ``offered_load`` a = rate · service, in Erlang."""
    _check(offered_load=offered_load)
    if servers < 1:
        raise ConfigError(f"servers={servers} must be at least 1.")
    if offered_load >= servers:
        return 1.0
    blocked = 1.0
    for k in range(1, servers + 1):
        blocked = offered_load * blocked / (k + offered_load * blocked)
    return blocked / (1 - offered_load / servers * (1 - blocked))


def several_servers_wait_s(
    rate_per_s: float, service_s: float, servers: int, service_scv: float = 0.0, arrival_scv: float = POISSON_SCV
) -> float:
    """Mean wait in GI/G/c by Allen and Cunneen: C(c, a) · S ÷ c(1 − ρ) · (arrival scv + service scv) ÷ 2; ∞ for ρ ≥ 1.

    Exact for M/M/c and M/G/1. Allen, Probability, Statistics and Queueing Theory, 2nd ed., 1990, section 5.3.
    """
    _check(service_scv=service_scv, arrival_scv=arrival_scv)
    busy = utilisation(rate_per_s, service_s, servers)
    if busy >= 1:
        return math.inf
    return erlang_c(rate_per_s * service_s, servers) * service_s / (servers * (1 - busy)) * (arrival_scv + service_scv) / 2


def largest_rate_per_s(response_s: float, service_s: float, service_scv: float = 0.0) -> float:
    """The Poisson rate at which wait and service of one server take ``response_s`` on average; 0 where service alone is longer.

    Pollaczek–Khinchine solved for the rate: ρ = 2w ÷ (2w + S(1 + scv)), w = response − S.
    """
    _check(response_s=response_s, service_s=service_s, service_scv=service_scv)
    wait = response_s - service_s
    if wait <= 0 or service_s == 0:
        return 0.0
    return 2 * wait / (2 * wait + service_s * (1 + service_scv)) / service_s


@dataclass(frozen=True)
class ClosedLoop:
    """``users`` who each send their next request as soon as the last is answered, seen in the steady state."""

    response_s: float  # wait and service at the server
    service_s: float
    rate_per_s: float

    @property
    def wait_s(self) -> float:
        return self.response_s - self.service_s

    @property
    def utilisation(self) -> float:
        """rate · service: the share of time that the server works."""
        return self.rate_per_s * self.service_s


def closed_loop(users: int, service_s: float, away_s: float) -> ClosedLoop:
    """``users`` requests that go round between one server (a prefill of ``service_s``) and ``away_s`` elsewhere (its decoding).

    Mean value analysis (Reiser and Lavenberg, J. ACM 27(2), 1980): R(n) = S(1 + Q(n−1)), X(n) = n ÷ (R(n) + Z), Q(n) = X·R.
    Exact for exponential service; for the even services of equal prompts it waits too long, by at most a service time.
    """
    _check(service_s=service_s, away_s=away_s)
    if users < 1:
        raise ConfigError(f"users={users} must be at least 1.")
    queue = rate = response = 0.0
    for n in range(1, users + 1):
        response = service_s * (1 + queue)
        rate = n / (response + away_s) if response + away_s else math.inf
        queue = rate * response if response else 0.0
    return ClosedLoop(response, service_s, rate)
