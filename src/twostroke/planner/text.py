"""Plans for people: aligned columns, every number with its unit and its mark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twostroke.core.units import format_bytes, format_count, format_money, format_seconds
from twostroke.planner.comparison import COLUMNS, Cell, Comparison
from twostroke.planner.search import Candidate
from twostroke.planner.serving import ServingPlan
from twostroke.planner.training import TrainingPlan
from twostroke.planner.work import Work

_MARKS = {"datasheet": " datasheet", "assumed": " assumed"}


def format_quantity(value: float | str | None, unit: str) -> str:
    """A value in one of the table's units; words as they are, None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if unit == "s":
        return format_seconds(value)
    if unit == "bytes":
        return format_bytes(value)
    if unit == "usd":
        return format_money(value)
    if unit == "share":
        return f"{100 * value:.3g}%"
    if unit == "kWh":
        return f"{value:.3g} kWh" if value >= 0.1 else f"{1000 * value:.3g} Wh"
    if unit == "FLOP/B":
        return f"{value:.3g} FLOP/B"
    if unit in ("tok/s", "tokens"):
        return f"{format_count(value)} {unit}"
    if unit == "FLOP":
        return format_count(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = (), gap: str = "  ") -> str:
    """Rows of cells as aligned lines; columns in ``right`` are set flush right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        gap.join(
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _memory(terms: Mapping[str, float], peak: float) -> str:
    rows = [[name, format_bytes(value)] for name, value in terms.items() if value]
    return columns([*rows, ["peak", format_bytes(peak)]], right=(1,))


def _works(title: str, works: Sequence[Work]) -> list[list[str]]:
    return [
        [title if i == 0 else "", w.component, format_seconds(w.seconds), w.bound, f"{w.intensity:.3g} FLOP/B"]
        for i, w in enumerate(works)
    ]


def _money_lines(plan: TrainingPlan | ServingPlan) -> str:
    hardware = plan.hardware
    price, watts = hardware.usd_per_hour, hardware.watts
    return (
        f"price {price.kind}: ${price.value:.4g} an hour ({price.source}; {price.date})\n"
        f"power {watts.kind}: {watts.value:.4g} W ({watts.source}; {watts.date})"
    )


def training_text(plan: TrainingPlan, subject: str) -> str:
    """``twostroke plan train``: all predicted."""
    shape = plan.shape
    lines = [
        f"Training {subject} on {plan.hardware.label} (rates {plan.hardware.basis}; everything below is predicted)",
        f"{plan.parameters.total:,} parameters; batch {shape.batch_size} × {shape.sequence_length} × {shape.grad_accumulation}"
        f", {shape.dtype}, {shape.optimizer}, {'compiled' if shape.compile else 'eager'}",
        "",
        "memory",
        _memory(plan.memory_bytes, plan.peak_memory_bytes),
        "",
        columns(
            [
                ["pass", "component", "time", "bound", "intensity"],
                *_works("forward", plan.forward),
                *_works("backward", plan.backward),
                *_works("update", plan.optimizer),
            ],
            right=(2, 4),
        ),
        "",
        f"step      {format_seconds(plan.step_time_s)}: forward {format_seconds(plan.forward_s)}, backward "
        f"{format_seconds(plan.backward_s)}, optimizer {format_seconds(plan.optimizer_s)}, data {format_seconds(plan.data_s)}",
        f"rate      {plan.tok_per_s:,.0f} tok/s, MFU {100 * plan.mfu:.1f}%",
        f"work      {format_count(plan.flops_per_token)} FLOP and {format_bytes(plan.bytes_per_token)} moved a token",
        f"disk      checkpoint {format_bytes(plan.checkpoint_bytes)}, model {format_bytes(plan.model_bytes)}",
        f"network   {format_bytes(plan.network_bytes_per_step)} of gradients a step, were there one more machine",
    ]
    if plan.cost is not None and plan.train_time_s is not None:
        tokens = shape.steps * shape.tokens_per_step
        lines.append(
            f"run       {shape.steps:,} steps, {format_count(tokens)} tokens, {format_seconds(plan.train_time_s)}, "
            f"{plan.cost.energy_kwh:.3g} kWh, {format_money(plan.cost.usd)}"
        )
    lines += [_money_lines(plan), *(f"note: {note}" for note in (*plan.notes, *memory_notes(plan)))]
    return "\n".join(lines)


def memory_notes(plan: TrainingPlan) -> list[str]:
    """A line where the plan does not fit the machine."""
    if plan.peak_memory_bytes <= plan.hardware.memory_bytes:
        return []
    return [
        f"this does not fit: {format_bytes(plan.peak_memory_bytes)} wanted, {format_bytes(plan.hardware.memory_bytes)} there."
    ]


def serving_text(plan: ServingPlan, subject: str) -> str:
    """``twostroke plan serve``: all predicted."""
    shape = plan.shape
    lines = [
        f"Serving {subject} on {plan.hardware.label} (rates {plan.hardware.basis}; everything below is predicted)",
        f"{plan.parameters.total:,} parameters, {shape.scheme} weights, {shape.cache_dtype} KV cache; batch {shape.batch}, "
        f"prompt {shape.prompt_tokens}, output {shape.output_tokens} tokens",
        "",
        "memory",
        _memory(plan.memory_bytes, plan.peak_memory_bytes),
        f"KV cache: {format_bytes(plan.kv_bytes_per_token)} a token, {plan.pages:,} pages of 16 tokens; "
        f"the memory holds {plan.largest_batch:,} such requests",
        "",
        columns(
            [
                ["pass", "component", "time", "bound", "intensity"],
                *_works("prefill", plan.prefill),
                *_works("decode", plan.decode),
            ],
            right=(2, 4),
        ),
        "",
        f"TTFT      {format_seconds(plan.ttft_s)} ({plan.prefill_tok_per_s:,.0f} prompt tok/s)",
        f"TPOT      {format_seconds(plan.tpot_s)} at batch {shape.batch} ({plan.decode_tok_per_s:,.0f} tok/s together)",
        f"answer    {format_seconds(plan.e2e_s)} from request to last token",
        f"rate      {plan.output_tok_per_s:,.0f} output tok/s with the batch kept full, prefills included",
        f"start     {format_seconds(plan.startup_s)}",
        f"cost      {format_money(plan.usd_per_mtok)} and {plan.kwh_per_mtok:.3g} kWh per million output tokens",
        _money_lines(plan),
        *(f"note: {note}" for note in plan.notes),
    ]
    return "\n".join(lines)


def candidates_text(candidates: Sequence[Candidate], limit: int = 6) -> str:
    """The first rungs of a ranking, the chosen one on top."""
    rows = [["", "width", "layers", "parameters", "steps", "tokens", "loss (assumed law)"]]
    rows += [
        [
            "chosen" if i == 0 else "",
            str(c.spec.d_model),
            str(c.spec.n_layers),
            format_count(c.n_parameters),
            f"{c.steps:,}",
            format_count(c.tokens),
            f"{c.predicted_loss:.3f}",
        ]
        for i, c in enumerate(candidates[:limit])
    ]
    return columns(rows, right=(1, 2, 3, 4, 5, 6))


def _cell(cell: Cell | None) -> str:
    """The predicted value with its mark and, in brackets, what it is."""
    if cell is None:
        return "–"
    text = format_quantity(cell.value, cell.unit)
    return text + _MARKS.get(cell.kind, "") + (f" ({cell.note})" if cell.note else "")


def _main_block(comparison: Comparison, has_measured: bool) -> list[list[str] | None]:
    """Rows of everything but the components; None where a new section begins."""
    rows: list[list[str] | None] = []
    section = ""
    for row in comparison.rows:
        if row.section.startswith("component"):
            continue
        if section and row.section != section:
            rows.append(None)
        section = row.section
        line = [row.label]
        for column in COLUMNS:
            cell = row.cells.get(column)
            line.append(_cell(cell))
            if has_measured:
                found = None if cell is None else cell.measured
                line.append("" if found is None or cell is None else format_quantity(found, cell.unit))
        rows.append(line)
    return rows


def _component_block(comparison: Comparison) -> list[list[str] | None]:
    """One line a component: share of the time, intensity, bound, and the batch from which arithmetic is the bound."""
    found: dict[str, dict[str, dict[str, Cell]]] = {}
    for row in comparison.rows:
        if row.section.startswith("component"):
            component, _, what = row.label.partition(": ")
            found.setdefault(component, {})[what] = row.cells
    rows: list[list[str] | None] = []
    for component, facts in found.items():
        line = [component]
        for column in COLUMNS:
            cell = facts["bound"].get(column)
            if cell is None:
                line += ["–", "", "", ""]
                continue
            flip = facts["arithmetic-bound"][column].value
            line += [
                format_quantity(facts["share of the step"][column].value, "share"),
                format_quantity(facts["intensity"][column].value, ""),
                str(cell.value),
                f"≥ {flip:,.0f}" if isinstance(flip, int | float) else "never",
            ]
        rows.append(line)
    return rows


def _ruled(rows: Sequence[list[str] | None], right: Sequence[int] = ()) -> list[str]:
    """Aligned lines, with a rule wherever ``rows`` has None."""
    lines = columns([row for row in rows if row is not None], right).split("\n")
    rule = "─" * max(map(len, lines))
    remaining = iter(lines)
    return [rule if row is None else next(remaining) for row in rows]


def comparison_text(comparison: Comparison) -> str:
    """The table: training, prefill and decode, predicted, and measured beside it once there is any. For 120 to 140 columns."""
    has_measured = any(cell.measured is not None for row in comparison.rows for cell in row.cells.values())
    head, under = [""], [""]
    for title in ("TRAINING", "PREFILL", "DECODE"):
        head += [title, ""] if has_measured else [title]
        under += ["predicted", "measured"] if has_measured else ["predicted"]
    body = _ruled([head, under, None, *_main_block(comparison, has_measured), None])

    head, under = ["component"], [""]
    for title, unit in (("TRAINING", "≥ sequences"), ("PREFILL", "≥ prompt tokens"), ("DECODE", "≥ requests")):
        head += [title, "", "", ""]
        under += ["time", "FLOP/B", "bound", unit]
    components = _ruled([head, under, None, *_component_block(comparison), None])

    served = comparison.crossover_served_tokens
    if comparison.training.cost is None:
        crossover = "crossover: give the run's length (--steps) to see after how many served tokens serving has cost more"
    else:
        crossover = f"crossover: serving has cost more than training after {format_count(served)} served tokens (predicted)"
        if comparison.measured_crossover_served_tokens is not None:
            crossover += f", {format_count(comparison.measured_crossover_served_tokens)} (from measured times)"
    return "\n".join(
        [
            f"{comparison.subject} on {comparison.hardware.label}; rates {comparison.hardware.basis}",
            *body,
            *components,
            "≥ n: from n on, arithmetic is the bound of that component",
            crossover,
            *comparison.assumptions,
            *(f"note: {note}" for note in comparison.notes),
        ]
    )
