"""``twostroke sweep`` trains a grid of recipes, several at once, and ranks them by their score on held-out text."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from twostroke.cli.console import JSON_HELP, emit, emit_error, log, progress
from twostroke.core.errors import InputError, Interrupted, TwostrokeError
from twostroke.core.grid import Point, points_of
from twostroke.core.parallel_recipe import MAX_LOCAL_RANKS
from twostroke.core.units import format_count, format_seconds

if TYPE_CHECKING:
    from twostroke.cli.sweep_processes import Job, Outcome
    from twostroke.core.recipe import TrainRecipe
    from twostroke.data.shards import PreparedData

SCORES = {"heldout_bits_per_byte": "bits per byte", "heldout_answer_nats_per_token": "nats a token"}
"""What points are ranked by, lowest first: the one that their runs measure, and its unit."""

MOST_COLUMNS = 6
"""Varied keys that the table has columns for. With more, a point is its directory's name."""

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Run:
    """A point of the grid, its recipe, the summary of its run if that has finished, and whether it began before."""

    point: Point
    recipe: TrainRecipe
    summary: Mapping[str, Any] | None = None
    began: bool = False

    @property
    def directory(self) -> Path:
        return Path(self.recipe.output)


@app.command()
def sweep(
    recipe: Path = typer.Argument(help="The run as a TOML file. Its output directory gets a directory for each point."),
    vary: list[str] = typer.Option(
        [], "--vary", metavar="a.b=c,d", help="Values of one recipe key. Repeatable: all combinations are trained."
    ),
    settings: list[str] = typer.Option([], "--set", metavar="a.b=c", help="Override one recipe key of all. Repeatable."),
    at_once: int = typer.Option(
        0, min=0, max=MAX_LOCAL_RANKS, help="Points that train at the same time; 0: as many as are planned to be fastest."
    ),
    resume: bool = typer.Option(False, "--resume", help="Keep the points that have finished and continue the others."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Train every combination of recipe values, several at once, and rank them by their score on held-out text.

    Each point is a run of `twostroke train` with a directory and a ledger entry of its own. A point that fails does not stop
    the others. Ctrl-C and SIGTERM write a checkpoint of each point that runs and exit with 75; --resume continues.
    """
    points = points_of(vary)
    parsed = _recipes(recipe, settings, points)
    runs = _opened(points, parsed, resume)
    output = runs[0].directory.parent
    left = [run for run in runs if run.summary is None]
    prepared = _prepared(left)
    from twostroke.cli.sweep_processes import run_points
    from twostroke.cli.sweep_times import SweepTimes
    from twostroke.planner.truth.recording import Planned, recording

    times = SweepTimes([run.recipe for run in left], prepared)
    n, sentence = times.at_once(at_once)
    log(sentence)
    jobs = [_job(run, recipe, settings, n, steps) for run, steps in zip(left, times.steps(n), strict=True)]
    inputs = {"recipe": str(recipe.resolve()), "vary": list(vary), "set": list(settings), "at_once": n, "resumes": resume}
    began = time.monotonic()

    def plan() -> Planned:
        return Planned({"sweep_s": times.seconds(n)}, times.hardware, n_devices=1 if times.is_cpu else n)

    with recording("sweep", str(output), inputs, plan if left else None, log) as entry:
        with progress("sweep", float(max(1, len(jobs)))) as advance, entry.meter:
            outcomes, is_stopped = run_points(jobs, times.environments(n), advance)
        elapsed_s = time.monotonic() - began
        is_whole = all(outcome.status == "finished" for outcome in outcomes.values())
        was_new = not any(run.began for run in left)  # a plan is of whole runs, not of what was left of them
        status = "finished" if is_whole else "interrupted" if is_stopped else "failed"
        entry.measure({"sweep_s": elapsed_s} if is_whole and was_new and left else {}, status)
    rows = _ranked(runs, outcomes)
    error = _error_of(rows, output, is_stopped)
    document = {
        "output": str(output), "at_once": n, "elapsed_s": elapsed_s, "points": rows, "run_id": entry.run_id,
        "prediction": entry.prediction, "error": None if error is None else str(error),
    }  # fmt: skip
    emit(document, _text(rows, elapsed_s, entry.prediction.get("sweep_s")), as_json)
    if error is not None:
        emit_error(str(error), as_json=False)
        raise typer.Exit(error.exit_code)


def _error_of(rows: Sequence[Mapping[str, Any]], output: Path, is_stopped: bool) -> TwostrokeError | None:
    """What ended the sweep before all points were trained; None if they are."""
    if is_stopped:
        return Interrupted(f"stopped. Points that were training wrote checkpoints in {output}. Go on with --resume.")
    failed = [row["name"] for row in rows if row["status"] == "failed"]
    if failed:
        return TwostrokeError(f"{len(failed)} of {len(rows)} points failed: {', '.join(failed)}. Go on with --resume.")
    return None


def _recipes(path: Path, settings: Sequence[str], points: Sequence[Point]) -> list[TrainRecipe]:
    """The recipe of each point, with its own output directory. All are read before any is trained."""
    from twostroke.core.recipe import read_recipe

    found = []
    for point in points:
        recipe = read_recipe(path, [*settings, *point.settings])
        found.append(dataclasses.replace(recipe, output=str(Path(recipe.output) / point.name)))
    return found


def _opened(points: Sequence[Point], recipes: Sequence[TrainRecipe], resume: bool) -> list[Run]:
    """The runs that are there and those that are not. Raises InputError or ConfigError where one would be overwritten or is
    another's, before anything is trained."""
    from twostroke.training.resolve import with_own_tokenizer
    from twostroke.training.run_directory import RunDirectory

    whole = RunDirectory(Path(recipes[0].output).parent)
    if whole.recipe.is_file():
        raise InputError(f"{whole.path} already holds a run. Name another directory for the sweep: --set output=...")
    found = []
    for point, recipe in zip(points, recipes, strict=True):
        directory = RunDirectory(Path(recipe.output))
        if directory.is_unused():
            found.append(Run(point, recipe))
            continue
        if not resume:
            raise InputError(
                f"{directory.path} already holds a point. Continue with --resume, or name another: --set output=..."
            )
        directory.open(with_own_tokenizer(recipe), True)
        found.append(Run(point, recipe, _finished(directory), began=True))
    if resume and not any(run.began for run in found):
        raise InputError(f"{whole.path} holds no sweep to resume. Start it without --resume.")
    return found


def _finished(directory: Any) -> Mapping[str, Any] | None:
    """The summary of a run that was trained and scored; None of another."""
    from twostroke.core.documents import read_object

    if not directory.summary.is_file():
        return None
    summary = read_object(directory.summary)
    return summary if SCORES.keys() & summary.get("measurement", {}).keys() else None


def _prepared(runs: Sequence[Run]) -> list[PreparedData]:
    """The data of each of ``runs``: prepared here, once, so that no two processes do it."""
    from twostroke.core.described import plain
    from twostroke.data.prepare import prepare
    from twostroke.training.resolve import with_own_tokenizer

    made: dict[str, PreparedData] = {}
    found = []
    for run in runs:
        data = with_own_tokenizer(run.recipe).data
        key = json.dumps(plain(data), sort_keys=True)
        if key not in made:
            with progress("preparing data", 1.0) as advance:
                made[key] = prepare(data, progress=advance)
        found.append(made[key])
    return found


def _job(run: Run, recipe: Path, settings: Sequence[str], n: int, steps: int) -> Job:
    from twostroke.cli.sweep_processes import Job

    own = f"output={json.dumps(str(run.directory))}"
    words = ["train", str(recipe), *(word for each in (*settings, *run.point.settings, own) for word in ("--set", each))]
    words += ["--beside", str(n - 1)] if n > 1 else []
    words += ["--resume"] if run.began else []
    return Job(run.point.name, run.directory, words, steps)


def _ranked(runs: Sequence[Run], outcomes: Mapping[str, Outcome]) -> list[dict[str, Any]]:
    """One row a point, the best score first; without a score last."""
    rows = []
    for run in runs:
        outcome = outcomes.get(run.point.name)
        summary = run.summary if run.summary is not None else outcome.summary if outcome is not None else {}
        measured = summary.get("measurement", {})
        rows.append(
            {
                "name": run.point.name,
                "values": run.point.values,
                "directory": str(run.directory),
                "status": "finished" if outcome is None else outcome.status,
                "score": next((measured[name] for name in SCORES if name in measured), None),
                "measure": next((name for name in SCORES if name in measured), None),
                "final_loss": summary.get("final_loss"),
                "train_time_s": measured.get("train_time_s"),
                "train_tok_per_s": measured.get("train_tok_per_s"),
                "error": outcome.error if outcome is not None else None,
            }
        )
    return sorted(rows, key=lambda row: (row["score"] is None, row["score"] or 0.0))


def _text(rows: Sequence[Mapping[str, Any]], elapsed_s: float, planned_s: float | None) -> str:
    from twostroke.ledger.text import align

    keys = list(rows[0]["values"]) if len(rows[0]["values"]) <= MOST_COLUMNS else []
    measure = next((row["measure"] for row in rows if row["measure"]), "heldout_bits_per_byte")
    lines = [[*(keys or ["point"]), SCORES[measure], "loss", "tok/s", "time"]]
    for row in rows:
        cells = [row["values"][key] for key in keys] or [row["name"]]
        if row["score"] is None:
            lines.append([*cells, row["status"], "", "", ""])
            continue
        loss, rate, seconds = row["final_loss"], row["train_tok_per_s"], row["train_time_s"]
        cells += [f"{row['score']:.4f}", "–" if loss is None else f"{loss:.4f}"]
        lines.append([*cells, "–" if rate is None else format_count(rate), "–" if seconds is None else format_seconds(seconds)])
    n = len(keys) or 1
    planned = f" (predicted {format_seconds(planned_s)})" if planned_s is not None else ""
    best = f"best: {rows[0]['directory']}" if rows[0]["score"] is not None else "no point was scored"
    return f"{align(lines, right=range(n, n + 4))}\n\n{best}\n{format_seconds(elapsed_s)} for the points trained now{planned}"
