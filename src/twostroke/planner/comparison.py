"""Training beside prefill beside decode: one model, one machine, every quantity of the three in one table of plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from twostroke.core.spec import ModelSpec
from twostroke.planner.cost import cost_of, crossover_tokens, usd_per_million_tokens
from twostroke.planner.hardware import Hardware
from twostroke.planner.network import send_s
from twostroke.planner.schema import PLAN_SCHEMA
from twostroke.planner.serving import ServingPlan, ServingShape, decode_works, plan_serving, prefill_works
from twostroke.planner.training import TrainingPlan, TrainingShape, plan_training
from twostroke.planner.work import COMPONENTS, Work

Column = Literal["train", "prefill", "decode"]
COLUMNS: tuple[Column, ...] = ("train", "prefill", "decode")

Mark = Literal["predicted", "measured", "datasheet", "assumed", "given"]
"""Where a value comes from. "given" is an input of the plan: a batch size, a type."""

LARGEST_BATCH = 2**20
"""Batches beyond this count as never."""


@dataclass(frozen=True)
class Cell:
    """One value. ``unit`` is one of "s", "bytes", "tok/s", "usd", "kWh", "FLOP", "FLOP/B", "share", "tokens", or "" for
    words and plain counts. ``name`` is the ledger's name of the quantity, where it has one; ``measured`` is filled by
    ``merge_measured``. ``note`` says what the number is where the row's label does not."""

    value: float | str | None
    unit: str = ""
    kind: Mark = "predicted"
    name: str | None = None
    measured: float | str | None = None
    note: str = ""


@dataclass(frozen=True)
class TableRow:
    """One quantity in the three columns; a column without it is absent from ``cells``."""

    section: str
    label: str
    cells: dict[str, Cell]


@dataclass(frozen=True)
class Comparison:
    """The table with what it was made from."""

    subject: str
    hardware: Hardware
    training: TrainingPlan
    serving: ServingPlan
    rows: tuple[TableRow, ...]
    assumptions: tuple[str, ...]
    crossover_served_tokens: float
    measured_crossover_served_tokens: float | None = None
    notes: tuple[str, ...] = field(default=())

    def row(self, label: str) -> TableRow:
        return next(r for r in self.rows if r.label == label)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": PLAN_SCHEMA,
            "kind": "compare",
            "subject": self.subject,
            "hardware": self.hardware.to_dict(),
            "columns": list(COLUMNS),
            "rows": [
                {"section": r.section, "label": r.label, **{c: asdict(cell) for c, cell in r.cells.items()}} for r in self.rows
            ],
            "crossover_served_tokens": self.crossover_served_tokens,
            "measured_crossover_served_tokens": self.measured_crossover_served_tokens,
            "assumptions": list(self.assumptions),
            "notes": list(self.notes),
        }


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


def component_flips(training: TrainingPlan, serving: ServingPlan) -> dict[str, dict[str, int | None]]:
    """Column → component → batch at which arithmetic becomes its limit: training in sequences of the plan's length, prefill in
    prompt tokens, decode in requests."""
    spec, hardware = training.spec, training.hardware
    caches: dict[str, dict[int, Sequence[Work]]] = {column: {} for column in COLUMNS}

    def works(column: str, n: int) -> Sequence[Work]:
        if n not in caches[column]:
            if column == "train":
                plan = plan_training(spec, replace(training.shape, batch_size=n, steps=0), hardware)
                caches[column][n] = (*plan.forward, *plan.backward, *plan.optimizer)
            elif column == "prefill":
                caches[column][n] = prefill_works(spec, replace(serving.shape, prompt_tokens=n), hardware)
            else:
                caches[column][n] = decode_works(spec, replace(serving.shape, batch=n), hardware)
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
    spec: ModelSpec, training_shape: TrainingShape, serving_shape: ServingShape, hardware: Hardware, subject: str = ""
) -> Comparison:
    """Both phases of ``spec`` on ``hardware``, predicted. Raises what ``plan_training`` and ``plan_serving`` raise."""
    training, serving = plan_training(spec, training_shape, hardware), plan_serving(spec, serving_shape, hardware)
    return compare_plans(training, serving, subject)


