"""Prints the ledger for people, in aligned columns and with each value in the unit that its name ends in."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twostroke.core.units import format_bytes, format_count, format_energy, format_flop_rate, format_money, format_seconds
from twostroke.ledger.scoring import Row, Score, compare

if TYPE_CHECKING:
    from twostroke.ledger.attribution import Attribution, PooledShare
    from twostroke.ledger.store import Run

WIDTH = 120
"""Longest line of these texts, in columns, unless a terminal has fewer."""

LEAST_SUBJECT = 8
"""Columns in which the end of a run's subject still says something."""

HEADLINES = (
    "step_time_s", "tpot_s", "decode_tok_per_s", "ttft_s", "scored_tok_per_s", "quantize_s", "prepare_s", "import_s",
    "export_s", "sweep_s", "startup_s",
)  # fmt: skip
"""A list shows one number of each run: the first of these names that was measured, else the first that was predicted."""

LEGEND = "error = 100·(predicted − measured) / measured. [low–high] is the interval frozen with the prediction"

_ONE_NUMBER = re.compile(r"^\$?(-?[\d.,]+(?:e[-+]?\d+)?)(?!.* \d)")
"""Matches the number of a text with a single one, so not ``1 min 33 s``."""


def format_value(name: str, value: float | None) -> str:
    """``value`` in the unit that ``name`` ends in (``step_time_s``, ``peak_memory_bytes``). None is a dash."""
    if value is None:
        return "–"
    if name.endswith("tok_per_s"):
        return f"{format_count(value)} tok/s"
    if name.endswith("flop_per_s"):
        return format_flop_rate(value)
    if name.endswith("bytes_per_s"):
        return f"{format_bytes(value)}/s"
    if name.endswith("_per_s"):
        return f"{value:,.4g}/s"
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_usd"):
        return format_money(value)
    if name.endswith("_kwh"):
        return format_energy(value)
    if name.endswith("_s"):
        return format_seconds(value)
    if name == "mfu" or name.endswith("_fraction"):
        return f"{100 * value:.1f}%"
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e9 else f"{value:.4g}"


def format_error(error_percent: float | None) -> str:
    return "–" if error_percent is None else f"{round(error_percent, 1) + 0.0:+.1f}%"  # + 0.0: never "-0.0%"


def align(rows: Sequence[Sequence[str]], right: Sequence[int] = (), gap: str = "  ") -> str:
    """Rows of cells as lines of aligned columns with ``gap`` between. Columns in ``right`` are aligned right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        lines.append(gap.join(cells).rstrip())
    return "\n".join(lines)


def format_interval(name: str, value: float | None, low: float | None, high: float | None) -> str:
    """The value with its interval in the same unit, as in ``65.2 ms [59–92.5]``."""
    shown = format_value(name, value)
    if value is None or low is None or high is None:
        return shown
    match = _ONE_NUMBER.match(shown)
    if match is None or not value or not float(match[1].replace(",", "")):  # 1 min 33 s, or nothing to scale by
        return f"{shown} [{format_value(name, low)}–{format_value(name, high)}]"
    scale = float(match[1].replace(",", "")) / value
    ends = [f"{end * scale:,.0f}" if abs(end * scale) >= 1000 else f"{end * scale:.3g}" for end in (low, high)]
    return f"{shown} [{ends[0]}–{ends[1]}]"


def format_inside(inside: bool | None) -> str:
    return {True: "inside", False: "OUTSIDE", None: ""}[inside]


def _shortened(text: str, width: int) -> str:
    """``text`` in at most ``width`` columns. The beginning is cut off, because the end of a path says more."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]


def headline(run: Run) -> Row | None:
    """The row of a run that a list shows."""
    rows = {row.name: row for row in compare(run)}
    for which in ("measured", "predicted"):
        for name in HEADLINES:
            if name in rows and getattr(rows[name], which) is not None:
                return rows[name]
    return None


