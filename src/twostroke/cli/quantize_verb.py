"""``twostroke quantize`` writes a copy of a model with its weights in fewer bits."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from twostroke.cli.console import JSON_HELP, emit, log, progress
from twostroke.cli.opened_model import opened_model
from twostroke.core.described import plain
from twostroke.core.errors import CapacityError, ConfigError, InputError
from twostroke.core.schemes import DEFAULT_WRITTEN, WRITTEN, written_scheme
from twostroke.core.units import format_bytes, format_count, format_seconds
from twostroke.quantization.roundings import DEFAULT_ROUNDING, ROUNDINGS, TRIED_SCALES, rounding_of

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.core.spec import ModelSpec
    from twostroke.planner.hardware.device import Hardware
    from twostroke.planner.truth.recording import Planned
    from twostroke.quantization.fitting import Fitted
    from twostroke.quantization.roundings import Rounding
    from twostroke.quantization.survey import Survey

app = typer.Typer(add_completion=False)


@app.command(name="quantize")
def quantize(
    model: Path = typer.Argument(help="Model directory, the output of a training run, or a GGUF file."),
    directory: Path | None = typer.Argument(None, help="Directory to write; with --survey none."),
    scheme: str | None = typer.Option(
        None, help=f"How to hold the matrices: {', '.join(WRITTEN)}. [default: {DEFAULT_WRITTEN}]"
    ),
    calibration: list[str] = typer.Option(
        [],
        help="Files, folders or globs of text that the rounding of groups is fitted to. Default: what the model's run trained "
        "on, or text that the model writes itself.",
    ),
    rounding: str | None = typer.Option(
        None,
        help=f"How codes of groups are found: {', '.join(ROUNDINGS)}; nearest needs no text. [default: {DEFAULT_ROUNDING}]",
    ),
    max_kl: float | None = typer.Option(
        None,
        min=0.0,
        help="Most KL to the model, in nats a token, before matrices in groups get 8 bits. Default: 0.02.",
    ),
    survey: bool = typer.Option(
        False, "--survey", help="Print a table of all schemes (size, KL, perplexity, predicted speed) and write nothing."
    ),
    replace: bool = typer.Option(False, "--replace", help="Replace what is in the directory."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Write a copy of a model with the matrices of its blocks in fewer bits, in compressed-tensors' layout.

    int8 and fp8 (E4M3) have one scale an output channel and need no text. int4 has a scale and a zero point for every 64 inputs
    (int4-g32, int4-g128: so many) and is fitted to text like that which the model will see. gptq: block after block on the
    output of the rounded blocks before, and each column's error is made up for by the columns after it. awq: inputs are scaled
    by their size first, which norms and neighbouring matrices take back. Other text then judges the result. If its KL to the
    model exceeds --max-kl, the matrices that matter most for their size are held in int8 instead.

    --survey measures all of that of every scheme and writes none, so that you can choose.
    """

    source = opened_model(model)
    if survey:
        of_writing: dict[str, object] = {"--scheme": scheme, "--rounding": rounding, "--replace": replace}
        _survey(source, directory, of_writing, calibration, max_kl, as_json)
        return
    if directory is None:
        raise InputError("quantize needs a DIRECTORY to write. `twostroke quantize MODEL --survey` writes none.")
    scheme = scheme or DEFAULT_WRITTEN
    chosen, how = written_scheme(scheme), rounding_of(rounding or DEFAULT_ROUNDING)  # before torch is imported
    if chosen.group is None and rounding is not None:
        raise ConfigError(f"--rounding is of groups. Use it with --scheme {_grouped()}.")
    if (calibration or max_kl is not None) and (not how.fitted or chosen.group is None):
        raise ConfigError(
            f"--calibration and --max-kl fit the rounding of groups. Use them with --scheme {_grouped()}, and not with "
            "--rounding nearest."
        )
    from twostroke.core.families import read_spec
    from twostroke.planner.truth.recording import recording
    from twostroke.quantization.convert import quantize_model

    group = chosen.group if how.fitted else None
    spec = read_spec(source)
    inputs: dict[str, Any] = {"model": str(source.resolve()), "directory": str(directory.resolve())}
    inputs |= {"scheme": scheme, "rounding": how.name, "max_kl": max_kl}
    plan = functools.partial(_planned, spec, scheme, group, how)
    with recording("quantize", directory.resolve().name, inputs, plan, log) as run:
        began = time.perf_counter()
        fitted = None if group is None else _fitted(source, directory, calibration, group, max_kl, how)
        with progress(f"quantising {source}", 1.0) as advance:
            report = quantize_model(source, directory, scheme, replace, advance, fitted)
        measured = {"quantize_s": time.perf_counter() - began, "model_bytes": float(report.bytes)}
        if report.kl_nats is not None and report.perplexity_ratio is not None:
            measured |= {"kl_nats": report.kl_nats, "perplexity_ratio": report.perplexity_ratio}
        run.measure(measured)
    in_int8 = f" ({report.n_int8_matrices} of them in {chosen.beside})" if report.n_int8_matrices else ""
    lines = [
        f"{directory}: {report.n_matrices} matrices in {report.scheme}{in_int8}, {report.bits_per_weight:.2f} bits a weight, "
        f"{format_bytes(report.bytes)} instead of {format_bytes(report.source_bytes)}, in "
        f"{format_seconds(measured['quantize_s'])}.",
        f"Rounding: {100 * report.relative_error:.2f}% of the weights' norm; worst in {report.worst}, "
        f"{100 * report.worst_relative_error:.2f}% (measured). `twostroke compare {model} {directory}` says what it costs.",
    ]
    if report.kl_nats is not None:
        lines.append(
            f"Fitted to {report.fitted_to_tokens} tokens; on {report.judged_tokens} others of the same text perplexity "
            f"× {report.perplexity_ratio:.4f}, KL {report.kl_nats:.4f} nats a token (measured, activations in "
            "8 bits as the engine has them)."
        )
    lines += [f"Note: {note}" for note in report.notes]
    run_document = {"run_id": run.run_id, "prediction": run.prediction, "measurement": measured}
    emit({"model": str(source), "directory": str(directory), **plain(report), **run_document}, "\n".join(lines), as_json)


