"""Starts a run: it resolves directory, data, model and steps, and freezes the prediction, before the first step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from twostroke.core.data_recipe import REUSED, DataRecipe
from twostroke.core.described import plain
from twostroke.core.errors import ConfigError, DataError, InputError, TwostrokeError
from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.core.policy import computed_type, multiplies_bf16
from twostroke.core.profile import read_fingerprint
from twostroke.core.recipe import TrainRecipe
from twostroke.core.spec import ModelSpec
from twostroke.core.units import format_bytes, format_count, format_seconds
from twostroke.data.prepare import prepare
from twostroke.data.shards import PreparedData, open_prepared
from twostroke.ledger.code_version import code_version
from twostroke.ledger.scoring import numbers_of
from twostroke.ledger.store import Ledger
from twostroke.planner.choosing.layouts import choose_layout
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.present import as_it_was
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.training.layout import layout_of
from twostroke.planner.training.plan import plan_training, startup_s, unknown_type
from twostroke.planner.training.preparing import recipe_s
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.truth.recording import Planned, Recording, freeze
from twostroke.planner.work.params import count_parameters
from twostroke.training.adapters import check_adapters
from twostroke.training.compiled_before import mark_of, was_compiled
from twostroke.training.environment import environment
from twostroke.training.finish import TrainingResult, finished
from twostroke.training.loop import Evaluate, execute
from twostroke.training.measurement import StepRecord
from twostroke.training.observers import Observer
from twostroke.training.parallelize import check_layout, pick_device
from twostroke.training.ranks import ALONE, Ranks, alone
from twostroke.training.resolve import resolve_spec, resolve_steps, spec_to_lay_out, with_own_tokenizer
from twostroke.training.run import RunInputs
from twostroke.training.run_directory import Resolved, RunDirectory, first_difference
from twostroke.training.scratch import check_offload
from twostroke.training.tensorboard import require_tensorboard

Log = Callable[[str], None]


def _silent(line: str) -> None:
    pass


def lay_out(recipe: TrainRecipe, ranks: Ranks | None, log: Log = _silent, beside: int = 0) -> Ranks:
    """``ranks`` by the recipe's ``[parallel]``, which is data parallel where several have none; a process by itself without
    either, with so many other runs ``beside`` it. ``log`` is told what the planner chose where that lays out.

    All ranks must run the same recipe and the same releases. Raises ConfigError on all of them otherwise, and for a layout that
    does not divide them.
    """
    if ranks is None:
        if recipe.parallel is None:
            return alone(beside)
        ranks = Ranks()
        ranks.beside = beside
    layout = recipe.parallel or ParallelRecipe()
    with ranks.agreed():
        releases = {"twostroke": code_version(), "torch": str(torch.__version__)}
        for rank, (theirs, other) in enumerate(ranks.gathered((releases, plain(recipe))) if ranks.n > 1 else ()):
            if ranks.is_first:  # which tells it
                _check_alike(rank, theirs, releases, first_difference(plain(recipe), other))
    if layout.is_auto:
        layout = ranks.led(lambda: _chosen(recipe, ranks, log))
    with ranks.agreed():
        ranks.lay_out(layout.on(ranks.n, recipe.train.grad_accumulation))
    return ranks


def _chosen(recipe: TrainRecipe, ranks: Ranks, log: Log) -> ParallelRecipe:
    """The planner's layout of ``recipe`` on ``ranks``."""
    assert recipe.parallel is not None
    if ranks.n == 1:
        return dataclasses.replace(recipe.parallel, layout="explicit")
    hardware, why_not = hardware_of(pick_device())
    if hardware is None:
        raise ConfigError(f'parallel.layout="auto" is planned by a profile of this machine: {why_not}')
    spec = spec_to_lay_out(with_own_tokenizer(recipe))
    chosen, sentence = choose_layout(recipe, spec, ranks.n, hardware, check_layout, ranks.sharing(pick_device().type))
    log(sentence)
    return chosen


def _check_alike(rank: int, theirs: dict[str, str], own: dict[str, str], key: tuple[str, Any, Any] | None) -> None:
    """Raise ConfigError if ``rank`` runs another release than the first rank, or another recipe, which differs in ``key``."""
    for name, version in own.items():
        if theirs[name] != version:
            raise ConfigError(
                f"rank {rank} runs {name} {theirs[name]}, and rank 0 {version}. Install one release on all hosts."
            )
    if key is not None:
        raise ConfigError(
            f"{key[0]}={key[2]!r} in the recipe of rank {rank} differs from {key[1]!r} in that of rank 0. Start all ranks with "
            "the same recipe."
        )


