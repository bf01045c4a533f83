"""A served model under load: what a request rate does to latency, the rate that keeps to an SLO, replicas, separated pools.

Latency is simulated: the scheduler on the plan's step times (``serving.simulation``). Closed formulas only say where to look. A
step takes T(b) for b decoding requests, and X more when a prompt is computed beside it. At a rate λ prompts take the share
ρ = λ·X of all time, so that

    TPOT = T(b) ÷ (1 − ρ),   b = λ·(output − 1)·TPOT   (Little's law)

All prompts and answers have the plan's lengths, or vary around them by the share ``spread``; requests of a rate come by chance.
The formulas are held against the simulation in tests/planner/test_serving_load.py.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, NamedTuple

from twostroke.core.checks import check_limit
from twostroke.core.described import LeftOut
from twostroke.core.errors import CapacityError, ConfigError
from twostroke.planner.money.cost import usd_per_million_tokens
from twostroke.planner.serving.drawn import Lengths, Uniform
from twostroke.planner.serving.http import http_front_end, step_beside_http_s, step_sharing_s, with_late_tokens
from twostroke.planner.serving.load import Latency, closed_loop, several_servers_wait_s
from twostroke.planner.serving.plan import ServingPlan, strategy_of
from twostroke.planner.serving.policies import Policy, policy_of
from twostroke.planner.serving.simulation import Simulated, simulate
from twostroke.planner.serving.step_costs import pace_of
from twostroke.planner.serving.step_table import StepTable
from twostroke.planner.serving.strategy import Chunk
from twostroke.planner.serving.workload import Workload
from twostroke.scheduling.pace import Pace

MAX_SAMPLED_BATCH = 2**14
CLOSE = 1e-6
"""Relative change at which an iteration is done."""


MOST_REQUESTS_PER_S = 1e12
"""More than a hundred a second for every person on earth. Far beyond it a float cannot count replicas one by one."""


@dataclass(frozen=True)
class Slo:
    """Limits that the mean TTFT and TPOT keep to; None is no limit. Raises ConfigError for limits that are not above 0."""

    ttft_s: Annotated[float | None, "longest s to the first token"] = None
    tpot_s: Annotated[float | None, "longest s between tokens"] = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_limit(name, value)

    @property
    def is_free(self) -> bool:
        """Whether nothing is asked."""
        return self.ttft_s is None and self.tpot_s is None

    def met(self, ttft_s: float, tpot_s: float) -> bool:
        return (self.ttft_s is None or ttft_s <= self.ttft_s) and (self.tpot_s is None or tpot_s <= self.tpot_s)


# -- simulating a plan ----------------------------------------------------------------------------------------------------


class Stretch(NamedTuple):
    """Factors of steps that only decode and of steps with prompts: the ends of a plan's intervals."""

    decode: float = 1.0
    prompts: float = 1.0

    @classmethod
    def ends(cls, intervals: Mapping[str, Mapping[str, float]]) -> tuple[Stretch, Stretch]:
        """(shortest, longest) from a plan's intervals by ledger name."""
        decode, prompts = intervals["tpot_s"], intervals["prefill_tok_per_s"]
        return (
            cls(decode["low"] / decode["value"], prompts["value"] / prompts["high"]),
            cls(decode["high"] / decode["value"], prompts["value"] / prompts["low"]),
        )


