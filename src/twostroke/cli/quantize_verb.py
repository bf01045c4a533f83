"""``twostroke quantize``: a copy of a model with weights in fewer bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from twostroke.cli.console import JSON_HELP, emit, log, progress
from twostroke.core.errors import ConfigError
from twostroke.core.units import format_bytes

app = typer.Typer(add_completion=False)


@app.command(name="quantize")
def quantize(
    model: Path = typer.Argument(help="Model directory, or the output of a training run."),
    directory: Path = typer.Argument(help="Directory to write."),
    scheme: str = typer.Option("int8", help="How to hold the matrices: int8, int4, or int4-g32, int4-g64, int4-g128."),
    calibration: list[str] = typer.Option(
        [], help="Files, folders or globs of text that int4's rounding is fitted to. Default: what the model's run trained on."
    ),
    nearest: bool = typer.Option(False, "--nearest", help="Round every weight to its nearest code, without calibration."),
    replace: bool = typer.Option(False, "--replace", help="Replace what is in the directory."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Write a copy of a model with the matrices of its blocks in int8 or int4, in compressed-tensors' layout.

    int8 has one scale an output channel and needs no text. int4 has a scale and a zero point for every 64 inputs; each column's
    rounding error is made up for by the columns after it (GPTQ), which takes text like that the model will see.
    """
    from twostroke.cli.serve_verb import model_directory
    from twostroke.quantization.schemes import scheme_of

    source = model_directory(model)
    chosen = scheme_of(scheme)  # a wrong name is told before torch is imported
    if calibration and (nearest or chosen.group is None):
        raise ConfigError("--calibration fits the rounding of int4; it goes with neither int8 nor --nearest.")
    from twostroke.quantization.convert import quantize_model

    hessians = {} if nearest or chosen.group is None else _hessians(source, calibration)
    with progress(f"quantising {source}", 1.0) as advance:
        report = quantize_model(source, directory, scheme, replace, advance, hessians)
    text = (
        f"{directory}: {report.n_matrices} matrices in {report.scheme}, {format_bytes(report.bytes)} instead of "
        f"{format_bytes(report.source_bytes)}.\n"
        f"Rounding: {100 * report.relative_error:.2f}% of the weights' norm; worst in {report.worst}, "
        f"{100 * report.worst_relative_error:.2f}% (measured). `twostroke compare {model} {directory}` says what it costs."
    )
    emit({"model": str(source), "directory": str(directory), **report.to_dict()}, text, as_json)


def _hessians(source: Path, calibration: list[str]) -> dict[str, Any]:
    """What rounding is fitted to, or nothing where there is no text."""
    from twostroke.model.load import load_model
    from twostroke.quantization.calibration_text import calibration_batches
    from twostroke.quantization.gptq import input_hessians

    decoder = load_model(source)
    batches = calibration_batches(source, decoder.spec, calibration)
    if not batches:
        log(f"{source} belongs to no training run, so weights go to their nearest codes. Better: --calibration TEXT.")
        return {}
    with progress("reading the calibration text", len(batches)) as advance:
        return input_hessians(decoder, batches, lambda i: advance(i + 1, f"{batches[i].numel()} tokens"))
