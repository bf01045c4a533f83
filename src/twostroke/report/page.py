"""One self-contained HTML page: what was planned, what was measured, and how far the two are apart."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostroke.core.aside import write_text
from twostroke.core.errors import InputError, TwostrokeError
from twostroke.core.version import __version__
from twostroke.ledger.scoring import compare, is_whole, quantile, summarise
from twostroke.ledger.store import Ledger, Run
from twostroke.ledger.text import format_error, format_inside, format_interval, format_value

if TYPE_CHECKING:
    from twostroke.report.plot import Plot

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
        [
            r.name,
            format_interval(r.name, r.predicted, r.low, r.high),
            format_value(r.name, r.measured),
            format_error(r.error_percent),
            format_inside(r.inside),
        ]
        for r in compare(run)
    ]
    note = f"{run.run_id} · {run.subject} · {run.status} · frozen {run.frozen_at} · code {run.code_version}"
    return Table(f"{run.kind.capitalize()} run", ("", "predicted [interval]", "measured", "error", ""), rows, note)


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
            f"{s.n_inside} of {s.n_intervals}" if s.n_intervals else "–",
        ]
        for s in scores
    ]
    columns = ("", "runs", "median |error|", "p90 |error|", "median error", "inside interval")
    return Table("All predictions so far", columns, rows)


def _terms_table(runs: Sequence[Run]) -> Table | None:
    """Which term of each total misses most, over all runs."""
    from twostroke.ledger.attribution import pool

    rows: list[list[str]] = []
    total = None
    for share in pool(runs):
        if share.total != total:
            total = share.total
            rows.append([total])
        percents = (f"{share.median_abs_percent:.1f}%", f"{share.median_percent:+.1f}%")
        rows.append([share.part, str(share.n_runs), *percents, str(share.worst_in)])
    note = "Each total's error, shared out to its terms, in percent of the measured total; medians over the runs."
    columns = ("", "runs", "median |share|", "median share", "largest share in")
    return Table("Which term misses most", columns, rows, note) if rows else None


def write_report(
    path: Path | str, ledger: Ledger, comparison: Table | None = None, facts: Mapping[str, str] | None = None
) -> Path:
    """Write the page to ``path`` and return it; of a ledger without runs, a page that says how to get some.

    ``comparison`` is the table of training beside inference, ``facts`` a few words shown under the title. Plotly's script is
    in the page once, about 4.8 MB of it; the page asks nothing of the network.
    """
    # Both are slow to import, and only this function needs them.
    import jinja2
    from plotly.offline import get_plotlyjs

    target = Path(path)
    if target.is_dir():
        raise InputError(f"the report cannot be written to {target}: it is a folder. Name a file, as {target / 'report.html'}.")
    runs = ledger.runs()
    plots, notes = _plots(runs)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined
    )
    overall = [table for table in (_scores_table(runs), _terms_table(runs)) if table is not None]
    html = environment.get_template("page.html").render(
        version=__version__,
        facts=dict(facts or _facts(runs)),
        comparison=comparison,
        overall=overall,
        tables=[_run_table(run) for run in _newest(runs).values()],
        plots=[{"title": p.title, "text": p.text, "html": p.to_html(), "wide": p.wide} for p in plots],
        notes=notes,
        glossary=GLOSSARY,
        plotly_js=get_plotlyjs() if plots else "",
        ledger=str(ledger.path),
        n_runs=len(runs),
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, html)
    except OSError as error:
        raise InputError(f"the report cannot be written to {target}: {error.strerror}. Name another file with --out.") from None
    return target


def _newest(runs: Sequence[Run]) -> dict[str, Run]:
    """The newest measured run of each kind: rather one that came to its end, of loads rather one over HTTP, with latencies."""
    found: dict[str, Run] = {}
    for kind in ("train", "serve", "bench"):
        measured = [r for r in runs if r.kind == kind and r.measurements]
        better = [r for r in measured if is_whole(r) and (kind != "bench" or "ttft_p99_s" in r.measurement)]
        if measured:
            found[kind] = (better or measured)[0]
    return found


def _facts(runs: Sequence[Run]) -> dict[str, str]:
    """The page in a few numbers."""
    if not runs:
        return {}
    rows = [row for run in runs for row in compare(run) if row.error_percent is not None]
    inside = [row.inside for row in rows if row.inside is not None]
    facts = {"runs": f"{len(runs)}, newest {runs[0].frozen_at[:16].replace('T', ' ')} UTC"}
    if rows:
        median = quantile([abs(row.error_percent or 0.0) for row in rows], 0.5)
        facts["predictions scored"] = f"{len(rows)}, median error {median:.0f}%"
    if inside:
        facts["inside their 90% interval"] = f"{sum(inside)} of {len(inside)} ({100 * sum(inside) / len(inside):.0f}%)"
    facts["machine"] = runs[0].fingerprint
    return facts


def _plots(runs: Sequence[Run]) -> tuple[list[Plot], list[str]]:
    """Every plot that has data, and for those that could have it a sentence on what is missing."""
    from twostroke.report import figures

    newest = _newest(runs)
    train, bench, serve = newest.get("train"), newest.get("bench"), newest.get("serve")
    plots = [
        figures.predicted_against_measured(runs),
        figures.residual_by_term(runs),
        figures.training_curve(_steps_of(train), train.prediction if train else {}),
        figures.step_split(train),
        figures.memory_by_term([run for run in (train, serve) if run is not None]),
        figures.latencies(bench),
    ]
    phases, notes = _phase_plots(train, bench)
    if runs and not any(run.prediction for run in runs):
        notes.insert(
            0, "No run has a prediction: without a profile of the machine, which `twostroke calibrate` makes, none is."
        )
    return [plot for plot in (*plots, *phases) if plot is not None], notes


def _phase_plots(train: Run | None, bench: Run | None) -> tuple[list[Plot | None], list[str]]:
    """Roofline and crossover, which need this machine's rates and prices, and a training run to take the model from."""
    from twostroke.core.profile import read_fingerprint
    from twostroke.planner.hardware import load_hardware
    from twostroke.planner.serving import ServingShape, plan_serving
    from twostroke.planner.training import plan_training
    from twostroke.report.money import crossover
    from twostroke.report.phases import serving_shape_of, training_shape_of
    from twostroke.report.roofline import roofline

    if train is None:
        return [], ["Roofline and crossover appear once a training run has been measured: `twostroke train`."] if bench else []
    try:
        trained_on, served_on = load_hardware("this", "train"), load_hardware("this", "serve")
        if train.fingerprint != read_fingerprint().key:
            return [], [f"No roofline: run {train.run_id} was made on another machine ({train.fingerprint})."]
        spec, shape = training_shape_of(train)
        served = bench.measurement if bench else {}
        serving = (
            serving_shape_of(bench) if bench else ServingShape(prompt_tokens=max(1, spec.max_positions // 2), output_tokens=1)
        )
        training = plan_training(spec, shape, trained_on)
        apart = trained_on.label != served_on.label
        plots = [
            None if apart else roofline(training, plan_serving(spec, serving, served_on), train.measurement, served),
            crossover(train.measurement, served, trained_on, served_on),
        ]
    except TwostrokeError as error:
        return [], [f"No roofline and no crossover: {error}"]
    notes = [f"No roofline: training ran on {trained_on.label}, serving on {served_on.label}."] if apart else []
    notes += [] if bench else ["Latencies and the crossover appear once a load was measured: `twostroke bench serve MODEL`."]
    return plots, notes


GLOSSARY = {
    "prediction": "What the planner expected, stored in the ledger before the run began. It cannot be changed afterwards.",
    "interval": "The range a measurement should fall into 9 times out of 10, stored with the prediction.",
    "error": "100·(predicted − measured) / measured: positive where the prediction was too high.",
    "TTFT, TPOT, ITL": "Time to the first token; mean time of each later one; gap between two neighbouring ones.",
    "prefill, decode": "Serving's two halves: the whole prompt at once, then the answer token by token.",
    "MFU": "Share of the machine's best product rate that goes into the model's own arithmetic.",
    "FLOP": "One addition or multiplication. A product of matrices needs two for every pair it joins.",
    "KV cache": "What a server remembers of the text so far, for each token of each request.",
}
"""Words that a newcomer to the page may not know."""
