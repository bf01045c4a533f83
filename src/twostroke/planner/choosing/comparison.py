"""Training beside prefill beside decode: one model, one machine, every quantity of the three in one table of plain data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from twostroke.core.described import LeftOut
from twostroke.core.dtypes import bytes_of
from twostroke.core.engines import planned_only_text
from twostroke.core.schemes import scheme_of
from twostroke.core.spec import ModelSpec
from twostroke.planner.choosing import flips
from twostroke.planner.choosing.flips import Amounts, Balance, flip_point
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.network import send_s
from twostroke.planner.money.cost import cost_of, crossover_tokens, usd_per_million_tokens
from twostroke.planner.serving.plan import ServingPlan, plan_serving, strategy_of
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.training.layout import SINGLE, Layout
from twostroke.planner.training.memory import PRECISIONS
from twostroke.planner.training.plan import TrainingPlan, plan_training
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.training.stage_times import rate_dtype, stage_time
from twostroke.planner.work.component import COMPONENTS, Work

Column = Literal["train", "prefill", "decode"]
COLUMNS: tuple[Column, ...] = ("train", "prefill", "decode")

Mark = Literal["predicted", "measured", "datasheet", "assumed", "given"]
"""Where a value comes from. "given" is an input of the plan: a batch size, a type."""

LARGEST_BATCH = 2**20
"""Batches beyond this count as never."""


@dataclass(frozen=True)
class Cell:
    """One value of the comparison; ``merge_measured`` fills ``measured``. "given" is an input of the plan."""

    value: Annotated[float | str | None, "a number, words, or null for never"]
    unit: Annotated[str, "s, bytes, tok/s, usd, kWh, FLOP, FLOP/B, share, tokens … or empty"] = ""
    kind: Annotated[Mark, "predicted, measured, datasheet, assumed or given"] = "predicted"
    name: Annotated[str | None, "the ledger's name of the quantity"] = None
    measured: Annotated[float | str | None, "what a run of the ledger measured, or null"] = None
    note: Annotated[str, "what the number is, where the row does not say"] = ""


@dataclass(frozen=True)
class TableRow:
    """One quantity in the three columns; a column without it is absent from ``cells``."""

    section: Annotated[str, "passes, memory, work, component: …, rate, network, storage, money"]
    label: Annotated[str, "the quantity"]
    cells: dict[str, Cell]

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


def _work_of(works: Sequence[Work], component: str) -> Work | None:
    return next((w for w in works if w.component == component), None)


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
    found = [w for w in works if w.component == component]
    work = _sum(found) if found else None
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
            found = [w for w in strategy_of(spec, at, hardware).decode(n) if w.component == "attention"]
            return _sum(found).bound

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
    caches: dict[str, dict[int, Sequence[Work]]] = {column: {} for column in COLUMNS}

    def works(column: str, n: int) -> Sequence[Work]:
        if n not in caches[column]:
            if column == "train":
                plan = plan_training(spec, replace(training.shape, batch_size=n, steps=0), hardware, training.layout)
                caches[column][n] = (*plan.forward, *plan.backward, *plan.optimizer)
            elif column == "prefill":
                caches[column][n] = strategy_of(spec, replace(serving.shape, prompt_tokens=n), hardware).prefill()
            else:
                caches[column][n] = strategy_of(spec, replace(serving.shape, batch=n), hardware).decode()
        return caches[column][n]

    def bound(column: str, component: str) -> Callable[[int], str]:
        def at(n: int) -> str:
            found = [w for w in works(column, n) if w.component == component]
            return _sum(found).bound if found else "none"

        return at

    return {
        column: {
            component: flip_batch(bound(column, component))
            for component in COMPONENTS
            if component != "optimizer" or column == "train"
        }
        for column in COLUMNS
    }


def _sum(works: Sequence[Work]) -> Work:
    """All of ``works`` (of one component) as one."""
    return Work(
        works[0].component,
        sum(w.flops for w in works),
        sum(w.bytes for w in works),
        sum(w.arithmetic_s for w in works),
        sum(w.memory_s for w in works),
        sum(w.launch_s for w in works),
        sum(w.seconds for w in works),
    )


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
    run = training.cost or cost_of(training.step_time_s, hardware, training.layout.n_devices)
    return Comparison(
        subject=subject or f"{training.spec.family} of {training.parameters.total:,} parameters",
        hardware=hardware,
        training=training,
        serving=serving,
        rows=tuple(rows),
        assumptions=(*_assumptions(hardware), *(f"serving: {line}" for line in _assumptions(served_on) if apart)),
        crossover_served_tokens=crossover_tokens(run.usd, serving.usd_per_mtok),
        flips={
            "searched": searched,
            "analytic": analytic_flips(training, serving),
            "attention": context_flips(serving),
        },
        notes=tuple(dict.fromkeys((*where, *_planned_only(training, serving), *training.notes, *serving.notes))),
    )


def _planned_only(training: TrainingPlan, serving: ServingPlan) -> list[str]:
    """One sentence a phase for what cannot run here."""
    phases = (("training", training.planned_only), ("serving", serving.planned_only))
    return [f"{phase} is {planned_only_text(reasons)}" for phase, reasons in phases if reasons]


def _assumptions(hardware: Hardware) -> tuple[str, ...]:
    run = cost_of(0.0, hardware)
    price, watts, tariff, network = run.usd_per_hour, run.watts, run.electricity, hardware.network
    return (
        f"price {price.kind}: ${price.value:.4g} an hour ({price.source}; {price.date})",
        f"power {watts.kind}: {watts.value:.4g} W ({watts.source}; {watts.date})",
        f"electricity {tariff.kind}: ${tariff.value:.2f} a kWh ({tariff.source})",
        f"network {network.kind}: {network.bytes_per_s / 1e9:.3g} GB/s to another machine ({network.source})",
    )


def _row(section: str, label: str, train: Cell | None, prefill: Cell | None, decode: Cell | None) -> TableRow:
    cells = {"train": train, "prefill": prefill, "decode": decode}
    return TableRow(section, label, {column: cell for column, cell in cells.items() if cell is not None})


def _given(value: float | str, unit: str = "", note: str = "") -> Cell:
    return Cell(value, unit, "given", note=note)


def _pass_rows(training: TrainingPlan, serving: ServingPlan) -> list[TableRow]:
    section, n = "passes", training.shape.grad_accumulation
    micro = f"{n} × (fwd + bwd) + update" if n > 1 else "fwd + bwd + update"
    return [
        _row(
            section,
            "passes in a step",
            _given(micro),
            _given("fwd, whole prompt"),
            _given("fwd, 1 token each"),
        ),
        _row(
            section,
            "weights",
            _given("updated each step"),
            _given("read-only"),
            _given("read-only"),
        ),
        _row(
            section,
            "forward",
            Cell(training.forward_s, "s", name="forward_s"),
            Cell(serving.ttft_s, "s", name="prefill_s"),
            Cell(serving.tpot_s, "s", name="decode_step_s"),
        ),
        _row(section, "backward", Cell(training.backward_s, "s", name="backward_s"), None, None),
        _row(section, "optimizer", Cell(training.optimizer_s, "s", name="optimizer_s"), None, None),
        _row(section, "data", Cell(training.data_s, "s", name="data_s"), None, None),
    ]


def _memory_rows(training: TrainingPlan, serving: ServingPlan) -> list[TableRow]:
    section = "memory"

    def terms(train: str | None, serve: str | None, train_name: str | None, serve_name: str | None) -> list[Cell | None]:
        t = Cell(training.memory_bytes[train], "bytes", name=train_name) if train else None
        s = Cell(serving.memory_bytes[serve], "bytes", name=serve_name) if serve else None
        return [t, s, s]

    return [
        _row(section, "weights in memory", *terms("weights", "weights", "weights_bytes", "weights_bytes")),
        _row(section, "gradients", *terms("gradients", None, "gradients_bytes", None)),
        _row(section, "optimizer state", *terms("optimizer", None, "optimizer_bytes", None)),
        _row(section, "activations", *terms("activations", "activations", "activations_bytes", "activations_bytes")),
        _row(section, "logits", *terms(None, "logits", None, None)),
        _row(section, "KV cache", *terms(None, "kv_cache", None, "kv_cache_bytes")),
        *[
            _row(section, label, *terms(term, None, None, None))
            for term, label in (
                ("recomputed", "computed again"),
                ("loss", "loss"),
                ("workspace", "heap and workspace"),
                ("snapshot", "copy for checkpoints"),
                ("gathered", "gathered for a layer"),
                ("dequantised", "dequantised"),
            )
            if training.memory_bytes.get(term)
        ],
        _row(section, "process at rest", *terms("process", "process", None, None)),
        _row(
            section,
            "peak",
            Cell(training.peak_memory_bytes, "bytes", name="peak_memory_bytes"),
            Cell(serving.peak_memory_bytes, "bytes", name="peak_memory_bytes"),
            Cell(serving.peak_memory_bytes, "bytes", name="peak_memory_bytes"),
        ),
    ]


def _work_rows(training: TrainingPlan, serving: ServingPlan) -> list[TableRow]:
    section, shape = "work", serving.shape
    prefill_bytes = sum(w.bytes for w in serving.prefill) / shape.prompt_tokens
    decode_bytes = sum(w.bytes for w in serving.decode) / shape.batch
    return [
        _row(
            section,
            "FLOP a token",
            Cell(training.flops_per_token, "FLOP"),
            Cell(serving.prefill_flops_per_token, "FLOP"),
            Cell(serving.decode_flops_per_token, "FLOP"),
        ),
        _row(
            section,
            "bytes moved a token",
            Cell(training.bytes_per_token, "bytes"),
            Cell(prefill_bytes, "bytes"),
            Cell(decode_bytes, "bytes"),
        ),
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
    rows = []
    for component in COMPONENTS:
        section = f"component: {component}"
        share: dict[str, Cell] = {}
        intensity: dict[str, Cell] = {}
        bound: dict[str, Cell] = {}
        flip: dict[str, Cell] = {}
        for column in COLUMNS:
            found = [w for w in passes[column] if w.component == component]
            if not found:
                continue
            work = _sum(found)
            whole = sum(w.seconds for w in passes[column])
            share[column] = Cell(work.seconds / whole, "share")
            intensity[column] = Cell(work.intensity, "FLOP/B")
            bound[column] = Cell(work.bound)
            at = searched[column].get(component)
            flip[column] = Cell(at, units[column])
        rows += [
            TableRow(section, f"{component}: share of the step", share),
            TableRow(section, f"{component}: intensity", intensity),
            TableRow(section, f"{component}: bound", bound),
            TableRow(section, f"{component}: arithmetic-bound", flip),
        ]
    return rows


def _rate_rows(training: TrainingPlan, serving: ServingPlan) -> list[TableRow]:
    section, shape = "rate", training.shape
    serve = serving.shape
    sequences = shape.batch_size * shape.grad_accumulation * training.layout.data
    precision = shape.dtype if not PRECISIONS[shape.dtype].master or shape.dtype == "fp32" else f"{shape.dtype}, fp32 masters"
    weights = scheme_of(serve.scheme).label or serve.scheme
    cached = f"{weights}, {serve.cache_dtype} KV"
    several = training.layout.n_devices > 1 or serving.devices > 1
    placed = _given(serve_cut(serving))
    devices = [_row(section, "devices", _given(train_cut(training.layout)), placed, placed)] if several else []
    return [
        *devices,
        _row(
            section,
            "batch",
            _given(f"{sequences} × {shape.sequence_length} tokens"),
            _given(f"1 × {serve.prompt_tokens} tokens"),
            _given(f"{serve.batch} × 1 token"),
        ),
        _row(section, "precision", _given(precision), _given(cached), _given(cached)),
        _row(
            section,
            "throughput",
            Cell(training.tok_per_s, "tok/s", name="train_tok_per_s"),
            Cell(serving.prefill_tok_per_s, "tok/s", name="prefill_tok_per_s"),
            Cell(serving.decode_tok_per_s, "tok/s", name="decode_tok_per_s"),
        ),
        _row(
            section,
            "latency",
            Cell(training.step_time_s, "s", name="step_time_s", note="step"),
            Cell(serving.ttft_s, "s", name="ttft_s", note="TTFT"),
            Cell(serving.tpot_s, "s", name="tpot_s", note="TPOT"),
        ),
        _row(section, "share of peak (MFU)", Cell(training.mfu, "share", name="mfu"), *_serving_utilisation(serving)),
    ]


def cuts_text(n_devices: int, **cuts: int) -> str:
    """``8: dp2 tp4``: devices, and the ways they are cut that are more than one."""
    words = " ".join(f"{name}{n}" for name, n in cuts.items() if n > 1 or (name == "z" and n))
    return f"{n_devices}: {words}" if words else str(n_devices)


def train_cut(layout: Layout) -> str:
    return cuts_text(layout.n_devices, dp=layout.data, tp=layout.tensor, pp=layout.pipeline, ep=layout.expert, z=layout.zero)


def serve_cut(serving: ServingPlan) -> str:
    shape = serving.shape
    return cuts_text(serving.devices, tp=shape.tensor, pp=shape.pipeline, ep=shape.expert)


def _serving_utilisation(serving: ServingPlan) -> list[Cell | None]:
    """Model FLOP a second ÷ the peak of the activations' type, for prefill and for decode."""
    peak = serving.hardware.peak(serving.shape.compute_dtype) * serving.devices
    prefill = serving.prefill_flops_per_token * serving.prefill_tok_per_s / peak
    decode = serving.decode_flops_per_token * serving.decode_tok_per_s / peak
    return [Cell(prefill, "share"), Cell(decode, "share")]


