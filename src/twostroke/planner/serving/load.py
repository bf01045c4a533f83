"""How long a request waits beside others, by formulas: what ranks thousands of layouts and says where to simulate.

All are arithmetic on the seconds of steps, which the planner has from a calibration or a datasheet. What a plan says of a load
comes from ``serving.simulation``, which they are held against in tests/planner/test_load.py.
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

from twostroke.core.checks import check_amount, check_count
from twostroke.core.named import letter, named


class Steps(NamedTuple):
    """Seconds of an engine's steps, and what each request asks of them.

    ``prefill_s`` P: a prompt alone. ``added_s`` X: what a prompt adds to a step in which others decode. ``step_s`` T: a step in
    which all users decode. ``prompt_tokens`` are those to compute, ``token_budget`` those that a step takes at most.
    """

    prefill_s: float
    added_s: float
    step_s: float
    prompt_tokens: int
    output_tokens: int
    token_budget: int

    def together(self, users: int) -> int:
        """Prompts g that one step computes: as many as the token budget holds, at least one, at most all users'."""
        return max(1, min(users, self.token_budget // max(1, self.prompt_tokens)))

    def prompt_s(self, users: int) -> float:
        """What a prompt takes on average: P in the steps that hold prompts alone, a share g/B of them, X in the others."""
        alone = letter("g", self.together(users)) / users
        seconds = alone * self.prefill_s + (1 - alone) * self.added_s
        return named(
            "prompt_s", seconds, "s", "a prompt, g of which share a step: alone, or beside others that decode", section="load"
        )


class Latency(NamedTuple):
    """Of one request: first token, each later one, all of them."""

    ttft_s: Annotated[float, "s", "to the first token"]
    tpot_s: Annotated[float, "s", "between tokens"]
    e2e_s: Annotated[float, "s", "of a whole answer"]


def closed_loop(steps: Steps, users: int) -> Latency:
    """Latency of a request beside those of ``users`` − 1 others, who each ask again when answered, all answers equally long.

    A request comes when another has ended. The g prompts of one step end together again and come together: with
    A = ``Steps.prompt_s`` they take g·A, and for the share 1 − g/B that has others decoding beside it there is waiting w = 2·T,
    the step that it comes in and its own.

    TTFT is these prompts and w. A request takes every user's prompt once and n − 1 steps: E2E = B·A + w + (n − 1)·T, and
    TPOT = (E2E − TTFT)/(n − 1). Alone TTFT = P, TPOT = T.
    """
    later, step_s = steps.output_tokens - 1, steps.step_s
    if users == 1:
        ttft_s, e2e_s = steps.prefill_s, steps.prefill_s + later * step_s
        return Latency(_loaded("ttft_s", ttft_s), _loaded("tpot_s", step_s), _loaded("e2e_s", e2e_s))
    together, prompt_s = letter("g", steps.together(users)), steps.prompt_s(users)
    waited_s = 2 * step_s * (1 - together / users)
    ttft_s = _loaded("ttft_s", waited_s + together * prompt_s)
    e2e_s = _loaded("e2e_s", waited_s + users * prompt_s + later * step_s)
    return Latency(ttft_s, _loaded("tpot_s", (e2e_s - ttft_s) / later if later else step_s), e2e_s)


_MEANING = {
    "ttft_s": "prompts of others, the step it comes in and its own",
    "tpot_s": "other users' prompts are between tokens",
    "e2e_s": "every user's prompt once, waiting, its steps",
}


def _loaded(which: str, seconds: float) -> float:
    return named(f"loaded_{which}", seconds, "s", _MEANING[which], section="load")


POISSON_SCV = 1.0
"""Gaps between requests of many people who do not know of each other."""


def utilisation(rate_per_s: float, service_s: float, servers: int = 1) -> float:
    """rate · service ÷ servers: the share of time that a server is busy; 1 and more means that the queue never ends."""
    check_amount("rate_per_s", rate_per_s)
    check_amount("service_s", service_s)
    check_count("servers", servers)
    return rate_per_s * service_s / servers


def erlang_c(offered_load: float, servers: int) -> float:
    """Probability that an arrival has to wait in M/M/c, from Erlang's B by its recursion: B_k = a·B_{k−1} ÷ (k + a·B_{k−1}),
    C = B ÷ (1 − ρ(1 − B)); 1 where the load is not carried. ``offered_load`` a = rate · service, in Erlang."""
    check_amount("offered_load", offered_load)
    check_count("servers", servers)
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
    check_amount("service_scv", service_scv)
    check_amount("arrival_scv", arrival_scv)
    busy = utilisation(rate_per_s, service_s, servers)
    if busy >= 1:
        return math.inf
    return erlang_c(rate_per_s * service_s, servers) * service_s / (servers * (1 - busy)) * (arrival_scv + service_scv) / 2
