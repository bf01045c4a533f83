"""``twostroke quantize``: a copy of a model with int8 weights."""

from __future__ import annotations

from pathlib import Path

import typer

from twostroke.cli.console import JSON_HELP, emit, progress
from twostroke.core.units import format_bytes

app = typer.Typer(add_completion=False)


@app.command(name="quantize")
def quantize(
    model: Path = typer.Argument(help="Model directory, or the output of a training run."),
    directory: Path = typer.Argument(help="Directory to write."),
    scheme: str = typer.Option("int8", help="How to hold the matrices: int8."),
    replace: bool = typer.Option(False, "--replace", help="Replace what is in the directory."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Write a copy of a model with the matrices of its blocks in int8, one scale an output channel."""
    from twostroke.cli.serve_verb import model_directory
    from twostroke.quantization.schemes import scheme_of

    source = model_directory(model)
    scheme_of(scheme)  # a wrong name is told before torch is imported
    from twostroke.quantization.convert import quantize_model

    with progress(f"quantising {source}", 1.0) as advance:
        report = quantize_model(source, directory, scheme, replace, advance)
    text = (
        f"{directory}: {report.n_matrices} matrices in {report.scheme}, {format_bytes(report.bytes)} instead of "
        f"{format_bytes(report.source_bytes)}.\n"
        f"Rounding: {100 * report.relative_error:.2f}% of the weights' norm; worst in {report.worst}, "
        f"{100 * report.worst_relative_error:.2f}% (measured). `twostroke compare {model} {directory}` says what it costs."
    )
    emit({"model": str(source), "directory": str(directory), **report.to_dict()}, text, as_json)
