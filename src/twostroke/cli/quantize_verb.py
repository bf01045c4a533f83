"""``twostroke quantize`` writes a copy of a model with its weights in fewer bits."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from twostroke.cli.console import JSON_HELP, emit, log, progress
from twostroke.core.described import plain
from twostroke.core.errors import ConfigError
from twostroke.core.paths import model_directory
from twostroke.core.schemes import DEFAULT_WRITTEN, WRITTEN, written_scheme
from twostroke.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from twostroke.core.spec import ModelSpec
    from twostroke.planner.truth.recording import Planned
    from twostroke.quantization.fitting import Fitted

app = typer.Typer(add_completion=False)


@app.command(name="quantize")
def quantize(
    model: Path = typer.Argument(help="Model directory, or the output of a training run."),
    directory: Path = typer.Argument(help="Directory to write."),
    scheme: str = typer.Option(DEFAULT_WRITTEN, help=f"How to hold the matrices: {', '.join(WRITTEN)}."),
    calibration: list[str] = typer.Option(
        [],
        help="Files, folders or globs of text that the rounding of groups is fitted to. Default: what the model's run trained "
        "on, or text that the model writes itself.",
    ),
    nearest: bool = typer.Option(False, "--nearest", help="Round every weight to its nearest code, without calibration."),
    max_kl: float | None = typer.Option(
        None,
        min=0.0,
        help="Most KL to the model, in nats a token, before matrices in groups get 8 bits. Default: 0.02.",
    ),
    replace: bool = typer.Option(False, "--replace", help="Replace what is in the directory."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Write a copy of a model with the matrices of its blocks in fewer bits, in compressed-tensors' layout.

    int8 and fp8 (E4M3) have one scale an output channel and need no text. int4 has a scale and a zero point for every 64 inputs
    and is fitted to text like that which the model will see (GPTQ): block after block on the output of the rounded blocks
    before, and each column's error is made up for by the columns after it. Other text then judges the result. If its KL to the
    model exceeds --max-kl, the matrices that matter most for their size are held in int8 instead.
    """

    source = model_directory(model)
    chosen = written_scheme(scheme)  # before torch is imported, so that a wrong name is told at once
    if (calibration or max_kl is not None) and (nearest or chosen.group is None):
        grouped = ", ".join(name for name in WRITTEN if written_scheme(name).group)
        raise ConfigError(
            f"--calibration and --max-kl fit the rounding of groups. Use them with --scheme {grouped}, without --nearest."
        )
    from twostroke.core.families import read_spec
    from twostroke.planner.truth.recording import recording
    from twostroke.quantization.convert import quantize_model

    group = None if nearest else chosen.group
    spec = read_spec(source)
    inputs = {"model": str(source), "scheme": scheme, "nearest": nearest, "max_kl": max_kl}
    with recording("quantize", directory.resolve().name, inputs, functools.partial(_planned, spec, scheme, group), log) as run:
        began = time.perf_counter()
        fitted = None if group is None else _fitted(source, calibration, group, max_kl)
        with progress(f"quantising {source}", 1.0) as advance:
            report = quantize_model(source, directory, scheme, replace, advance, fitted)
        measured = {"quantize_s": time.perf_counter() - began, "model_bytes": float(report.bytes)}
        run.measure(measured)
    in_int8 = f" ({report.n_int8_matrices} of them in {chosen.beside})" if report.n_int8_matrices else ""
    lines = [
        f"{directory}: {report.n_matrices} matrices in {report.scheme}{in_int8}, {format_bytes(report.bytes)} instead of "
        f"{format_bytes(report.source_bytes)}, in {format_seconds(measured['quantize_s'])}.",
        f"Rounding: {100 * report.relative_error:.2f}% of the weights' norm; worst in {report.worst}, "
        f"{100 * report.worst_relative_error:.2f}% (measured). `twostroke compare {model} {directory}` says what it costs.",
    ]
    if report.kl_nats is not None:
        lines.append(
            f"Fitted to {report.fitted_to_tokens} tokens; on {report.judged_tokens} others of the same text perplexity "
            f"× {report.perplexity_ratio:.4f}, KL {report.kl_nats:.4f} nats a token (measured, activations not rounded)."
        )
    run_document = {"run_id": run.run_id, "prediction": run.prediction, "measurement": measured}
    emit({"model": str(source), "directory": str(directory), **plain(report), **run_document}, "\n".join(lines), as_json)


def _planned(spec: ModelSpec, scheme: str, group: int | None) -> Planned:
    """The time on this machine, and bytes on disk of a model none of whose matrices is held in more bits."""
    from twostroke.planner.hardware.tables import load_hardware
    from twostroke.planner.training.quantising import quantise_s
    from twostroke.planner.truth.recording import Planned
    from twostroke.planner.work.weights import mixed_weights_bytes
    from twostroke.quantization.calibration_text import text_size

    hardware = load_hardware("this", "train")
    tokens = (0, 1) if group is None else text_size(spec)
    values = {"quantize_s": quantise_s(spec, scheme, hardware, *tokens)}
    return Planned(values | {"model_bytes": mixed_weights_bytes(spec, written_scheme(scheme).name, ())}, hardware)


def _fitted(source: Path, calibration: list[str], group: int, max_kl: float | None) -> Fitted:
    """Codes fitted to text: the named text, the text that the model's run trained on, or text that the model writes."""
    from twostroke.core.families import read_spec
    from twostroke.engine.own_text import own_text
    from twostroke.model.load import load_model
    from twostroke.quantization.calibration_text import calibration_batches, text_size
    from twostroke.quantization.fitting import MAX_KL_NATS, fit_codes

    spec = read_spec(source)
    batches = calibration_batches(source, spec, calibration)
    if not batches:
        n_tokens, length = text_size(spec)
        log(f"{source} belongs to no training run, so rounding is fitted to text that it writes. Better: --calibration TEXT.")
        batches = [own_text(source, max(2, n_tokens // length), length)]
    decoder = load_model(source)
    limit = MAX_KL_NATS if max_kl is None else max_kl
    with progress("fitting to text", 1.0) as advance:
        fitted = fit_codes(decoder, batches, group, limit, advance)
    if fitted.judgement is not None and fitted.judgement.kl_nats > limit:
        log(f"KL is {fitted.judgement.kl_nats:.4f} nats a token, above {limit:g}, with {len(fitted.int8)} matrices in 8 bits.")
    return fitted