def find_finished(recipe: TrainRecipe, resume: bool, ranks: Ranks = ALONE) -> TrainingResult | None:
    """The result of the run that ``recipe`` would resume; None if it has not finished.

    Raises the errors of ``start`` if the run directory and the recipe do not match.
    """
    directory = RunDirectory(Path(recipe.output))

    def find() -> TrainingResult | None:
        return finished(directory) if directory.open(with_own_tokenizer(recipe), resume) is not None else None

    return ranks.led(find)


def start(
    recipe: TrainRecipe,
    resume: bool = False,
    log: Log = _silent,
    data_progress: Callable[[float, str], None] | None = None,
    ledger: Ledger | None = None,
    ranks: Ranks = ALONE,
) -> RunInputs:
    """Do everything before the first step: open the run directory, prepare the data, resolve model and steps, and predict.

    The prediction is frozen in the ledger before anything is trained. Of several ``ranks`` the first does all this, and the
    others open the same data. Raises InputError, ConfigError, DataError or CorruptFileError with nothing created if the recipe
    cannot be run.
    """
    recipe = with_own_tokenizer(recipe)
    ledger = ledger or Ledger()
    began: list[RunInputs] = []

    def begin() -> tuple[Resolved, bool]:
        began.append(_start(recipe, resume, log, data_progress, ledger, ranks))
        return began[0].resolved, began[0].resumes

    resolved, resumes = ranks.led(begin)
    with ranks.agreed():
        if began:
            return began[0]
        prepared = _same_data(recipe, resolved, None)
        entry = Recording(None, Planned(), log, ledger)
        return RunInputs(recipe, RunDirectory(Path(recipe.output)), resolved, prepared, entry, resumes, log, ranks)


def _start(
    recipe: TrainRecipe,
    resume: bool,
    log: Log,
    data_progress: Callable[[float, str], None] | None,
    ledger: Ledger,
    ranks: Ranks,
) -> RunInputs:
    if recipe.train.tensorboard:
        require_tensorboard()
    directory = RunDirectory(Path(recipe.output))
    resolved = directory.open(recipe, resume)
    check_offload(recipe.train, pick_device().type)
    hardware, why_not = hardware_of(pick_device())
    if hardware is not None and ranks.beside:  # its share leaves room for the runs beside it, which are no other programs
        hardware = as_it_was(hardware)
    layout = partial(layout_of, ranks.layout, sharing=ranks.sharing(pick_device().type))
    if resolved is not None:
        check_layout(recipe, resolved.spec, ranks.layout)
        prepared = _same_data(recipe, resolved, data_progress)
        planned = Planned(_frozen_prediction(ledger, resolved.run_id), hardware, n_devices=layout(resolved.spec).n_paid)
        entry = Recording(resolved.run_id, planned, log, ledger)
        return RunInputs(recipe, directory, resolved, prepared, entry, True, log, ranks)
    prepared, is_made = _prepare(recipe.data, data_progress)
    spec = resolve_spec(recipe, prepared, hardware, ranks)
    check_adapters(recipe, spec)
    check_layout(recipe, spec, ranks.layout)
    steps = resolve_steps(recipe, spec, hardware, ranks)
    dtype = computed_type(recipe.train.dtype, multiplies_bf16(pick_device().type, read_fingerprint().isa))
    if dtype != recipe.train.dtype:
        log(
            f"train.dtype={recipe.train.dtype!r} is computed in {dtype}: this processor multiplies bf16 a hundred times slower."
        )
    surroundings = environment(pick_device(), recipe.train.compile, ranks.sums)
    planned, shape = Planned(), TrainingShape.from_recipe(recipe, steps, ranks.n_readers)
    if hardware is not None and (kind := unknown_type(shape, hardware)) is not None:
        hardware, why_not = None, f"this machine's profile has no rate of products in {kind}, which torch computes slowly here."
    if hardware is not None:
        plan = plan_training(spec, shape, hardware, layout(spec))
        if surroundings["compiled"] and was_compiled(mark_of(recipe, spec, surroundings)):
            plan = dataclasses.replace(plan, startup_s=startup_s(plan.shape, hardware, is_compiled=True))
        if is_made:
            plan = dataclasses.replace(plan, startup_s=plan.startup_s + _preparing_s(recipe.data, prepared, hardware))
        planned = Planned(plan.prediction(), hardware, n_devices=plan.layout.n_paid)
    else:
        log(f"no prediction and no MFU: {why_not}")
    inputs = {
        "recipe": plain(recipe),
        "spec": _plain(spec),
        "steps": steps,
        "n_train_tokens": prepared.n_train_tokens,
        "run_directory": str(directory.path.resolve()),
    }
    run_id = freeze("train", str(directory.path), inputs, planned, ledger)
    resolved = Resolved(
        spec=spec,
        steps=steps,
        data_directory=str(prepared.directory),
        data_key=prepared.key,
        run_id=run_id,
        environment=surroundings,
        dtype=dtype,
    )
    with directory.locked():
        if not directory.is_unused():
            raise InputError(f"another process has just begun a run in {directory.path}. Name another directory.")
        directory.create(recipe, resolved)
    return RunInputs(recipe, directory, resolved, prepared, Recording(run_id, planned, log, ledger), False, log, ranks)


