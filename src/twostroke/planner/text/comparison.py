"""``twostroke plan compare`` as text: the table of training beside prefill beside decode."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from twostroke.core.units import format_count
from twostroke.ledger.text import WIDTH, align
from twostroke.planner.choosing.comparison import COLUMNS, Cell, Column, Comparison
from twostroke.planner.text.format import format_quantity

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
        if row.section.startswith("component"):
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


def _component_block(comparison: Comparison) -> list[list[str] | None]:
    """One line a component: share of the time, intensity, bound, and the batch from which arithmetic is the bound."""
    found: dict[str, dict[str, Mapping[Column, Cell]]] = {}
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
                _share(facts["share of the step"][column].value),
                format_quantity(facts["intensity"][column].value, ""),
                str(cell.value),
                format_count(flip) if isinstance(flip, int | float) else "never",
            ]
        rows.append(line)
    return rows


def _share(value: float | str | None) -> str:
    """Whole percents, and one digit below ten: a component's part of the time is not known better."""
    percent = 100 * float(value or 0)
    return f"{percent:.0f}%" if percent >= 9.95 else f"{percent:.1f}%" if percent >= 0.05 else "<0.1%"


def _wrapped(lines: Sequence[str]) -> list[str]:
    """Sentences at ``WIDTH``, continued with an indent."""
    return [part for line in lines for part in textwrap.wrap(line, WIDTH, subsequent_indent="    ", break_on_hyphens=False)]


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


def comparison_text(comparison: Comparison) -> str:
    """The table: training, prefill and decode, predicted, and measured beside it once there is any. For 120 columns."""
    has_measured = any(cell.measured is not None for row in comparison.rows for cell in row.cells.values())
    head, under = [""], [""]
    for title in ("TRAINING", "PREFILL", "DECODE"):
        head += [title, ""] if has_measured else [title]
        under += ["predicted", "measured"] if has_measured else ["predicted"]
    body = _ruled([head, under, None, *_main_block(comparison, has_measured), None])

    head, under = ["component"], [""]
    for title, unit in (("TRAINING", "seqs."), ("PREFILL", "tokens"), ("DECODE", "reqs.")):
        head += [title, "", "", "from"]
        under += ["time", "FLOP/B", "bound", unit]
    components = _ruled([head, under, None, *_component_block(comparison), None], right=(1, 2, 4, 5, 6, 8, 9, 10, 12))

    served = comparison.crossover_served_tokens
    if comparison.training.cost is None:
        crossover = "crossover: give the run's length (--steps) to see after how many served tokens serving has cost more"
    else:
        crossover = f"crossover: serving has cost more than training after {format_count(served)} served tokens (predicted)"
        if comparison.measured_crossover_served_tokens is not None:
            crossover += f", {format_count(comparison.measured_crossover_served_tokens)} (from measured times)"
    subject = f"{comparison.subject} on {comparison.hardware.label}; rates {comparison.hardware.basis}"
    below = [
        "from: sequences of a pass, prompt tokens and requests from which arithmetic bounds that component",
        *flip_lines(comparison),
        crossover,
        *comparison.assumptions,
        *(f"note: {note}" for note in comparison.notes),
    ]
    return "\n".join([*_wrapped([subject]), *body, *components, *_wrapped(below)])
