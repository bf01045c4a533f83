"""The layout of ``[parallel]`` that trains fastest on some ranks, of those that the trainer runs and that fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from twostroke.core.errors import ConfigError
from twostroke.core.parallel_recipe import CUTS, ParallelRecipe
from twostroke.core.recipe import TrainRecipe
from twostroke.core.spec import ModelSpec
from twostroke.core.units import format_bytes, format_seconds
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.training.layout import layout_of
from twostroke.planner.training.plan import TrainingPlan, plan_training
from twostroke.planner.training.shape import TrainingShape

INTERLEAVES = (1, 2, 4, 8)
"""Chunks of layers a stage that are tried: with v of them a pipeline waits a v-th as long, and eight leave little of it."""

Check = Callable[[TrainRecipe, ModelSpec, ParallelRecipe], None]
"""Raises ConfigError for a layout that cannot cut what a recipe trains."""


@dataclass(frozen=True)
class PlannedLayout:
    """A layout, and what its ranks need."""

    parallel: ParallelRecipe
    plan: TrainingPlan

    @property
    def keeps_bits(self) -> bool:
        """Whether it comes to the bits of one rank where ``exact`` is set."""
        return self.parallel.tensor * self.parallel.context * self.parallel.expert == 1

    @property
    def words(self) -> str:
        """ "data=2, shard=4, zero=3": what one would write into ``[parallel]``."""
        parallel = self.parallel
        words = [f"{name}={n}" for name in ("data", *CUTS) if (n := getattr(parallel, name)) > 1]
        words += [f"zero={parallel.zero}"] * (parallel.shard > 1)
        words += [f"interleave={parallel.interleave}"] * (parallel.interleave > 1)
        return ", ".join(words) or "data=1"

    @property
    def costs(self) -> str:
        held = f"{format_bytes(self.plan.peak_memory_bytes)} of {format_bytes(self.plan.room_bytes)} a rank"
        return f"{format_seconds(self.plan.step_time_s)} a step, {held}"


def choose_layout(
    recipe: TrainRecipe, spec: ModelSpec, n_ranks: int, hardware: Hardware, check: Check, sharing: int = 1
) -> tuple[ParallelRecipe, str]:
    """The fastest layout of ``recipe`` on ``n_ranks`` ranks of ``hardware`` that fits, and a sentence on it.

    ``sharing`` ranks have one device. With ``exact`` a layout that keeps the bits of one rank comes first, whatever it costs.
    Raises ConfigError if none fits.
    """
    planned = list(_planned(recipe, spec, n_ranks, hardware, check, sharing))
    if not planned:
        raise ConfigError(
            f'parallel.layout="auto" found no layout that divides the model, train.grad_accumulation='
            f"{recipe.train.grad_accumulation} and {n_ranks} ranks. Start another number of ranks."
        )
    fitting = [one for one in planned if one.plan.fits]
    if not fitting:
        least = min(planned, key=lambda one: one.plan.peak_memory_bytes)
        raise ConfigError(
            f'parallel.layout="auto" found no layout that fits {n_ranks} ranks: the smallest, {least.words}, takes '
            f"{least.costs}. Start more ranks, or lower train.batch_size and raise train.grad_accumulation."
        )
    exact = recipe.parallel is None or recipe.parallel.exact
    fitting.sort(
        key=lambda one: (exact and not one.keeps_bits, one.plan.step_time_s, _n_cuts(one.parallel), one.parallel.interleave)
    )
    chosen, others = fitting[0], sorted(fitting[1:], key=lambda one: one.plan.step_time_s)
    faster = next((one for one in others if exact and one.plan.step_time_s < chosen.plan.step_time_s), None)
    sentence = f"layout of {n_ranks} ranks, as planned the fastest of {len(planned)}: {chosen.words} ({chosen.costs})"
    if faster is not None:
        sentence += f"; with exact=false it would be {faster.words} ({format_seconds(faster.plan.step_time_s)})"
    elif others:
        sentence += f"; next is {others[0].words} ({format_seconds(others[0].plan.step_time_s)})"
    return chosen.parallel, f"{sentence}."


def _n_cuts(parallel: ParallelRecipe) -> int:
    return sum(getattr(parallel, name) > 1 for name in CUTS)


def _planned(
    recipe: TrainRecipe, spec: ModelSpec, n_ranks: int, hardware: Hardware, check: Check, sharing: int
) -> Iterator[PlannedLayout]:
    """Of every layout that the trainer runs."""
    for parallel in every_layout(recipe.parallel or ParallelRecipe(), n_ranks):
        try:
            laid_out = replace(recipe, parallel=parallel.on(n_ranks, recipe.train.grad_accumulation))
            check(laid_out, spec, parallel)
            shape = TrainingShape.from_recipe(laid_out, steps=0)
            plan = plan_training(spec, shape, hardware, layout_of(laid_out.parallel, spec, sharing))
        except ConfigError:
            continue
        yield PlannedLayout(parallel, plan)


def every_layout(asked: ParallelRecipe, n_ranks: int) -> Iterator[ParallelRecipe]:
    """``asked`` with every way to cut a replica of ``n_ranks`` ranks or fewer that ``ParallelRecipe`` takes, stages in
    ``INTERLEAVES`` chunks each."""
    divisors = [n for n in range(1, n_ranks + 1) if n_ranks % n == 0]
    for counts in itertools.product(divisors, repeat=len(CUTS)):
        of_a_replica, cuts = math.prod(counts), dict[str, Any](zip(CUTS, counts, strict=True))
        if n_ranks % of_a_replica:
            continue
        zeros = (2, 3) if cuts["shard"] > 1 else (3,)
        for zero, interleave in itertools.product(zeros, INTERLEAVES if cuts["pipeline"] > 1 else (1,)):
            try:
                yield replace(asked, layout="explicit", data=n_ranks // of_a_replica, zero=zero, interleave=interleave, **cuts)
            except ConfigError:
                continue
