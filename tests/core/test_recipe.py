"""Recipes: overrides apply, and every mistake is a sentence that names the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from twostroke.core.described import plain
from twostroke.core.errors import ConfigError, InputError
from twostroke.core.recipe import TrainRecipe, read_recipe, recipe_from_dict

GOOD = {"model": {"n_layers": 2, "d_model": 64, "n_heads": 1, "d_ff": 128}, "train": {"steps": 3}}


def test_a_recipe_survives_a_round_trip_through_its_dictionary() -> None:
    recipe = recipe_from_dict(GOOD)
    assert recipe_from_dict(plain(recipe)) == recipe
    assert isinstance(recipe, TrainRecipe)


def test_set_overrides_are_read_as_toml_values_and_else_as_text(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text('[model]\nsize="auto"\n[train]\nbudget_s = 300\n')
    recipe = read_recipe(file, ["train.budget_s=60", "output=runs/x", 'data.sources=["a.txt", "b"]', "train.compile=false"])
    assert recipe.train.budget_s == 60.0
    assert recipe.output == "runs/x"
    assert recipe.data.sources == ("a.txt", "b")
    assert recipe.train.compile is False


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"trian": {}}, ["trian", "Did you mean 'train'"]),
        ({"train": {"steps": 3, "learning_rat": 1.0}}, ["train.learning_rat", "learning_rate"]),
        ({"train": {"steps": 3, "batch_size": 0}}, ["train.batch_size=0", "at least 1"]),
        ({"train": {"steps": 3, "batch_size": "8"}}, ["train.batch_size='8'", "int"]),
        ({"train": {"steps": 3, "batch_size": True}}, ["train.batch_size=True", "int"]),
        ({"train": {"steps": 3, "dtype": "fp8"}}, ["train.dtype='fp8'", "'bf16'"]),
        ({"train": {"steps": 3, "budget_s": 4}}, ["exactly one"]),
        ({"train": {}}, ["exactly one"]),
        ({"train": {"steps": 3, "learning_rate": float("nan")}}, ["learning_rate=nan"]),
        ({"train": {"steps": 3, "beta2": 1.0}}, ["beta2=1.0", "less than 1"]),
        ({"data": {"sources": []}}, ["data.sources is empty"]),
        ({"data": {"vocab_size": 100}}, ["data.vocab_size=100", "257"]),
        ({"data": {"vocab_size": 10**12}}, ["data.vocab_size=1000000000000", "at most 4194304"]),
        ({"train": {"steps": 3, "budget_s": float("nan")}}, ["train.budget_s=nan", "finite"]),
        ({"train": {"steps": 10**16}}, ["train.steps=10000000000000000", "at most 1,000,000,000,000,000."]),
        ({"train": {"budget_s": 1e30}}, ["train.budget_s=1e+30", "at most 1,000,000,000,000,000."]),
        ({"data": {"sources": 5}}, ["data.sources=5", "list"]),
        ({"model": {"size": "auto"}}, ["budget_s"]),
        ({"model": 7}, ["model must be a table"]),
        ({"method": "full"}, ["init_from"]),
    ],
)
def test_a_mistake_is_a_sentence_naming_the_key(change: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe_from_dict(GOOD | change)
    for word in words:
        assert word in str(caught.value)


def test_a_missing_or_malformed_file_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read_recipe(tmp_path / "absent.toml")
    with pytest.raises(InputError, match="is not a file"):
        read_recipe(tmp_path)
    bad = tmp_path / "bad.toml"
    bad.write_text("steps = = 3")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_recipe(bad)
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_recipe(bad)


@pytest.mark.parametrize("setting", ["nothing", "=3", "seed.x=3"])
def test_a_malformed_override_is_named(tmp_path: Path, setting: str) -> None:
    file = tmp_path / "r.toml"
    file.write_text("seed = 1\n[model]\nsize='auto'\n[train]\nbudget_s=1\n")
    with pytest.raises(ConfigError, match="--set"):
        read_recipe(file, [setting])