class Server:
    """One copy of the planned model: its steps, worked out once for any number of workloads. ``http``: reached by HTTP, which
    adds to each step and before each first token what calibration measured of it, one request after another."""

    def __init__(self, plan: ServingPlan, http: bool = False) -> None:
        self.plan, self.http = plan, http
        strategy = strategy_of(plan.spec, plan.shape, plan.hardware)
        policy, shape = policy_of("twostroke" if plan.hardware.is_calibrated_cpu else plan.shape.engine), plan.shape
        self.policy: Policy = replace(
            policy,
            token_budget=shape.token_budget or policy.token_budget,
            max_running=shape.max_running or policy.max_running,
        )
        self.steps, self.front_end_s = StepTable(strategy.step_seconds), strategy.front_end_s
        self.shares_processors = strategy.on_all_threads
        self.speed_up = plan.step_s / plan.tpot_s  # of speculation

    def serve(self, workload: Workload, stretch: Stretch = Stretch()) -> Simulated:
        """What ``workload`` finds there."""

        def seconds(decoding: int, context: float, chunks: Sequence[Chunk]) -> float:
            beside_s = self._beside_s(decoding) if self.http else 0.0
            if not chunks:
                return stretch.decode / self.speed_up * self.steps(decoding, context, ()) + beside_s
            return stretch.prompts * self.steps(decoding, context, chunks) + beside_s

        plan = self.plan
        prompt = plan.shape.prompt_tokens
        front = http_front_end(plan.hardware, prompt, self.shares_processors(prompt, 0)) if self.http else None
        window = plan.spec.window_of_every_layer
        found = simulate(workload, self.policy, seconds, plan.pages, window=window, front=front, pace=self._pace())
        if self.http:
            return replace(found, itl_s=with_late_tokens(found.itl_s, plan.hardware))
        return replace(found, ttft_s=found.ttft_s.later(self.front_end_s), e2e_s=found.e2e_s.later(self.front_end_s))

    def _pace(self) -> Pace | None:
        """How our engine bounds prompts on a machine whose steps it knows; others do not."""
        if not self.plan.hardware.is_calibrated_cpu:
            return None
        return pace_of(self.steps, self.plan.shape.max_step_ratio, self.policy.token_budget)

    def _beside_s(self, decoding: int) -> float:
        """What HTTP adds to a step in which so many requests decode."""
        return step_beside_http_s(self.plan.hardware, decoding) + self.sharing_s(decoding)

    def sharing_s(self, decoding: int) -> float:
        """What HTTP takes of a step's own processors, if it runs on all of them and requests decode in it."""
        if not decoding or not self.shares_processors(decoding, decoding):
            return 0.0
        return step_sharing_s(self.plan.hardware, decoding, self.plan.shape.output_tokens)

    def lengths(self, spread: float) -> tuple[Lengths, Lengths]:
        """Of prompts and answers: the plan's, each from (1 − spread) to (1 + spread) times as long. Raises ConfigError."""
        if not 0 <= spread < 1:
            raise ConfigError(f"spread={spread:g} must be at least 0 and below 1: a share of the length.")
        shape = self.plan.shape
        longest = shape.max_model_len or self.plan.spec.max_positions
        share = min(spread, longest / (shape.prompt_tokens + shape.output_tokens) - 1)  # the longest pair fits
        prompts, outputs = (
            Uniform(max(1, n - int(share * n)), n + int(share * n)) for n in (shape.prompt_tokens, shape.output_tokens)
        )
        return prompts, outputs

    def closed_loop(self, spread: float = 0.0, rounds: int = 0) -> Workload:
        """The plan's users, who each ask again when answered; ``rounds`` (default: ``ROUNDS``) answers of each are reported."""
        shape = self.plan.shape
        users, prompts, outputs = shape.prompts, *self.lengths(spread)
        if users > MOST_USERS:
            raise ConfigError(
                f"batch={shape.batch} are more users than are simulated, {MOST_USERS:,}. Lower it; "
                "`plan serve --no-simulation` plans without them."
            )
        n = max(users, min((rounds or ROUNDS) * users, MOST_SIMULATED - 2 * users))
        return Workload.closed(
            users, n + 2 * users, prompts, outputs, warmup=users, cooldown=users, answers=shape.answers,
            shared_prefix=shape.hit_tokens,
        )  # fmt: skip

    def at_rate(self, rate_per_s: float, in_flight: float, spread: float = 0.0, n: int = 0) -> Workload:
        """Requests that come by chance, about ``in_flight`` of them at a time."""
        shape, (prompts, outputs) = self.plan.shape, self.lengths(spread)
        filling = min(MOST_SIMULATED, math.ceil(1.2 * in_flight) + 20)
        return Workload.open(
            rate_per_s, (n or RATE_REQUESTS) + filling + filling // 2, prompts, outputs, warmup=filling, cooldown=filling // 2,
            shared_prefix=shape.hit_tokens, seed=1,
        )  # fmt: skip


ROUNDS = 6
"""Answers that each user gets of those that are reported."""

RATE_REQUESTS = 600
"""Requests that are reported at a rate: the mean of waits that are as long as they vary is then known within 4%."""

SEARCH_REQUESTS = 150
"""The same while a rate is searched."""

MOST_USERS = 10_000
"""Most users of a simulation: 17 s of it on two cores. A million would be half an hour."""

MOST_SIMULATED = 4000
"""Most requests of one simulation of a plan, half a second of them."""


