"""``twostroke export`` writes a model, or adapters merged into their base, as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

import typer

from twostroke.cli.console import JSON_HELP, emit, progress
from twostroke.core.units import format_bytes, format_count

app = typer.Typer(add_completion=False)


@app.command(name="export")
def export(
    model: Path = typer.Argument(help="Model or adapter directory, or the output of a training run."),
    directory: Path = typer.Argument(help="Directory to write, in Hugging Face layout."),
    merge: bool = typer.Option(False, "--merge", help="Merge adapters into their base, so that the result needs no other."),
    dtype: str = typer.Option("auto", help="Format to store: auto (the base's), fp32, bf16 or fp16."),
    replace: bool = typer.Option(False, "--replace", help="Replace what is in the directory."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Write a model that other programs open. With --merge, adapters and their base become one model.

    Adapters need no export to be used with peft: the ``model`` directory of a LoRA run is in its layout, and every command
    here takes it as it is.
    """
    from twostroke.interop.export_model import export_model

    with progress(f"exporting {model}", 1.0) as advance:
        report = export_model(model, directory, merge, dtype, replace, advance)
    of_base = f", adapters merged into {report.base}" if report.base else ""
    lines = [
        f"{report.directory}: a {report.family} model of {format_count(report.n_parameters)} parameters in {report.dtype}, "
        f"{format_bytes(report.n_bytes)}{of_base}.",
        *(f"Note: {note}" for note in report.notes),
    ]
    emit(report, "\n".join(lines), as_json)
