"""``twostroke ledger list|show|compare|fit|report`` shows predictions and measurements of every run, and learns from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from twostroke.cli.console import JSON_HELP, emit, terminal_width
from twostroke.core.described import plain
from twostroke.ledger.store import KINDS

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Predictions and measurements of every run.")

LEDGER = typer.Option(None, "--ledger", help="Another ledger file than the one in Twostroke's home.")
RUN_HELP = 'A run\'s id, enough of its beginning, or "last".'


@app.callback()
def ledger() -> None:
    """Predictions and measurements of every run."""


@app.command("list")
def list_runs(
    kind: str = typer.Option(None, help=f"Only runs of this kind: {', '.join(KINDS)}."),
    limit: int = typer.Option(20, help="At most so many, newest first."),
    path: Path = LEDGER,
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """List runs, newest first."""
    from twostroke.ledger.store import Ledger
    from twostroke.ledger.text import runs_text

    runs = Ledger(path).runs(kind, limit)
    emit({"runs": runs}, runs_text(runs, terminal_width()), as_json)


@app.command(short_help="Show a run: predicted beside measured, inputs, notes.")
def show(
    run: str = typer.Argument(help=RUN_HELP),
    path: Path = LEDGER,
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Show a run: predicted with interval beside measured, which term missed, inputs, notes. --json has all that is stored."""
    from twostroke.ledger.attribution import attribute
    from twostroke.ledger.scoring import compare as compare_run
    from twostroke.ledger.store import Ledger
    from twostroke.ledger.text import run_text

    found = Ledger(path).get(run)
    rows, attributions = compare_run(found), attribute(found)
    document = {**plain(found), "attribution": attributions}
    emit(document, run_text(found, rows, attributions, terminal_width()), as_json)


@app.command(short_help="How good predictions were: a run's, or all of them.")
def compare(
    run: str | None = typer.Argument(None, help=RUN_HELP + " Without it: how good all predictions were."),
    kind: str = typer.Option(None, help="Without a run: only runs of this kind."),
    path: Path = LEDGER,
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Compare predicted with measured: error in percent, 100·(predicted − measured) / measured, and which term missed."""
    from twostroke.ledger.attribution import attribute, pool
    from twostroke.ledger.scoring import compare as compare_run
    from twostroke.ledger.scoring import summarise
    from twostroke.ledger.store import Ledger
    from twostroke.ledger.text import comparison_text, scores_text

    store = Ledger(path)
    if run is None:
        runs = store.runs(kind)
        scores, pooled = summarise(runs), pool(runs)
        scored = {"scores": scores, "attribution": pooled}
        emit(scored, scores_text(scores, pooled), as_json)
        return
    found = store.get(run)
    rows, attributions = compare_run(found), attribute(found)
    document: dict[str, Any] = {
        "run_id": found.run_id,
        "rows": rows,
        "attribution": attributions,
    }
    emit(document, comparison_text(found, rows, attributions), as_json)


@app.command(short_help="Correct this machine's calibrated times by its own runs.")
def fit(
    undo: bool = typer.Option(False, "--undo", help="Remove the corrections: plans are as calibration made them."),
    path: Path = LEDGER,
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Correct this machine's calibrated times by its own runs, as far as that helps runs held out in time.

    Each quantity (a pass, a prompt, a decode step, start-up) gets one factor, shrunk towards calibration. It needs runs of at
    least five configurations; older runs fade, and those of another machine, version or calibration do not count.
    """
    from twostroke.core.profile import save_profile
    from twostroke.core.rates import Corrections
    from twostroke.ledger.store import Ledger
    from twostroke.planner.text.learning import fits_text
    from twostroke.planner.truth.learning import fit_ledger, profiles_in_use

    if undo:
        profiles = [profile for profile in profiles_in_use() if profile.corrections.fitted_at]
        for profile in profiles:
            save_profile(replace(profile, corrections=Corrections()))
        removed = [f"removed the corrections of {p.corrections.fitted_at} ({p.device})." for p in profiles]
        emit({"removed": [p.corrections for p in profiles]}, "\n".join(removed) or "There are no corrections.", as_json)
        return
    fits = fit_ledger(Ledger(path))
    documents, stored = [], []
    for one in fits:
        corrected = one.corrected
        written = save_profile(corrected)
        documents.append({
            "device": one.profile.device, "quantities": one.quantities, "totals": one.totals, "left_out": one.left_out,
            "corrections": corrected.corrections, "profile": str(written),
        })  # fmt: skip
        n = len(corrected.corrections.learned)
        stored.append(
            f"{n} corrections in {written}; `twostroke ledger fit --undo` removes them." if n else "nothing to correct."
        )
    emit({"fits": documents}, fits_text(fits, stored), as_json)


@app.command(short_help="Write one HTML page of predictions and measurements.")
def report(
    out: Path = typer.Option(Path("report.html"), help="File to write."),
    path: Path = LEDGER,
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Write one self-contained HTML page: predicted against measured, training curve, memory by term, latencies."""
    from twostroke.ledger.store import Ledger
    from twostroke.report.page import write_report

    written = write_report(out, Ledger(path))
    emit({"report": str(written)}, f"report    {written}", as_json)
