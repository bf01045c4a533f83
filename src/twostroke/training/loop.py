"""Runs training from the first step to the last: steps, log, checkpoints, stop."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from twostroke.core.described import plain
from twostroke.core.errors import CapacityError, InputError, Interrupted, TwostrokeError
from twostroke.core.heap import return_freed_memory, settle_memory
from twostroke.core.recipe import TrainRecipe
from twostroke.data.loader import Batch
from twostroke.data.shards import PreparedData
from twostroke.model.decoder import Decoder
from twostroke.training.anomalies import anchor_every
from twostroke.training.build import build, capture, random_states, restore_random, save
from twostroke.training.bursts import BURSTS
from twostroke.training.checkpoint import CheckpointError
from twostroke.training.clock import StepClock
from twostroke.training.compiled_before import mark_of, note_compiled
from twostroke.training.exchanges import SENT
from twostroke.training.finish import TrainingResult, finish, finished, step_measurement
from twostroke.training.measurement import PARTS, StepRecord
from twostroke.training.memory import memory_bytes, peak_memory_bytes, reset_peak
from twostroke.training.observers import Observer, Observers
from twostroke.training.parallelize import eager
from twostroke.training.progress import Phase
from twostroke.training.ranks import RankLost, is_lost
from twostroke.training.respond import respond
from twostroke.training.run import RunInputs, RunState
from twostroke.training.schedules import scheduled_factor
from twostroke.training.scratch import ScratchError
from twostroke.training.step import StepResult, WindowAbandoned
from twostroke.training.stop import StopSignals
from twostroke.training.stragglers import RankTimes

Log = Callable[[str], None]
OnStep = Callable[[StepRecord, float], None]
Evaluate = Callable[[Decoder, PreparedData], dict[str, float]]
"""Scores the decoder in the middle of a run. Its values are added to the step's log line."""

WARM_UP_STEPS = 3
"""First steps of a process, which medians leave out. The first compiles, and the next two still fill caches and allocators."""

ABANDON_S = 10.0
"""Longest wait for the current step when a stop is requested, by the time of earlier steps. A longer step is dropped after its
current micro-batch, and the resumed run computes it again."""


