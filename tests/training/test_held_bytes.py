"""What a rank holds of weights, gradients and the optimizer's state is what the plan of the recipe's layout says."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from ranked import RankRunner, laid_out, train_each_counting
from torch import Tensor

from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.core.recipe import TrainRecipe
from twostroke.planner.training.exchanging import largest_buckets
from twostroke.planner.training.layout import layout_of
from twostroke.planner.training.memory import FP32
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.training.sharding import (
    rank_state_bytes,
    stage_held,
    stages_of,
    sums_bucket_by_bucket,
    trained_tensors,
)
from twostroke.training.run_directory import RunDirectory

HELD = ("weights", "gradients", "optimizer")


def _train_each(ranks: Any, recipes: list[TrainRecipe]) -> list[dict[str, int]]:
    """The most bytes that this rank held of each, by recipe."""
    from twostroke.training.optimizers import Optimizers
    from twostroke.training.ranked_masters import SummedMasters

    most: dict[str, int] = {}
    accumulate, step = SummedMasters.accumulate, Optimizers.step

    def watched(masters: Any, chunk: int = 0) -> None:
        left = [parameter.grad for parameter in masters._parameters.values() if parameter.grad is not None]
        sums = [t for _, tree in masters._chunks for level in tree._levels if level is not None for t in level]
        _keep_most(most, "gradients", [*left, *sums, *masters.gradients.values()])
        _keep_most(most, "weights", [*masters.weights.values(), *masters.parameters.values()])
        accumulate(masters, chunk)

    def stepped(optimizers: Any, *arguments: Any) -> Any:
        found = step(optimizers, *arguments)
        most["optimizer"] = optimizers.state_bytes
        return found

    SummedMasters.accumulate, Optimizers.step = watched, stepped  # type: ignore[method-assign, assignment]
    return train_each_counting(most, ranks, recipes)


def _keep_most(most: dict[str, int], kind: str, tensors: Iterable[Tensor]) -> None:
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    once = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in local}
    most[kind] = max(most.get(kind, 0), sum(once.values()))


@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("llama", [{"data": 4}, {"data": 4, "exact": False}, {"data": 2, "shard": 2}, {"tensor": 2, "pipeline": 2}]),
        ("qwen2_moe", [{"expert": 4}, {"expert": 2, "shard": 2}, {"expert": 2, "pipeline": 2}, {"expert": 2, "tensor": 2}]),
    ],
)
def test_ranks_hold_what_is_planned(make_recipe: Any, runner: RankRunner, family: str, layouts: list[dict[str, Any]]) -> None:
    """Of stages the fullest holds it. Rows that two ranks of shards do not divide go to one of them: 0.1% of what they hold."""
    sizes = {"family": family, "n_layers": 4, "d_model": 256, "n_heads": 4, "n_kv_heads": 4, "d_ff": 64}
    recipe = make_recipe("run", sizes, steps=2, grad_accumulation=16, batch_size=1, dtype="fp32")
    recipes = [laid_out(recipe, str(parallel), **parallel) for parallel in layouts]
    answers = runner.call(_train_each, 4, recipes)
    for number, parallel in enumerate(layouts):
        found = RunDirectory(Path(recipes[number].output)).open(recipes[number], resume=True)
        assert found is not None
        spec, layout = found.spec, layout_of(ParallelRecipe(**parallel).on(4, 16), found.spec)
        shape = TrainingShape.from_recipe(recipes[number])
        planned = [
            rank_state_bytes(shape, layout, stage_held(spec, shape, layout, stage)) for stage in stages_of(spec, shape, layout)
        ]
        for terms, stage in zip(planned, stages_of(spec, shape, layout), strict=True):
            left = terms["left"]
            if sums_bucket_by_bucket(shape, layout):
                bucket, _ = largest_buckets(reversed(list(trained_tensors(spec, shape, layout, stage))))
                left = min(left, FP32 * bucket)
            terms["gradients"] += left  # both are there at the end of the last pass
        for kind in HELD:
            held, wanted = max(by_rank[number][kind] for _, by_rank, _ in answers), max(terms[kind] for terms in planned)
            assert held == pytest.approx(wanted, rel=2e-3), (parallel, kind, held / wanted)
