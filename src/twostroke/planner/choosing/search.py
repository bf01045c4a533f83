"""Which machine, how many of it, cut how, in which precision and at which batch: every combination of a space, ranked.

Training and serving are searched apart, because they want different machines. Each space is walked whole: what the memory
rules out costs no timing, memory is computed once for all devices, and a prefill once for all batches. What is left is timed by
the functions that ``plan train`` and ``plan serve`` use, so a winner found here is the plan that they print.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Annotated, Any

from twostroke.core.checks import MOST_WHOLE, check_count, check_limit
from twostroke.core.described import As
from twostroke.core.engines import RECOMPUTATIONS
from twostroke.core.errors import ConfigError
from twostroke.core.optimizers import CHOICES
from twostroke.core.schemes import PLANNED, SEARCHED, scheme_of
from twostroke.core.spec import ModelSpec
from twostroke.planner.choosing.candidates import (
    Candidate,
    DeviceResult,
    Miss,
    Objective,
    Phase,
    choose,
    nearest_miss,
    reliefs,
    with_simulated_best,
)
from twostroke.planner.choosing.interconnect import LinkFinding, blame_idle_links, link_findings
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.money.cost import energy_kwh, rent_usd, usd_per_million_tokens
from twostroke.planner.money.power import Busy, mean_watts
from twostroke.planner.serving.load import Steps, closed_loop
from twostroke.planner.serving.memory import batch_pages
from twostroke.planner.serving.plan import plan_serving, served_schemes, strategy_of
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.serving.under_load import MOST_REQUESTS_PER_S
from twostroke.planner.training.checkpointing import resilience
from twostroke.planner.training.datasheet_rates import peak_type
from twostroke.planner.training.layout import Layout
from twostroke.planner.training.memory import PRECISIONS, snapshot_bytes, state_bytes
from twostroke.planner.training.plan import (
    StageTime,
    batches_s,
    bubble_of,
    n_nodes,
    rate_dtype,
    stage_time,
    startup_s,
    step_traffic,
    step_watts,
    training_memory,
    unknown_type,
    update_work,
)
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.work.component import bound_of, total_seconds
from twostroke.planner.work.flops import training_flops_per_token
from twostroke.planner.work.params import count_parameters

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Requests that decode together."""

MICRO_BATCHES = (1, 2, 4, 8)
"""Sequences of one forward and backward on one data-parallel rank."""

BATCH_TOKENS = 2**21
"""Tokens of an optimizer step where none are given: 2 M, between the 0.5 M and 3.2 M of GPT-3's sizes (arXiv 2005.14165, table
2.1). Assumed."""

TOKENS_PER_PARAMETER = 20
"""Training tokens where none are given: about 20 a parameter (Hoffmann et al. 2022, arXiv 2203.15556). Assumed."""

SEQUENCE_LENGTH = 4096
"""Training tokens of a sequence where none are given: Llama 2's (arXiv 2307.09288). Assumed."""

MAX_DEVICES = 8
"""Devices of one kind that a search may use where nothing is said."""

MOST_DEVICES = 2**16

DAY_S = 86400.0


@dataclass(frozen=True)
class ServeLimits:
    """What serving must keep to; None is no limit. Raises ConfigError for limits that are not above 0."""

    ttft_s: Annotated[float | None, "longest s to the first token"] = None
    tpot_s: Annotated[float | None, "longest s between tokens"] = None
    usd_per_mtok: Annotated[float | None, "most $ per million output tokens"] = None
    usd_per_hour: Annotated[float | None, "most $ an hour of all devices"] = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_limit(name, value)


@dataclass(frozen=True)
class TrainLimits:
    """What a training run must keep to; None is no limit. Raises ConfigError for limits that are not above 0."""

    days: Annotated[float | None, "most days of the run"] = None
    run_usd: Annotated[float | None, "most $ of the run"] = None
    usd_per_hour: Annotated[float | None, "most $ an hour of all devices"] = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_limit(name, value)


