"""``twostroke export`` writes a model, or adapters merged into their base, in a format that other programs open."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from twostroke.cli.console import JSON_HELP, emit, log, progress
from twostroke.cli.moved_models import Watch, planned_export, took
from twostroke.core.described import plain
from twostroke.core.errors import ConfigError
from twostroke.core.units import format_count
from twostroke.interop.export_targets import TARGETS, target_of

if TYPE_CHECKING:
    from torch import Tensor

app = typer.Typer(add_completion=False)

_FORMATS = "; ".join(f"{row.name} ({row.summary})" for row in TARGETS.values())
_WEIGHED = "; ".join(f"{row.name}: {', '.join(row.weighed)}" for row in TARGETS.values() if row.weighed)
_PRECISIONS = "; ".join(f"{row.name}: {', '.join(row.precisions)}" for row in TARGETS.values())


@app.command(name="export")
def export(
    model: Path = typer.Argument(help="Model or adapter directory, or the output of a training run."),
    directory: Path = typer.Argument(help="What to write: a directory, or a file for a format of one file."),
    to: str = typer.Option("hf", help=f"Format: {_FORMATS}."),
    precision: str = typer.Option(
        "auto", "--precision", "--dtype", help=f"Numbers to store. auto: the model's (the base's). {_PRECISIONS}."
    ),
    calibration: list[str] = typer.Option(
        [],
        help=f"Files, folders or globs of text that say which inputs matter when scales are searched for ({_WEIGHED}). "
        "Default: what the model's run trained on, else none.",
    ),
    merge: bool = typer.Option(False, "--merge", help="Merge adapters into their base, so that the result needs no other."),
    replace: bool = typer.Option(False, "--replace", help="Replace what is there."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Write a model that other programs open. With --merge, adapters and their base become one model.

    docs/formats.md says what opens each format and how it is tested. Adapters need no export to be used with peft: the
    `model` directory of a LoRA run is in its layout, and every command here takes it as it is.
    """
    row = target_of(to)
    if calibration and precision not in row.weighed:
        raise ConfigError(
            f"--calibration guides the search for scales, which --to {to} does in {', '.join(row.weighed) or 'no precision'}."
        )
    from twostroke.interop.export_model import export_model
    from twostroke.planner.truth.recording import recording

    inputs = {"model": str(model.resolve()), "directory": str(directory.resolve()), "to": to, "precision": precision}
    plan = functools.partial(planned_export, model, to, precision, bool(calibration))
    with recording("export", directory.resolve().name, inputs, plan, log) as run:
        watch = Watch()
        with progress(f"exporting {model}", 1.0) as advance:
            report = export_model(
                model, directory, merge, precision, replace, advance, to, lambda found: _importance(found, calibration)
            )
        measured = watch.read("export_s", report.n_bytes)
        run.measure(measured)
    of_base = f", adapters merged into {report.base}" if report.base else ""
    lines = [
        f"{report.directory}: a {report.family} model of {format_count(report.n_parameters)} parameters in {report.precision}, "
        f"format {report.target}{of_base}: {took(run, 'export_s', measured)}.",
        *(f"Note: {note}" for note in report.notes),
    ]
    run_document = {"run_id": run.run_id, "prediction": run.prediction, "measurement": measured}
    emit({**plain(report), **run_document}, "\n".join(lines), as_json)


def _importance(directory: Path, calibration: list[str]) -> dict[str, Tensor] | None:
    """Mean squares of the inputs of the model in ``directory``; None where there is no text."""
    from twostroke.core.families import read_spec
    from twostroke.model.adapter_directory import is_adapter_directory
    from twostroke.model.load import load_model
    from twostroke.quantization.calibration_text import calibration_batches
    from twostroke.quantization.importance import mean_squares

    if is_adapter_directory(directory):
        return None
    batches = calibration_batches(directory, read_spec(directory), calibration)
    return mean_squares(load_model(directory), batches) if batches else None
