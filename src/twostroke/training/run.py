"""A run as data: ``RunInputs``, fixed before anything is computed, and ``RunState``, complete as soon as it is made."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from twostroke.core.recipe import TrainRecipe
from twostroke.core.spec import ModelSpec
from twostroke.core.train_settings import TrainingType
from twostroke.data.background import BackgroundLoader
from twostroke.data.loader import Batch
from twostroke.data.shards import PreparedData
from twostroke.model.decoder import Decoder
from twostroke.planner.training.plan import flops_per_token
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.truth.recording import Recording
from twostroke.training.anomalies import AnomalyLog, SpikeWatch
from twostroke.training.experts import correction_biases
from twostroke.training.optimizers import Optimizers
from twostroke.training.precision import MasterWeights
from twostroke.training.ranks import ALONE, Part, Ranks
from twostroke.training.run_directory import Resolved, RunDirectory, StepLog
from twostroke.training.saver import CheckpointSaver
from twostroke.training.scratch import ScratchFile
from twostroke.training.step import StepResult, TrainStep
from twostroke.training.whole import Whole

Log = Callable[[str], None]


@dataclass(frozen=True)
class RunInputs:
    """A run, resolved and predicted, not yet begun. ``start`` makes it, ``execute`` does the work."""

    recipe: TrainRecipe
    directory: RunDirectory
    resolved: Resolved
    prepared: PreparedData
    entry: Recording  # in the ledger
    resumes: bool
    log: Log
    ranks: Ranks = ALONE

    @property
    def steps(self) -> int:
        return self.resolved.steps

    @property
    def spec(self) -> ModelSpec:
        return self.resolved.spec

    @cached_property
    def computed(self) -> TrainRecipe:
        """The recipe with the training type that the run is computed in: fp32 for bf16 on a processor without its products."""
        dtype = cast(TrainingType, self.resolved.dtype or self.recipe.train.dtype)
        return dataclasses.replace(self.recipe, train=dataclasses.replace(self.recipe.train, dtype=dtype))

    def mfu(self, tok_per_s: float) -> float | None:
        """Model FLOP/s of ``tok_per_s``, that of all ranks, over the peak of their devices, whole ones; None where that is not
        known."""
        planned = self.entry.planned
        hardware = planned.hardware
        peak = hardware.peak_flop_per_s.get(self.computed.train.compute_dtype) if hardware is not None else None
        return None if peak is None else self._flops_per_token * tok_per_s / (math.ceil(planned.n_devices) * peak)

    @cached_property
    def _flops_per_token(self) -> float:
        return flops_per_token(self.spec, TrainingShape.from_recipe(self.recipe, self.steps))


@dataclass
class RunState:
    """What a run computes with, and how far it is. ``build`` makes it from ``inputs``; observers read it.

    ``last_batch`` is the last micro-batch of the step that was just done, ``last_result`` what that step returned.
    """

    inputs: RunInputs
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
    scratch: tuple[ScratchFile, ...] = ()
    scratch_steps: int = 0  # whose bytes they have counted
    step: int = 0
    tokens: int = 0
    notes: list[str] = field(default_factory=list)
    elapsed_before_s: float = 0.0  # in earlier processes
    began: float = field(default_factory=time.perf_counter)
    train_time_s: float | None = None
    startup_s: float | None = None
    last_batch: Batch | None = None
    last_result: StepResult | None = None

    @property
    def biases(self) -> dict[str, Tensor]:
        """What a run changes beside its masters: its routers' correction biases."""
        return {} if self.inputs.recipe.trains_adapters else correction_biases(self.decoder)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The whole masters and ``biases``: what a checkpoint and the model's directory hold. Where ranks hold rows of them,
        one is gathered when it is read, inside ``Ranks.led``; ``optimizer_state`` and ``average`` likewise."""
        return self.masters.whole(self.biases)

    @property
    def optimizer_state(self) -> Mapping[str, Tensor]:
        return self.masters.whole_state(self.optimizers.state())

    @property
    def average(self) -> Mapping[str, Tensor] | None:
        """The running average of the weights, and ``biases``."""
        average = self.optimizers.average
        return None if average is None else self.masters.whole_average(average.averages, self.biases)

    def parts(self) -> dict[str, Part]:
        """What ranks hold together of weights and optimizer, by the names under which they ask each other for it."""
        held = (self.weights, self.optimizer_state)
        return {name: part for whole in held if isinstance(whole, Whole) for name, part in whole.parts().items()}

    def elapsed_s(self) -> float:
        return self.elapsed_before_s + time.perf_counter() - self.began
