"""A training run from its recipe to its model: prepare, predict, train, checkpoint, measure."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from twostroke.core.errors import (
    CapacityError,
    ConfigError,
    CorruptFileError,
    DataError,
    InputError,
    Interrupted,
    TwostrokeError,
)
from twostroke.core.recipe import TrainRecipe
from twostroke.core.spec import ModelSpec
from twostroke.core.units import format_bytes, format_count, format_seconds
from twostroke.data.loader import Batch
from twostroke.data.prepare import prepare
from twostroke.data.shards import PreparedData, open_prepared
from twostroke.ledger.scoring import numbers_of
from twostroke.ledger.store import Ledger
from twostroke.model.decoder import Decoder
from twostroke.model.initialise import initialise
from twostroke.model.load import load_model, save_model
from twostroke.planner.hardware import Hardware, load_hardware
from twostroke.planner.intervals import predict_with_intervals
from twostroke.planner.params import count_parameters
from twostroke.planner.training import TrainingShape, flops_per_token, plan_training
from twostroke.training.adapters import base_state, check_adapters, check_base, load_adapted, write_adapters
from twostroke.training.checkpoint import Checkpoint, CheckpointError, list_checkpoints, load_newest, save_checkpoint
from twostroke.training.clock import StepClock
from twostroke.training.conversations import make_loader, write_chat_template
from twostroke.training.measurement import PARTS, StepRecord, directory_bytes, medians
from twostroke.training.memory import memory_bytes, peak_memory_bytes, reset_peak
from twostroke.training.optimizers import Optimizers
from twostroke.training.parallelize import eager, pick_device
from twostroke.training.precision import MasterWeights
from twostroke.training.resolve import resolve_spec, resolve_steps, with_own_tokenizer
from twostroke.training.run_directory import Resolved, RunDirectory, StepLog, read_summary, write_json
from twostroke.training.schedules import learning_rate_factor
from twostroke.training.step import TrainStep
from twostroke.training.stop import StopSignals

Log = Callable[[str], None]
Evaluate = Callable[[Decoder, PreparedData], dict[str, float]]
"""Scores the decoder in the middle of a run; its values join the step's log line."""

WARM_UP_STEPS = 3
"""First steps of a process that medians leave out: the first compiles, the next two still fill caches and allocators."""

SKIPPED_IN_A_ROW = 10
"""A step whose loss or gradient is not finite is skipped; so many in a row will not get better by themselves."""


def _silent(line: str) -> None:
    pass


@dataclass(frozen=True)
class TrainingResult:
    """A finished run. ``summary`` is what ``summary.json`` holds; ``was_finished`` where there was nothing left to do."""

    directory: Path
    model: Path
    run_id: str
    summary: dict[str, Any]
    was_finished: bool = False


