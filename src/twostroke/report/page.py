"""One self-contained HTML page: what was planned, what was measured, and how far the two are apart."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.core.errors import InputError
from twostroke.core.version import __version__
from twostroke.ledger.scoring import compare, summarise
from twostroke.ledger.store import Ledger, Run
from twostroke.ledger.text import format_error, format_value

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Table:
    """A table of the page: ``columns`` are headings, ``rows`` hold as many cells; a row of one cell is a sub-heading."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def _steps_of(run: Run | None) -> list[dict[str, Any]]:
    """Lines of the run's log.jsonl, if its directory is still there; a torn last line is passed over."""
    directory = run and (run.inputs.get("run_directory") or run.inputs.get("output"))
    log = Path(directory) / "log.jsonl" if directory else None
    if log is None or not log.is_file():
        return []
    steps = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            steps.append(json.loads(line))
        except ValueError:
            continue
    return [s for s in steps if isinstance(s, dict)]


def _run_table(run: Run) -> Table:
    rows = [
        [r.name, format_value(r.name, r.predicted), format_value(r.name, r.measured), format_error(r.error_percent)]
        for r in compare(run)
    ]
    note = f"{run.run_id} · {run.subject} · {run.status} · frozen {run.frozen_at} · code {run.code_version}"
    return Table(f"{run.kind.capitalize()} run", ("", "predicted", "measured", "error"), rows, note)


def _scores_table(runs: Sequence[Run]) -> Table | None:
    scores = summarise(runs)
    if not scores:
        return None
    rows = [
        [
            s.name,
            str(s.n_runs),
            f"{s.median_abs_error_percent:.1f}%",
            f"{s.p90_abs_error_percent:.1f}%",
            f"{s.median_error_percent:+.1f}%",
        ]
        for s in scores
    ]
    return Table("All predictions so far", ("", "runs", "median |error|", "p90 |error|", "median error"), rows)


def write_report(
    path: Path | str, ledger: Ledger, comparison: Table | None = None, facts: Mapping[str, str] | None = None
) -> Path:
    """Write the page to ``path`` and return it. ``comparison`` is the table of training beside inference, ``facts`` a few
    words shown under the title. Raises InputError where the ledger has no run yet."""
    # Both are slow to import, and only this function needs them.
    import jinja2
    from plotly.offline import get_plotlyjs

    from twostroke.report import figures

    runs = ledger.runs()
    if not runs:
        raise InputError(f"the ledger {ledger.path} has no runs yet: `twostroke train`, `serve` or `bench` adds the first.")
    latest = {kind: next((r for r in runs if r.kind == kind and r.measurements), None) for kind in ("train", "serve", "bench")}
    shown = [run for run in latest.values() if run is not None]
    steps = _steps_of(latest["train"])
    predicted_rate = latest["train"].prediction.get("train_tok_per_s") if latest["train"] else None
    plots = [
        figures.training_curve(steps),
        figures.throughput_curve(steps, predicted_rate),
        figures.step_split(latest["train"]),
        figures.memory_by_term(shown),
        figures.latencies(latest["bench"]),
        figures.errors(shown),
    ]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined
    )
    scores = _scores_table(runs)
    html = environment.get_template("page.html").render(
        version=__version__,
        facts=dict(facts or {}),
        comparison=comparison,
        tables=[_run_table(run) for run in shown] + ([scores] if scores else []),
        plots=[
            p.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False, "responsive": True})
            for p in plots
            if p is not None
        ],
        plotly_js=get_plotlyjs(),
        ledger=str(ledger.path),
        n_runs=len(runs),
    )
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(html, encoding="utf-8")
    os.replace(partial, target)
    return target
