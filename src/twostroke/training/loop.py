"""Runs training from the first step to the last: steps, log, checkpoints, stop."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from twostroke.core.described import plain
from twostroke.core.errors import CapacityError, Interrupted, TwostrokeError
from twostroke.core.recipe import TrainRecipe
from twostroke.core.spec import ModelSpec
from twostroke.data.background import BackgroundLoader
from twostroke.data.loader import Batch
from twostroke.data.shards import PreparedData
from twostroke.model.decoder import Decoder
from twostroke.planner.recording import Recording
from twostroke.planner.training import TrainingShape, flops_per_token
from twostroke.training.anomalies import AnomalyLog, SpikeWatch, anchor_every
from twostroke.training.build import build, capture, random_states, restore_random
from twostroke.training.checkpoint import CheckpointError
from twostroke.training.clock import StepClock
from twostroke.training.finish import TrainingResult, finish, finished, step_measurement
from twostroke.training.measurement import PARTS, StepRecord
from twostroke.training.memory import memory_bytes, peak_memory_bytes, reset_peak
from twostroke.training.observers import Observer, Observers, requested
from twostroke.training.optimizers import Optimizers
from twostroke.training.parallelize import eager
from twostroke.training.precision import MasterWeights
from twostroke.training.respond import respond
from twostroke.training.run_directory import Resolved, RunDirectory, StepLog
from twostroke.training.saver import CheckpointSaver
from twostroke.training.schedules import scheduled_factor
from twostroke.training.step import StepResult, TrainStep, WindowAbandoned
from twostroke.training.stop import StopSignals

Log = Callable[[str], None]
OnStep = Callable[[StepRecord, float], None]
Evaluate = Callable[[Decoder, PreparedData], dict[str, float]]
"""Scores the decoder in the middle of a run. Its values are added to the step's log line."""

WARM_UP_STEPS = 3
"""First steps of a process, which medians leave out. The first compiles, and the next two still fill caches and allocators."""

ABANDON_S = 10.0
"""Longest wait for the current step when a stop is requested, by the time of earlier steps. A longer step is dropped after its
current micro-batch, and the resumed run computes it again."""


