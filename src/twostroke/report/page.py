"""Writes the report, one self-contained HTML page: what was predicted, what was measured, and the errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostroke.core.aside import write_text
from twostroke.core.errors import InputError, TwostrokeError
from twostroke.core.version import __version__
from twostroke.ledger.scoring import is_whole
from twostroke.ledger.store import Ledger, Run
from twostroke.report.cards import Card, Table, cards_of

if TYPE_CHECKING:
    from twostroke.report.plot import Plot

TEMPLATES = Path(__file__).parent / "templates"


def _steps_of(run: Run | None) -> list[dict[str, Any]]:
    """Lines of the run's log.jsonl; empty if its directory is gone. An incomplete last line is skipped."""
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


def write_report(path: Path | str, ledger: Ledger, comparison: Table | None = None, more: Sequence[Card] = ()) -> Path:
    """Write the page to ``path`` and return the path. For a ledger without runs, the page says how to make some.

    ``comparison`` is the table of training beside inference, ``more`` are cards beside those that the ledger gives. Plotly's
    script is in the page once, about 4.8 MB of it; the page asks nothing of the network.
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
    html = environment.get_template("page.html").render(
        version=__version__,
        cards=[*cards_of(runs, _newest(runs)), *more],
        comparison=comparison,
        plots=[{"title": p.title, "text": p.text, "html": p.to_html(), "wide": p.wide} for p in plots],
        notes=notes,
        glossary=GLOSSARY,
        plotly_js=get_plotlyjs() if plots else "",
        ledger=str(ledger.path),
        n_runs=len(runs),
        newest=runs[0].frozen_at[:16].replace("T", " ") + " UTC" if runs else "",
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, html)
    except OSError as error:
        raise InputError(f"the report cannot be written to {target}: {error.strerror}. Name another file with --out.") from None
    return target


def _newest(runs: Sequence[Run]) -> dict[str, Run]:
    """The newest measured run of each kind. Complete runs are preferred, and of loads those over HTTP, which have latencies."""
    found: dict[str, Run] = {}
    for kind in ("train", "serve", "bench"):
        measured = [r for r in runs if r.kind == kind and r.measurements]
        better = [r for r in measured if is_whole(r) and (kind != "bench" or "ttft_p99_s" in r.measurement)]
        if measured:
            found[kind] = (better or measured)[0]
    return found


def _plots(runs: Sequence[Run]) -> tuple[list[Plot], list[str]]:
    """Every plot that has data, and sentences that say what other plots lack."""
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
            0, "No run has a prediction. Predictions need a profile of the machine, which `twostroke calibrate` makes."
        )
    return [plot for plot in (*plots, *phases) if plot is not None], notes


def _phase_plots(train: Run | None, bench: Run | None) -> tuple[list[Plot | None], list[str]]:
    """Roofline and crossover. They need this machine's rates and prices, and a training run that names the model."""
    from twostroke.core.profile import read_fingerprint
    from twostroke.planner.hardware.tables import load_hardware
    from twostroke.planner.serving.plan import plan_serving
    from twostroke.planner.serving.shape import ServingShape
    from twostroke.planner.training.plan import plan_training
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
    "error": "100·(predicted − measured) / measured. It is positive if the prediction was too high.",
    "TTFT, TPOT, ITL": "Time to the first token; mean time of each later one; gap between two neighbouring ones.",
    "prefill, decode": "Serving's two halves: the whole prompt at once, then the answer token by token.",
    "MFU": "Share of the machine's best product rate that goes into the model's own arithmetic.",
    "FLOP": "One floating-point addition or multiplication. A matrix product needs two for each pair of numbers it multiplies.",
    "KV cache": "The keys and values of attention that a server stores for each token of each request.",
}
"""Words of the page that newcomers may not know."""