class TrainingRun:
    """One run, resolved and predicted, not yet started. Made by ``start``; ``execute`` does the work."""

    def __init__(
        self,
        recipe: TrainRecipe,
        directory: RunDirectory,
        resolved: Resolved,
        prepared: PreparedData,
        hardware: Hardware | None,
        prediction: dict[str, Any],
        resumes: bool,
        log: Log,
        ledger: Ledger,
    ) -> None:
        self.recipe, self.directory, self.resolved, self.prepared = recipe, directory, resolved, prepared
        self.hardware, self.prediction, self.resumes = hardware, prediction, resumes
        self._log, self._ledger = log, ledger
        self._flops_per_token = flops_per_token(resolved.spec, TrainingShape.from_recipe(recipe, resolved.steps))
        self._notes: list[str] = []
        self.step = self.tokens = self.skipped_in_a_row = 0
        self._began = time.perf_counter()
        self._elapsed_before_s = 0.0  # in earlier processes
        self._train_time_s: float | None = None
        self._startup_s: float | None = None
        self._last_batch: Batch | None = None

    @property
    def steps(self) -> int:
        return self.resolved.steps

    @property
    def spec(self) -> ModelSpec:
        return self.resolved.spec

    # -- setting up ------------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        """Decoder, masters, optimizers, loader and step, from the newest intact checkpoint where the run resumes."""
        settings = self.recipe.train
        self.device = pick_device()
        checkpoint = load_newest(self.directory.checkpoints, self._log) if self.resumes else None
        torch.manual_seed(self.recipe.seed)
        if self.recipe.trains_adapters:  # the base is not in checkpoints
            decoder = load_adapted(self.recipe, self.device)
        elif self.recipe.model.init_from is not None and checkpoint is None:
            decoder = load_model(self.recipe.model.init_from, "fp32", self.device)
        else:
            decoder = Decoder(self.spec, device="meta").to_empty(device=self.device)
            if checkpoint is None:
                initialise(decoder, self.recipe.seed)
        decoder.train()
        self.decoder = decoder
        self.masters = MasterWeights(decoder, torch.bfloat16 if settings.dtype == "bf16" else torch.float32)
        self.optimizers = Optimizers(self.masters, self.spec, settings)
        self.loader = make_loader(self.prepared, self.recipe, self._log)
        self.step_log = StepLog(self.directory.log, self._log)
        if checkpoint is not None:
            self._restore(checkpoint)
        self.step_log.restart(self.step)
        self.train_step = TrainStep(decoder, self.masters, self.optimizers, settings.clip_norm, settings.compile, self._log)

    def _restore(self, checkpoint: Checkpoint) -> None:
        check_base(self.recipe, checkpoint.state)
        missing = set(self.masters.weights) ^ set(checkpoint.weights)
        if missing:
            raise CorruptFileError(
                f"the checkpoint's weights are of another model: {sorted(missing)[0]!r} is in one of the two only."
            )
        self.masters.load(checkpoint.weights)
        self.optimizers.load_state(checkpoint.optimizer)
        state = checkpoint.state
        self.step, self.tokens = int(state["step"]), int(state["tokens"])
        self.skipped_in_a_row, self._elapsed_before_s = int(state["skipped_in_a_row"]), float(state["elapsed_s"])
        self.loader.restore(state["loader"])
        torch.set_rng_state(_decode(state["rng"]["cpu"]))
        if self.device.type == "cuda" and "cuda" in state["rng"]:
            torch.cuda.set_rng_state(_decode(state["rng"]["cuda"]), self.device)
        now = (torch.__version__, torch.get_num_threads(), str(self.device))
        then = (self.resolved.torch_version, self.resolved.n_threads, self.resolved.device)
        if now != then:
            self._log(
                f"resuming on torch {now[0]}, {now[1]} threads, {now[2]}; the run began on torch {then[0]}, {then[1]} threads, "
                f"{then[2]}: sums may round otherwise, so losses need not be equal to the last bit."
            )

    def _checkpoint(self) -> Checkpoint:
        rng = {"cpu": _encode(torch.get_rng_state())}
        if self.device.type == "cuda":
            rng["cuda"] = _encode(torch.cuda.get_rng_state(self.device))
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "skipped_in_a_row": self.skipped_in_a_row,
            "elapsed_s": self._elapsed_s(),
            "loader": self.loader.state(),
            "rng": rng,
        } | base_state(self.recipe)
        return Checkpoint(self.masters.weights, self.optimizers.state(), state)

    def _elapsed_s(self) -> float:
        return self._elapsed_before_s + time.perf_counter() - self._began

    def _save(self) -> Path:
        """A checkpoint of this step. Raises CheckpointError with the older ones untouched."""
        self.step_log.sync()
        return save_checkpoint(self.directory.checkpoints, self._checkpoint(), self.recipe.train.keep_checkpoints)

    # -- running ---------------------------------------------------------------------------------------------------------

    def execute(
        self,
        on_step: Callable[[StepRecord, float], None] | None = None,
        evaluate: Evaluate | None = None,
        should_stop: Callable[[int], bool] | None = None,
        command_began: float | None = None,
    ) -> TrainingResult:
        """Train to the last step, write the model and ``summary.json``, and record what was measured in the ledger.

        ``on_step(record, eta_s)`` is called after each step. ``command_began`` (``time.time()``) is what ``startup_s`` counts
        from. Raises Interrupted after SIGTERM, Ctrl-C or ``should_stop(step)``, with a checkpoint written; TwostrokeError
        where it could not be, or after ``SKIPPED_IN_A_ROW`` steps that were not finite.
        """
        with self.directory.locked():
            done = _finished(self.directory)
            if done is not None:  # by another process, since ``start``
                return done
            began = time.time() if command_began is None else command_began
            self._build()
            with StopSignals(self._log) as stop:
                try:
                    self._train(on_step, evaluate, lambda: stop.requested or (should_stop or _never)(self.step), began)
                except Interrupted as error:
                    self._measure(self._step_measurement(), "interrupted", str(error))
                    raise
                except TwostrokeError as error:
                    self._measure(self._step_measurement(), "failed", str(error))
                    raise
                except (RuntimeError, MemoryError) as error:
                    self._measure(self._step_measurement(), "failed", str(error))
                    if not _is_out_of_memory(error):
                        raise
                    raise CapacityError(
                        f"step {self.step + 1} did not fit in memory ({self._what_is_kept()}) Lower train.batch_size and raise "
                        "train.grad_accumulation by the same factor."
                    ) from error
                return self._finish()

    def _train(
        self,
        on_step: Callable[[StepRecord, float], None] | None,
        evaluate: Evaluate | None,
        stop_asked: Callable[[], bool],
        command_began: float,
    ) -> None:
        settings = self.recipe.train
        clock = StepClock(self.device)
        recent: deque[float] = deque(maxlen=20)
        first_step = self.step
        if not reset_peak(self.device):
            self._notes.append("peak_memory_bytes is that of the whole process: this system cannot reset it")
        self._began = time.perf_counter()
        while self.step < self.steps:
            if stop_asked():
                self._stop()
            clock.start()
            starts = self.loader.state()["next_window"]
            batches = [self.loader.next_batch() for _ in range(settings.grad_accumulation)]
            clock.lap("data")
            factor = learning_rate_factor(
                self.step, self.steps, settings.schedule, settings.warmup_fraction, settings.min_lr_ratio
            )
            result = self.train_step(batches, factor, clock)
            step_time_s, parts = clock.finish()
            self._last_batch = batches[-1]
            self.step += 1
            n_tokens = sum(batch.tokens.numel() for batch in batches)
            self.tokens += n_tokens
            if self._startup_s is None:
                self._startup_s = time.time() - command_began
            tok_per_s = n_tokens / step_time_s
            record = StepRecord(
                step=self.step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                learning_rate=settings.learning_rate * factor,
                tok_per_s=tok_per_s,
                mfu=self._mfu(tok_per_s),
                memory_bytes=memory_bytes(self.device),
                peak_memory_bytes=peak_memory_bytes(self.device),
                step_time_s=step_time_s,
                **{name: parts.get(name.removesuffix("_s"), 0.0) for name in PARTS},
                tokens=self.tokens,
                epoch=self.loader.epoch,
                warm_up=self.step - first_step <= WARM_UP_STEPS,
                skipped=result.skipped,
            )
            line = record.to_dict()
            if evaluate is not None and settings.evaluate_every and self.step % settings.evaluate_every == 0:
                with eager(self.decoder):
                    line |= evaluate(self.decoder, self.prepared)
            self.step_log.append(line)
            recent.append(step_time_s)
            if on_step is not None:
                on_step(record, statistics.median(recent) * (self.steps - self.step))
            self._count_skipped(result.skipped, starts, self.loader.state()["next_window"] - 1)
            if settings.checkpoint_every and self.step % settings.checkpoint_every == 0 and self.step < self.steps:
                try:
                    self._save()
                except CheckpointError as error:
                    self._log(f"{error} {self._what_is_kept()} Training continues.")
        self._train_time_s = self._elapsed_s()

    def _mfu(self, tok_per_s: float) -> float | None:
        peak = self.hardware.peak_flop_per_s.get(self.recipe.train.dtype) if self.hardware is not None else None
        return None if peak is None else self._flops_per_token * tok_per_s / peak

    def _count_skipped(self, skipped: str | None, first_window: int, last_window: int) -> None:
        if skipped is None:
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        self._log(
            f"step {self.step} was skipped: its {skipped}; weights are unchanged. "
            f"Its text: windows {first_window} to {last_window} of the loader."
        )
        if self.skipped_in_a_row >= SKIPPED_IN_A_ROW:
            with contextlib.suppress(CheckpointError):
                self._save()
            raise TwostrokeError(
                f"{self.skipped_in_a_row} steps in a row were not finite, up to step {self.step} (its {skipped}). Lower "
                f"train.learning_rate or look at the text. {self._what_is_kept()}"
            )

    def _what_is_kept(self) -> str:
        kept = list_checkpoints(self.directory.checkpoints)
        return f"Checkpoint {kept[-1][1].name} is kept." if kept else "There is no earlier checkpoint."

    def _stop(self) -> None:
        try:
            path = self._save()
        except CheckpointError as error:
            raise TwostrokeError(f"stopped at step {self.step}, but {error} {self._what_is_kept()}") from error
        raise Interrupted(f"stopped at step {self.step} of {self.steps}; {path} holds it. Continue with --resume.")

    # -- finishing -------------------------------------------------------------------------------------------------------

    def _finish(self) -> TrainingResult:
        """Last checkpoint, model, measurement, summary: the summary last, because it says that the run is done."""
        checkpoint: Path | None = None
        try:
            checkpoint = self._save()
        except CheckpointError as error:
            self._log(f"{error} {self._what_is_kept()} The model is written all the same.")
        self._write_model()
        measured = self._step_measurement() | self._memory_measurement()
        if checkpoint is not None:
            measured["checkpoint_bytes"] = directory_bytes(checkpoint)
        measured["model_bytes"] = directory_bytes(self.directory.model, "*.safetensors")
        records = self.step_log.read()
        last: dict[str, Any] = next((r for r in reversed(records) if r.get("loss") is not None), {})
        summary = {
            "run_id": self.resolved.run_id,
            "model": str(self.directory.model),
            "n_parameters": count_parameters(self.spec).total,
            "n_trained_parameters": sum(weight.numel() for weight in self.masters.weights.values()),
            "steps": self.steps,
            "tokens": self.tokens,
            "epochs": self.loader.epoch,
            "skipped_steps": sum(1 for r in records if r.get("skipped")),
            "final_loss": last.get("loss"),
            "compiled": self.train_step.is_compiled,
            "prediction": self.prediction,
            "measurement": measured,
            "notes": self._notes,
        }
        self._measure(measured, "finished", "; ".join(self._notes) or None)
        write_json(self.directory.summary, summary)
        return TrainingResult(self.directory.path, self.directory.model, self.resolved.run_id, summary)

    def _write_model(self) -> None:
        """The model directory. Raises TwostrokeError where it cannot be written; the run can then be resumed to this point."""
        for leftover in self.directory.path.glob(".model.*"):  # of a kill while the model was being written
            shutil.rmtree(leftover, ignore_errors=True)
        dtype, weights = self.recipe.train.dtype, self.masters.weights
        try:
            if self.recipe.trains_adapters:
                write_adapters(self.recipe, self.spec, weights, self.directory.model)
            else:
                save_model(weights, self.spec, self.directory.model, dtype, self._tokenizer(), replace=True)
            write_chat_template(self.recipe, self.directory.model)
        except (OSError, SafetensorError) as error:
            raise TwostrokeError(
                f"all {self.steps} steps are done, but {self.directory.model} cannot be written: {error}. "
                f"{self._what_is_kept()} Make room and continue with --resume."
            ) from error

    def _tokenizer(self) -> Path:
        """A model's tokenizer directory, with its chat template, where the run started from one; else the file the text was
        read with."""
        source = self.recipe.data.tokenizer
        return Path(source) if source is not None and Path(source).is_dir() else self.prepared.tokenizer_path

    def _step_measurement(self) -> dict[str, Any]:
        """Medians over the whole log, all sessions, and the run's length so far."""
        measured: dict[str, Any] = dict(medians(self.step_log.read()))
        if not measured:
            return {}
        settings = self.recipe.train
        tokens_per_step = settings.batch_size * settings.sequence_length * settings.grad_accumulation
        measured["train_tok_per_s"] = tokens_per_step / measured["step_time_s"]
        utilisation = self._mfu(measured["train_tok_per_s"])
        if utilisation is not None:
            measured["mfu"] = utilisation
        measured["train_time_s"] = self._elapsed_s() if self._train_time_s is None else self._train_time_s
        measured["peak_memory_bytes"] = max(r["peak_memory_bytes"] for r in self.step_log.read())
        if self._startup_s is not None:
            measured["startup_s"] = self._startup_s
        return measured

    def _memory_measurement(self) -> dict[str, Any]:
        measured: dict[str, Any] = {
            "weights_bytes": self.masters.weights_bytes,
            "gradients_bytes": self.masters.gradients_bytes,
            "optimizer_bytes": self.optimizers.state_bytes,
        }
        if self._last_batch is not None:
            measured["activations_bytes"] = self.train_step.activations_bytes(self._last_batch)
            self._notes.append("activations_bytes: storages that autograd saved in one micro-step (saved-tensor hooks)")
        return measured

    def _measure(self, measured: dict[str, Any], status: str, notes: str | None) -> None:
        """Into the ledger. A ledger that cannot be written must not cost a finished run its summary."""
        try:
            self._ledger.measure(self.resolved.run_id, measured, status, notes)
        except (TwostrokeError, OSError) as error:
            self._log(f"the measurement was not recorded: {error}")