def runs_text(runs: Sequence[Run], width: int = WIDTH) -> str:
    """One line for each run, newest first, with its headline number as predicted and measured; two lines where ``width`` has
    no room for the subject."""
    if not runs:
        return "The ledger has no runs yet. Every `twostroke train`, `serve`, `bench` and `generate` adds one."
    rows = [["run", "status", "", "predicted", "measured", "error", "", "subject"]]
    for run in runs:
        row = headline(run)
        cells = ["", "", "", "", ""]
        if row is not None:
            cells = [
                row.name,
                format_interval(row.name, row.predicted, row.low, row.high),
                format_value(row.name, row.measured),
                format_error(row.error_percent),
                format_inside(row.inside),
            ]
        rows.append([run.run_id, run.status, *cells, run.subject])
    room = width - sum(max(len(row[i]) for row in rows) + 2 for i in range(len(rows[0]) - 1))
    if width < WIDTH and room < LEAST_SUBJECT:
        left = width - sum(max(len(row[i]) for row in rows) + 2 for i in (0, 1))
        heads = align([[row[0], row[1], _shortened(row[-1], left)] for row in rows]).split("\n")
        numbers = align([["", *row[2:-1]] for row in rows], right=(3, 4)).split("\n")
        return "\n".join(line for pair in zip(heads, numbers, strict=True) for line in pair if line)
    rows = [[*row[:-1], _shortened(row[-1], max(LEAST_SUBJECT, room))] for row in rows]
    if not any(row[6] for row in rows):  # all runs are of releases whose predictions had no intervals
        rows = [[*row[:6], row[7]] for row in rows]
    return align(rows, right=(4, 5))


def run_head(run: Run) -> str:
    """Two lines that identify the run."""
    return (
        f"{run.run_id}  {_shortened(run.subject, WIDTH - len(run.run_id) - len(run.status) - 4)}  {run.status}\n"
        f"frozen {run.frozen_at}  code {run.code_version}  machine {run.fingerprint}"
    )


def comparison_text(run: Run, rows: Sequence[Row], attributions: Sequence[Attribution] = ()) -> str:
    """Predicted and measured values with interval and error in percent, then the attribution of the errors."""
    if not rows:
        return f"{run_head(run)}\nNothing was predicted or measured as a number."
    cells = [["", "predicted [interval]", "measured", "error", ""]]
    cells += [
        [
            row.name,
            format_interval(row.name, row.predicted, row.low, row.high),
            format_value(row.name, row.measured),
            format_error(row.error_percent),
            format_inside(row.inside),
        ]
        for row in rows
    ]
    text = f"{run_head(run)}\n\n{align(cells, right=(2, 3))}\n{LEGEND}{_level(run)}."
    return f"{text}\n\n{attribution_text(attributions)}" if attributions else text


def _level(run: Run) -> str:
    """The level of the intervals and the source of their width, as they were frozen."""
    found = [value for value in run.prediction.values() if isinstance(value, Mapping) and "level" in value]
    if not found:
        return "; this run has no intervals"
    n_assumed = sum(value.get("width") != "measured" for value in found)
    widths = "assumed" if n_assumed == len(found) else "measured" if not n_assumed else f"assumed for {n_assumed}"
    return f",\nmeant to hold {100 * found[0]['level']:.0f}% of measurements; widths {widths}"


def attribution_text(attributions: Sequence[Attribution]) -> str:
    """Each total's error and the shares of its terms. The percents of the terms add up to the total's."""
    cells = [["which term missed", "predicted", "measured", "of the error"]]
    for one in attributions:
        name = one.total
        cells.append([name, format_value(name, one.predicted), format_value(name, one.measured), f"{one.error_percent:+.1f}%"])
        for share in one.shares:
            times = f" × {share.coefficient:g}" if share.coefficient != 1 else ""
            label = _shortened(f"  {share.part}{times}", WIDTH - 50)
            shown = [format_value(name, share.predicted), format_value(name, share.measured), f"{share.percent:+.1f}%"]
            cells.append([label, *shown])
    return align(cells, right=(1, 2, 3))