def execute(
    inputs: RunInputs,
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
    ranks = inputs.ranks
    with contextlib.ExitStack() as holding:
        with ranks.agreed():
            if ranks.is_first:
                holding.enter_context(inputs.directory.locked())
        done = ranks.led(lambda: finished(inputs.directory))
        if done is not None:  # another process has finished the run since ``start``
            return done
        began = time.time() if command_began is None else command_began
        run: RunState | None = None
        with _abandoning(inputs, lambda: run), StopSignals(inputs.log) as stop, contextlib.ExitStack() as closing:
            stop.nothing_to_save = True  # until the first step of this process is done, the first Ctrl-C may end it at once
            ranks.progress.mark(Phase.BUILDING)
            try:
                run = _built(inputs)
                # Closed in reverse order: the saver may still write when the observers have ended.
                closing.callback(run.loader.close)
                closing.callback(run.saver.close)
                asked = [*requested(inputs.recipe, inputs.log, ranks.is_first), *(observers if ranks.is_first else ())]
                together = ranks.any if run.masters.is_sharded else None
                watching = Observers(asked if ranks.is_first or together else (), inputs.log, together)
                closing.callback(watching.close)
                closing.enter_context(inputs.entry.meter)
                watching.begin(run)
                _Loop(run, on_step, evaluate, stop, should_stop or _never, began, watching).train_and_record()
            except KeyboardInterrupt:
                if not stop.nothing_to_save:
                    raise
                step = "the next step" if run is None else f"step {run.step + 1}"
                error = Interrupted(f"stopped before {step} was done, so nothing is lost. Continue with --resume.")
                inputs.entry.measure({}, "interrupted", {}, str(error))
                raise ranks.told(error) from None
            stop.answer = "all steps are done, and the model is being written."
            state = run
            return ranks.led(lambda: finish(state), Phase.ENDING)


@contextlib.contextmanager
def _abandoning(inputs: RunInputs, run: Callable[[], RunState | None]) -> Iterator[None]:
    """A new run that turns out not to be possible before a step is done leaves nothing, so that the corrected recipe starts."""
    try:
        yield
    except InputError:
        began = run()
        if inputs.ranks.is_first and not inputs.resumes and (began is None or not began.step):
            inputs.directory.abandon()
        raise


def _built(inputs: RunInputs) -> RunState:
    try:
        return build(inputs)
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        raise CapacityError(
            "weights, gradients and optimizer's state do not fit in memory. Take a smaller model; `twostroke plan train` says "
            "what one needs."
        ) from error


@dataclass
class _Loop:
    """The steps of one process, and the callbacks that are called in them."""

    run: RunState
    on_step: OnStep | None
    evaluate: Evaluate | None
    stop: StopSignals
    should_stop: Callable[[int], bool]
    command_began: float
    observers: Observers

    def train_and_record(self) -> None:
        """Call ``_train``. If it ends before the last step, the measurements until then go into the ledger."""
        run = self.run
        try:
            self._train()
        except (TwostrokeError, RuntimeError, MemoryError) as error:
            run.saver.settle()
            status = "interrupted" if isinstance(error, Interrupted) else "failed"
            run.inputs.entry.measure(step_measurement(run) if run.inputs.ranks.is_first else {}, status, {}, str(error))
            if run.inputs.ranks.n > 1 and is_lost(error):
                raise RankLost(
                    f"rank {run.inputs.ranks.rank} lost another one in step {run.step + 1}. {run.saver.what_is_kept()} "
                    "Continue with --resume."
                ) from error
            if isinstance(error, ScratchError):
                raise ScratchError(
                    f"step {run.step + 1} failed: {error} {run.saver.what_is_kept()} Continue with --resume."
                ) from error
            if not _is_out_of_memory(error):
                raise
            raise CapacityError(
                f"step {run.step + 1} did not fit in memory ({run.saver.what_is_kept()}) Lower train.batch_size and raise "
                "train.grad_accumulation by the same factor, which gives the same result in less memory."
            ) from error

    def _train(self) -> None:
        run, settings = self.run, self.run.inputs.recipe.train
        clock = StepClock(run.device)
        times = RankTimes(run.inputs.ranks, run.inputs.log)
        recent: deque[float] = deque(maxlen=20)
        steady: deque[float] = deque(maxlen=20)  # without warm-up steps, so that the estimate of the time left is realistic
        first_step = run.step
        return_freed_memory()  # 60 MB of preparing text, which would count as the steps'
        if not reset_peak(run.device):
            run.notes.append("peak_memory_bytes is that of the whole process, because this system cannot reset it")
        run.began = time.perf_counter()
        sends_between_steps, sent_before = run.inputs.ranks.layout.outer_overlap > 0, SENT.total()
        rolls_back = anchor_every(settings) > 0
        if rolls_back and run.step == 0:
            self._begin_checkpoint(wait=True)  # an anomaly before the first scheduled checkpoint goes back here
        while run.step < run.inputs.steps:
            if self._stop_asked():
                self._stop()
            run.inputs.ranks.progress.mark(self._phase(first_step), run.step)
            times.begin_step()
            clock.start()
            if not sends_between_steps:
                sent_before = SENT.total()
                BURSTS.peaks()  # of what was sent since the last step
            position = run.loader.state()  # an abandoned window is read again from here, and an anomaly's text is named by it
            batches = [run.loader.next_batch() for _ in range(settings.grad_accumulation // run.inputs.ranks.n_readers)]
            clock.lap("data")
            factor = scheduled_factor(settings, run.step, run.inputs.steps)
            if run.train_step.early_exit is not None:
                run.train_step.early_exit.begin(run.step)
            result = self._step_or_stop(batches, factor, clock, position, recent)
            step_time_s, parts = clock.finish()
            self.stop.nothing_to_save = False
            run.last_batch, run.last_result = batches[-1], result
            if run.step == first_step:
                settle_memory()
            run.step += 1
            n_tokens = run.inputs.ranks.n_readers * sum(batch.tokens.numel() for batch in batches)
            run.tokens += n_tokens
            run.scratch_steps += 1
            if run.startup_s is None:  # start-up ends with the first step, so it includes compilation
                run.startup_s = time.time() - self.command_began
                if run.train_step.is_compiled and run.inputs.ranks.is_first and not run.inputs.resumes:
                    resolved = run.inputs.resolved
                    note_compiled(mark_of(run.inputs.recipe, resolved.spec, resolved.environment))
                run.scratch_steps = 0  # the first step of a new run has no state to read
                for file in run.scratch:
                    file.read_bytes = file.written_bytes = 0
            rate, sent_bytes = settings.learning_rate * factor, SENT.total() - sent_before
            sent_before += sent_bytes
            record = self._record(result, rate, n_tokens, sent_bytes, step_time_s, parts, first_step)
            line = plain(record) | BURSTS.peaks() | times.after_step(step_time_s, record.warm_up)
            line |= self.observers.after_step(run, record)
            if self.evaluate is not None and settings.evaluate_every and run.step % settings.evaluate_every == 0:
                # Ranks that hold parts of the model compute together.
                ranks = run.inputs.ranks
                with ranks.progress.doing(Phase.SCORING):
                    line |= ranks.of_last_layer(self._scores()) if run.masters.is_sharded else ranks.led(self._scores)
            if run.inputs.ranks.is_first:
                run.step_log.append(line)
            self.observers.after_line(line)
            recent.append(step_time_s)
            if not record.warm_up:
                steady.append(step_time_s)
            if self.on_step is not None:
                self.on_step(record, statistics.median(steady) * (run.inputs.steps - run.step) if steady else math.nan)
            self._handle_result(result, batches, (position["next_window"], run.loader.state()["next_window"] - 1))
            if run.step < record.step:  # the policy has rolled the run back
                self.observers.begin(run)
            is_scheduled = settings.checkpoint_every > 0 and record.step % settings.checkpoint_every == 0
            # None after a rollback, whose checkpoint exists, and none at the last step, which ``finish`` saves.
            if is_scheduled and record.step == run.step < run.inputs.steps:
                if rolls_back:
                    run.watch.in_a_row = 0  # the run has got past the anomaly, and a rollback cannot go before this step
                # With rollbacks the checkpoint is waited for: the step that a run goes back to must not depend on the disk's
                # speed.
                self._begin_checkpoint(wait=rolls_back)
            run.saver.poll()
        run.masters.finish_run()
        run.train_time_s = run.elapsed_s()

    def _phase(self, first_step: int) -> Phase:
        return Phase.STEPS if self.run.step >= first_step + WARM_UP_STEPS else Phase.FIRST_STEPS

    def _begin_checkpoint(self, wait: bool) -> None:
        run = self.run
        run.inputs.ranks.led(lambda: run.saver.begin(lambda: capture(run), wait), Phase.SAVING)

    def _scores(self) -> dict[str, float]:
        """What ``evaluate`` says of the model, and of the running average of its weights."""
        run = self.run
        assert self.evaluate is not None
        with eager(run.decoder):  # scoring has other shapes, and each would be compiled
            found = dict(self.evaluate(run.decoder, run.inputs.prepared))
            run.masters.drop_gathered()
            if run.optimizers.average is not None:
                with run.optimizers.average.swapped_into(run.masters):
                    averaged = self.evaluate(run.decoder, run.inputs.prepared)
                found |= {f"ema_{name}": value for name, value in averaged.items()}
                run.masters.drop_gathered()
        return found

    def _step_or_stop(
        self,
        batches: Sequence[Batch],
        factor: float,
        clock: StepClock,
        position: dict[str, int],
        recent: Sequence[float],
    ) -> StepResult:
        """One step. If a stop is requested and the step would still take longer than ``ABANDON_S``, drop it, save a checkpoint
        of the state before it, and raise Interrupted."""
        run = self.run
        random, began, scaler = random_states(run.device), time.perf_counter(), run.optimizers.loss_scale
        scale = scaler.state() if scaler is not None else {}
        expected_s = statistics.median(recent) if recent else math.inf

        def abandon() -> bool:
            return expected_s - (time.perf_counter() - began) > ABANDON_S and self._stop_asked()

        try:
            return run.train_step(batches, factor, clock, run.watch.accept, abandon)
        except WindowAbandoned:
            run.loader.restore(position)
            restore_random(run.device, random)
            if scaler is not None:  # the window may have overflowed and halved the scale before it was abandoned
                scaler.load_state(scale)
            self._stop()

    def _record(
        self,
        result: StepResult,
        learning_rate: float,
        n_tokens: int,
        sent_bytes: int,
        step_time_s: float,
        parts: dict[str, float],
        first_step: int,
    ) -> StepRecord:
        run = self.run
        tok_per_s = n_tokens / step_time_s
        return StepRecord(
            step=run.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=learning_rate,
            tok_per_s=tok_per_s,
            mfu=run.inputs.mfu(tok_per_s),
            memory_bytes=memory_bytes(run.device),
            peak_memory_bytes=peak_memory_bytes(run.device),
            step_time_s=step_time_s,
            **{name: parts.get(name.removesuffix("_s"), 0.0) for name in PARTS},
            tokens=run.tokens,
            epoch=run.loader.epoch,
            warm_up=run.step - first_step <= WARM_UP_STEPS,
            skipped=result.skipped,
            elapsed_s=run.elapsed_s(),
            sent_bytes=sent_bytes,
            block_grad_norms=result.block_grad_norms,
        )

    def _handle_result(self, result: StepResult, batches: Sequence[Batch], windows: tuple[int, int]) -> None:
        """Tell the spike watch of an accepted step, or respond to a refused one."""
        run = self.run
        if result.skipped is None:
            run.watch.took(result.loss, result.grad_norm)
            if not anchor_every(run.inputs.recipe.train):
                run.watch.in_a_row = 0
        else:
            respond(run, result, batches, windows)

    def _stop(self) -> NoReturn:
        run = self.run
        try:
            path = run.inputs.ranks.led(lambda: save(run), Phase.SAVING)
        except (CheckpointError, ScratchError) as error:
            failed = TwostrokeError(f"stopped at step {run.step}, but {error} {run.saver.what_is_kept()}")
            raise run.inputs.ranks.told(failed) from error
        stopped = Interrupted(
            f"stopped at step {run.step} of {run.inputs.steps} with checkpoint {path}. Continue with --resume."
        )
        raise run.inputs.ranks.told(stopped)

    def _stop_asked(self) -> bool:
        return self.run.inputs.ranks.any(self.stop.requested or self.should_stop(self.run.step))


def _never(step: int) -> bool:
    return False


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is a lack of memory. torch has a type for it on GPUs only; on CPUs it is its allocator's
    RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def requested(recipe: TrainRecipe, log: Log, is_first: bool) -> list[Observer]:
    """The observers that ``recipe`` names, where this ``is_first`` of its ranks; of others those that run the model. Raises
    InputError if it names TensorBoard and that is not installed."""
    from twostroke.training.diagnostics import Diagnostics
    from twostroke.training.samples import Samples
    from twostroke.training.tensorboard import TensorBoard

    settings = recipe.train
    found: list[Observer] = []
    if settings.diagnostics_every:
        found.append(Diagnostics(settings.diagnostics_every))
    if settings.sample_every:
        found.append(Samples(settings.sample_every, settings.sample_prompts, log))
    if settings.tensorboard and is_first:
        found.append(TensorBoard(log))
    return found
