"""``twostroke train``: a model by a TOML recipe, and how well it does on held-out text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from twostroke.cli.console import JSON_HELP, emit, log, progress
from twostroke.core.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from twostroke.data.shards import PreparedData
    from twostroke.model.decoder import Decoder
    from twostroke.training.finish import TrainingResult
    from twostroke.training.measurement import StepRecord

app = typer.Typer(add_completion=False)


@app.command()
def train(
    recipe: Path = typer.Argument(help="The run as a TOML file."),
    resume: bool = typer.Option(False, "--resume", help="Continue the run in the recipe's output directory exactly."),
    settings: list[str] = typer.Option([], "--set", metavar="a.b=c", help="Override one recipe key. Repeatable."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Train by a TOML recipe, checkpointing; then score the model on held-out text beside xz -9.

    The prediction is frozen in the ledger before the first step and what was measured is added after the last. Ctrl-C and
    SIGTERM write a checkpoint and exit with 75; --resume continues to the same losses and weights.
    """
    from twostroke.core.recipe import read_recipe

    parsed = read_recipe(recipe, settings)  # before torch is imported: a wrong key is answered at once

    import psutil

    from twostroke.training.parallelize import use_available_cores
    from twostroke.training.start import describe, find_finished, start

    use_available_cores()
    result = find_finished(parsed, resume)
    if result is None:
        with progress("preparing data", 1.0) as advance:
            run = start(parsed, resume, log, advance)
        log(describe(run))
        with progress("training", run.steps) as advance:
            began = psutil.Process().create_time()
            result = run.execute(_shown(advance), _score_briefly, command_began=began)
    else:
        log(f"the run in {result.directory} had finished: nothing is left to train.")
    summary = result.summary
    if not {"heldout_bits_per_byte", "heldout_answer_nats_per_token"} & summary["measurement"].keys():
        summary = _score(result, parsed.train.dtype)
    emit({"directory": str(result.directory), **summary}, _text(result.directory, summary), as_json)


def _shown(advance: Callable[[float, str], None]) -> Callable[[StepRecord, float], None]:
    """The bar's note: loss, rate and, where no terminal draws its own, the time left."""

    def show(record: StepRecord, eta_s: float) -> None:
        note = f"loss {record.loss:.3f}, {format_count(record.tok_per_s)} tok/s"
        if not sys.stderr.isatty():
            note += f", ETA {format_seconds(eta_s)}"
        advance(record.step, note)

    return show


def _score_briefly(decoder: Decoder, prepared: PreparedData) -> dict[str, float]:
    """How well it does on held-out text in the middle of a run (``train.evaluate_every``), in the format being trained."""
    from twostroke.evaluation.bits import bits_per_byte, default_context
    from twostroke.evaluation.conversations import score_answers

    if prepared.holds_conversations:
        score = score_answers(decoder, prepared, default_context(decoder))
        return {"heldout_answer_nats_per_token": score.nats_per_token}
    context = decoder.spec.max_positions
    scored = bits_per_byte(decoder, prepared, ctx=context, stride=context, with_xz=False)
    return {"heldout_bits_per_byte": scored.bits_per_byte}


def _score(result: TrainingResult, dtype: str) -> dict[str, Any]:
    """Score the finished model on the run's held-out text as ``twostroke eval`` does; add it to ledger and summary."""
    from twostroke.core.errors import TwostrokeError
    from twostroke.evaluation.bits import bits_per_byte, default_context
    from twostroke.evaluation.conversations import score_answers
    from twostroke.evaluation.held_out import held_out_to_score
    from twostroke.ledger.store import Ledger
    from twostroke.model.load import load_model
    from twostroke.training.run_directory import RunDirectory, write_json

    text = held_out_to_score(result.model)
    with progress("scoring held-out text", 1.0) as advance:
        # In the format that was trained and will be served; fp32 takes several times as long where products of bf16 are fast.
        decoder = load_model(result.model, dtype)
        if text.prepared is not None and text.prepared.holds_conversations:
            answers = score_answers(decoder, text.prepared, default_context(decoder), advance)
            values: dict[str, float | None] = {"heldout_answer_nats_per_token": answers.nats_per_token}
        else:
            scored = bits_per_byte(decoder, text, tokenizer_path=result.model, progress=advance)
            values = {"heldout_bits_per_byte": scored.bits_per_byte, "xz_bits_per_byte": scored.xz_bits_per_byte}
    summary = result.summary | {"measurement": result.summary["measurement"] | values}
    try:
        Ledger().measure(result.run_id, values)
    except (TwostrokeError, OSError) as error:
        log(f"the score was not recorded in the ledger: {error}")
    write_json(RunDirectory(result.directory).summary, summary)
    return summary


def _text(directory: Path, summary: dict[str, Any]) -> str:
    m = summary["measurement"]
    mfu = f", MFU {100 * m['mfu']:.1f}%" if m.get("mfu") is not None else ""
    lines = [
        f"trained  {summary['steps']} steps, {format_count(summary['tokens'])} tokens, loss {summary['final_loss'] or 0:.4f}",
        f"held out {_quality(m)}",
        f"time     {format_seconds(m['train_time_s'])} measured, {format_seconds(m['step_time_s'])} a step: "
        + ", ".join(f"{part} {format_seconds(m[part + '_s'])}" for part in ("forward", "backward", "optimizer", "data")),
        f"rate     {format_count(m['train_tok_per_s'])} tok/s measured{mfu}",
        f"memory   {format_bytes(m['peak_memory_bytes'])} at most",
        f"model    {directory / 'model'}",
    ]
    predicted = summary.get("prediction", {}).get("train_time_s")
    if isinstance(predicted, float):
        lines.insert(3, f"         {format_seconds(predicted)} predicted")
    if summary["skipped_steps"]:
        lines.append(f"skipped  {summary['skipped_steps']} steps that were not finite; see log.jsonl")
    return "\n".join(lines)


def _quality(measured: dict[str, Any]) -> str:
    if "heldout_answer_nats_per_token" in measured:
        return f"{measured['heldout_answer_nats_per_token']:.4f} nats a token of the assistant's answers measured"
    quality, xz = measured["heldout_bits_per_byte"], measured.get("xz_bits_per_byte")
    against = f" (xz -9 on the same text: {xz:.4f}, {'below' if quality < xz else 'not below'} it)" if xz else ""
    return f"{quality:.4f} bits per byte measured{against}"
