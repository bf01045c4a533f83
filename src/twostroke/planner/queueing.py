"""Waiting before the first token: queues in front of several servers, and of one that works in steps.

Times are seconds, rates requests a second. ``scv`` is a squared coefficient of variation, variance ÷ mean²: 0 for constant
times, 1 for exponential ones. Every formula is held against a discrete-event simulation in tests/planner/test_queueing.py.
"""

from __future__ import annotations

import math

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


def stepped_server_wait_s(rate_per_s: float, step_s: float, added_s: float) -> float:
    """Mean time that a Poisson arrival takes beyond step + added of its own, at a server that works in steps of
    step + N · added seconds, N being the requests that arrived during the step before (gated service); ∞ for
    ρ = rate · added ≥ 1.

    Steps last L with mean T ÷ (1 − ρ) and variance X²·λ·mean; an arrival meets m = E[L²]/E[L] = mean + λ·X². It waits for
    half of that and for those who arrived in it and go into the same step, on average λ·m·X in all: m/2 + ρ·m. The variance
    leaves out that long steps follow long ones, so waits near ρ = 1 are longer than this.
    """
    _check(step_s=step_s, added_s=added_s)
    busy = utilisation(rate_per_s, added_s)
    if busy >= 1:
        return math.inf
    met = step_s / (1 - busy) + rate_per_s * added_s**2
    return met / 2 + busy * met