@dataclass(frozen=True)
class ServeWork:
    """What is to be served. ``requests_per_s`` = 0: one replica, kept full; above it, as many replicas as that rate needs."""

    prompt_tokens: Annotated[int, "tokens", "of a prompt"] = 512
    output_tokens: Annotated[int, "tokens", "of an answer"] = 128
    requests_per_s: Annotated[float, "requests a second, for the number of copies; 0: one kept full"] = 0.0

    def __post_init__(self) -> None:
        check_count("prompt_tokens", self.prompt_tokens)
        check_count("output_tokens", self.output_tokens)
        if not 0 <= self.requests_per_s <= MOST_REQUESTS_PER_S:
            raise ConfigError(f"requests_per_s={self.requests_per_s:g} must be from 0 to {MOST_REQUESTS_PER_S:g}.")


@dataclass(frozen=True)
class TrainWork:
    """What is to be trained: ``tokens`` in steps of ``batch_tokens``, cut into sequences of ``sequence_length``."""

    tokens: Annotated[float, "tokens", "of the run"]
    sequence_length: Annotated[int, "tokens", "of a sequence"] = SEQUENCE_LENGTH
    batch_tokens: Annotated[int, "tokens", "of an optimizer step"] = BATCH_TOKENS
    optimizer: Annotated[str, CHOICES] = "adamw"

    def __post_init__(self) -> None:
        for name in ("tokens", "sequence_length", "batch_tokens"):
            if not 1 <= getattr(self, name) <= MOST_WHOLE:
                raise ConfigError(f"{name}={getattr(self, name):g} must be from 1 to {MOST_WHOLE:g}.")
        if self.batch_tokens % self.sequence_length:
            nearest = max(1, round(self.batch_tokens / self.sequence_length)) * self.sequence_length
            raise ConfigError(
                f"batch_tokens={self.batch_tokens} must be a whole number of sequences of {self.sequence_length} tokens. "
                f"Use {nearest}."
            )

    @property
    def sequences(self) -> int:
        """Sequences of one optimizer step."""
        return self.batch_tokens // self.sequence_length


@dataclass(frozen=True)
class Space:
    """What may be combined: up to ``max_devices`` of one kind (a mixture of kinds is not searched), ``precisions`` and
    ``batches`` (none: those of the phase)."""

    machines: tuple[Hardware, ...]
    max_devices: int = MAX_DEVICES
    precisions: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.machines:
            raise ConfigError("there is no device to search. Name one with --hardware; without the option all are searched.")
        if not 1 <= self.max_devices <= MOST_DEVICES:
            raise ConfigError(f"max_devices={self.max_devices} must be from 1 to {MOST_DEVICES}.")
        for batch in self.batches:
            check_count("batch", batch)

    def most(self, machine: Hardware) -> int:
        """Devices of ``machine``'s kind that may be used: of a calibrated machine as many as it has."""
        return min(self.max_devices, machine.devices_per_node) if machine.basis == "measured" else self.max_devices

    def counts(self, machine: Hardware) -> tuple[int, ...]:
        """1, 2, 4 … up to the most, and the most itself."""
        most = self.most(machine)
        return tuple(dict.fromkeys((*_powers_of_2(most), most)))


def _powers_of_2(most: int) -> list[int]:
    """1, 2, 4 … up to ``most``."""
    return [2**i for i in range(most.bit_length())]


@dataclass(frozen=True)
class Search:
    """One phase, searched. ``results`` has every device, best first; ``best`` the best candidates of all devices together."""

    DOCUMENT = (
        "phase objective work limits enumerated out_of_memory timed kept_every_limit reliefs winner nearest_miss best devices "
        "links notes"
    )

    phase: Annotated[Phase, "train or serve"]
    objective: Annotated[Objective, "cost, time, throughput or energy"]
    work: Annotated[ServeWork | TrainWork, "tokens, lengths, rate: what is to be done"]
    limits: Annotated[ServeLimits | TrainLimits, "what must be kept; null: no limit"]
    results: Annotated[tuple[DeviceResult, ...], "every device, best first", As("devices")]
    best: Annotated[tuple[Candidate, ...], "the next best, one a device"]
    enumerated: Annotated[int, "candidates"]
    out_of_memory: Annotated[int, "of them, rejected for memory"]
    timed: Annotated[int, "of them, timed"]
    kept: Annotated[int, "of them, that keep every limit", As("kept_every_limit")]
    reliefs: Annotated[tuple[Candidate, ...], "where none does: those that one relaxed limit would let in"] = ()
    links: Annotated[tuple[LinkFinding, ...], "what fast links cost and whether they are used"] = ()
    notes: Annotated[tuple[str, ...], "what to bear in mind"] = field(default=())

    @property
    def winner(self) -> Annotated[Candidate | None, "the best"]:
        return self.best[0] if self.best else None

    @property
    def nearest(self) -> Annotated[Candidate | None, "where there is no winner", As("nearest_miss")]:
        """The candidate that misses by least, where none keeps the limits."""
        return None if self.best else nearest_miss(self.results)


