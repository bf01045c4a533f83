"""What a sweep is planned to take, by how many of its runs train at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from twostroke.core.errors import ConfigError
from twostroke.core.grid import makespan
from twostroke.core.units import format_seconds
from twostroke.evaluation.bits import DEFAULT_CONTEXT, default_stride
from twostroke.planner.training.layout import layout_of
from twostroke.planner.training.plan import TrainingPlan, plan_training, startup_s
from twostroke.planner.training.scoring import decoder_token_s
from twostroke.planner.training.shape import TrainingShape
from twostroke.training.compiled_before import mark_of, was_compiled
from twostroke.training.environment import environment
from twostroke.training.parallelize import available_cores, pick_device
from twostroke.training.ranks import alone
from twostroke.training.resolve import resolve_spec, resolve_steps
from twostroke.training.start import hardware_of

if TYPE_CHECKING:
    from twostroke.core.recipe import TrainRecipe
    from twostroke.data.shards import PreparedData
    from twostroke.planner.hardware.device import Hardware


class _Planned(NamedTuple):
    """A run that shares the machine, seconds of scoring it at its end, and the mark of its compiled graphs (None of an eager
    one)."""

    plan: TrainingPlan
    scoring_s: float
    mark: Path | None


class SweepTimes:
    """Plans of the runs of ``recipes``, each with its data, in the order in which they start. ConfigError for a model that
    cannot be made, by the name of its directory; and from ``hardware`` and all that needs it on a machine that was not
    calibrated."""

    def __init__(self, recipes: Sequence[TrainRecipe], prepared: Sequence[PreparedData]) -> None:
        self._runs = list(zip(recipes, prepared, strict=True))
        self._device = pick_device()
        self.is_cpu = self._device.type == "cpu"
        self._most = available_cores() if self.is_cpu else torch.cuda.device_count()
        self._hardware, self._why_not = hardware_of(self._device)
        self._plans: dict[int, list[_Planned]] = {}
        for recipe, data in self._runs:
            try:
                resolve_spec(recipe, data, self._hardware)
            except ConfigError as error:
                raise ConfigError(f"{Path(recipe.output).name}: {error}") from None

    @property
    def hardware(self) -> Hardware:
        if self._hardware is None:
            raise ConfigError(self._why_not)
        return self._hardware

    def at_once(self, asked: int) -> tuple[int, str]:
        """How many train at once, and a sentence that says why. 0 asks for as many as are planned to end first."""
        n_runs = len(self._runs)
        if asked and not self.is_cpu and asked > self._most:
            raise ConfigError(f"at_once={asked} is more than the {self._most} GPUs here, of which each run takes one.")
        if asked:
            n = min(asked, max(1, n_runs))
            return n, f"{n_runs} to train, {n} at once."
        if self._hardware is None or not n_runs:
            return 1, f"{n_runs} to train, one after another."
        choices = range(1, min(self._most, n_runs) + 1)
        seconds = {n: self.seconds(n) for n in choices if n == 1 or all(run.plan.fits for run in self._planned(n))}
        n = min(seconds, key=lambda each: (seconds[each], each))
        alone_s = f"; one after another, {format_seconds(seconds[1])}" if n > 1 else ""
        return n, f"{n_runs} to train, {n} at once: predicted {format_seconds(seconds[n])}{alone_s}."

    def seconds(self, n: int) -> float:
        """From the start of the first run to the end of the last, ``n`` at once. A run finds compiled what an earlier one has
        compiled whose first step was done by then: all but the ``n`` − 1 that started last before it."""
        runs, each_s = self._planned(n), []
        for i, (plan, scoring_s, mark) in enumerate(runs):
            earlier = {other.mark for other in runs[: max(0, i + 1 - n)]}
            is_compiled = mark is not None and (mark in earlier or was_compiled(mark))
            start_s = startup_s(plan.shape, self.hardware, is_compiled)
            each_s.append((dataclasses.replace(plan, startup_s=start_s).train_time_s or 0.0) + scoring_s)
        return makespan(each_s, n)

    def steps(self, n: int) -> list[int]:
        """Of each run; 0 where the machine is not calibrated and the recipe has a budget."""
        if self._hardware is None:
            return [recipe.train.steps for recipe, _ in self._runs]
        return [run.plan.shape.steps for run in self._planned(n)]

    def environments(self, n: int) -> list[dict[str, str]]:
        """Of the ``n`` places that runs train in: each its own GPU, where there are some."""
        return [{} if self.is_cpu else {"CUDA_VISIBLE_DEVICES": str(place)} for place in range(n)]

    def _planned(self, n: int) -> list[_Planned]:
        if n not in self._plans:
            self._plans[n] = [self._plan(recipe, prepared, n) for recipe, prepared in self._runs]
        return self._plans[n]

    def _plan(self, recipe: TrainRecipe, prepared: PreparedData, n: int) -> _Planned:
        ranks = alone(n - 1)
        spec = resolve_spec(recipe, prepared, self.hardware, ranks)
        shape = TrainingShape.from_recipe(recipe, resolve_steps(recipe, spec, self.hardware, ranks))
        layout = layout_of(ranks.layout, spec, ranks.sharing(self._device.type))
        known = environment(self._device, recipe.train.compile, ranks.sums)
        known |= {"n_threads": max(1, available_cores() // n)} if self.is_cpu else {}
        mark = mark_of(recipe, spec, known) if known["compiled"] else None
        plan = plan_training(spec, shape, self.hardware, layout)
        context = min(DEFAULT_CONTEXT, spec.max_positions)
        n_tokens = prepared.n_heldout_tokens * context / default_stride(context)
        token_s = decoder_token_s(spec, plan.shape.compute_dtype, self.hardware, context)
        return _Planned(plan, n_tokens * token_s * (n if self.is_cpu else 1), mark)
