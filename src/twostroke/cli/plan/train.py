"""``twostroke plan train``."""

from __future__ import annotations

import dataclasses

import typer

from twostroke.cli.console import JSON_HELP, emit
from twostroke.cli.plan.explain import EXPLAIN, with_terms
from twostroke.cli.plan.subject import (
    BATCH_SIZE,
    DTYPE,
    EAGER,
    GRAD_ACCUMULATION,
    HARDWARE,
    OPTIMIZER,
    SEQUENCE_LENGTH,
    SETTINGS,
    STEPS,
    TRAIN_TOKENS,
    read_subject,
)


def train(
    subject: str = typer.Argument(metavar="RECIPE|MODEL", help="A recipe (.toml), a model directory or a config.json."),
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
    explain: bool = EXPLAIN,
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Memory by term, time by pass and component, throughput, energy and money of a training run.

    A recipe brings its own shape; the options from --batch-size to --steps are for a bare model.
    """
    from twostroke.planner.hardware import load_hardware
    from twostroke.planner.intervals import predict_with_intervals
    from twostroke.planner.text.training import candidates_text, training_text
    from twostroke.planner.training import TrainingShape, plan_training

    machine = load_hardware(hardware)
    found = read_subject(subject, settings, machine, train_tokens)
    shape = found.shape or TrainingShape(batch_size, sequence_length, grad_accumulation, dtype, optimizer, not eager, steps)
    planned = plan_training(found.spec, shape, machine)
    planned = dataclasses.replace(planned, notes=(*planned.notes, *found.notes))
    intervals = predict_with_intervals(planned.prediction(), machine, "train")
    ranking = [c.to_dict() for c in found.ranking]
    document = {"subject": found.name, **planned.to_dict(), "intervals": intervals, "ranking": ranking}
    text = training_text(planned, found.name)
    if found.ranking:
        text = f"{candidates_text(found.ranking)}\n\n{text}"
    if explain:
        document, text = with_terms(document, text, planned)
    emit(document, text, as_json)
