"""``twostroke plan compare``."""

from __future__ import annotations

import dataclasses
from typing import Any

import typer

from twostroke.cli.console import JSON_HELP, emit
from twostroke.cli.plan.explain import EXPLAIN, with_terms
from twostroke.cli.plan.subject import (
    BATCH,
    BATCH_SIZE,
    DTYPE,
    EAGER,
    GRAD_ACCUMULATION,
    HARDWARE,
    OPTIMIZER,
    OUTPUT,
    PROMPT,
    SCHEME,
    SEQUENCE_LENGTH,
    SETTINGS,
    STEPS,
    SUBJECT_HELP,
    TRAIN_TOKENS,
    read_subject,
    serving_shape,
)
from twostroke.core.errors import CapacityError, ConfigError

TRAIN_WAYS = ("data", "zero", "tensor", "pipeline", "interleave", "expert")
SERVE_WAYS = ("tensor", "pipeline", "expert")

SHORT_WAYS = {"dp": "data", "tp": "tensor", "pp": "pipeline", "ep": "expert"}


def _ways(option: str, text: str, known: tuple[str, ...]) -> dict[str, Any]:
    """``data=8,zero=3``, ``dp=8,zero=3`` or ``fsdp=8`` as a dictionary. Raises ConfigError for another form or name."""
    found: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = part.partition("=")
        name = SHORT_WAYS.get(name, name)
        is_number = value.isdigit() and (int(value) > 0 or name == "zero")
        if name == "fsdp" and "zero" in known and is_number:
            found |= {"data": int(value), "zero": 3}
        elif name in known and is_number:
            found[name] = int(value)
        else:
            names = ", ".join(known)
            raise ConfigError(f"{option}={text}: {part!r} is not one of {names} with a number of at least 1, as {known[0]}=2.")
    return found


def compare(
    subject: str = typer.Argument(metavar="MODEL|RECIPE", help=SUBJECT_HELP),
    hardware: str = HARDWARE,
    settings: list[str] = SETTINGS,
    train_tokens: int = TRAIN_TOKENS,
    batch_size: int = BATCH_SIZE,
    sequence_length: int = SEQUENCE_LENGTH,
    grad_accumulation: int = GRAD_ACCUMULATION,
    dtype: str = DTYPE,
    optimizer: str = OPTIMIZER,
    eager: bool = EAGER,
    steps: int = STEPS,
    scheme: str = SCHEME,
    batch: int = BATCH,
    prompt_tokens: int = PROMPT,
    output_tokens: int = OUTPUT,
    train_layout: str = typer.Option("", help="Devices of training, such as fsdp=8, or tp=8,pp=2. Default: one."),
    checkpointing: str = typer.Option("none", help="What training's backward computes again: none, selective or full."),
    serve_layout: str = typer.Option("", help="Devices of serving, such as tp=8, or tp=1,ep=8. Default: one."),
    train_run: str = typer.Option(None, help="A training run of the ledger whose measurements go beside the predictions."),
    serve_run: list[str] = typer.Option([], help="Serving or bench runs of the ledger, likewise. Repeatable."),
    explain: bool = EXPLAIN,
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Training beside prefill beside decode: passes, memory, work, bounds, latency, network, storage, energy, money."""
    from twostroke.planner.choosing.comparison import compare_plans, merge_measured, merge_ranges
    from twostroke.planner.choosing.fitting import remedy_for
    from twostroke.planner.choosing.serving_fits import fitting_plan
    from twostroke.planner.hardware.tables import load_hardware
    from twostroke.planner.text.comparison import comparison_text
    from twostroke.planner.training.layout import Layout
    from twostroke.planner.training.plan import plan_training
    from twostroke.planner.training.shape import TrainingShape
    from twostroke.planner.truth.document import plan_document
    from twostroke.planner.truth.intervals import predict_with_intervals

    machine = load_hardware(hardware, "train")
    served_on = load_hardware(hardware, "serve") if hardware == "this" else machine
    layout = Layout(**_ways("--train-layout", train_layout, TRAIN_WAYS))
    found = read_subject(subject, settings, machine, train_tokens)
    shape = found.shape or TrainingShape(
        batch_size, sequence_length, grad_accumulation, dtype, optimizer, not eager, steps, checkpointing=checkpointing
    )
    serving = serving_shape(
        found,
        scheme,
        batch,
        prompt_tokens,
        output_tokens,
        **_ways("--serve-layout", serve_layout, SERVE_WAYS),
    )
    training = plan_training(found.spec, shape, machine, layout)
    training = dataclasses.replace(training, notes=(*training.notes, *found.notes))
    remedy = "" if training.fits else remedy_for(found.spec, shape, machine, layout)
    table = compare_plans(training, fitting_plan(found.spec, serving, served_on), found.name)
    ranges = predict_with_intervals(training.prediction(), machine, "train")
    served_ranges = predict_with_intervals(table.serving.prediction(), served_on, "serve", experts=found.spec.moe is not None)
    table = merge_ranges(table, ranges, served_ranges)
    if train_run or serve_run:
        from twostroke.ledger.store import Ledger  # only here, because importing sqlite3 takes a tenth of a plan's time

        ledger = Ledger()
        trained = ledger.get(train_run).measurement if train_run else None
        served: dict[str, Any] = {}
        for run_id in serve_run:
            served |= ledger.get(run_id).measurement
        table = merge_measured(table, trained, served)
    document, text = plan_document("compare", table), comparison_text(table, remedy)
    if remedy:
        document["notes"] = [*document["notes"], remedy]
    if explain:
        document, text = with_terms(document, text, table)
    emit(document, text, as_json)
    if not training.fits:
        raise typer.Exit(CapacityError.exit_code)
