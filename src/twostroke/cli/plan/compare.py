"""``twostroke plan compare``."""

from __future__ import annotations

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
    TRAIN_TOKENS,
    read_subject,
    serving_shape,
)


def compare(
    subject: str = typer.Argument(metavar="MODEL|RECIPE", help="A model directory, a config.json or a recipe (.toml)."),
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
    prompt: int = PROMPT,
    output: int = OUTPUT,
    train_run: str = typer.Option(None, help="A training run of the ledger whose measurements go beside the predictions."),
    serve_run: list[str] = typer.Option([], help="Serving or bench runs of the ledger, likewise. Repeatable."),
    explain: bool = EXPLAIN,
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Training beside prefill beside decode: passes, memory, work, bounds, latency, network, storage, energy, money."""
    from twostroke.planner.comparison import compare as compare_phases
    from twostroke.planner.comparison import merge_measured
    from twostroke.planner.hardware import load_hardware
    from twostroke.planner.text.comparison import comparison_text
    from twostroke.planner.training import TrainingShape

    machine = load_hardware(hardware)
    found = read_subject(subject, settings, machine, train_tokens)
    shape = found.shape or TrainingShape(batch_size, sequence_length, grad_accumulation, dtype, optimizer, not eager, steps)
    serving = serving_shape(found.spec, scheme, batch, prompt, output)
    table = compare_phases(found.spec, shape, serving, machine, found.name)
    if train_run or serve_run:
        from twostroke.ledger.store import Ledger  # only here: sqlite3 takes a tenth of the time a plan has

        ledger = Ledger()
        trained = ledger.get(train_run).measurement if train_run else None
        served: dict[str, Any] = {}
        for run_id in serve_run:
            served |= ledger.get(run_id).measurement
        table = merge_measured(table, trained, served)
    document, text = table.to_dict(), comparison_text(table)
    if explain:
        document, text = with_terms(document, text, table)
    emit(document, text, as_json)
