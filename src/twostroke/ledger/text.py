"""The ledger for people: aligned columns, values in the unit that their name ends in."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.core.units import format_bytes, format_count, format_money, format_seconds
from twostroke.ledger.scoring import Row, Score
from twostroke.ledger.store import Run


def format_value(name: str, value: float | None) -> str:
    """``value`` in the unit that ``name`` ends in, as in ``step_time_s`` or ``peak_memory_bytes``; a dash for None."""
    if value is None:
        return "–"
    if name.endswith("tok_per_s"):
        return f"{format_count(value)} tok/s"
    if name.endswith("flop_per_s"):
        return f"{format_count(value)}FLOP/s"
    if name.endswith("bytes_per_s"):
        return f"{format_bytes(value)}/s"
    if name.endswith("_per_s"):
        return f"{value:,.4g}/s"
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_usd"):
        return format_money(value)
    if name.endswith("_kwh"):
        return f"{value:.3g} kWh"
    if name.endswith("_s"):
        return format_seconds(value)
    if name == "mfu" or name.endswith("_fraction"):
        return f"{100 * value:.1f}%"
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e9 else f"{value:.4g}"


def format_error(error_percent: float | None) -> str:
    return "–" if error_percent is None else f"{error_percent:+.1f}%"


def align(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Rows of cells as lines of aligned columns, two spaces between; columns in ``right`` are set flush right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def runs_text(runs: Sequence[Run]) -> str:
    """One line a run, newest first."""
    if not runs:
        return "The ledger has no runs yet. Every `twostroke train`, `serve` and `bench` adds one."
    rows = [["run", "kind", "status", "frozen (UTC)", "code", "subject"]]
    rows += [[r.run_id, r.kind, r.status, r.frozen_at[:19].replace("T", " "), r.code_version, r.subject] for r in runs]
    return align(rows)


def comparison_text(run: Run, rows: Sequence[Row]) -> str:
    """Predicted beside measured, with the error in percent."""
    head = (
        f"{run.run_id}  {run.subject}  {run.status}\nfrozen {run.frozen_at}  code {run.code_version}  machine {run.fingerprint}"
    )
    if not rows:
        return f"{head}\nNothing was predicted or measured as a number."
    cells = [["", "predicted", "measured", "error"]]
    cells += [
        [r.name, format_value(r.name, r.predicted), format_value(r.name, r.measured), format_error(r.error_percent)]
        for r in rows
    ]
    return f"{head}\n{align(cells, right=(1, 2, 3))}"


def scores_text(scores: Sequence[Score]) -> str:
    """One line a predicted quantity: how far predictions were off over all runs."""
    if not scores:
        return "No run has both a prediction and a measurement yet."
    cells = [["", "runs", "median |error|", "p90 |error|", "worst |error|", "median error"]]
    cells += [
        [
            s.name,
            str(s.n_runs),
            f"{s.median_abs_error_percent:.1f}%",
            f"{s.p90_abs_error_percent:.1f}%",
            f"{s.worst_abs_error_percent:.1f}%",
            f"{s.median_error_percent:+.1f}%",
        ]
        for s in scores
    ]
    return align(cells, right=(1, 2, 3, 4, 5))
