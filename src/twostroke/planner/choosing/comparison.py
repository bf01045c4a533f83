"""Training beside prefill beside decode: one model, one machine, every quantity of the three in one table of plain data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from twostroke.core.described import LeftOut
from twostroke.core.dtypes import bytes_of
from twostroke.core.engines import planned_only_text
from twostroke.core.schemes import scheme_of
from twostroke.core.spec import ModelSpec
from twostroke.planner.choosing import flips
from twostroke.planner.choosing.candidates import cuts_text
from twostroke.planner.choosing.flips import LARGEST_BATCH, Amounts, Balance, flip_point
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.network import send_s
from twostroke.planner.hardware.tables import price
from twostroke.planner.money.cost import (
    cost_of,
    crossover_tokens,
    energy_kwh,
    excluded_power,
    rent_and_power,
    usd_per_million_tokens,
)
from twostroke.planner.money.power import mean_watts
from twostroke.planner.serving.plan import ServingPlan, plan_serving, strategy_of
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.training.layout import SINGLE, Layout
from twostroke.planner.training.memory import PRECISIONS
from twostroke.planner.training.plan import TrainingPlan, plan_training
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.training.stage_times import rate_dtype, stage_time
from twostroke.planner.work.component import COMPONENTS, Work, merge, total_seconds

Column = Literal["train", "prefill", "decode"]
COLUMNS: tuple[Column, ...] = ("train", "prefill", "decode")

Mark = Literal["predicted", "measured", "datasheet", "assumed", "given"]
"""Where a value comes from. "given" is an input of the plan: a batch size, a type."""


@dataclass(frozen=True)
class Cell:
    """One value of the comparison; ``merge_measured`` fills ``measured``. "given" is an input of the plan."""

    value: Annotated[float | str | None, "a number, words, or null for never"]
    unit: Annotated[str, "s, bytes, tok/s, usd, kWh, FLOP, FLOP/B, share, tokens … or empty"] = ""
    kind: Annotated[Mark, "predicted, measured, datasheet, assumed or given"] = "predicted"
    name: Annotated[str | None, "the ledger's name of the quantity"] = None
    measured: Annotated[float | str | None, "what a run of the ledger measured, or null"] = None
    low: Annotated[float | None, "lower end of the prediction's range, or null"] = None
    high: Annotated[float | None, "its upper end, or null"] = None
    note: Annotated[str, "what the number is, where the row does not say"] = ""


@dataclass(frozen=True)
class TableRow:
    """One quantity in the three columns; a column without it is absent from ``cells``."""

    section: Annotated[str, "passes, memory, work, component: …, rate, network, storage, money"]
    label: Annotated[str, "the quantity"]
    cells: Mapping[Column, Cell]

    @property
    def train(self) -> Annotated[Cell | None, "training", LeftOut]:
        return self.cells.get("train")

    @property
    def prefill(self) -> Annotated[Cell | None, "prefill", LeftOut]:
        return self.cells.get("prefill")

    @property
    def decode(self) -> Annotated[Cell | None, "decode", LeftOut]:
        return self.cells.get("decode")


@dataclass(frozen=True)
class Comparison:
    """The table with what it was made from."""

    DOCUMENT = "subject hardware columns rows flips crossover_served_tokens measured_crossover_served_tokens assumptions notes"

    subject: Annotated[str, "the model or recipe that was named"]
    hardware: Annotated[Hardware, "the machine"]
    training: TrainingPlan
    serving: ServingPlan
    rows: Annotated[tuple[TableRow, ...], "the table"]
    assumptions: Annotated[tuple[str, ...], "prices and power"]
    crossover_served_tokens: Annotated[float, "served tokens at which both phases have cost the same"]
    flips: Annotated[
        dict[str, Any],
        "batch at which arithmetic becomes the bound: searched, analytic (FLOP/B = balance), attention by context",
    ]
    measured_crossover_served_tokens: Annotated[float | None, "the same from measured times"] = None
    notes: Annotated[tuple[str, ...], "what to bear in mind"] = field(default=())

    @property
    def columns(self) -> Annotated[tuple[Column, ...], "train, prefill, decode"]:
        return COLUMNS

    def row(self, label: str) -> TableRow:
        return next(r for r in self.rows if r.label == label)


# -- bounds ---------------------------------------------------------------------------------------------------------------


def _work_of(works: Iterable[Work], component: str) -> Work | None:
    """All works of ``component`` as one; None if no work is of it."""
    return next(iter(merge(work for work in works if work.component == component)), None)


def _bound_of(works: Iterable[Work], component: str) -> str:
    work = _work_of(works, component)
    return "none" if work is None else work.bound


def flip_batch(bound_at: Callable[[int], str]) -> int | None:
    """The smallest batch, by doubling and then bisection, at which ``bound_at`` says "arithmetic"; None where no batch up to
    ``LARGEST_BATCH`` does."""
    high = 1
    while bound_at(high) != "arithmetic":
        high *= 2
        if high > LARGEST_BATCH:
            return None
    low = high // 2  # not arithmetic there, or 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bound_at(middle) == "arithmetic" else (middle, high)
    return high


CONTEXTS = (128, 1024, 8192, 32768, 131072)
"""Tokens before a decoded one at which the flip of attention is shown, as far as the model goes."""

SETTLED_TOKENS = 2**16
"""Rows at which every product's rate has settled."""

