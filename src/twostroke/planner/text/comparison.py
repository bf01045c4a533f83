"""``twostroke plan compare`` as text: the table of training beside prefill beside decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twostroke.core.units import format_count
from twostroke.ledger.text import align
from twostroke.planner.choosing.comparison import COLUMNS, Cell, Column, Comparison
from twostroke.planner.text.format import (
    LAUNCH,
    fits_lines,
    footnotes,
    format_intensity,
    format_quantity,
    format_range,
    notes_lines,
    wrapped,
)

_MARKS = {"datasheet": " datasheet", "assumed": " assumed"}


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
        if row.section.startswith("component") or not any(cell.value or cell.measured for cell in row.cells.values()):
            continue
        if section and row.section != section:
            rows.append(None)
        section = row.section
        line = [row.label.replace("million tokens", "Mtok")]
        for column in COLUMNS:
            cell = row.cells.get(column)
            line.append(_cell(cell))
            if has_measured:
                found = None if cell is None else cell.measured
                line.append("" if found is None or cell is None else format_quantity(found, cell.unit))
        rows.append(line)
    return rows


NARROW = 1.01
"""A range whose ends are no farther apart than this factor is not shown."""


def _ranges_block(comparison: Comparison) -> list[list[str] | None]:
    """Rows of the ranges that are wide enough to matter; a column without one is empty."""
    rows: list[list[str] | None] = []
    for row in comparison.rows:
        cells = (row.cells.get(column) for column in COLUMNS)
        line = ["" if cell is None or _is_narrow(cell) else format_range(cell.low, cell.high, cell.unit) for cell in cells]
        if any(line):
            rows.append([row.label, *line])
    return rows


def _is_narrow(cell: Cell) -> bool:
    return cell.low is None or cell.high is None or cell.high <= NARROW * cell.low


def ranges_lines(comparison: Comparison) -> list[str]:
    """The table of the predictions' ranges; nothing if they were not merged in."""
    rows = _ranges_block(comparison)
    return [*_ruled([["90% range", "TRAINING", "PREFILL", "DECODE"], None, *rows]), ""] if rows else []


def _component_facts(comparison: Comparison) -> dict[str, dict[str, Mapping[Column, Cell]]]:
    """Component → what is said of it → cells."""
    found: dict[str, dict[str, Mapping[Column, Cell]]] = {}
    for row in comparison.rows:
        if row.section.startswith("component"):
            component, _, what = row.label.partition(": ")
            found.setdefault(component, {})[what] = row.cells
    return found


def _bounds_block(comparison: Comparison) -> list[list[str] | None]:
    """One line a component: its share of the time, and what bounds it."""
    rows: list[list[str] | None] = []
    for component, facts in _component_facts(comparison).items():
        line = [component]
        for column in COLUMNS:
            cell = facts["bound"].get(column)
            line += ["–", ""] if cell is None else [_share(facts["share of the step"][column].value), str(cell.value)]
        rows.append(line)
    return rows


def _flips_block(comparison: Comparison) -> list[list[str] | None]:
    """One line a component: its FLOP for each byte, and the batch from which arithmetic is its bound."""
    rows: list[list[str] | None] = []
    for component, facts in _component_facts(comparison).items():
        line = [component]
        for column in COLUMNS:
            cell = facts["intensity"].get(column)
            flip = facts["arithmetic-bound"].get(column)
            if cell is None or flip is None:
                line += ["–", "–"]
                continue
            line += [format_intensity(float(cell.value or 0)).removesuffix(" FLOP/B"), _flip_cell(flip.value)]
        rows.append(line)
    return rows


def _flip_cell(value: float | str | None) -> str:
    return format_count(value) if isinstance(value, int | float) else "never"


def _share(value: float | str | None) -> str:
    """Whole percents, and one digit below ten: a component's part of the time is not known better."""
    percent = 100 * float(value or 0)
    return f"{percent:.0f}%" if percent >= 9.95 else f"{percent:.1f}%" if percent >= 0.05 else "<0.1%"


def _ruled(rows: Sequence[list[str] | None], right: Sequence[int] = ()) -> list[str]:
    """Aligned lines, with a rule wherever ``rows`` has None."""
    lines = align([row for row in rows if row is not None], right).split("\n")
    rule = "─" * max(map(len, lines))
    remaining = iter(lines)
    return [rule if row is None else next(remaining) for row in rows]