def _prepare(recipe: DataRecipe, progress: Callable[[float, str], None] | None) -> tuple[PreparedData, bool]:
    """The data, and whether they were prepared now."""
    notes: list[str] = []

    def tell(done: float, note: str) -> None:
        notes.append(note)
        if progress is not None:
            progress(done, note)

    prepared = prepare(recipe, progress=tell)
    return prepared, notes[-1] != REUSED


def _preparing_s(recipe: DataRecipe, prepared: PreparedData, hardware: Hardware) -> float:
    """What preparing is planned to take; 0 for what was not measured."""
    try:
        return recipe_s(recipe, prepared.report["n_train_bytes"] + prepared.n_heldout_bytes, hardware)
    except (ConfigError, KeyError):  # conversations count their turns, not bytes
        return 0.0


def hardware_of(device: torch.device) -> tuple[Hardware | None, str]:
    """(the machine as calibrated for training on ``device``, or None; the reason if it is None)."""
    try:
        return load_hardware("this", "train", device.type), ""
    except ConfigError as error:
        return None, str(error)


def _plain(spec: ModelSpec) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(spec)))
    return plain


def _same_data(recipe: TrainRecipe, resolved: Resolved, progress: Callable[[float, str], None] | None) -> PreparedData:
    """The shards that the run began with, from their directory or prepared again if the sources have not changed."""
    try:
        prepared = open_prepared(resolved.data_directory)
        if prepared.key == resolved.data_key:
            return prepared
    except DataError:
        pass
    prepared = prepare(recipe.data, progress=progress)
    if prepared.key != resolved.data_key:
        raise DataError(
            f"the run's prepared data {resolved.data_directory} is gone, and the sources have changed since, so the run cannot "
            "be "
            "continued exactly. Start another run with --set output=..."
        )
    return prepared


def _frozen_prediction(ledger: Ledger, run_id: str) -> dict[str, Any]:
    """The prediction that was frozen when the run began; empty if the ledger does not have it."""
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
    observers: Sequence[Observer] = (),
    ranks: Ranks | None = None,
) -> TrainingResult:
    """Train by ``recipe`` from beginning to end, with ``start`` and ``execute`` in one call. Each of ``ranks`` calls it."""
    laid_out = lay_out(recipe, ranks, log)
    done = find_finished(recipe, resume, laid_out)
    if done is not None:
        return done
    run = start(recipe, resume, log, ledger=ledger, ranks=laid_out)
    return execute(run, on_step, evaluate, should_stop, observers=observers)


def describe(run: RunInputs) -> str:
    """One line that describes the run for people: model, steps, tokens, and the predicted time and memory."""
    spec, settings = run.spec, run.recipe.train
    n_parameters = count_parameters(spec).total
    tokens = run.steps * settings.batch_size * settings.sequence_length * settings.grad_accumulation
    line = (
        f"{spec.family}, {format_count(n_parameters)} parameters ({spec.n_layers} × {spec.d_model}), {run.steps} steps, "
        f"{format_count(tokens)} tokens ({tokens / max(1, run.prepared.n_train_tokens):.2g} epochs of "
        f"{format_count(run.prepared.n_train_tokens)})"
    )
    time_s, peak = run.entry.prediction.get("train_time_s"), run.entry.prediction.get("peak_memory_bytes")
    if isinstance(time_s, float) and isinstance(peak, float):
        line += f"; predicted {format_seconds(time_s)}, {format_bytes(peak)}"
    return line