@dataclass(frozen=True)
class Loaded:
    """A simulated load, and the same with all steps as fast and as slow as the plan's intervals end."""

    expected: Annotated[Simulated, "at the predicted step times"]
    fast: Annotated[Simulated, "with the shortest step times of the intervals"]
    slow: Annotated[Simulated, "with the longest"]

    @property
    def medians(self) -> Latency:
        """What a user mostly finds."""
        found = self.expected
        tpot_s = found.tpot_s.median if found.tpot_s.n else 0.0
        return Latency(found.ttft_s.median, tpot_s, found.e2e_s.median)


def simulated(server: Server, workload: Workload, fast: Stretch, slow: Stretch) -> Loaded:
    """``workload`` at the expected step times and at both ends of their intervals."""
    expected, *ends = (server.serve(workload, stretch) for stretch in (Stretch(), fast, slow))
    return Loaded(expected, *ends)


@dataclass(frozen=True)
class AtRate:
    """One copy at a request rate, simulated."""

    rate_per_s: Annotated[float, "requests a second"]
    batch: Annotated[float, "requests that decode together, on average"]
    prefill_utilisation: Annotated[float, "share of the time in which a step holds a prompt"]
    wait_s: Annotated[float, "s", "before a prompt is begun, on average"]
    ttft_s: Annotated[float, "s", "to the first token, on average"]
    tpot_s: Annotated[float, "s", "between tokens, on average"]
    e2e_s: Annotated[float, "s", "of a whole answer, on average"]
    simulated: Annotated[Simulated | None, "all of it", LeftOut] = field(default=None, compare=False)

    @classmethod
    def of(cls, rate_per_s: float, found: Simulated) -> AtRate:
        tpot_s = found.tpot_s.mean if found.tpot_s.n else 0.0
        means = found.wait_s.mean, found.ttft_s.mean, tpot_s, found.e2e_s.mean
        return cls(rate_per_s, found.decoding, found.prompt_share, *means, found)


def _most_at_once(plan: ServingPlan) -> int:
    """Requests that decode together at most: as many as the memory holds, and no more than are let run."""
    return min(plan.largest_batch, plan.shape.max_running or plan.largest_batch)


def step_of_batch(plan: ServingPlan) -> Callable[[float], float]:
    """TPOT without others' prompts by batch: sampled at powers of two up to the largest batch, linear between them."""
    most = min(max(_most_at_once(plan), 1), MAX_SAMPLED_BATCH)
    batches = [2**k for k in range(most.bit_length()) if 2**k < most] + [most]
    seconds = [strategy_of(plan.spec, replace(plan.shape, batch=b), plan.hardware).tpot_s() for b in batches]

    def of(batch: float) -> float:
        i = min(max(bisect.bisect_right(batches, batch), 1), len(batches) - 1)
        if len(batches) == 1:
            return seconds[0]
        share = (batch - batches[i - 1]) / (batches[i] - batches[i - 1])
        return seconds[i - 1] + max(0.0, share) * (seconds[i] - seconds[i - 1])

    return of


def carried(plan: ServingPlan, rate_per_s: float, step: Callable[[float], float]) -> tuple[float, float] | None:
    """(requests that decode, TPOT) at ``rate_per_s`` by the formulas above; None where one copy cannot carry it: prompts alone
    take all the time, or more requests decode at once than the memory holds."""
    busy = rate_per_s * plan.added_by_a_prompt_s
    if busy >= 1:
        return None
    later = plan.shape.output_tokens - 1
    batch, tpot = 1.0, step(1.0) / (1 - busy)
    while True:  # rises towards the least fixed point
        wanted = rate_per_s * later * tpot
        if wanted > _most_at_once(plan):
            return None
        if wanted <= batch * (1 + CLOSE):
            return wanted, tpot
        batch = wanted
        tpot = step(batch) / (1 - busy)


def at_rate(
    plan: ServingPlan, rate_per_s: float, step: Callable[[float], float] | None = None, server: Server | None = None,
    spread: float = 0.0, n: int = 0,
) -> AtRate | None:  # fmt: skip
    """One copy at ``rate_per_s``, simulated; None where it cannot carry it (``carried``). Raises ConfigError for a rate that is
    not above 0."""
    if not 0 < rate_per_s < math.inf:
        raise ConfigError(f"rate={rate_per_s:g} requests/s must be above 0 and finite.")
    found = carried(plan, rate_per_s, step or step_of_batch(plan))
    if found is None:
        return None
    server = server or Server(plan)
    return AtRate.of(rate_per_s, server.serve(server.at_rate(rate_per_s, found[0], spread, n)))


