"""Ranks whose layout the planner chooses, and whose steps follow from a time budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ranked import RankRunner, laid_out

from twostroke.core.profile import MachineProfile, save_profile
from twostroke.core.recipe import TrainRecipe
from twostroke.training.start import train


def _train(ranks: Any, recipe: TrainRecipe, profile: MachineProfile) -> tuple[list[str], str]:
    if ranks.is_first:
        save_profile(profile)
    said: list[str] = []
    train(recipe, log=said.append, ranks=ranks)
    return said, str(ranks.layout)


def test_ranks_agree_on_a_layout_and_on_the_steps_of_a_budget(
    make_recipe: Any, runner: RankRunner, profile: MachineProfile
) -> None:
    recipe = laid_out(make_recipe(steps=0, budget_s=0.01, grad_accumulation=2), "auto", layout="auto")
    (_, (said, first), _), (_, (_, second), _) = runner.call(_train, 2, recipe, profile)
    assert said[0].startswith("layout of 2 ranks, as planned the fastest of ")
    assert first == second
    assert "layout='explicit'" in first
    summary = json.loads((Path(recipe.output) / "summary.json").read_text())
    assert summary["steps"] >= 1
    assert summary["prediction"]["step_time_s"] > 0  # of ranks that share the cores, too
    lines = (Path(recipe.output) / "log.jsonl").read_text().splitlines()
    assert len(lines) == summary["steps"]