# -- serving --------------------------------------------------------------------------------------------------------------


def search_serving(
    spec: ModelSpec, work: ServeWork, space: Space, limits: ServeLimits = ServeLimits(), objective: Objective = "cost",
    simulated: int = 0,
) -> Search:  # fmt: skip
    """Rank every way to serve ``spec`` by formulas; the ``simulated`` best then have the latencies of a simulated load, and may
    miss a limit by them. Raises ConfigError for impossible inputs; a search that finds nothing has no winner."""
    if work.prompt_tokens + work.output_tokens > spec.max_positions:
        raise ConfigError(
            f"prompt_tokens={work.prompt_tokens} and output_tokens={work.output_tokens} make "
            f"{work.prompt_tokens + work.output_tokens} tokens; the context holds {spec.max_positions}. Use less of either."
        )
    _check_precisions(space, PLANNED, "a way to hold weights")
    candidates = list(_serve_candidates(spec, work, space, limits))
    if simulated:
        by_name = {machine.name: machine for machine in space.machines}
        candidates = with_simulated_best(
            candidates, objective, simulated, lambda c: _simulated(spec, work, by_name[c.device], limits, c)
        )
    return _ranked("serve", objective, work, limits, space, candidates)


SEARCH_ROUNDS = 2
"""Answers of each user that are reported where many layouts are simulated."""


def _simulated(spec: ModelSpec, work: ServeWork, machine: Hardware, limits: ServeLimits, one: Candidate) -> Candidate:
    """``one`` with the latencies that its users find in a simulation, and the limits that it misses by them."""
    from twostroke.planner.serving.under_load import Server  # brings the scheduler, which most searches do without

    tensor, pipeline, expert = (one.layout.get(name, 1) for name in ("tensor", "pipeline", "expert"))
    shape = ServingShape(
        one.precision, one.batch, work.prompt_tokens, work.output_tokens, tensor=tensor, pipeline=pipeline, expert=expert
    )
    server = Server(plan_serving(spec, shape, machine))
    found = server.serve(server.closed_loop(rounds=SEARCH_ROUNDS))
    latency = {"loaded_ttft_s": found.ttft_s.median, "e2e_s": found.e2e_s.median}
    latency |= {"loaded_tpot_s": found.tpot_s.median} if found.tpot_s.n else {}
    values = one.values | latency
    missed = _misses(
        (("ttft", values["loaded_ttft_s"], limits.ttft_s, "s"), ("tpot", values["loaded_tpot_s"], limits.tpot_s, "s"))
    )
    return replace(one, values=values, misses=missed)


def serve_placements(spec: ModelSpec, max_devices: int, devices_per_node: int) -> tuple[tuple[int, int, int], ...]:
    """(tensor, pipeline, expert) of every way to lay one copy over at most ``max_devices``: powers of 2, tensor and expert
    parallel within a node. What heads, layers or experts do not divide by is left out."""
    powers, found = _powers_of_2(max_devices), []
    for tensor, pipeline in itertools.product(powers, powers):
        wider = [e for e in powers if spec.moe is not None and e > tensor and spec.moe.n_experts % e == 0]
        for expert in (1, *wider):
            stage = max(tensor, expert)
            fits = stage * pipeline <= max_devices and stage <= devices_per_node and spec.n_layers % pipeline == 0
            if fits and not spec.n_heads % tensor and not (spec.n_kv_heads % tensor and tensor % spec.n_kv_heads):
                found.append((tensor, pipeline, expert))
    return tuple(found)