def _move_and_store_rows(training: TrainingPlan, serving: ServingPlan) -> list[TableRow]:
    network = training.hardware.network
    alone = training.layout.n_devices == 1
    gradients, cache = training.network_bytes_per_step if alone else None, serving.kv_request_bytes
    rows = []
    if not alone or serving.devices > 1:
        sent = None if alone else Cell(training.network_bytes_per_step, "bytes", note="a device")
        waiting = None if alone else Cell(training.communication_s, "s")
        rows = [
            _row("network", "sent in a step", sent, None, None),
            _row("network", "waiting for links", waiting, *_serving_waits(serving)),
        ]
    return [
        *rows,
        _row(
            "network",
            "to one more machine",
            None if gradients is None else Cell(gradients, "bytes", note="gradients"),
            Cell(cache, "bytes", note="KV a request"),
            None,
        ),
        _row(
            "network",
            "which would take",
            None if gradients is None else Cell(send_s(gradients, network), "s"),
            Cell(send_s(cache, network), "s"),
            None,
        ),
        _row(
            "storage",
            "on disk",
            Cell(training.checkpoint_bytes, "bytes", name="checkpoint_bytes", note="checkpoint"),
            Cell(serving.model_bytes, "bytes", name="model_bytes", note="model"),
            Cell(serving.model_bytes, "bytes", name="model_bytes", note="model"),
        ),
    ]