def _planned(spec: ModelSpec, scheme: str, group: int | None, rounding: Rounding) -> Planned:
    """The time on this machine, and bytes on disk of a model none of whose matrices is held in more bits."""
    from twostroke.planner.hardware.tables import load_hardware
    from twostroke.planner.training.quantising import quantise_s
    from twostroke.planner.truth.recording import Planned
    from twostroke.planner.work.weights import mixed_weights_bytes
    from twostroke.quantization.calibration_text import text_size

    hardware = load_hardware("this", "train")
    tokens = (0, 1) if group is None else text_size(spec)
    tried = TRIED_SCALES if rounding.scaled else 0
    values = {"quantize_s": quantise_s(spec, scheme, hardware, *tokens, rounding.compensated, tried)}
    return Planned(values | {"model_bytes": mixed_weights_bytes(spec, written_scheme(scheme).name, ())}, hardware)


def _grouped() -> str:
    return ", ".join(name for name in WRITTEN if written_scheme(name).group)


def _text(source: Path, calibration: list[str], otherwise: str = "") -> list[Tensor]:
    """Batches of the named text, of the text that the model's run trained on, or of text that the model writes.

    Raises CapacityError, with what the user can do ``otherwise``, if the model would write and does not fit in memory whole:
    block by block each token would read all of it from the disk."""
    from twostroke.core.families import read_spec
    from twostroke.engine.own_text import own_text
    from twostroke.quantization.calibration_text import calibration_batches, text_size

    spec = read_spec(source)
    batches = calibration_batches(source, spec, calibration)
    if batches:
        return batches
    n_tokens, length = text_size(spec)
    log(f"{source} belongs to no training run, so rounding is fitted to text that it writes. Better: --calibration TEXT.")
    try:
        return [own_text(source, max(2, n_tokens // length), length)]
    except CapacityError as error:
        lack, _, _ = str(error).partition(". ")  # what follows are remedies of serving
        raise CapacityError(f"{source} is to write text: {lack}. Name text with --calibration TEXT{otherwise}.") from error


def _fitted(
    source: Path, directory: Path, calibration: list[str], group: int, max_kl: float | None, rounding: Rounding
) -> Fitted:
    """Codes fitted to text, which wait beside ``directory``."""
    from twostroke.core.policy import MAX_KL_NATS
    from twostroke.model.streamed import stream_model
    from twostroke.quantization.fitting import fit_codes

    batches = _text(source, calibration, ", or need none with --rounding nearest")
    decoder = stream_model(source)
    limit = MAX_KL_NATS if max_kl is None else max_kl
    with progress("fitting to text", 1.0) as advance:
        fitted = fit_codes(decoder, batches, group, limit, advance, rounding, directory.absolute().parent)
    if fitted.nearest:
        log(f"{fitted.nearest} matrices of experts went to their nearest codes: too little of the text reached them.")
    if fitted.judgement is not None and fitted.judgement.kl_nats > limit:
        log(f"KL is {fitted.judgement.kl_nats:.4f} nats a token, above {limit:g}, with {len(fitted.int8)} matrices in 8 bits.")
    return fitted


def _survey(
    source: Path, directory: Path | None, of_writing: dict[str, object], calibration: list[str], max_kl: float | None,
    as_json: bool,
) -> None:  # fmt: skip
    given = [name for name, value in {"DIRECTORY": directory, **of_writing}.items() if value]
    if given:
        raise InputError(f"--survey writes nothing and compares all schemes. Leave out {', '.join(given)}.")
    from twostroke.cli.side_measurements import machine_of
    from twostroke.core.policy import MAX_KL_NATS
    from twostroke.model.streamed import stream_model
    from twostroke.planner.choosing.quality import survey_values
    from twostroke.planner.truth.recording import recording
    from twostroke.quantization.survey import survey

    machine = machine_of(None)
    batches = _text(source, calibration)
    inputs = {"model": str(source.resolve()), "survey": True, "max_kl": max_kl}
    with (
        recording("quantize", source.resolve().name, inputs, None, log) as run,
        progress(f"surveying {source}", 1.0) as advance,
    ):
        found = survey(stream_model(source), batches, MAX_KL_NATS if max_kl is None else max_kl, machine, advance)
        run.measure(survey_values(found.rows))
    document = {"model": str(source), "hardware": None if machine is None else machine.label, **plain(found)}
    emit(document, "\n".join(_survey_lines(source, found, machine)), as_json)


def _survey_lines(source: Path, found: Survey, machine: Hardware | None) -> list[str]:
    head = ("scheme", "rounding", "size", "bits", "KL", "perplexity", "decode", "prefill", "")
    cells: list[tuple[str, ...]] = [head]
    for row in found.rows:
        quality = ("–", "–") if row.kl_nats is None else (f"{row.kl_nats:.4f}", f"× {row.perplexity_ratio:.4f}")
        rates = (format_count(rate) if rate else "–" for rate in (row.decode_tok_per_s, row.prefill_tok_per_s))
        note = f"beaten by {row.beaten_by}" if row.beaten_by else "the model itself" if row.kl_nats is None else ""
        size = format_bytes(row.bytes)
        cells.append((row.held, row.rounding, size, f"{row.bits_per_weight:.2f}", *quality, *rates, note))
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = [
        "  ".join(f"{cell:{'<' if i in (0, 1, 8) else '>'}{widths[i]}}" for i, cell in enumerate(row)).rstrip() for row in cells
    ]
    lines += [
        "",
        "bits        of a weight of the blocks' matrices, scales included",
        f"KL          to the model, nats a token, measured on {found.judged_tokens} tokens that nothing was fitted to; "
        "perplexity × likewise",
        "decode      tok/s of one request, and prefill of its prompt: "
        + ("not predicted: this machine is not calibrated" if machine is None else f"predicted for {machine.label}"),
        "beaten by   a row that is no worse in size, KL, decode and prefill, and better in one of them",
    ]
    lines += [f"Note: {note}" for note in found.notes]
    chosen = found.chosen
    if chosen is not None:
        rounding = f" --rounding {chosen.rounding}" if chosen.rounding not in ("", DEFAULT_ROUNDING) else ""
        lines.append(
            f"The smallest with a KL of at most {found.max_kl_nats:g}: {chosen.label}. "
            f"`twostroke quantize {source} DIRECTORY --scheme {chosen.written}{rounding}` writes it."
        )
    return lines