def _serve_candidates(spec: ModelSpec, work: ServeWork, space: Space, limits: ServeLimits) -> Iterator[Candidate]:
    batches = tuple(sorted(set(space.batches or BATCHES)))
    for machine in space.machines:
        for scheme in space.precisions or SEARCHED:
            activations = scheme_of(scheme).activations
            lacking = None if activations in machine.peak_flop_per_s else activations
            if machine.is_calibrated_cpu:  # our engine, which expands what the processor cannot multiply
                lacking = None if scheme in served_schemes(machine) else scheme
            if lacking is not None:
                yield _without_type("serve", machine, scheme, lacking)
                continue
            shape = ServingShape(scheme, prompt_tokens=work.prompt_tokens, output_tokens=work.output_tokens)
            for tensor, pipeline, expert in serve_placements(spec, space.most(machine), machine.devices_per_node):
                placed = replace(shape, tensor=tensor, pipeline=pipeline, expert=expert)
                yield from _ServeTimer(spec, work, machine, placed, space, limits).candidates(batches)


def _check_precisions(space: Space, known: tuple[str, ...], what: str) -> None:
    for precision in space.precisions:
        if precision not in known:
            raise ConfigError(f"{precision!r} is not {what}. Use one of {', '.join(known)}.")


def _without_type(phase: Phase, machine: Hardware, precision: str, lacking: str) -> Candidate:
    """The one candidate that stands for a precision that a device has no arithmetic for."""
    misses = (Miss("type", 1.0, 0.0, lacking),)
    return _candidate(phase, machine, 1, precision, 0, machine.memory_bytes, {}, {}, memory_bytes={}, misses=misses)


def _candidate(
    phase: Phase, machine: Hardware, n_devices: int, precision: str, batch: int, allowed_bytes: float,
    layout: dict[str, int], settings: dict[str, Any], **found: Any,
) -> Candidate:  # fmt: skip
    """One on ``n_devices`` of ``machine``, at their price. ``found``: its memory and what was predicted of it."""
    return Candidate(
        phase=phase, device=machine.name, label=machine.label, n_devices=n_devices, layout=layout, precision=precision,
        batch=batch, settings=settings, allowed_bytes=allowed_bytes, usd_per_hour=n_devices * machine.usd_per_hour.value,
        **found,
    )  # fmt: skip


def _memory_miss(memory: dict[str, float], allowed_bytes: float) -> Miss:
    return Miss("memory", sum(memory.values()), allowed_bytes, "bytes", max(memory, key=lambda name: memory[name]))