def run_text(run: Run, rows: Sequence[Row], attributions: Sequence[Attribution] = (), width: int = WIDTH) -> str:
    """One run for people: numbers, attributions, reasons for what was not measured, inputs and notes. The JSON holds more."""
    parts = [comparison_text(run, rows, attributions)]
    missing = run.measurement.get("not_measured")
    if isinstance(missing, Mapping) and missing:
        by_reason: dict[str, list[str]] = {}
        for name, reason in missing.items():
            by_reason.setdefault(str(reason), []).append(name)
        reasons = (f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())
        parts.append("not measured\n" + "\n".join(_folded(line, width) for line in reasons))
    inputs = list(_flat(run.inputs))
    if inputs:
        parts.append(_wrapped("inputs", [f"{name}={value}" for name, value in inputs], width))
    notes = [f"{m.measured_at[:19].replace('T', ' ')}  {m.status}  {m.notes or ''}".rstrip() for m in run.measurements]
    if notes:
        parts.append("measured\n" + "\n".join(_folded(note, width) for note in notes))
    return "\n\n".join(parts)


def _flat(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Inputs as (name, value), with dots in names of nested ones. Unset and false inputs are left out, and the beginning of
    long values is cut off."""
    found: list[tuple[str, str]] = []
    for name, value in table.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{name}.")
        elif value is not None and value is not False and value != []:
            shown = ":".join(map(str, value)) if isinstance(value, list) else f"{value}"
            found.append((f"{prefix}{name}", _shortened(shown, 60)))
    return found


def _wrapped(title: str, words: Sequence[str], width: int) -> str:
    lines, line = [title], " "
    for word in words:
        if len(line) + len(word) + 1 > width and line.strip():
            lines.append(line)
            line = " "
        line += f" {word}"
    return "\n".join([*lines, line])


def _folded(note: str, width: int) -> str:
    return _wrapped("", note.split(" "), width).lstrip("\n")


def scores_text(scores: Sequence[Score], pooled: Sequence[PooledShare] = ()) -> str:
    """One line for each predicted quantity with its errors over all runs and how many measurements lie in their intervals, then
    the terms that miss most."""
    if not scores:
        return "No run has both a prediction and a measurement yet. A prediction needs a profile: `twostroke calibrate`."
    cells = [["", "runs", "median |error|", "p90 |error|", "worst |error|", "median error", "inside"]]
    cells += [
        [
            s.name,
            str(s.n_runs),
            f"{s.median_abs_error_percent:.1f}%",
            f"{s.p90_abs_error_percent:.1f}%",
            f"{s.worst_abs_error_percent:.1f}%",
            f"{s.median_error_percent:+.1f}%",
            f"{s.n_inside} of {s.n_intervals}" if s.n_intervals else "–",
        ]
        for s in scores
    ]
    text = align(cells, right=(1, 2, 3, 4, 5, 6))
    n, inside = sum(s.n_intervals for s in scores), sum(s.n_inside for s in scores)
    if n:
        text += (
            f"\n{inside} of {n} measurements ({100 * inside / n:.0f}%) fell inside the interval frozen with their prediction."
        )
    return f"{text}\n\n{pooled_text(pooled)}" if pooled else text


def pooled_text(pooled: Sequence[PooledShare]) -> str:
    """The terms of each total over all runs, the worst first, in percent of the measured total."""
    cells = [["which term misses most", "runs", "median |share|", "median share", "worst in"]]
    total = None
    for share in pooled:
        if share.total != total:
            total = share.total
            cells.append([total, "", "", "", ""])
        cells.append(
            [
                f"  {share.part}",
                str(share.n_runs),
                f"{share.median_abs_percent:.1f}%",
                f"{share.median_percent:+.1f}%",
                str(share.worst_in),
            ]
        )
    return align(cells, right=(1, 2, 3, 4))