def _never(step: int) -> bool:
    return False


def _is_out_of_memory(error: BaseException) -> bool:
    """torch has a type for it on GPUs only; on CPUs it is a RuntimeError of its allocator."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _finished(directory: RunDirectory) -> TrainingResult | None:
    summary = read_summary(directory.path)
    if summary is None:
        return None
    return TrainingResult(directory.path, directory.model, str(summary.get("run_id", "")), summary, was_finished=True)


def find_finished(recipe: TrainRecipe, resume: bool) -> TrainingResult | None:
    """The result of the run that ``recipe`` would resume, where it has finished; else None.

    Raises as ``start`` does where the run directory and the recipe do not go together.
    """
    directory = RunDirectory(Path(recipe.output))
    return _finished(directory) if directory.open(with_own_tokenizer(recipe), resume) is not None else None


def start(
    recipe: TrainRecipe,
    resume: bool = False,
    log: Log = _silent,
    data_progress: Callable[[float, str], None] | None = None,
    ledger: Ledger | None = None,
) -> TrainingRun:
    """Everything before the first step: open or refuse the run directory, prepare the data, fix model and steps, predict.

    The prediction is frozen in the ledger before anything is trained. Raises InputError, ConfigError, DataError or
    CorruptFileError with nothing created where the recipe cannot be run.
    """
    recipe = with_own_tokenizer(recipe)
    ledger = ledger or Ledger()
    directory = RunDirectory(Path(recipe.output))
    resolved = directory.open(recipe, resume)
    try:
        hardware: Hardware | None = load_hardware("this")
    except ConfigError:
        hardware = None
    if resolved is not None:
        prepared = _same_data(recipe, resolved, data_progress)
        frozen = _frozen_prediction(ledger, resolved.run_id)
        return TrainingRun(recipe, directory, resolved, prepared, hardware, frozen, True, log, ledger)
    prepared = prepare(recipe.data, progress=data_progress)
    spec = resolve_spec(recipe, prepared, hardware)
    check_adapters(recipe, spec)
    steps = resolve_steps(recipe, spec, hardware)
    prediction: dict[str, Any] = {}
    if hardware is not None:
        plan = plan_training(spec, TrainingShape.from_recipe(recipe, steps), hardware)
        prediction = plan.prediction()
    else:
        log("no prediction and no MFU: this machine has no profile (`twostroke calibrate`, once, two minutes).")
    inputs = {
        "recipe": recipe.to_dict(),
        "spec": _plain(spec),
        "steps": steps,
        "n_train_tokens": prepared.n_train_tokens,
        "run_directory": str(directory.path.resolve()),
    }
    frozen = predict_with_intervals(prediction, hardware, "train", ledger)
    run_id = ledger.freeze("train", str(directory.path), inputs, frozen)
    resolved = Resolved(
        spec=spec,
        steps=steps,
        data_directory=str(prepared.directory),
        data_key=prepared.key,
        run_id=run_id,
        torch_version=str(torch.__version__),
        n_threads=torch.get_num_threads(),
        device=str(pick_device()),
    )
    with directory.locked():
        if not directory.is_unused():
            raise InputError(f"another process began a run in {directory.path} meanwhile. Name another directory.")
        directory.create(recipe, resolved)
    return TrainingRun(recipe, directory, resolved, prepared, hardware, prediction, False, log, ledger)


def _plain(spec: ModelSpec) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(spec)))
    return plain


def _same_data(recipe: TrainRecipe, resolved: Resolved, progress: Callable[[float, str], None] | None) -> PreparedData:
    """The shards the run began with: where they were, or prepared again if the sources still give the same."""
    try:
        prepared = open_prepared(resolved.data_directory)
        if prepared.key == resolved.data_key:
            return prepared
    except DataError:
        pass
    prepared = prepare(recipe.data, progress=progress)
    if prepared.key != resolved.data_key:
        raise DataError(
            f"the run's prepared data {resolved.data_directory} is gone, and the sources have changed since: its steps "
            "cannot be repeated exactly. Start another run: --set output=..."
        )
    return prepared


def _frozen_prediction(ledger: Ledger, run_id: str) -> dict[str, Any]:
    """What was predicted when the run began; empty where the ledger is another one now."""
    try:
        return dict(numbers_of(ledger.get(run_id).prediction))
    except TwostrokeError:
        return {}


def train(
    recipe: TrainRecipe,
    resume: bool = False,
    log: Log = _silent,
    on_step: Callable[[StepRecord, float], None] | None = None,
    evaluate: Evaluate | None = None,
    should_stop: Callable[[int], bool] | None = None,
    ledger: Ledger | None = None,
) -> TrainingResult:
    """Train by ``recipe`` from beginning to end: ``start`` and ``TrainingRun.execute`` in one call."""
    done = find_finished(recipe, resume)
    if done is not None:
        return done
    run = start(recipe, resume, log, ledger=ledger)
    return run.execute(on_step, evaluate, should_stop)


def describe(run: TrainingRun) -> str:
    """One line for the person watching: what will be trained on what, and how long it is expected to take."""
    spec, settings = run.spec, run.recipe.train
    n_parameters = count_parameters(spec).total
    tokens = run.steps * settings.batch_size * settings.sequence_length * settings.grad_accumulation
    line = (
        f"{spec.family}, {format_count(n_parameters)} parameters ({spec.n_layers} × {spec.d_model}), {run.steps} steps, "
        f"{format_count(tokens)} tokens ({tokens / max(1, run.prepared.n_train_tokens):.2g} epochs of "
        f"{format_count(run.prepared.n_train_tokens)})"
    )
    time_s, peak = run.prediction.get("train_time_s"), run.prediction.get("peak_memory_bytes")
    if isinstance(time_s, float) and isinstance(peak, float):
        line += f"; predicted {format_seconds(time_s)}, {format_bytes(peak)}"
    return line