SEARCH_STEPS = 5
"""Bisections of a rate: it is found within 1/32 of the highest that is carried at all, as near as so few requests tell."""


def largest_rate(
    plan: ServingPlan, slo: Slo, step: Callable[[float], float] | None = None, server: Server | None = None,
    spread: float = 0.0,
) -> AtRate | None:  # fmt: skip
    """The highest rate that one copy carries within the SLO; None where it is not met even alone. Formulas say what is carried
    at all and keeps to the TPOT; below that the simulation is bisected."""
    step, server = step or step_of_batch(plan), server or Server(plan)
    if not slo.met(server.front_end_s + plan.ttft_s, step(1.0)):
        return None
    high = _highest_carried(plan, slo, step)
    low, found = 0.0, at_rate(plan, high, step, server, spread, SEARCH_REQUESTS) if slo.is_free else None
    for _ in range(0 if slo.is_free else SEARCH_STEPS):
        middle = (low + high) / 2
        there = at_rate(plan, middle, step, server, spread, SEARCH_REQUESTS)
        if there is not None and slo.met(there.ttft_s, there.tpot_s):
            low, found = middle, there
        else:
            high = middle
    return found


def _highest_carried(plan: ServingPlan, slo: Slo, step: Callable[[float], float]) -> float:
    """The highest rate that is carried within the SLO's TPOT by the formulas. Nothing is carried beyond prompts that fill all
    time, nor beyond the largest batch of steps that hold no prompt."""
    later = max(1, plan.shape.output_tokens - 1)
    low = 0.0
    high = min(
        1 / plan.added_by_a_prompt_s if plan.added_by_a_prompt_s else math.inf, _most_at_once(plan) / (later * step(1.0))
    )
    for _ in range(40):
        middle = (low + high) / 2
        found = carried(plan, middle, step)
        low, high = (middle, high) if found is not None and slo.met(0.0, found[1]) else (low, middle)
    return low


def largest_batch_within(
    plan: ServingPlan, tpot_s: float, step: Callable[[float], float] | None = None, prompts_elsewhere: bool = False
) -> int:
    """The most users, each asking again at once, whose TPOT stays within ``tpot_s`` (``load.closed_loop``). 0: none."""
    step = step or step_of_batch(plan)
    steps = plan.steps._replace(prefill_s=0.0, added_s=0.0) if prompts_elsewhere else plan.steps

    def within(batch: int) -> bool:
        return closed_loop(steps._replace(step_s=step(batch)), batch).tpot_s <= tpot_s

    low, high = 0, min(max(plan.largest_batch, 1), MAX_SAMPLED_BATCH)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if within(middle) else (low, middle - 1)
    return low


@dataclass(frozen=True)
class Service:
    """What a rate needs: ``replicas`` copies, each at its share of the rate; ``capacity`` is one copy's highest within the SLO
    (or at ``MOST_UTILISED`` of what it can carry, without one)."""

    rate_per_s: Annotated[float, "requests a second, all copies"]
    replicas: Annotated[int, "copies"]
    devices: Annotated[int, "devices of all copies"]
    capacity_per_s: Annotated[float, "requests a second that one copy carries"]
    concurrency: Annotated[float, "requests under way, Little's law"]
    each: Annotated[AtRate, "one copy"]
    usd_per_hour: Annotated[float, "$", "of all devices"]
    usd_per_mtok: Annotated[float, "$", "per million output tokens"]


def replicas_for(
    plan: ServingPlan, rate_per_s: float, slo: Slo, best: AtRate | None, step: Callable[[float], float], server: Server,
    spread: float = 0.0,
) -> Service:  # fmt: skip
    """Copies for ``rate_per_s``, so that each keeps to the SLO; ``best`` is the ``largest_rate`` of one. Raises CapacityError
    where no number of them can."""
    if best is None:
        alone = f"TTFT {1e3 * plan.ttft_s:.3g} ms and TPOT {1e3 * step(1.0):.3g} ms"
        raise CapacityError(
            f"one request alone takes {alone}: no number of replicas meets the SLO. Use --tensor, or allow more."
        )
    capacity = best.rate_per_s * (MOST_UTILISED if slo.is_free else 1.0)
    replicas = max(1, math.ceil(rate_per_s / capacity * (1 - CLOSE)))
    each = at_rate(plan, rate_per_s / replicas, step, server, spread) or best
    devices = replicas * plan.devices
    usd = devices * plan.hardware.usd_per_hour.value
    output_tok_per_s = rate_per_s * plan.shape.output_tokens
    money = usd_per_million_tokens(output_tok_per_s, usd)
    return Service(rate_per_s, replicas, devices, capacity, rate_per_s * each.e2e_s, each, usd, money)


