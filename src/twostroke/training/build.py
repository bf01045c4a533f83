"""Builds what a run computes with, new or restored from the newest intact checkpoint."""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from twostroke.core.errors import CorruptFileError
from twostroke.model.decoder import Decoder
from twostroke.model.initialise import initialise
from twostroke.model.load import filled, load_model
from twostroke.training.adapters import base_state, check_base, load_adapted
from twostroke.training.anomalies import AnomalyLog, SpikeWatch, anchor_every
from twostroke.training.checkpoint import Checkpoint, checkpoint_name, read_checkpoint
from twostroke.training.conversations import make_loader
from twostroke.training.early_exit import EarlyExit
from twostroke.training.environment import differences, environment
from twostroke.training.experts import ExpertBalance
from twostroke.training.masters import masters_of
from twostroke.training.offloaded_activations import OffloadedActivations
from twostroke.training.optimizers import Optimizers
from twostroke.training.parallelize import chunk_of, pick_device
from twostroke.training.pipelined_step import PipelinedStep
from twostroke.training.ranked_step import RankedStep
from twostroke.training.ranks import Ranks
from twostroke.training.reader import CheckpointReader
from twostroke.training.retention import Retention
from twostroke.training.run import RunInputs, RunState
from twostroke.training.run_directory import StepLog
from twostroke.training.saver import CheckpointSaver
from twostroke.training.scratch import scratch_files
from twostroke.training.step import TrainStep
from twostroke.training.together import run_together


def build(inputs: RunInputs) -> RunState:
    """Build decoder, masters, optimizers, loader and step of a run. A resumed run is restored from its newest intact
    checkpoint."""
    recipe, log, ranks = inputs.computed, inputs.log, inputs.ranks
    settings = recipe.train
    device = pick_device()
    reader = CheckpointReader(inputs.directory.checkpoints, log) if inputs.resumes and ranks.is_first else None
    starts_new = ranks.led(lambda: reader is None or not reader.will_find)
    torch.manual_seed(recipe.seed)
    if recipe.trains_adapters:  # the base is not in checkpoints
        decoder = load_adapted(recipe, device)
    elif recipe.model.init_from is not None and starts_new:
        decoder = load_model(recipe.model.init_from, "fp32", device)
    else:
        decoder = filled(Decoder(inputs.spec, device="meta"), device, ())
        if starts_new:
            initialise(decoder, recipe.seed)
    if starts_new:
        for note in decoder.spec.notes:
            log(note)
    decoder.train()
    masters = masters_of(decoder, settings.dtype, None if ranks.is_alone else ranks)
    run_together(decoder, ranks, masters.dtype)
    state_file, activations_file = scratch_files(settings, inputs.directory.path)
    optimizers = Optimizers(masters, inputs.spec, settings, state_file)
    own = (*decoder.parameters(), *decoder.buffers())
    step_log = StepLog(inputs.directory.log, log)
    saver = CheckpointSaver(
        inputs.directory.checkpoints,
        Retention(settings.keep_checkpoints, settings.keep_every, anchor_every(settings)),
        log,
        flush_log=step_log.flush,
        sync_log=step_log.sync,
        in_background=settings.checkpoint_in_background,
    )
    run = RunState(
        inputs,
        device,
        decoder,
        masters,
        optimizers,
        make_loader(inputs.prepared, recipe, log, ranks),
        step_log,
        SpikeWatch(settings.spike_factor),
        AnomalyLog(inputs.directory.anomalies, log),
        saver,
        step_kind(ranks)(
            decoder,
            masters,
            optimizers,
            settings.clip_norm,
            settings.compile,
            log,
            settings.activation_checkpointing,
            ExpertBalance(decoder, settings, moves_biases=not recipe.trains_adapters),
            EarlyExit.of(decoder, settings, inputs.steps, from_scratch=recipe.model.init_from is None),
            chunk_of(decoder, ranks),
            OffloadedActivations(activations_file, own) if activations_file is not None else None,
        ),
        scratch=tuple(file for file in (state_file, activations_file) if file is not None),
    )
    ranks.parts = run.parts
    checkpoint = read_on_all(run, lambda: reader.get() if reader is not None else None) if inputs.resumes else None
    if checkpoint is not None:
        restore(run, checkpoint)
    elif ranks.is_first:
        run.anomalies.restart(0)
    if ranks.is_first:
        run.step_log.restart(run.step)
    return run


