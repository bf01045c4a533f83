"""Runs on mixtures: resumed with another number of workers they are the uninterrupted run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from twostroke.core.described import plain
from twostroke.core.errors import ConfigError, DataError, Interrupted
from twostroke.core.recipe import TrainRecipe, recipe_from_dict
from twostroke.training.finish import TrainingResult
from twostroke.training.start import train


@pytest.fixture
def mixed(make_recipe, tmp_path: Path):  # type: ignore[no-untyped-def]
    """``mixed("name", workers=2)``: a run on two sources in the shares 3 to 1."""
    for name, word in (("a", "and or not "), ("b", "while True: pass ")):
        (tmp_path / name).mkdir()
        for i in range(12):
            (tmp_path / name / f"{i}.txt").write_text(f"{i} {word * 60}")

    def make(name: str, **data: Any) -> TrainRecipe:
        table = plain(make_recipe(name, steps=10))
        table["data"] |= {"sources": [str(tmp_path / "a"), str(tmp_path / "b")], "weights": [0.75, 0.25]} | data
        return recipe_from_dict(json.loads(json.dumps(table)))

    return make


def losses(result: TrainingResult) -> list[float]:
    lines = (result.directory / "log.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_a_mixture_resumed_with_other_workers_is_the_uninterrupted_run(mixed) -> None:  # type: ignore[no-untyped-def]
    heard: list[str] = []
    whole = train(mixed("whole"), log=heard.append)
    assert any(line.startswith("mixture: ") and "75%" in line and "25%" in line for line in heard)
    for workers, stop in ((2, 3), (0, 7)):
        with pytest.raises(Interrupted):
            train(mixed("parts", workers=workers), resume=stop > 3, should_stop=lambda step, stop=stop: step == stop)
    parts = train(mixed("parts", workers=1), resume=True)
    assert losses(parts) == losses(whole)
    assert parts.summary["weights_sha256"] == whole.summary["weights_sha256"]
    epochs = whole.summary["source_epochs"]
    assert [Path(source).name for source in epochs] == ["a", "b"]
    assert epochs == parts.summary["source_epochs"]


def test_other_weights_are_another_run(mixed) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(Interrupted):
        train(mixed("run"), should_stop=lambda step: step == 2)
    with pytest.raises(ConfigError, match=r"data.weights=\[0.5, 0.5\] in the recipe differs"):
        train(mixed("run", weights=[0.5, 0.5]), resume=True)


def test_a_source_with_too_little_text_is_named(mixed, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for path in (tmp_path / "b").iterdir():
        path.write_text(" ")
    with pytest.raises(DataError, match=r"/b has 0 tokens to train on, fewer than sequence_length=32"):
        train(mixed("run"))


def test_a_background_that_is_ahead_costs_the_run_nothing(make_recipe) -> None:  # type: ignore[no-untyped-def]
    recipe = make_recipe("run", steps=8)
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, workers=1))
    result = train(recipe)
    waits = [json.loads(line)["data_s"] for line in (result.directory / "log.jsonl").read_text().splitlines()]
    assert len(waits) == 8