class _ServeTimer:
    """Candidates of one machine, scheme and placement: its weights and its prefill are the same for every batch."""

    def __init__(
        self, spec: ModelSpec, work: ServeWork, machine: Hardware, shape: ServingShape, space: Space, limits: ServeLimits
    ) -> None:
        self.spec, self.work, self.machine, self.space, self.limits = spec, work, machine, space, limits
        self.shape = shape
        self.layout = {"tensor": shape.tensor, "pipeline": shape.pipeline, "expert": shape.expert}
        self.engine = strategy_of(spec, self.shape, machine)
        self.weights, self.page, self.room = self.engine.weights_bytes(), self.engine.page_bytes(), self.engine.room_for_kv()

    def candidates(self, batches: Sequence[int]) -> Iterator[Candidate]:
        prompt = None
        for batch in batches:
            memory = {"weights": self.weights, "kv_cache": batch_pages(self.spec, self.shape, batch) * self.page}
            if memory["kv_cache"] > self.room:
                yield self._candidate(batch, memory, misses=(_memory_miss(memory, max(self.room + self.weights, 0.0)),))
                continue
            if prompt is None:
                prompt = self.engine.prompt_busy()
            yield self._timed(batch, memory, prompt)

    def _candidate(self, batch: int, memory: dict[str, float], replicas: int | None = None, **found: Any) -> Candidate:
        """``replicas`` is None where one copy does not fit: nobody knows how many it would take."""
        layout = self.layout if replicas is None else {**self.layout, "replicas": replicas}
        n_devices = self.shape.placement.devices * (replicas or 1)
        return _candidate(
            "serve", self.machine, n_devices, self.shape.scheme, batch, self.room + self.weights,
            layout, {"kv_dtype": self.shape.cache_dtype}, memory_bytes=memory, **found,
        )  # fmt: skip

    def _timed(self, batch: int, memory: dict[str, float], prompt: Busy) -> Candidate:
        """One that fits, with its rates, its money and the limits it misses; with as many replicas as the requests need.

        TTFT and TPOT are those of users who ask again at once, as of ``ServingPlan.loaded``.
        """
        work, machine, output = self.work, self.machine, self.work.output_tokens
        step_s, network_s, bound, busy = self.engine.step(batch)
        ttft_s = prompt.seconds
        added_s = self.engine.added_s(ttft_s, step_s, batch)
        loaded = closed_loop(Steps(ttft_s, added_s, step_s, work.prompt_tokens, output, self.engine.token_budget), batch)
        rate = batch * output / (batch * ttft_s + output * step_s)
        served = work.requests_per_s * output or rate
        replicas = math.ceil(served / rate) if work.requests_per_s else 1
        n_devices = self.shape.placement.devices * replicas
        usd_per_hour = n_devices * machine.usd_per_hour.value
        watts = n_devices * mean_watts((prompt.times(batch), busy.times(output)), machine)
        values = {
            "ttft_s": ttft_s,
            "tpot_s": step_s,
            "loaded_ttft_s": loaded.ttft_s,
            "loaded_tpot_s": loaded.tpot_s,
            "e2e_s": loaded.e2e_s,
            "output_tok_per_s": served,
            "cost_per_mtok_usd": usd_per_million_tokens(served, usd_per_hour),
            "energy_per_mtok_kwh": energy_kwh(1e6 / served, watts),
        }
        limits = self.limits
        checks = (
            ("devices", float(n_devices), float(self.space.most(machine)), "devices"),
            ("ttft", loaded.ttft_s, limits.ttft_s, "s"),
            ("tpot", loaded.tpot_s, limits.tpot_s, "s"),
            ("usd_per_hour", usd_per_hour, limits.usd_per_hour, "usd"),
            ("usd_per_mtok", values["cost_per_mtok_usd"], limits.usd_per_mtok, "usd"),
        )
        share, misses = network_s / step_s, _misses(checks)
        found = {
            "values": values,
            "watts": watts,
            "communication_share": share,
            "link_use": share,
            "bound": bound,
            "misses": misses,
        }
        return self._candidate(batch, memory, replicas, **found)


def _misses(checks: Sequence[tuple[str, float, float | None, str]]) -> tuple[Miss, ...]:
    """The checks (limit, needed, allowed, unit) that fail."""
    return tuple(
        Miss(name, needed, allowed, unit) for name, needed, allowed, unit in checks if allowed is not None and needed > allowed
    )


# -- training -------------------------------------------------------------------------------------------------------------


def search_training(
    spec: ModelSpec, work: TrainWork, space: Space, limits: TrainLimits = TrainLimits(), objective: Objective = "cost"
) -> Search:
    """Rank every way to train ``spec``. Raises as ``search_serving`` does."""
    if work.sequence_length > spec.max_positions:
        raise ConfigError(
            f"sequence_length={work.sequence_length} is more than the model's max_positions={spec.max_positions}. Use less."
        )
    _check_precisions(space, tuple(PRECISIONS), "a training type")
    candidates = list(_train_candidates(spec, work, space, limits))
    return _ranked("train", objective, work, limits, space, candidates)