def flip_lines(comparison: Comparison) -> list[str]:
    """Where decode's memory and arithmetic take equally long, by hand: the MLP's batch, which experts raise, and attention's,
    which context raises until there is none."""
    analytic, searched = comparison.flips["analytic"]["decode"], comparison.flips["searched"]["decode"]
    attention = comparison.flips["attention"]
    moe = comparison.serving.spec.moe
    why = f", a token passing {moe.top_k} of {moe.n_experts} experts" if moe else ""
    last = attention["last_context"]
    numbers = [row for row in attention["contexts"] if row["analytic"] is not None]
    by_context = [f"{_context(row['context'])} tokens: {_flip(row['analytic'])} requests" for row in numbers]
    if last is not None:
        by_context.append(f"never beyond {last:,} tokens" if last else "never")
    never = any(analytic[name] is not None and searched[name] is None for name in ("mlp", "attention"))
    return [
        "decode's bound depends on component, batch and context. Memory and arithmetic take equally long (by hand) at",
        f"  mlp        {_flip(analytic['mlp'])} requests{why}",
        f"  attention  by context: {', '.join(by_context)}",
        *(["never in the table: starting operations and waiting for links take longer than either"] if never else []),
    ]


def _context(tokens: int) -> str:
    return f"{(tokens + 1) // 1024}k" if tokens >= 1023 else str(tokens)


def _flip(batch: float | None) -> str:
    return "never" if batch is None else format_count(batch) if batch >= 1000 else f"{batch:.0f}"


def comparison_text(comparison: Comparison, remedy: str = "") -> str:
    """The table: training, prefill and decode, predicted, and measured beside it once there is any; first, if training does not
    fit, that and the ``remedy``. In 80 columns; in 120 with measurements."""
    training, serving = comparison.training, comparison.serving
    has_measured = any(cell.measured is not None for row in comparison.rows for cell in row.cells.values())
    head, under = [""], [""]
    for title in ("TRAINING", "PREFILL", "DECODE"):
        head += [title, ""] if has_measured else [title]
        under += ["predicted", "measured"] if has_measured else ["predicted"]
    top = [
        *fits_lines(training.peak_memory_bytes, training.layout.n_devices, training.hardware, remedy),
        *wrapped([f"{comparison.subject} on {comparison.hardware.label} (rates {comparison.hardware.basis})"]),
    ]
    body = _ruled([head, under, None, *_main_block(comparison, has_measured), None])
    blocks = [
        *ranges_lines(comparison),
        *bounds_lines(comparison),
        "",
        *batch_lines(comparison),
        "",
        *wrapped(flip_lines(comparison)),
    ]
    below = "\n".join([*top, *body, *notes_lines(comparison.notes), *wrapped([crossover_line(comparison)])])
    alone = serving.devices == training.layout.n_devices == 1
    whose = [] if alone else wrapped(["memory, traffic and waits are per device; rates, energy and money of all together"])
    return "\n\n".join(["\n".join([below, *whose]), "\n".join(blocks), footnotes(comparison.assumptions)])


def bounds_lines(comparison: Comparison) -> list[str]:
    """The table of what bounds each component."""
    head = ["share of time, bound", "TRAINING", "", "PREFILL", "", "DECODE", ""]
    rows = _bounds_block(comparison)
    starting = any("launch" in row for row in rows if row)
    return [*_ruled([head, None, *rows], right=(1, 3, 5)), *([LAUNCH] if starting else [])]


def batch_lines(comparison: Comparison) -> list[str]:
    """The table of the batch at which each component's bound becomes arithmetic."""
    head = ["FLOP per byte, and"] + [title for name in ("TRAINING", "PREFILL", "DECODE") for title in (name, "")]
    under = ["arithmetic-bound from", "", "sequences", "", "tokens", "", "requests"]
    return _ruled([head, under, None, *_flips_block(comparison)], right=tuple(range(1, 7)))


def crossover_line(comparison: Comparison) -> str:
    """After how many served tokens serving has cost more than training."""
    if comparison.training.cost is None:
        return "crossover: give the run's length (--steps) to see after how many served tokens serving has cost more"
    served = format_count(comparison.crossover_served_tokens)
    measured = comparison.measured_crossover_served_tokens
    also = "" if measured is None else f", {format_count(measured)} (from measured times)"
    return f"crossover: serving has cost more than training after {served} served tokens (predicted){also}"