def _serving_waits(serving: ServingPlan) -> list[Cell | None]:
    """Seconds of a prefill and of a decode step in collectives; none on one device."""
    if serving.devices == 1:
        return [None, None]
    engine = strategy_of(serving.spec, serving.shape, serving.hardware)
    return [Cell(seconds, "s") for seconds in engine.network_s()]


def _money_rows(training: TrainingPlan, serving: ServingPlan) -> list[TableRow]:
    """Energy and rent: of the run where its length is known, and per million tokens in every column."""
    million = 1e6
    rows = []
    if training.cost is not None and training.train_time_s is not None:
        tokens = training.shape.steps * training.tokens_per_step
        rows += [
            _row("money", "whole run, tokens", _given(tokens, "tokens"), None, None),
            _row("money", "whole run, time", Cell(training.train_time_s, "s", name="train_time_s"), None, None),
            _row("money", "whole run, energy", Cell(training.cost.energy_kwh, "kWh", name="energy_kwh"), None, None),
            _row("money", "whole run, money", Cell(training.cost.usd, "usd", name="cost_usd"), None, None),
        ]
    rates = (training.tok_per_s, serving.prefill_tok_per_s, serving.decode_tok_per_s)
    devices = ((training.hardware, training.layout.n_devices), *[(serving.hardware, serving.devices)] * 2)
    each = [cost_of(million / rate, *at) for rate, at in zip(rates, devices, strict=True)]
    energy, money = [Cell(cost.energy_kwh, "kWh") for cost in each], [Cell(cost.usd, "usd") for cost in each]
    return [
        *rows,
        _row("money", "energy per million tokens", *energy),
        _row("money", "money per million tokens", *money),
    ]


