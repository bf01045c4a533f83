"""Ends a run: writes the last checkpoint, the model, the measurement, and the summary that marks it as finished."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from twostroke.core.errors import TwostrokeError
from twostroke.model.save import save_model
from twostroke.planner.work.params import count_parameters
from twostroke.training.adapters import write_adapters
from twostroke.training.build import save
from twostroke.training.checkpoint import CheckpointError
from twostroke.training.conversations import write_chat_template
from twostroke.training.environment import environment, weights_sha256
from twostroke.training.measurement import OVER_RANKS, PEAKS, directory_bytes, medians
from twostroke.training.run import RunInputs, RunState
from twostroke.training.run_directory import RunDirectory, read_summary, write_json
from twostroke.training.scratch import ScratchError


@dataclass(frozen=True)
class TrainingResult:
    """A finished run. ``summary`` is the content of ``summary.json``. ``was_finished`` is True if nothing was left to do."""

    directory: Path
    model: Path
    run_id: str
    summary: dict[str, Any]
    was_finished: bool = False


def finished(directory: RunDirectory) -> TrainingResult | None:
    """The result of the run in ``directory``; None if it has not finished."""
    summary = read_summary(directory.path)
    if summary is None:
        return None
    return TrainingResult(directory.path, directory.model, str(summary.get("run_id", "")), summary, was_finished=True)


def finish(run: RunState) -> TrainingResult:
    """Write last checkpoint, model, measurement and summary. The summary is last, because it marks the run as finished. The
    first rank does so, inside ``Ranks.led``."""
    checkpoint: Path | None = None
    try:
        checkpoint = save(run)
    except (CheckpointError, ScratchError) as error:
        run.inputs.log(f"{error} {run.saver.what_is_kept()} The model is written anyway.")
    _write_model(run)
    measured = step_measurement(run) | _memory_measurement(run)
    if checkpoint is not None:
        measured["checkpoint_bytes"] = directory_bytes(checkpoint)
    measured["model_bytes"] = directory_bytes(run.inputs.directory.model, "*.safetensors")
    if run.inputs.recipe.train.checkpoint_every:
        measured["checkpoint_wait_s"] = run.saver.waited_s
    measured |= run.inputs.entry.spent(measured)
    records = run.step_log.read()
    last: dict[str, Any] = next((r for r in reversed(records) if r.get("loss") is not None), {})
    summary = {
        "run_id": run.inputs.resolved.run_id,
        "model": str(run.inputs.directory.model),
        "n_parameters": count_parameters(run.inputs.spec).total,
        "n_trained_parameters": sum(math.prod(shape) for shape in run.masters.shapes.values()),
        "steps": run.inputs.steps,
        "tokens": run.tokens,
        "epochs": run.loader.epoch,
        "source_epochs": dict(zip(run.inputs.recipe.data.sources, run.loader.source_epochs, strict=False))
        if run.inputs.recipe.data.weights
        else {},
        "skipped_steps": sum(1 for r in records if r.get("skipped")),
        "final_loss": last.get("loss"),
        "compiled": run.train_step.is_compiled,
        "compute_dtype": run.inputs.computed.train.compute_dtype,
        "weights_sha256": weights_sha256(run.weights),
        "environment": environment(run.device, run.train_step.is_compiled, run.inputs.ranks.sums),
        "prediction": run.inputs.entry.prediction,
        "measurement": measured,
        "notes": run.notes,
    }
    run.inputs.entry.measure(measured, "finished", {}, "; ".join(run.notes) or None)
    write_json(run.inputs.directory.summary, summary)
    return TrainingResult(run.inputs.directory.path, run.inputs.directory.model, run.inputs.resolved.run_id, summary)


def _write_model(run: RunState) -> None:
    """Write the model directory, and that of the running average. Raises TwostrokeError if they cannot be written; the run can
    then be resumed at this point."""
    inputs, recipe = run.inputs, run.inputs.recipe
    written = {inputs.directory.model: run.weights}
    if run.average is not None:
        written[average_directory(inputs.directory)] = run.average
    for directory, weights in written.items():
        try:
            if recipe.trains_adapters:
                write_adapters(recipe, inputs.spec, weights, directory)
            else:
                save_model(weights, inputs.spec, directory, recipe.train.compute_dtype, _tokenizer(inputs), replace=True)
            write_chat_template(recipe, directory)
        except (OSError, SafetensorError) as error:
            raise TwostrokeError(
                f"all {run.inputs.steps} steps are done, but {directory} cannot be written: {error}. "
                f"{run.saver.what_is_kept()} Free space and continue with --resume."
            ) from error


def average_directory(directory: RunDirectory) -> Path:
    """The model directory of the running average of the weights."""
    return directory.model.with_name(f"{directory.model.name}-ema")


def _tokenizer(inputs: RunInputs) -> Path:
    """The directory with tokenizer and chat template of the model that the run started from, or else the tokenizer of the
    prepared data."""
    source = inputs.recipe.data.tokenizer
    return Path(source) if source is not None and Path(source).is_dir() else inputs.prepared.tokenizer_path


def step_measurement(run: RunState) -> dict[str, Any]:
    """Medians over the log of all sessions, and the run's length so far."""
    records = run.step_log.read()
    measured: dict[str, Any] = dict(medians(records))
    if not measured:
        return {}
    settings = run.inputs.recipe.train
    tokens_per_step = settings.batch_size * settings.sequence_length * settings.grad_accumulation
    measured["train_tok_per_s"] = tokens_per_step / measured["step_time_s"]
    utilisation = run.inputs.mfu(measured["train_tok_per_s"])
    if utilisation is not None:
        measured["mfu"] = utilisation
    measured["train_time_s"] = run.elapsed_s() if run.train_time_s is None else run.train_time_s
    if run.inputs.ranks.n > 1:
        measured["sent_bytes_per_step"] = statistics.fmean(r.get("sent_bytes", 0) for r in records)
        measured |= medians(records, OVER_RANKS) | medians([r for r in records if r.get("sent_bytes")], PEAKS)
    measured["peak_memory_bytes"] = max(r["peak_memory_bytes"] for r in records)
    if run.startup_s is not None:
        measured["startup_s"] = run.startup_s
    return measured


def _memory_measurement(run: RunState) -> dict[str, Any]:
    measured: dict[str, Any] = {
        "weights_bytes": run.masters.weights_bytes,
        "gradients_bytes": run.masters.gradients_bytes,
        "optimizer_bytes": run.optimizers.state_bytes + run.masters.exchange_bytes,
    }
    if run.scratch_steps and run.scratch:
        measured["offload_read_bytes_per_step"] = sum(file.read_bytes for file in run.scratch) / run.scratch_steps
        measured["offload_written_bytes_per_step"] = sum(file.written_bytes for file in run.scratch) / run.scratch_steps
    # Other ranks would have to compute it too.
    if run.last_batch is not None and not run.masters.is_sharded and run.inputs.ranks.layout.context == 1:
        measured["activations_bytes"] = run.train_step.activations_bytes(run.last_batch)
        run.notes.append("activations_bytes are the storages that autograd saved in one micro-step (saved-tensor hooks)")
    return measured
