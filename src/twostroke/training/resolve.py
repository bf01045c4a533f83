"""Resolves a recipe to a model and a number of steps before the first step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from twostroke.core.errors import ConfigError
from twostroke.core.families import read_spec
from twostroke.core.profile import CALIBRATION_TIME
from twostroke.core.recipe import TrainRecipe, spec_from_recipe
from twostroke.core.spec import ModelSpec
from twostroke.data.shards import PreparedData
from twostroke.data.tokenizer import load_tokenizer
from twostroke.planner.choosing.size_ladder import pick_model
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.training.layout import layout_of
from twostroke.planner.training.plan import steps_for_budget
from twostroke.planner.training.shape import TrainingShape
from twostroke.training.parallelize import pick_device
from twostroke.training.ranks import ALONE, Ranks


def with_own_tokenizer(recipe: TrainRecipe) -> TrainRecipe:
    """``recipe`` with the tokenizer of the model that it starts from, unless it names another."""
    if recipe.model.init_from is None or recipe.data.tokenizer is not None:
        return recipe
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, tokenizer=recipe.model.init_from))


def spec_to_lay_out(recipe: TrainRecipe) -> ModelSpec:
    """The spec that ``parallel.layout`` = "auto" is planned for, before the data are prepared."""
    model, data = recipe.model, recipe.data
    if model.init_from is not None:
        return read_spec(Path(model.init_from))
    vocabulary = load_tokenizer(data.tokenizer).get_vocab_size() if data.tokenizer is not None else data.vocab_size
    return spec_from_recipe(model, vocabulary, recipe.train.sequence_length)


def resolve_spec(recipe: TrainRecipe, prepared: PreparedData, hardware: Hardware | None, ranks: Ranks = ALONE) -> ModelSpec:
    """The spec of the model to train: that of ``model.init_from``, the planner's choice, or the recipe's sizes.

    Raises ConfigError if the model is of a kind that is only planned, or cannot hold the tokenizer's vocabulary or the
    sequence, or if ``size = "auto"`` on a machine that was not calibrated.
    """
    settings, model = recipe.train, recipe.model
    if model.init_from is not None:
        spec = read_spec(Path(model.init_from))
        spec.require_buildable()
        if prepared.vocab_size > spec.vocab_size:
            raise ConfigError(
                f"the tokenizer has {prepared.vocab_size} entries and {model.init_from} has rows for {spec.vocab_size}. "
                "Leave data.tokenizer out to use the model's own."
            )
        if settings.sequence_length > spec.max_positions:
            raise ConfigError(
                f"train.sequence_length={settings.sequence_length} must be at most the {spec.max_positions} positions of "
                f"{model.init_from}. Lower it."
            )
        return _with_exits(spec, recipe)
    if model.size == "auto":
        if hardware is None:
            raise ConfigError(
                f'model.size="auto" needs a profile of this machine. Run `twostroke calibrate` once ({CALIBRATION_TIME}), or '
                "give the model's sizes."
            )
        device = pick_device()
        times = ranks.n // ranks.sharing(device.type)  # as many machines, or devices, as a budget counts for
        picked = pick_model(times * settings.budget_s, prepared.vocab_size, prepared.n_train_tokens, settings, hardware)
        model = model.sized_as(picked)
    return _with_exits(spec_from_recipe(model, prepared.vocab_size, settings.sequence_length, (prepared.eos_id,)), recipe)


def _with_exits(spec: ModelSpec, recipe: TrainRecipe) -> ModelSpec:
    """``spec``, which says so if earlier layers are trained to be read. Raises ConfigError if it has too few of them."""
    settings = recipe.train
    if not settings.exit_loss:
        return spec
    if settings.exits_per_step >= spec.n_layers:
        raise ConfigError(
            f"train.exits_per_step={settings.exits_per_step} must be less than the model's {spec.n_layers} layers: the last "
            "has its loss in every step."
        )
    return spec.with_(early_exit=True)


def resolve_steps(recipe: TrainRecipe, spec: ModelSpec, hardware: Hardware | None, ranks: Ranks = ALONE) -> int:
    """``train.steps``, or the number of steps that the planner expects in ``train.budget_s`` with the start-up, by the layout
    of ``ranks``. All ranks stop after so many.

    Raises ConfigError for a budget on a machine that was not calibrated.
    """
    settings = recipe.train
    if settings.steps:
        return settings.steps
    if hardware is None:
        raise ConfigError(
            f"train.budget_s={settings.budget_s:g} is turned into steps by this machine's profile, which does not exist. "
            f"Run `twostroke calibrate` once ({CALIBRATION_TIME}), or give train.steps."
        )
    shape, layout = (
        TrainingShape.from_recipe(recipe, 0, ranks.n_readers),
        layout_of(ranks.layout, spec, ranks.sharing(pick_device().type)),
    )
    return steps_for_budget(spec, shape, hardware, settings.budget_s, layout)