def compare_plans(training: TrainingPlan, serving: ServingPlan, subject: str = "") -> Comparison:
    """The table of two plans that were already made."""
    hardware = training.hardware
    rows = [
        *_pass_rows(training, serving),
        *_memory_rows(training, serving),
        *_work_rows(training, serving),
        *_component_rows(training, serving),
        *_rate_rows(training, serving),
        *_move_and_store_rows(training, serving),
        *_money_rows(training, serving),
    ]
    run = training.cost or cost_of(training.step_time_s, hardware)
    return Comparison(
        subject=subject or f"{training.spec.family} of {training.parameters.total:,} parameters",
        hardware=hardware,
        training=training,
        serving=serving,
        rows=tuple(rows),
        assumptions=_assumptions(hardware),
        crossover_served_tokens=crossover_tokens(run.usd, serving.usd_per_mtok),
        notes=tuple(dict.fromkeys((*training.notes, *serving.notes))),
    )


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
        _row(section, "loss", *terms("loss", None, None, None)),
        _row(section, "KV cache", *terms(None, "kv_cache", None, "kv_cache_bytes")),
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


def _component_rows(training: TrainingPlan, serving: ServingPlan) -> list[TableRow]:
    """For each component: share of the step, arithmetic intensity, the bound that holds and the batch at which it flips."""
    flips = component_flips(training, serving)
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
            at = flips[column].get(component)
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
    sequences = shape.batch_size * shape.grad_accumulation
    precision = "bf16, fp32 masters" if shape.dtype == "bf16" else "fp32"
    weights = {"int8": "int8 × bf16"}.get(serve.scheme, serve.scheme)
    cached = f"{weights}, {serve.cache_dtype} KV"
    return [
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


def _serving_utilisation(serving: ServingPlan) -> list[Cell | None]:
    """Model FLOP a second ÷ the peak of the activations' type, for prefill and for decode."""
    peak = serving.hardware.peak(serving.shape.compute_dtype)
    prefill = serving.prefill_flops_per_token * serving.prefill_tok_per_s / peak
    decode = serving.decode_flops_per_token * serving.decode_tok_per_s / peak
    return [Cell(prefill, "share"), Cell(decode, "share")]


def _move_and_store_rows(training: TrainingPlan, serving: ServingPlan) -> list[TableRow]:
    network = training.hardware.network
    gradients, cache = training.network_bytes_per_step, serving.kv_request_bytes
    return [
        _row(
            "network",
            "to one more machine",
            Cell(gradients, "bytes", note="gradients"),
            Cell(cache, "bytes", note="KV a request"),
            None,
        ),
        _row(
            "network",
            "which would take",
            Cell(send_s(gradients, network), "s"),
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


def _money_rows(training: TrainingPlan, serving: ServingPlan) -> list[TableRow]:
    """Energy and rent: of the run where its length is known, and per million tokens in every column."""
    hardware, million = training.hardware, 1e6
    rows = []
    if training.cost is not None and training.train_time_s is not None:
        tokens = training.shape.steps * training.shape.tokens_per_step
        rows += [
            _row("money", "whole run, tokens", _given(tokens, "tokens"), None, None),
            _row("money", "whole run, time", Cell(training.train_time_s, "s", name="train_time_s"), None, None),
            _row("money", "whole run, energy", Cell(training.cost.energy_kwh, "kWh", name="energy_kwh"), None, None),
            _row("money", "whole run, money", Cell(training.cost.usd, "usd", name="cost_usd"), None, None),
        ]
    rates = (training.tok_per_s, serving.prefill_tok_per_s, serving.decode_tok_per_s)
    energy = [Cell(cost_of(million / rate, hardware).energy_kwh, "kWh") for rate in rates]
    money = [Cell(usd_per_million_tokens(rate, hardware.usd_per_hour.value), "usd") for rate in rates]
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
    hardware = comparison.hardware
    if "train_time_s" in measured["train"]:
        spent = cost_of(measured["train"]["train_time_s"], hardware)
        measured["train"] = {"energy_kwh": spent.energy_kwh, "cost_usd": spent.usd} | measured["train"]
    rates = {"train": "train_tok_per_s", "prefill": "prefill_tok_per_s", "decode": "decode_tok_per_s"}
    rows = []
    for row in comparison.rows:
        cells = {}
        for column, cell in row.cells.items():
            found = measured[column].get(cell.name) if cell.name else None
            rate = measured[column].get(rates[column])
            if rate and row.label == "energy per million tokens":
                found = cost_of(1e6 / rate, hardware).energy_kwh
            elif rate and row.label == "money per million tokens":
                found = usd_per_million_tokens(rate, hardware.usd_per_hour.value)
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
    train, serve, hardware = measured["train"], measured["decode"], comparison.hardware
    spent = train.get("cost_usd")
    if spent is None and "train_time_s" in train:
        spent = cost_of(train["train_time_s"], hardware).usd
    rate = serve.get("output_tok_per_s") or serve.get("decode_tok_per_s")
    if spent is None or not rate:
        return None
    return crossover_tokens(spent, usd_per_million_tokens(rate, hardware.usd_per_hour.value))
