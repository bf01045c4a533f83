"""How long a request waits beside others: the one model that plans, searches, explanations and ``bench`` ask.

There are two kinds of load. In a closed loop each of B users asks again when answered; in an open one requests arrive by
chance at a rate. All formulas are arithmetic on the seconds of steps, which the planner has from a calibration or a datasheet.
They are held against a simulated engine in tests/planner/test_load.py.
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


def closed_loop(steps: Steps, users: int, lengths: int = 1, requests: float = math.inf) -> Latency:
    """Median latency of a request beside those of ``users`` − 1 others, who each ask again when answered.

    A request comes when another has ended. Where all answers are equally long (``lengths`` = 1), the g prompts of one step end
    together again and come together: with A = ``Steps.prompt_s`` they take g·A, and for the share 1 − g/B that has others
    decoding beside it there is waiting w = 2·T, the step that it comes in and its own. At random it finds q = (B − 1)/n others
    ending in its own and in the last step: X·(1 + 2·q), and w = 2·T. Answers of W different ``lengths`` end together with
    probability 1/W. In a load of less than two waves of ``requests`` most come at once, and half of them go first:
    (B/g + 1)/2 groups of g·P.

    TTFT is these prompts and w. A request takes every user's prompt once and n − 1 steps: E2E = B·A + w + (n − 1)·T, and
    TPOT = (E2E − TTFT)/(n − 1). Alone TTFT = P, TPOT = T.
    """
    later, step_s = steps.output_tokens - 1, steps.step_s
    if users == 1:
        ttft_s, e2e_s = steps.prefill_s, steps.prefill_s + later * step_s
        return Latency(_loaded("ttft_s", ttft_s), _loaded("tpot_s", step_s), _loaded("e2e_s", e2e_s))
    together, prompt_s = letter("g", steps.together(users)), steps.prompt_s(users)
    if requests < 2 * users:
        waited_s, prompts_s = 0.0, (users / together + 1) / 2 * together * steps.prefill_s
    else:
        waited_s = 2 * step_s * (1 - together / users / lengths)
        by_chance = steps.added_s * (1 + 2 * (users - 1) / steps.output_tokens)
        prompts_s = by_chance + (together * prompt_s - by_chance) / lengths
    ttft_s = _loaded("ttft_s", waited_s + prompts_s)
    e2e_s = _loaded("e2e_s", waited_s + users * prompt_s + later * step_s)
    return Latency(ttft_s, _loaded("tpot_s", (e2e_s - ttft_s) / later if later else step_s), e2e_s)


_MEANING = {
    "ttft_s": "prompts of others, the step it comes in and its own",
    "tpot_s": "other users' prompts are between tokens",
    "e2e_s": "every user's prompt once, waiting, its steps",
}


def _loaded(which: str, seconds: float) -> float:
    return named(f"loaded_{which}", seconds, "s", _MEANING[which], section="load")


def open_loop_first_token(steps: Steps, rate_per_s: float, decoding: float = 1.0) -> tuple[float, float]:
    """(mean wait, mean TTFT) of requests that arrive by chance at ``rate_per_s``; ``decoding`` is the share of time in which
    others decode.

    Wait until the own step begins: ``stepped_server_wait_s``, with a step of T in that share of time. Then the own
    step with the prompt in it, T + X, or P where nothing decodes.
    """
    wait_s = stepped_server_wait_s(rate_per_s, decoding * steps.step_s, steps.added_s)
    return wait_s, wait_s + decoding * (steps.step_s + steps.added_s) + (1 - decoding) * steps.prefill_s


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


def stepped_server_wait_s(rate_per_s: float, step_s: float, added_s: float) -> float:
    """Mean time that a Poisson arrival takes beyond step + added of its own, at a server that works in steps of
    step + N · added seconds, N being the requests that arrived during the step before (gated service); ∞ for
    ρ = rate · added ≥ 1.

    Steps last L with mean T ÷ (1 − ρ) and variance X²·λ·mean; an arrival meets m = E[L²]/E[L] = mean + λ·X². It waits for
    half of that and for those who arrived in it and go into the same step, on average λ·m·X in all: m/2 + ρ·m. The variance
    leaves out that long steps follow long ones, so waits near ρ = 1 are longer than this.
    """
    check_amount("step_s", step_s)
    check_amount("added_s", added_s)
    busy = utilisation(rate_per_s, added_s)
    if busy >= 1:
        return math.inf
    met = step_s / (1 - busy) + rate_per_s * added_s**2
    return met / 2 + busy * met