def pools_for(plan: ServingPlan, rate_per_s: float, slo: Slo) -> Disaggregation:
    """The same rate with prefill and decode on machines of their own. Decode instances hold the largest batch whose steps keep
    to the SLO's TPOT (the plan's batch without one). Every device sends its part of a prompt's cache to another node."""
    step = step_of_batch(plan)
    batch = min(plan.shape.batch, plan.largest_batch)
    if slo.tpot_s is not None:
        batch = largest_batch_within(plan, slo.tpot_s, step, prompts_elsewhere=True)
        if batch == 0:
            raise CapacityError(
                f"one request alone decodes a token in {1e3 * step(1.0):.3g} ms, above the SLO of {1e3 * slo.tpot_s:.3g} ms. "
                "Use --tensor, or allow more."
            )
    sending = sending_s(plan)
    return disaggregate(rate_per_s, plan.ttft_s, step(batch), batch, plan.shape.output_tokens, plan.kv_request_bytes, sending)


def sending_s(plan: ServingPlan, near: bool = False) -> float:
    """Seconds to send the cache of the plan's prompt to another node, or if ``near`` to another engine of the same one. Every
    device sends its part."""
    link = plan.hardware.link if near else plan.hardware.network
    part = plan.kv_bytes_per_token / plan.devices
    return transfer_s(plan.shape.prompt_tokens, part, link.alpha_s, link.effective_bytes_per_s)


@dataclass(frozen=True)
class Load:
    """What was asked of a plan: an SLO, a rate or both. ``best`` is one copy at its highest rate within the SLO (None: not met
    even alone), ``largest_batch`` the most users within its TPOT (None: no such limit)."""

    slo: Annotated[Slo, "the objective"]
    best: Annotated[AtRate | None, "the largest rate of one copy that keeps it"]
    largest_batch: Annotated[int | None, "the largest batch whose steps keep it"]
    service: Annotated[Service | None, "copies for the rate asked for"]
    pools: Annotated[Disaggregation | None, "the same with prefill and decode apart"]


def load_of(plan: ServingPlan, slo: Slo, rate_per_s: float = 0.0, separated: bool = False, spread: float = 0.0) -> Load:
    """``largest_rate`` and ``largest_batch_within``; with a rate also replicas, and pools where they are asked for."""
    step, server = step_of_batch(plan), Server(plan)
    best = largest_rate(plan, slo, step, server, spread)
    return Load(
        slo,
        best,
        None if slo.tpot_s is None else largest_batch_within(plan, slo.tpot_s, step),
        replicas_for(plan, rate_per_s, slo, best, step, server, spread) if rate_per_s else None,
        pools_for(plan, rate_per_s, slo) if rate_per_s and separated else None,
    )


# -- a small table --------------------------------------------------------------------------------------------------------

TABLE_BATCHES = (1, 4, 16, 64, 256)
TABLE_CONTEXTS = (256, 1024, 4096, 16384, 65536)


class LatencyRow(NamedTuple):
    """One batch of the latency table."""

    batch: Annotated[int, "requests that decode together"]
    tpot_s: Annotated[tuple[float | None, ...], "s", "between tokens by context; null where memory ends"]


@dataclass(frozen=True)
class LatencyTable:
    """TTFT of a prompt of each context alone, and TPOT by batch (rows) and context (columns); None where memory ends."""

    contexts: Annotated[tuple[int, ...], "tokens"]
    ttft_s: Annotated[tuple[float, ...], "s", "to the first token of a prompt so long, alone"]
    rows: Annotated[tuple[LatencyRow, ...], "by batch"]