# -- measured beside predicted --------------------------------------------------------------------------------------------


def merge_measured(
    comparison: Comparison, train: Mapping[str, Any] | None = None, serve: Mapping[str, Any] | None = None
) -> Comparison:
    """The same table with what was measured beside each prediction.

    ``train`` and ``serve`` are measurements as the ledger holds them (``Run.measurement``): ``train`` fills the first column,
    ``serve`` prefill and decode, each cell by its ledger name. Energy and money of what was measured follow from the
    measured rates at the same assumed price and watts, and so does the measured crossover.
    """
    measured: dict[str, dict[str, float]] = {
        "train": _numbers(train or {}),
        "prefill": _numbers(serve or {}),
        "decode": _numbers(serve or {}),
    }
    served_on = comparison.serving.hardware
    places = {"train": comparison.hardware, "prefill": served_on, "decode": served_on}
    if "train_time_s" in measured["train"]:
        spent = cost_of(measured["train"]["train_time_s"], comparison.hardware)
        measured["train"] = {"energy_kwh": spent.energy_kwh, "cost_usd": spent.usd} | measured["train"]
    rates = {"train": "train_tok_per_s", "prefill": "prefill_tok_per_s", "decode": "decode_tok_per_s"}
    rows = []
    for row in comparison.rows:
        cells = {}
        for column, cell in row.cells.items():
            found = measured[column].get(cell.name) if cell.name else None
            rate = measured[column].get(rates[column])
            if rate and row.label == "energy per million tokens":
                found = cost_of(1e6 / rate, places[column]).energy_kwh
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
