"""Responds to an anomaly as ``train.anomaly_policy`` says: skip the step, roll back to a checkpoint, or stop."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from twostroke.core.errors import TwostrokeError
from twostroke.data.loader import Batch
from twostroke.training.anomalies import anchor_every
from twostroke.training.build import read_on_all, restore_computation, save
from twostroke.training.checkpoint import CheckpointError, load_newest, remove_newer
from twostroke.training.run import RunState
from twostroke.training.step import StepResult

MAX_TEXTS, TEXT_TOKENS = 32, 16
"""Rows of the anomaly's batch whose beginnings are recorded, and tokens of each."""


def respond(run: RunState, result: StepResult, batches: Sequence[Batch], windows: tuple[int, int]) -> None:
    """Log the refused step and its text, and follow the policy. Raises TwostrokeError if the run must stop.

    ``windows`` are the first and the last window that the loader handed out for the step.
    """
    settings = run.inputs.recipe.train
    policy, step = settings.anomaly_policy, run.step
    run.watch.in_a_row += 1
    gives_up = run.watch.in_a_row >= settings.anomaly_limit
    ranks = run.inputs.ranks
    record = {
        "step": step,
        "reason": result.skipped,
        "action": "stop" if gives_up else policy,
        "windows": list(windows),
        "texts": _beginnings(run, batches) if ranks.is_first else [],
    }
    if ranks.is_first:
        run.anomalies.append(record)
    said = (
        f"step {step} was skipped: its {result.skipped}; weights are unchanged. Its text is windows {windows[0]} to "
        f"{windows[1]} "
        f"of the loader ({run.inputs.directory.anomalies.name} shows it)."
    )
    if gives_up or policy == "stop":
        run.inputs.log(said)
        with contextlib.suppress(CheckpointError):
            ranks.led(lambda: save(run))
        if policy == "stop":
            why = (
                f'step {step} was an anomaly (its {result.skipped}), and train.anomaly_policy is "stop". '
                "--resume continues after its text."
            )
        else:
            why = (
                f"{run.watch.in_a_row} anomalies in a row, up to step {step} (its {result.skipped}). "
                f"Lower train.learning_rate or look at the text in {run.inputs.directory.anomalies}."
            )
        raise ranks.told(TwostrokeError(f"{why} {run.saver.what_is_kept()}"))
    if policy == "rollback":
        _roll_back(run)
        said += f" The run went back to step {run.step}; the text since then is not read again."
    run.inputs.log(said)


def _roll_back(run: RunState) -> None:
    """Restore weights, optimizer, random states and step of the newest scheduled checkpoint. The loader stays after the bad
    text.

    The log is cut to that step, and later checkpoints are removed. A run that is killed at any moment arrives at the same
    rollback when it is resumed, because every checkpoint before it leads there.
    """
    every = anchor_every(run.inputs.recipe.train)
    run.saver.settle()
    checkpoints, ranks = run.inputs.directory.checkpoints, run.inputs.ranks
    checkpoint = read_on_all(run, lambda: load_newest(checkpoints, run.inputs.log, lambda step: step % every == 0))
    if checkpoint is None:
        error = TwostrokeError(
            f"step {run.step} was an anomaly, and no checkpoint of a multiple of {every} steps is left to roll back to. "
            'Set train.anomaly_policy to "skip", or start another run.'
        )
        raise ranks.told(error)
    in_a_row = run.watch.in_a_row
    restore_computation(run, checkpoint)
    run.watch.in_a_row = in_a_row
    if ranks.is_first:
        run.step_log.restart(run.step)
        remove_newer(checkpoints, run.step)


def _beginnings(run: RunState, batches: Sequence[Batch]) -> list[str]:
    """The beginnings of the rows of ``batches`` as text; empty if the tokenizer's file is gone."""
    from twostroke.data.tokenizer import load_tokenizer

    rows = [row[:TEXT_TOKENS].tolist() for batch in batches for row in batch.tokens][:MAX_TEXTS]
    try:
        tokenizer = load_tokenizer(run.inputs.prepared.tokenizer_path)
    except (TwostrokeError, OSError):
        return []
    return [str(tokenizer.decode(row, skip_special_tokens=False)) for row in rows]