def latency_table(plan: ServingPlan) -> LatencyTable:
    """TTFT and TPOT around the plan: its own batch and context, and the usual ones that the model and the memory allow."""
    most = plan.shape.max_model_len or plan.spec.max_positions
    own = plan.shape.context
    contexts = sorted({c for c in TABLE_CONTEXTS if c < most} | {own})
    batches = sorted({b for b in TABLE_BATCHES if b <= plan.largest_batch} | {min(plan.shape.batch, plan.largest_batch)})
    room = plan.largest_batch * (plan.shape.prompt_tokens + plan.shape.output_tokens)  # tokens that the memory holds
    first, rows = [], []
    for context in contexts:
        shape = replace(plan.shape, batch=1, prompt_tokens=context, output_tokens=1)
        first.append(strategy_of(plan.spec, shape, plan.hardware).prefill_s())
    for batch in batches:
        row = []
        for context in contexts:
            # One answer token after context − 1 others: the step at that very context.
            shape = replace(plan.shape, batch=batch, prompt_tokens=max(1, context - 1), output_tokens=1)
            row.append(strategy_of(plan.spec, shape, plan.hardware).tpot_s() if batch * context <= room else None)
        rows.append(LatencyRow(batch, tuple(row)))
    return LatencyTable(tuple(contexts), tuple(first), tuple(rows))


MOST_UTILISED = 0.8
"""Share of time that a pool may be busy where nothing else bounds it: beyond it waiting grows faster than load."""


def transfer_s(prompt_tokens: float, kv_bytes_per_token: float, alpha_s: float, bytes_per_s: float) -> float:
    """Seconds to send one prompt's cache: α + prompt tokens · KV bytes ÷ β. Nothing overlaps with the prefill; engines that
    send layer by layer hide most of it behind the prefill itself."""
    if bytes_per_s <= 0:
        raise ConfigError(f"a link of {bytes_per_s} bytes/s sends nothing. Use hardware whose network is known.")
    return alpha_s + prompt_tokens * kv_bytes_per_token / bytes_per_s


@dataclass(frozen=True)
class Disaggregation:
    """Two pools for ``rate_per_s`` requests a second. ``prefill_instances`` and ``decode_instances`` count groups of
    tensor · pipeline devices."""

    rate_per_s: Annotated[float, "requests a second"]
    prefill_instances: Annotated[int, "copies that compute prompts"]
    decode_instances: Annotated[int, "copies that decode"]
    transfer_bytes: Annotated[float, "bytes", "of KV that a request moves"]
    transfer_s: Annotated[float, "s", "that takes"]
    wait_s: Annotated[float, "s", "before a prompt is begun"]
    ttft_s: Annotated[float, "s", "to the first token"]
    tpot_s: Annotated[float, "s", "between tokens, transfer included"]
    prefill_utilisation: Annotated[float, "share of the time"]
    decode_utilisation: Annotated[float, "share of the time"]


def disaggregate(
    rate_per_s: float,
    prefill_s: float,
    decode_step_s: float,
    batch: int,
    output_tokens: int,
    transfer_bytes: float,
    sending_s: float,
) -> Disaggregation:
    """Pools that carry ``rate_per_s``: prefill instances until they are busy at most ``MOST_UTILISED``, decode instances by
    Little's law, rate · (output − 1) · step ÷ batch requests in flight, likewise.

    The first token comes from the prefill pool (wait + prefill); the second waits for the cache, so TPOT carries the transfer
    once: step + transfer ÷ (output − 1). Decode steps have no prefill beside them: that is what the split is for.
    """
    if not 0 < rate_per_s < math.inf:
        raise ConfigError(f"rate={rate_per_s} requests/s must be above 0 to size two pools. Give --rate.")
    later = max(1, output_tokens - 1)
    prefills = max(1, math.ceil(rate_per_s * prefill_s / MOST_UTILISED))
    in_flight = rate_per_s * later * decode_step_s
    decodes = max(1, math.ceil(in_flight / (batch * MOST_UTILISED)))
    wait = several_servers_wait_s(rate_per_s, prefill_s, prefills)
    return Disaggregation(
        rate_per_s=rate_per_s,
        prefill_instances=prefills,
        decode_instances=decodes,
        transfer_bytes=transfer_bytes,
        transfer_s=sending_s,
        wait_s=wait,
        ttft_s=wait + prefill_s,
        tpot_s=decode_step_s + sending_s / later,
        prefill_utilisation=rate_per_s * prefill_s / prefills,
        decode_utilisation=in_flight / (batch * decodes),
    )