DENSE_BATCHES = ("attention", "mlp", "head")
"""Components that multiply by weights: the others have no batch at which arithmetic bounds them."""


def balance_of(works: Sequence[Work], component: str) -> Balance | None:
    """The rates that a component reaches in these works: FLOP over its arithmetic's seconds, bytes over its memory's. None
    where it has neither."""
    work = _work_of(works, component)
    if work is None or not work.arithmetic_s or not work.memory_s:
        return None
    return Balance(work.flops / work.arithmetic_s, work.bytes / work.memory_s)


def analytic_flips(training: TrainingPlan, serving: ServingPlan) -> dict[str, dict[str, float | None]]:
    """Column → component → the batch at which FLOP per byte, written down by hand (``flips``), equals the machine's balance.

    The same questions as ``component_flips`` answers by searching the plans. They agree where starting operations costs nothing
    (tests/planner/test_flips.py); with launches in the plan, the searched batch is the larger one.
    """
    spec, shape = training.spec, serving.shape
    w_kv, dtype = bytes_of(shape.cache_dtype), training.shape.compute_dtype
    makers: dict[str, Callable[[str], Amounts]] = {
        "train": lambda name: flips.training(spec, name, training.shape.sequence_length, dtype),
        "prefill": lambda name: flips.prefilling(spec, name, shape.scheme),
        "decode": lambda name: flips.decoding(spec, name, float(shape.context), shape.scheme, w_kv),
    }
    # Of training the rates of a large pass: with few rows a product's seconds are those of reading its weights.
    rows = replace(training.shape, batch_size=-(-SETTLED_TOKENS // training.shape.sequence_length), steps=0)
    settled = stage_time(spec, replace(rows, dtype=rate_dtype(rows, training.hardware)), training.hardware, training.layout)
    works = {"train": (*settled.forward, *settled.backward), "prefill": serving.prefill, "decode": serving.decode}
    found: dict[str, dict[str, float | None]] = {column: {} for column in COLUMNS}
    for column, component in itertools.product(COLUMNS, DENSE_BATCHES):
        balance = balance_of(works[column], component)
        found[column][component] = None if balance is None else flip_point(makers[column](component), balance.flop_per_byte)
    return found


def context_flips(serving: ServingPlan) -> dict[str, Any]:
    """Decode's attention by context: the searched and the analytic batch at each of ``CONTEXTS``, and the last context at which
    there is one."""
    spec, shape, hardware = serving.spec, serving.shape, serving.hardware
    w_kv = bytes_of(shape.cache_dtype)
    balance = balance_of(serving.decode, "attention")
    rows = []
    for context in sorted({c for c in CONTEXTS if c < spec.max_positions} | {spec.max_positions - 1}):
        at = replace(shape, prompt_tokens=max(1, context - 1), output_tokens=1, prefix_hit_share=0.0)

        def bound(n: int, at: ServingShape = at) -> str:
            return _bound_of(strategy_of(spec, at, hardware).decode(n), "attention")

        by_hand = None
        if balance is not None:
            by_hand = flip_point(flips.decoding(spec, "attention", float(context), shape.scheme, w_kv), balance.flop_per_byte)
        rows.append({"context": context, "searched": flip_batch(bound), "analytic": by_hand})
    last = None if balance is None else flips.last_context(spec, balance.flop_per_byte, shape.scheme, w_kv)
    return {"contexts": rows, "last_context": last}


def component_flips(training: TrainingPlan, serving: ServingPlan) -> dict[str, dict[str, int | None]]:
    """Column → component → batch at which arithmetic becomes its limit: training in sequences of the plan's length, prefill in
    prompt tokens, decode in requests."""
    spec, hardware = training.spec, training.hardware

    @cache
    def works(column: str, n: int) -> Sequence[Work]:
        if column == "train":
            plan = plan_training(spec, replace(training.shape, batch_size=n, steps=0), hardware, training.layout)
            return (*plan.forward, *plan.backward, *plan.optimizer)
        if column == "prefill":
            return strategy_of(spec, replace(serving.shape, prompt_tokens=n), hardware).prefill()
        return strategy_of(spec, replace(serving.shape, batch=n), hardware).decode()

    def flip(column: str, component: str) -> int | None:
        return flip_batch(lambda n: _bound_of(works(column, n), component))

    return {
        column: {name: flip(column, name) for name in COMPONENTS if name != "optimizer" or column == "train"}
        for column in COLUMNS
    }


# -- the table ------------------------------------------------------------------------------------------------------------


def compare(
    spec: ModelSpec,
    training_shape: TrainingShape,
    serving_shape: ServingShape,
    hardware: Hardware,
    subject: str = "",
    layout: Layout = SINGLE,
    served_on: Hardware | None = None,
) -> Comparison:
    """Both phases of ``spec`` on ``hardware``, predicted: training over ``layout``, serving as its shape places it, on another
    device where ``served_on`` names one. Raises what ``plan_training`` and ``plan_serving`` raise."""
    training = plan_training(spec, training_shape, hardware, layout)
    return compare_plans(training, plan_serving(spec, serving_shape, served_on or hardware), subject)


def compare_plans(training: TrainingPlan, serving: ServingPlan, subject: str = "") -> Comparison:
    """The table of two plans that were already made."""
    hardware, served_on = training.hardware, serving.hardware
    apart = hardware.label != served_on.label
    where = (f"prefill and decode are on {served_on.label}.",) if apart else ()
    searched = component_flips(training, serving)
    rows = [
        *_pass_rows(training, serving),
        *_memory_rows(training, serving),
        *_work_rows(training, serving),
        *_component_rows(training, serving, searched),
        *_rate_rows(training, serving),
        *_move_and_store_rows(training, serving),
        *_money_rows(training, serving),
    ]
    run = training.cost or cost_of(training.step_time_s, hardware, training.layout.n_devices, watts=training.watts)
    return Comparison(
        subject=subject or f"{training.spec.family} of {training.parameters.total:,} parameters",
        hardware=hardware,
        training=training,
        serving=serving,
        rows=tuple(rows),
        assumptions=(*_assumptions(hardware), *(f"serving: {line}" for line in _assumptions(served_on) if apart)),
        crossover_served_tokens=crossover_tokens(run.usd, serving.usd_per_mtok),
        flips={"searched": searched, "analytic": analytic_flips(training, serving), "attention": context_flips(serving)},
        notes=tuple(dict.fromkeys((*where, *_planned_only(training, serving), *training.notes, *serving.notes))),
    )


def _planned_only(training: TrainingPlan, serving: ServingPlan) -> list[str]:
    """One sentence a phase for what cannot run here."""
    phases = (("training", training.planned_only), ("serving", serving.planned_only))
    return [f"{phase} is {planned_only_text(reasons)}" for phase, reasons in phases if reasons]


def _assumptions(hardware: Hardware) -> tuple[str, ...]:
    tariff, network = price("electricity_usd_per_kwh"), hardware.network
    return (
        *rent_and_power(hardware),
        excluded_power(hardware),
        f"electricity {tariff.kind}: ${tariff.value:.2f} a kWh ({tariff.source})",
        f"network {network.kind}: {network.bytes_per_s / 1e9:.3g} GB/s to another machine ({network.source})",
    )


Shared = TypeVar("Shared")


def _each(given: Shared | tuple[Shared, ...]) -> tuple[Shared, ...]:
    """What is given for every column, or for all of them alike."""
    return given if isinstance(given, tuple) else (given,) * len(COLUMNS)


def _row(
    section: str,
    label: str,
    unit: str,
    *values: float | None,
    name: str | tuple[str | None, ...] | None = None,
    note: str | tuple[str, ...] = "",
) -> TableRow:
    """A predicted quantity of training, prefill and decode. A column without it has the value None, or none at the end.
    ``name`` is the ledger's, ``note`` says what the number is."""
    found = zip(COLUMNS, values, _each(name), _each(note), strict=False)
    cells = {column: Cell(value, unit, name=key, note=what) for column, value, key, what in found if value is not None}
    return TableRow(section, label, cells)


def _given(section: str, label: str, *values: str) -> TableRow:
    """What the plans were asked for, in words, for training, prefill and decode."""
    return TableRow(section, label, {column: Cell(words, kind="given") for column, words in zip(COLUMNS, values, strict=True)})


def _pass_rows(training: TrainingPlan, serving: ServingPlan) -> list[TableRow]:
    n = training.shape.grad_accumulation
    micro = f"{n} × (fwd + bwd) + update" if n > 1 else "fwd + bwd + update"
    forward = training.forward_s, serving.ttft_s, serving.tpot_s
    return [
        _given("passes", "passes in a step", micro, "fwd, whole prompt", "fwd, one token"),
        _given("passes", "weights", "updated each step", "read-only", "read-only"),
        _row("passes", "forward", "s", *forward, name=("forward_s", "prefill_s", "decode_step_s")),
        _row("passes", "backward", "s", training.backward_s, name="backward_s"),
        _row("passes", "optimizer", "s", training.optimizer_s, name="optimizer_s"),
        _row("passes", "data", "s", training.data_s, name="data_s"),
    ]


MEMORY_ROWS = (
    # label, training's term, serving's term, the ledger's name
    ("weights in memory", "weights", "weights", "weights_bytes"),
    ("gradients", "gradients", None, "gradients_bytes"),
    ("optimizer state", "optimizer", None, "optimizer_bytes"),
    ("activations", "activations", "activations", "activations_bytes"),
    ("logits", None, "logits", None),
    ("KV cache", None, "kv_cache", "kv_cache_bytes"),
    ("computed again", "recomputed", None, None),
    ("loss", "loss", None, None),
    ("heap and workspace", "workspace", None, None),
    ("compiled products", "expert_products", None, None),
    ("copy for checkpoints", "snapshot", None, None),
    ("gathered for a layer", "gathered", None, None),
    ("exchange of gradients", "exchange", None, None),
    ("dequantised", "dequantised", None, None),
    ("process at rest", "process", "process", None),
)

WHERE_NEEDED = ("recomputed", "loss", "workspace", "expert_products", "snapshot", "gathered", "exchange", "dequantised")
"""Terms of training that have a row only where they take memory."""


def _memory_rows(training: TrainingPlan, serving: ServingPlan) -> list[TableRow]:
    rows = []
    for label, train, serve, name in MEMORY_ROWS:
        if train not in WHERE_NEEDED or training.memory_bytes.get(train):
            trained = training.memory_bytes[train] if train else None
            served = serving.memory_bytes[serve] if serve else None
            rows.append(_row("memory", label, "bytes", trained, served, served, name=name))
    peaks = training.peak_memory_bytes, serving.peak_memory_bytes, serving.peak_memory_bytes
    return [*rows, _row("memory", "peak", "bytes", *peaks, name="peak_memory_bytes")]


def _work_rows(training: TrainingPlan, serving: ServingPlan) -> list[TableRow]:
    shape = serving.shape
    prefill_bytes = sum(w.bytes for w in serving.prefill) / shape.prompt_tokens
    decode_bytes = sum(w.bytes for w in serving.decode) / shape.batch
    flops = training.flops_per_token, serving.prefill_flops_per_token, serving.decode_flops_per_token
    return [
        _row("work", "FLOP a token", "FLOP", *flops),
        _row("work", "bytes moved a token", "bytes", training.bytes_per_token, prefill_bytes, decode_bytes),
    ]


def _component_rows(training: TrainingPlan, serving: ServingPlan, searched: dict[str, dict[str, int | None]]) -> list[TableRow]:
    """For each component: share of the step, arithmetic intensity, the bound that holds and the batch at which it flips."""
    n = training.shape.grad_accumulation
    passes: dict[str, Sequence[Work]] = {
        "train": [*(w.times(n) for w in (*training.forward, *training.backward)), *training.optimizer],
        "prefill": serving.prefill,
        "decode": serving.decode,
    }
    units = {"train": "sequences", "prefill": "prompt tokens", "decode": "requests"}
    whole = {column: total_seconds(works) for column, works in passes.items()}
    rows = []
    for component in COMPONENTS:
        works = {column: work for column in COLUMNS if (work := _work_of(passes[column], component))}
        facts = {
            "share of the step": {column: Cell(work.seconds / whole[column], "share") for column, work in works.items()},
            "intensity": {column: Cell(work.intensity, "FLOP/B") for column, work in works.items()},
            "bound": {column: Cell(work.bound) for column, work in works.items()},
            "arithmetic-bound": {column: Cell(searched[column].get(component), units[column]) for column in works},
        }
        rows += [TableRow(f"component: {component}", f"{component}: {fact}", cells) for fact, cells in facts.items()]
    return rows


def _rate_rows(training: TrainingPlan, serving: ServingPlan) -> list[TableRow]:
    shape, served, layout = training.shape, serving.shape, training.layout
    sequences = shape.batch_size * shape.grad_accumulation * layout.data
    batches = f"{sequences} × {shape.sequence_length} tokens", f"1 × {served.prompt_tokens} tokens", f"{served.batch} × 1 token"
    precision = shape.dtype if not PRECISIONS[shape.dtype].master or shape.dtype == "fp32" else f"{shape.dtype}, fp32 masters"
    cached = f"{scheme_of(served.scheme).label or served.scheme}, {served.cache_dtype} KV"
    placed = cuts_text(serving.devices, vars(served))
    rates = training.tok_per_s, serving.prefill_tok_per_s, serving.decode_tok_per_s
    latencies = training.step_time_s, serving.ttft_s, serving.tpot_s
    # Model FLOP a second over the peak of the activations' type: the native engine's where torch has no fast products of it.
    kind, known = served.compute_dtype, serving.hardware.peak_flop_per_s
    peak = serving.hardware.peak(kind if kind in known else f"native_{kind}") * serving.devices
    prefill_share = serving.prefill_flops_per_token * serving.prefill_tok_per_s / peak
    decode_share = serving.decode_flops_per_token * serving.decode_tok_per_s / peak
    rows = [
        _given("rate", "batch", *batches),
        _given("rate", "precision", precision, cached, cached),
        _row("rate", "throughput", "tok/s", *rates, name=("train_tok_per_s", "prefill_tok_per_s", "decode_tok_per_s")),
        _row("rate", "latency", "s", *latencies, name=("step_time_s", "ttft_s", "tpot_s"), note=("step", "TTFT", "TPOT")),
        _row("rate", "share of peak (MFU)", "share", training.mfu, prefill_share, decode_share, name=("mfu", None, None)),
    ]
    if layout.n_devices > 1 or serving.devices > 1:
        rows.insert(0, _given("rate", "devices", cuts_text(layout.n_devices, vars(layout)), placed, placed))
    return rows


def _move_and_store_rows(training: TrainingPlan, serving: ServingPlan) -> list[TableRow]:
    network, cache = training.hardware.network, serving.kv_request_bytes
    alone, sent = training.layout.n_devices == 1, training.network_bytes_per_step
    moved = sent if alone else None
    rows = []
    if not alone or serving.devices > 1:
        waits = _serving_waits(serving)
        rows = [
            _row("network", "sent in a step", "bytes", None if alone else sent, note="a device"),
            _row("network", "waiting for links", "s", None if alone else training.communication_s, *waits),
        ]
    taking = None if moved is None else send_s(moved, network), send_s(cache, network)
    stored = training.checkpoint_bytes, serving.model_bytes, serving.model_bytes
    files = "checkpoint_bytes", "model_bytes", "model_bytes"
    return [
        *rows,
        _row("network", "to one more machine", "bytes", moved, cache, note=("gradients", "KV cache", "")),
        _row("network", "which would take", "s", *taking),
        _row("storage", "on disk", "bytes", *stored, name=files, note=("checkpoint", "model", "model")),
    ]


def _serving_waits(serving: ServingPlan) -> tuple[float, ...]:
    """Seconds of a prefill and of a decode step in collectives; nothing on one device."""
    return strategy_of(serving.spec, serving.shape, serving.hardware).network_s() if serving.devices > 1 else ()


def _money_rows(training: TrainingPlan, serving: ServingPlan) -> list[TableRow]:
    """Energy and rent: of the run where its length is known, and per million tokens in every column."""
    rows, run, run_s = [], training.cost, training.train_time_s
    if run is not None and run_s is not None:
        tokens = Cell(training.shape.steps * training.tokens_per_step, "tokens", "given")
        rows = [
            TableRow("money", "whole run, tokens", {"train": tokens}),
            _row("money", "whole run, time", "s", run_s, name="train_time_s"),
            _row("money", "whole run, energy", "kWh", run.energy_kwh, name="energy_kwh"),
            _row("money", "whole run, money", "usd", run.usd, name="cost_usd"),
        ]
    devices = {"train": training.layout.n_devices, "prefill": serving.devices, "decode": serving.devices}
    rates = (training.tok_per_s, serving.prefill_tok_per_s, serving.decode_tok_per_s)
    each = [
        cost_of(1e6 / rate, training.hardware if phase == "train" else serving.hardware, devices[phase], watts=watts)
        for rate, (phase, watts) in zip(rates, _watts(training, serving).items(), strict=True)
    ]
    return [
        *rows,
        _row("money", "energy per million tokens", "kWh", *(cost.energy_kwh for cost in each)),
        _row("money", "money per million tokens", "usd", *(cost.usd for cost in each)),
    ]


def _watts(training: TrainingPlan, serving: ServingPlan) -> dict[str, float]:
    """Mean W of one device by phase."""
    prefill, decode = (mean_watts((busy,), serving.hardware) for busy in (serving.prompt_busy, serving.step_busy))
    return {"train": training.watts, "prefill": prefill, "decode": decode}


# -- ranges and measurements beside predictions ---------------------------------------------------------------------------


def merge_ranges(
    comparison: Comparison, train: Mapping[str, Mapping[str, Any]], serve: Mapping[str, Mapping[str, Any]]
) -> Comparison:
    """The same table with the ends of each prediction's range, by its ledger name, as ``truth.intervals`` gives them."""
    ranges = {"train": train, "prefill": serve, "decode": serve}

    def ranged(column: Column, cell: Cell) -> Cell:
        found = ranges[column].get(cell.name or "", {})
        return replace(cell, low=found.get("low"), high=found.get("high"))

    rows = (replace(row, cells={of: ranged(of, cell) for of, cell in row.cells.items()}) for row in comparison.rows)
    return replace(comparison, rows=tuple(rows))


def merge_measured(
    comparison: Comparison, train: Mapping[str, Any] | None = None, serve: Mapping[str, Any] | None = None
) -> Comparison:
    """The same table with what was measured beside each prediction.

    ``train`` and ``serve`` are measurements as the ledger holds them (``Run.measurement``): ``train`` fills the first column,
    ``serve`` prefill and decode, each cell by its ledger name. Energy and money of what was measured follow from the
    measured rates at the same assumed price and predicted watts, and so does the measured crossover.
    """
    measured: dict[str, dict[str, float]] = {
        "train": _numbers(train or {}),
        "prefill": _numbers(serve or {}),
        "decode": _numbers(serve or {}),
    }
    served_on = comparison.serving.hardware
    places = {"train": comparison.hardware, "prefill": served_on, "decode": served_on}
    watts = _watts(comparison.training, comparison.serving)
    if "train_time_s" in measured["train"]:
        spent = cost_of(measured["train"]["train_time_s"], comparison.hardware, watts=watts["train"])
        measured["train"] = {"energy_kwh": spent.energy_kwh, "cost_usd": spent.usd} | measured["train"]
    rates = {"train": "train_tok_per_s", "prefill": "prefill_tok_per_s", "decode": "decode_tok_per_s"}
    rows = []
    for row in comparison.rows:
        cells = {}
        for column, cell in row.cells.items():
            found = measured[column].get(cell.name) if cell.name else None
            rate = measured[column].get(rates[column])
            if rate and row.label == "energy per million tokens":
                found = energy_kwh(1e6 / rate, watts[column])
            elif rate and row.label == "money per million tokens":
                found = usd_per_million_tokens(rate, places[column].usd_per_hour.value)
            cells[column] = cell if found is None else replace(cell, measured=found)
        rows.append(replace(row, cells=cells))
    return replace(comparison, rows=tuple(rows), measured_crossover_served_tokens=_measured_crossover(comparison, measured))


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Only the numbers of a measurement, under the names the table uses; a prefill is the TTFT of an idle server."""
    numbers = {k: float(v) for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    for ours, theirs in (("prefill_s", "ttft_s"), ("decode_step_s", "tpot_s")):
        if theirs in numbers:
            numbers.setdefault(ours, numbers[theirs])
    return numbers


def _measured_crossover(comparison: Comparison, measured: Mapping[str, Mapping[str, float]]) -> float | None:
    """Training's measured money ÷ the measured money per served token; None while either was not measured."""
    train, serve = measured["train"], measured["decode"]
    spent = train.get("cost_usd")
    if spent is None and "train_time_s" in train:
        spent = cost_of(train["train_time_s"], comparison.hardware).usd
    rate = serve.get("output_tok_per_s") or serve.get("decode_tok_per_s")
    if spent is None or not rate:
        return None
    return crossover_tokens(spent, usd_per_million_tokens(rate, comparison.serving.hardware.usd_per_hour.value))
