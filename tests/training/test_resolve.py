from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from twostroke.core.errors import ConfigError
from twostroke.core.spec import ModelSpec
from twostroke.model.decoder import Decoder
from twostroke.model.save import save_model
from twostroke.planner.choosing.size_ladder import pick_model
from twostroke.planner.hardware.tables import hardware_names, load_hardware
from twostroke.planner.training.plan import plan_training
from twostroke.planner.training.shape import TrainingShape
from twostroke.training.resolve import resolve_spec, resolve_steps, with_own_tokenizer

DATA: Any = SimpleNamespace(vocab_size=300, n_train_tokens=1_000_000, eos_id=0)
HARDWARE = load_hardware(hardware_names()[0])


def test_explicit_sizes_are_the_models(make_recipe) -> None:
    spec = resolve_spec(make_recipe(), DATA, None)
    assert (spec.n_layers, spec.d_model, spec.vocab_size, spec.max_positions) == (2, 32, 300, 32)
    assert spec.eos_token_ids == (0,)
    assert spec.bos_token_id is None


def test_auto_takes_the_planners_sizes_and_the_recipes_family(make_recipe) -> None:
    recipe = make_recipe(model={"size": "auto", "family": "qwen3", "rope_theta": 5000.0}, steps=0, budget_s=60)
    spec = resolve_spec(recipe, DATA, HARDWARE)
    picked = pick_model(60, 300, 1_000_000, recipe.train, HARDWARE)
    assert (spec.n_layers, spec.d_model, spec.d_ff) == (picked.n_layers, picked.d_model, picked.d_ff)
    assert spec.family == "qwen3"
    assert spec.qk_norm
    assert spec.rope.theta == 5000.0


def test_a_budget_is_as_many_steps_as_the_planner_expects_to_fit(make_recipe) -> None:
    recipe = make_recipe(steps=0, budget_s=60)
    spec = resolve_spec(recipe, DATA, HARDWARE)
    steps = resolve_steps(recipe, spec, HARDWARE)
    plan = plan_training(spec, TrainingShape.from_settings(recipe.train, steps), HARDWARE)
    assert plan.train_time_s is not None
    assert plan.train_time_s <= 60 < plan.train_time_s + plan.step_time_s


def test_steps_are_taken_as_they_are(make_recipe) -> None:
    recipe = make_recipe(steps=17)
    assert resolve_steps(recipe, resolve_spec(recipe, DATA, None), None) == 17


def test_budget_and_auto_need_a_calibrated_machine(make_recipe) -> None:
    recipe = make_recipe(steps=0, budget_s=60)
    with pytest.raises(ConfigError, match="twostroke calibrate"):
        resolve_steps(recipe, resolve_spec(recipe, DATA, None), None)
    with pytest.raises(ConfigError, match="twostroke calibrate"):
        resolve_spec(make_recipe(model={"size": "auto"}, steps=0, budget_s=60), DATA, None)


@pytest.fixture
def model_directory(tmp_path: Path, tokenizer: Path) -> Path:
    spec = ModelSpec("llama", 300, 1, 16, 2, 2, 8, 24, 24, eos_token_ids=(0,))
    return save_model(Decoder(spec), spec, tmp_path / "model", tokenizer_path=tokenizer)


def test_a_model_to_start_from_brings_spec_and_tokenizer(make_recipe, model_directory: Path) -> None:
    recipe = make_recipe(model={"init_from": str(model_directory)}, sequence_length=16)
    assert resolve_spec(recipe, DATA, None).n_layers == 1
    assert with_own_tokenizer(recipe) == recipe  # it names another
    import dataclasses

    bare = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, tokenizer=None))
    assert with_own_tokenizer(bare).data.tokenizer == str(model_directory)


def test_a_model_too_small_for_tokenizer_or_sequence_is_refused(make_recipe, model_directory: Path) -> None:
    recipe = make_recipe(model={"init_from": str(model_directory)}, sequence_length=16)
    larger: Any = SimpleNamespace(vocab_size=301, n_train_tokens=1, eos_id=0)
    with pytest.raises(ConfigError, match="301 entries"):
        resolve_spec(recipe, larger, None)
    with pytest.raises(ConfigError, match="sequence_length=32"):
        resolve_spec(make_recipe(model={"init_from": str(model_directory)}), DATA, None)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt2"])
def test_each_family_brings_its_own_parts(make_recipe, family: str) -> None:
    sizes = {"family": family, "n_layers": 1, "d_model": 32, "n_heads": 2, "d_ff": 48, "dropout": 0.1}
    spec = resolve_spec(make_recipe(model=sizes), DATA, None)
    assert (spec.norm, spec.positions) == (("layernorm", "learned") if family == "gpt2" else ("rmsnorm", "rope"))
    assert (spec.qk_norm, spec.qkv_bias) == (family == "qwen3", family in ("qwen2", "gpt2"))
    assert (spec.sliding_window, spec.dropout, spec.head_dim) == (None, 0.1, 16)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"family": "gpt2", "n_kv_heads": 1}, "leave both out for gpt2"),
        ({"max_positions": 16}, r"sequence_length=32 must be at most model\.max_positions=16"),
        ({"n_heads": 3}, r"model\.n_heads=3 must divide model\.d_model=32"),
        ({"n_kv_heads": 3}, "n_kv_heads=3 must divide n_heads=2"),
        ({"family": "mamba"}, "not supported"),
    ],
)
def test_impossible_sizes_are_named(make_recipe, changes: dict[str, Any], sentence: str) -> None:
    sizes = {"n_layers": 1, "d_model": 32, "n_heads": 2, "d_ff": 48} | changes
    with pytest.raises(ConfigError, match=sentence):
        resolve_spec(make_recipe(model=sizes), DATA, None)