def step_kind(ranks: Ranks) -> Callable[..., TrainStep]:
    """The step of a run on ``ranks``."""
    if ranks.is_alone:
        return TrainStep
    return partial(RankedStep if ranks.layout.pipeline == 1 else PipelinedStep, ranks)


def read_on_all(run: RunState, find: Callable[[], Checkpoint | None]) -> Checkpoint | None:
    """What ``find`` returns on the first rank, which verifies it. Other ranks read the same files."""
    ranks = run.inputs.ranks
    found: list[Checkpoint] = []

    def step() -> int | None:
        checkpoint = find()
        if checkpoint is None:
            return None
        found.append(checkpoint)
        return int(checkpoint.state["step"])

    number = ranks.led(step)
    if number is None:
        return None
    with ranks.agreed():
        return found[0] if found else read_checkpoint(run.inputs.directory.checkpoints / checkpoint_name(number))


def capture(run: RunState) -> Checkpoint:
    """The state that the rest of ``run`` depends on. The tensors are the run's own and not copies."""
    state = {
        "step": run.step,
        "tokens": run.tokens,
        "watch": run.watch.state(),
        "n_anomalies": run.anomalies.count,
        "elapsed_s": run.elapsed_s(),
        "loader": run.loader.state(),
        "rng": random_states(run.device),
    } | base_state(run.inputs.recipe)
    return Checkpoint(run.weights, run.optimizer_state, state)


def save(run: RunState) -> Path:
    """Write a checkpoint of this step to the disk. Raises CheckpointError; older checkpoints are unchanged. The first rank does
    so, inside ``Ranks.led``."""
    return run.saver.save(capture(run))


def restore(run: RunState, checkpoint: Checkpoint) -> None:
    """Restore in ``run`` the state that ``capture`` returned. Raises CorruptFileError or InputError if it is of another run."""
    state = checkpoint.state
    check_base(run.inputs.recipe, state)
    restore_computation(run, checkpoint)
    run.elapsed_before_s = float(state["elapsed_s"])
    if run.inputs.ranks.is_first:
        run.anomalies.restart(int(state.get("n_anomalies", 0)))  # releases before it had none
    run.loader.restore(state["loader"])
    now = environment(run.device, run.inputs.recipe.train.compile, run.inputs.ranks.sums)
    differing = differences(run.inputs.resolved.environment, now)
    if differing:
        run.inputs.log(
            f"the run resumes in another environment than it began in: {'; '.join(differing)}. Sums may round differently, so "
            "losses may differ in their last bits."
        )


def restore_computation(run: RunState, checkpoint: Checkpoint) -> None:
    """Restore weights, optimizer, random states and step. The loader stays where it is."""
    missing = set(run.weights) ^ set(checkpoint.weights)
    if missing:
        raise CorruptFileError(
            f"the checkpoint's weights are of another model: only one of the two has {sorted(missing)[0]!r}."
        )
    run.masters.load(checkpoint.weights)
    for name, bias in run.biases.items():
        bias.copy_(checkpoint.weights[name])
    run.optimizers.load_state(run.masters.own_state(checkpoint.optimizer))
    state = checkpoint.state
    run.step, run.tokens = int(state["step"]), int(state["tokens"])
    if "watch" in state:
        run.watch.load_state(state["watch"])
    restore_random(run.device, state["rng"])


def random_states(device: torch.device) -> dict[str, str]:
    """The states of the random generators, which dropout uses."""
    states = {"cpu": _encode(torch.get_rng_state())}
    if device.type == "cuda":
        states["cuda"] = _encode(torch.cuda.get_rng_state(device))
    return states


def restore_random(device: torch.device, states: dict[str, str]) -> None:
    torch.set_rng_state(_decode(states["cpu"]))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(_decode(states["cuda"]), device)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