class TrainingRun:
    """One run. ``start`` makes it, resolved and predicted but not started, and ``execute`` does the work.

    ``build`` adds what it computes with: ``device``, ``decoder``, ``masters``, ``optimizers``, ``loader``, ``step_log``,
    ``watch``, ``anomalies``, ``saver`` and ``train_step``. Observers read these.
    """

    device: torch.device
    decoder: Decoder
    masters: MasterWeights
    optimizers: Optimizers
    loader: BackgroundLoader
    step_log: StepLog
    watch: SpikeWatch
    anomalies: AnomalyLog
    saver: CheckpointSaver
    train_step: TrainStep

    def __init__(
        self,
        recipe: TrainRecipe,
        directory: RunDirectory,
        resolved: Resolved,
        prepared: PreparedData,
        entry: Recording,
        resumes: bool,
        log: Log,
    ) -> None:
        self.recipe, self.directory, self.resolved, self.prepared = recipe, directory, resolved, prepared
        self.entry, self.resumes, self.log = entry, resumes, log
        self._flops_per_token = flops_per_token(resolved.spec, TrainingShape.from_recipe(recipe, resolved.steps))
        self.notes: list[str] = []
        self.step = self.tokens = 0
        self._began = time.perf_counter()
        self.elapsed_before_s = 0.0  # in earlier processes
        self.train_time_s: float | None = None
        self.startup_s: float | None = None
        self.last_batch: Batch | None = None
        self.last_result: StepResult | None = None

    @property
    def steps(self) -> int:
        return self.resolved.steps

    @property
    def spec(self) -> ModelSpec:
        return self.resolved.spec

    def elapsed_s(self) -> float:
        return self.elapsed_before_s + time.perf_counter() - self._began

    def mfu(self, tok_per_s: float) -> float | None:
        hardware = self.entry.planned.hardware
        peak = hardware.peak_flop_per_s.get(self.recipe.train.compute_dtype) if hardware is not None else None
        return None if peak is None else self._flops_per_token * tok_per_s / peak

    def save(self) -> Path:
        """Write a checkpoint of this step to the disk. Raises CheckpointError; older checkpoints are not touched."""
        return self.saver.save(capture(self))

    def what_is_kept(self) -> str:
        return self.saver.what_is_kept()

    def execute(
        self,
        on_step: OnStep | None = None,
        evaluate: Evaluate | None = None,
        should_stop: Callable[[int], bool] | None = None,
        command_began: float | None = None,
        observers: Sequence[Observer] = (),
    ) -> TrainingResult:
        """Train to the last step, write the model and ``summary.json``, and record the measurements in the ledger.

        ``on_step(record, eta_s)`` is called after each step; ``eta_s`` is nan while steps still compile. ``startup_s`` counts
        from ``command_began`` (``time.time()``). Raises Interrupted after SIGTERM, Ctrl-C or ``should_stop(step)``, with a
        checkpoint written, and TwostrokeError if that failed or if anomalies stop the run (``training.respond``).
        """
        with self.directory.locked():
            done = finished(self.directory)
            if done is not None:  # another process has finished the run since ``start``
                return done
            began = time.time() if command_began is None else command_began
            with StopSignals(self.log) as stop, contextlib.ExitStack() as closing:
                stop.nothing_to_save = True  # until the first step of this process is done, the first Ctrl-C may end it at once
                try:
                    build(self)
                    # Closed in reverse order: the saver may still write when the observers have ended.
                    closing.callback(self.loader.close)
                    closing.callback(self.saver.close)
                    watching = Observers((*requested(self.recipe, self.log), *observers), self.log)
                    closing.callback(watching.close)
                    watching.begin(self)
                    self._train_and_record(on_step, evaluate, stop, should_stop or _never, began, watching)
                except KeyboardInterrupt:
                    if not stop.nothing_to_save:
                        raise
                    raise Interrupted(
                        f"stopped before step {self.step + 1} was done, so nothing is lost. Continue with --resume."
                    ) from None
                stop.answer = "all steps are done, and the model is being written."
                return finish(self)

    def _train_and_record(
        self,
        on_step: OnStep | None,
        evaluate: Evaluate | None,
        stop: StopSignals,
        should_stop: Callable[[int], bool],
        command_began: float,
        observers: Observers,
    ) -> None:
        """Call ``_train``. If it ends before the last step, the measurements until then go into the ledger."""
        try:
            self._train(on_step, evaluate, stop, should_stop, command_began, observers)
        except (TwostrokeError, RuntimeError, MemoryError) as error:
            self.saver.settle()
            status = "interrupted" if isinstance(error, Interrupted) else "failed"
            self.entry.measure(step_measurement(self), status, {}, str(error))
            if not _is_out_of_memory(error):
                raise
            raise CapacityError(
                f"step {self.step + 1} did not fit in memory ({self.what_is_kept()}) Lower train.batch_size and raise "
                "train.grad_accumulation by the same factor, which gives the same result in less memory."
            ) from error

    def _train(
        self,
        on_step: OnStep | None,
        evaluate: Evaluate | None,
        stop: StopSignals,
        should_stop: Callable[[int], bool],
        command_began: float,
        observers: Observers,
    ) -> None:
        def stop_asked() -> bool:
            return stop.requested or should_stop(self.step)

        settings = self.recipe.train
        clock = StepClock(self.device)
        recent: deque[float] = deque(maxlen=20)
        steady: deque[float] = deque(maxlen=20)  # without warm-up steps, so that the estimate of the time left is realistic
        first_step = self.step
        if not reset_peak(self.device):
            self.notes.append("peak_memory_bytes is that of the whole process, because this system cannot reset it")
        self._began = time.perf_counter()
        rolls_back = anchor_every(settings) > 0
        if rolls_back and self.step == 0:
            self.saver.begin(
                lambda: capture(self), wait=True
            )  # an anomaly before the first scheduled checkpoint goes back here
        while self.step < self.steps:
            if stop_asked():
                self._stop()
            clock.start()
            position = self.loader.state()  # an abandoned window is read again from here, and an anomaly's text is named by it
            batches = [self.loader.next_batch() for _ in range(settings.grad_accumulation)]
            clock.lap("data")
            factor = scheduled_factor(settings, self.step, self.steps)
            result = self._step_or_stop(batches, factor, clock, position, recent, stop_asked)
            step_time_s, parts = clock.finish()
            stop.nothing_to_save = False
            self.last_batch, self.last_result = batches[-1], result
            self.step += 1
            n_tokens = sum(batch.tokens.numel() for batch in batches)
            self.tokens += n_tokens
            if self.startup_s is None:  # start-up ends with the first step, so it includes compilation
                self.startup_s = time.time() - command_began
            record = self._record(result, settings.learning_rate * factor, n_tokens, step_time_s, parts, first_step)
            line = plain(record)
            line |= observers.after_step(self, record)
            if evaluate is not None and settings.evaluate_every and self.step % settings.evaluate_every == 0:
                with eager(self.decoder):  # scoring has other shapes, and each would be compiled
                    line |= evaluate(self.decoder, self.prepared)
                    if self.optimizers.average is not None:
                        with self.optimizers.average.swapped_into(self.masters):
                            line |= {f"ema_{name}": value for name, value in evaluate(self.decoder, self.prepared).items()}
            self.step_log.append(line)
            observers.after_line(line)
            recent.append(step_time_s)
            if not record.warm_up:
                steady.append(step_time_s)
            if on_step is not None:
                on_step(record, statistics.median(steady) * (self.steps - self.step) if steady else math.nan)
            self._handle_result(result, batches, (position["next_window"], self.loader.state()["next_window"] - 1))
            if self.step < record.step:  # the policy has rolled the run back
                observers.begin(self)
            is_scheduled = settings.checkpoint_every > 0 and record.step % settings.checkpoint_every == 0
            # None after a rollback, whose checkpoint exists, and none at the last step, which ``finish`` saves.
            if is_scheduled and record.step == self.step < self.steps:
                if rolls_back:
                    self.watch.in_a_row = 0  # the run has got past the anomaly, and a rollback cannot go before this step
                # With rollbacks the checkpoint is waited for: the step that a run goes back to must not depend on the disk's
                # speed.
                self.saver.begin(lambda: capture(self), wait=rolls_back)
            self.saver.poll()
        self.train_time_s = self.elapsed_s()

    def _step_or_stop(
        self,
        batches: Sequence[Batch],
        factor: float,
        clock: StepClock,
        position: dict[str, int],
        recent: Sequence[float],
        stop_asked: Callable[[], bool],
    ) -> StepResult:
        """One step. If a stop is requested and the step would still take longer than ``ABANDON_S``, drop it, save a checkpoint
        of the state before it, and raise Interrupted."""
        random, began, scaler = random_states(self.device), time.perf_counter(), self.optimizers.loss_scale
        scale = scaler.state() if scaler is not None else {}
        expected_s = statistics.median(recent) if recent else math.inf

        def abandon() -> bool:
            return expected_s - (time.perf_counter() - began) > ABANDON_S and stop_asked()

        try:
            return self.train_step(batches, factor, clock, self.watch.accept, abandon)
        except WindowAbandoned:
            self.loader.restore(position)
            restore_random(self.device, random)
            if scaler is not None:  # the window may have overflowed and halved the scale before it was abandoned
                scaler.load_state(scale)
            self._stop()

    def _record(
        self,
        result: StepResult,
        learning_rate: float,
        n_tokens: int,
        step_time_s: float,
        parts: dict[str, float],
        first_step: int,
    ) -> StepRecord:
        tok_per_s = n_tokens / step_time_s
        return StepRecord(
            step=self.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=learning_rate,
            tok_per_s=tok_per_s,
            mfu=self.mfu(tok_per_s),
            memory_bytes=memory_bytes(self.device),
            peak_memory_bytes=peak_memory_bytes(self.device),
            step_time_s=step_time_s,
            **{name: parts.get(name.removesuffix("_s"), 0.0) for name in PARTS},
            tokens=self.tokens,
            epoch=self.loader.epoch,
            warm_up=self.step - first_step <= WARM_UP_STEPS,
            skipped=result.skipped,
            elapsed_s=self.elapsed_s(),
            block_grad_norms=result.block_grad_norms,
        )

    def _handle_result(self, result: StepResult, batches: Sequence[Batch], windows: tuple[int, int]) -> None:
        """Tell the spike watch of an accepted step, or respond to a refused one."""
        if result.skipped is None:
            self.watch.took(result.loss, result.grad_norm)
            if not anchor_every(self.recipe.train):
                self.watch.in_a_row = 0
        else:
            respond(self, result, batches, windows)

    def _stop(self) -> NoReturn:
        try:
            path = self.save()
        except CheckpointError as error:
            raise TwostrokeError(f"stopped at step {self.step}, but {error} {self.what_is_kept()}") from error
        raise Interrupted(f"stopped at step {self.step} of {self.steps} with checkpoint {path}. Continue with --resume.")


def _never(step: int) -> bool:
    return False


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is a lack of memory. torch has a type for it on GPUs only; on CPUs it is its allocator's
    RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
