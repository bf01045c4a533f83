"""What ranks of a replica send each other in a step is what the plan of the recipe's layout says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from ranked import RankRunner

from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.core.recipe import TrainRecipe
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.training.layout import layout_of
from twostroke.planner.training.plan import plan_training
from twostroke.planner.training.shape import TrainingShape
from twostroke.training.run_directory import RunDirectory
from twostroke.training.start import train

STEPS = 2


def _train(ranks: Any, recipe: TrainRecipe) -> dict[str, int]:
    from twostroke.training.ranks import SENT

    train(recipe, ranks=ranks)
    return dict(SENT)


@pytest.mark.parametrize(
    ("family", "n", "parallel", "kinds", "within"),
    [
        # The loss exchanges three numbers a token beside what the plan counts, and norms' gradients.
        ("llama", 2, {"tensor": 2}, {"tensor": "tensor"}, 0.01),
        ("llama", 4, {"tensor": 4}, {"tensor": "tensor"}, 0.03),
        ("llama", 2, {"context": 2}, {"context": "context", "data": "gradients"}, 1e-3),
        ("llama", 4, {"context": 4}, {"context": "context", "data": "gradients"}, 1e-3),
        ("llama", 2, {"pipeline": 2}, {"pipeline": "pipeline"}, 1e-6),
        # The plan's tokens choose evenly.
        ("mixtral", 2, {"expert": 2}, {"expert": "expert"}, 0.15),
    ],
)
def test_ranks_send_what_is_planned(
    make_recipe: Any, runner: RankRunner, family: str, n: int, parallel: Any, kinds: dict[str, str], within: float
) -> None:
    sizes = {"family": family, "n_layers": 2, "d_model": 256, "n_heads": 4, "n_kv_heads": 4, "d_ff": 64}
    recipe = make_recipe("run", sizes, steps=STEPS, grad_accumulation=2, sequence_length=64, dtype="fp32")
    recipe = dataclasses.replace(recipe, parallel=ParallelRecipe(**parallel))
    answers = runner.call(_train, n, recipe)
    spec = RunDirectory(Path(recipe.output)).open(recipe, resume=True).spec  # type: ignore[union-attr]
    plan = plan_training(spec, TrainingShape.from_recipe(recipe), load_hardware("h100"), layout_of(recipe.parallel))
    for planned, counted in kinds.items():
        wanted = sum(traffic.sent_bytes for traffic in plan.traffic if traffic.parallel == planned)
        found = sum(sent[counted] for _, sent, _ in answers) / n / STEPS
        assert found == pytest.approx(wanted, rel=within), (planned, found / wanted)