def train_work(
    spec: ModelSpec, tokens: float = 0.0, sequence_length: int = 0, batch_tokens: int = 0, optimizer: str = "adamw"
) -> TrainWork:
    """The work that is meant where 0 stands: 20 tokens a parameter, sequences of 4096 or the context, steps of about 2 M."""
    length = sequence_length or min(SEQUENCE_LENGTH, spec.max_positions)
    batch = batch_tokens or max(1, BATCH_TOKENS // length) * length
    return TrainWork(tokens or TOKENS_PER_PARAMETER * count_parameters(spec).total, length, batch, optimizer)


@lru_cache(maxsize=1024)
def train_layouts(spec: ModelSpec, n_devices: int, devices_per_node: int) -> tuple[Layout, ...]:
    """Every way to cut training over ``n_devices``: tensor within a node and pipeline by powers of 2, the rest data parallel
    under each ZeRO stage; experts whole on each device, or as far apart as they go. What a model's heads, widths or layers do
    not divide by is left out."""
    powers, found = _powers_of_2(n_devices), []
    for tensor, pipeline in itertools.product(powers, powers):
        if tensor > devices_per_node or n_devices % (tensor * pipeline):
            continue
        data = n_devices // (tensor * pipeline)
        stages = (0,) if data == 1 else (0, 1) if pipeline > 1 else (0, 1, 2, 3)
        experts = (1,) if spec.moe is None else tuple(dict.fromkeys((1, math.gcd(data * tensor, spec.moe.n_experts))))
        for zero, expert in itertools.product(stages, experts):
            layout = Layout(data, zero, tensor, True, pipeline, 1, expert, devices_per_node)
            try:
                layout.check(spec)
            except ConfigError:
                continue
            found.append(layout)
    return tuple(found)


def _train_candidates(spec: ModelSpec, work: TrainWork, space: Space, limits: TrainLimits) -> Iterator[Candidate]:
    micro_batches = tuple(sorted(set(space.batches or MICRO_BATCHES)))
    memories: dict[tuple[str, Layout, TrainingShape], dict[str, float]] = {}

    @cache
    def shape_of(dtype: str, micro: int, data: int, checkpointing: str) -> TrainingShape | None:
        """None where micro-batches and ranks do not divide the step's sequences."""
        n_micro, left = divmod(work.sequences, data * micro)
        if left or not n_micro:
            return None
        return TrainingShape(micro, work.sequence_length, n_micro, dtype, work.optimizer, checkpointing=checkpointing)

    for machine in space.machines:
        timer = _TrainTimer(spec, work, machine, limits)
        # Memory asks nothing else of a datasheet, so it is computed once for all of a kind.
        memory_of = machine.kind if machine.basis == "datasheet" else machine.name
        for dtype in space.precisions or (_training_type(machine),):
            lacking = unknown_type(TrainingShape(dtype=dtype), machine)
            if lacking is not None:
                yield _without_type("train", machine, dtype, lacking)
                continue
            for n_devices in space.counts(machine):
                layouts = train_layouts(spec, n_devices, machine.devices_per_node)
                for layout, micro, checkpointing in itertools.product(layouts, micro_batches, RECOMPUTATIONS):
                    shape = shape_of(dtype, micro, layout.data, checkpointing)
                    if shape is None:
                        continue
                    key = (memory_of, layout, shape)
                    if key not in memories:
                        memories[key] = training_memory(spec, shape, machine, layout)
                    yield timer.candidate(layout, shape, memories[key])


def _training_type(machine: Hardware) -> str:
    """The 16-bit type that a device multiplies in, or fp32."""
    return next((dtype for dtype in ("bf16", "fp16") if dtype in machine.peak_flop_per_s), "fp32")


class _TrainTimer:
    """Candidates of one machine with their time. The passes of a micro-batch, which take longest to plan, are the same for any
    number of data-parallel ranks and any ZeRO stage, and are made once."""

    def __init__(self, spec: ModelSpec, work: TrainWork, machine: Hardware, limits: TrainLimits) -> None:
        self.spec, self.work, self.machine, self.limits = spec, work, machine, limits
        self.passes: dict[tuple[Any, ...], StageTime] = {}
        self.lost: dict[int, float] = {}
        self.steps = math.ceil(work.tokens / work.batch_tokens)
        self.flops_per_token = training_flops_per_token(spec, work.sequence_length)

    def candidate(self, layout: Layout, shape: TrainingShape, memory: dict[str, float]) -> Candidate:
        """One way to train, with its memory and, where that fits, its time, money, energy and the limits it misses."""
        machine, n_devices = self.machine, layout.n_devices
        cuts = {"data": layout.data, "zero": layout.zero, "tensor": layout.tensor, "pipeline": layout.pipeline}
        cuts |= {"expert": layout.expert} if layout.expert > 1 else {}
        if sum(memory.values()) > machine.memory_bytes:
            found: dict[str, Any] = {"misses": (_memory_miss(memory, machine.memory_bytes),)}
        else:
            found = self._timed(layout, shape)
            checks = (
                ("days", found["values"]["train_time_s"] / DAY_S, self.limits.days, "days"),
                ("usd_per_hour", n_devices * machine.usd_per_hour.value, self.limits.usd_per_hour, "usd"),
                ("run_usd", found["values"]["cost_usd"], self.limits.run_usd, "usd"),
            )
            found["misses"] = _misses(checks)
        settings = {"checkpointing": shape.checkpointing, "grad_accumulation": shape.grad_accumulation}
        return _candidate(
            "train", machine, n_devices, shape.dtype, shape.batch_size, machine.memory_bytes, cuts, settings,
            memory_bytes=memory, **found,
        )  # fmt: skip

    def _timed(self, layout: Layout, shape: TrainingShape) -> dict[str, Any]:
        """Predictions, the shares of a step that go to communication and bubble and in which links are busy, and the bound: as
        ``plan_training`` adds them up (tests/planner/test_search.py)."""
        machine = self.machine
        passes = self._passes(layout, shape)
        traffic = step_traffic(self.spec, shape, machine, layout, passes)
        update = update_work(self.spec, shape, machine, layout)
        bubble_s = bubble_of(shape, layout, passes, traffic)
        exposed_s = sum(t.exposed_s for t in traffic)
        works = (*passes.forward, *passes.backward)
        compute_s = shape.grad_accumulation * total_seconds(works) + update.seconds
        step_s = compute_s + batches_s(shape, machine) + exposed_s + bubble_s
        watts = layout.n_devices * step_watts(
            (passes.forward, passes.backward), (update,), shape.grad_accumulation,
            step_s - compute_s - exposed_s, exposed_s, machine,
        )  # fmt: skip
        running_s = startup_s(shape, machine) + self.steps * step_s
        if layout.n_devices > 1:
            running_s *= 1 + self._lost_share(layout, shape)
        tok_per_s = self.work.batch_tokens / step_s
        values = {
            "step_time_s": step_s,
            "train_tok_per_s": tok_per_s,
            "mfu": self.flops_per_token * tok_per_s / (machine.peak(peak_type(rate_dtype(shape, machine))) * layout.n_devices),
            "train_time_s": running_s,
            "cost_usd": layout.n_devices * rent_usd(running_s, machine.usd_per_hour.value),
            "energy_kwh": energy_kwh(running_s, watts),
        }
        return {
            "values": values,
            "watts": watts,
            "communication_share": exposed_s / step_s,
            "bubble_share": bubble_s / step_s,
            "link_use": min(1.0, sum(t.seconds for t in traffic) / step_s),
            "bound": bound_of((*works, update)),
        }

    def _passes(self, layout: Layout, shape: TrainingShape) -> StageTime:
        key = (layout.tensor, layout.pipeline, layout.expert, shape.dtype, shape.batch_size, shape.checkpointing)
        if key not in self.passes:
            timed = replace(shape, dtype=rate_dtype(shape, self.machine))
            self.passes[key] = stage_time(self.spec, timed, self.machine, layout)
        return self.passes[key]

    def _lost_share(self, layout: Layout, shape: TrainingShape) -> float:
        """What failures and checkpoints add to the time of several devices."""
        n = layout.n_devices
        if n not in self.lost:
            parameters = count_parameters(self.spec)
            state = state_bytes(parameters.total, parameters.block_matrices, shape.optimizer, PRECISIONS[shape.dtype].state)
            stored = snapshot_bytes(shape.dtype, parameters.total, state)
            self.lost[n] = resilience(stored, self.machine.disk_write_bytes_per_s * n_nodes(layout, self.machine), n).lost_share
        return self.lost[n]


# -- ranking --------------------------------------------------------------------------------------------------------------

KEPT_BEST = 10
"""Candidates of all devices together that a search names."""


def _ranked(
    phase: Phase,
    objective: Objective,
    work: ServeWork | TrainWork,
    limits: ServeLimits | TrainLimits,
    space: Space,
    candidates: Sequence[Candidate],
) -> Search:
    results, feasible = choose(candidates, objective)
    links = link_findings(results, {machine.name: machine for machine in space.machines})
    return Search(
        phase,
        objective,
        work,
        limits,
        results=tuple(blame_idle_links(results, links)),
        best=tuple(feasible[:KEPT_BEST]),
        enumerated=len(candidates),
        out_of_memory=sum(1 for c in candidates if c.misses and c.misses[0].limit == "memory"),
        timed=sum(1 for c in candidates if c.values),
        kept=len(feasible),
        reliefs=() if feasible else reliefs(candidates),
        links=links,
    )
