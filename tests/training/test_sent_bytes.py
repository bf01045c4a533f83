"""What ranks of a replica send each other in a step is what the plan of the recipe's layout says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranked import RankRunner, laid_out, train_each_counting

from small_models import SPECS
from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.core.recipe import TrainRecipe
from twostroke.model.decoder import Decoder
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.training.layout import Layout, layout_of
from twostroke.planner.training.plan import plan_training
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.training.sharding import Stage, whole_parameters
from twostroke.training.run_directory import RunDirectory
from twostroke.training.tensor_parallel import cuts

STEPS = 2

Case = tuple[dict[str, Any], dict[str, float]]
"""A layout, and how close the bytes of each kind of traffic come to the plan."""


def _train_each(ranks: Any, recipes: list[TrainRecipe]) -> list[dict[str, int]]:
    from twostroke.training.exchanges import SENT

    return train_each_counting(SENT, ranks, recipes)


@pytest.mark.parametrize(
    ("family", "n", "cases"),
    [
        # The loss of tensor parallel exchanges three numbers a token beside what the plan counts: 0.07% of it here.
        (
            "llama",
            2,
            [
                ({"tensor": 2}, {"tensor": 1e-3}),
                ({"context": 2}, {"context": 1e-3, "data": 1e-3}),
                ({"pipeline": 2}, {"pipeline": 1e-6}),  # the embedding is the head too
            ],
        ),
        (
            "llama",
            4,
            [
                ({"tensor": 4}, {"tensor": 2e-3}),
                ({"data": 2, "shard": 2}, {"data": 1e-3}),
                ({"context": 4}, {"context": 1e-3, "data": 1e-3}),
                ({"data": 2, "context": 2}, {"context": 1e-3, "data": 1e-3}),
                ({"pipeline": 2, "shard": 2, "zero": 2}, {"pipeline": 1e-6, "data": 5e-3}),
                ({"shard": 2, "tensor": 2, "zero": 2}, {"data": 1e-3, "tensor": 1e-3}),
                ({"shard": 2, "context": 2, "zero": 2}, {"data": 1e-3, "context": 1e-3}),
                ({"tensor": 2, "context": 2}, {"tensor": 1e-3, "data": 1e-3, "context": 1e-3}),
                ({"data": 2, "pipeline": 2, "interleave": 2}, {"pipeline": 1e-6, "data": 1e-3}),
                ({"tensor": 2, "pipeline": 2}, {"tensor": 2e-3, "pipeline": 1e-6}),
            ],
        ),
        # The plan's tokens choose evenly.
        ("mixtral", 2, [({"expert": 2}, {"expert": 0.15, "data": 1e-3})]),
        (
            "qwen2_moe",  # of which every row passes an MLP too
            4,
            [
                ({"expert": 2, "data": 2}, {"expert": 0.15, "data": 1e-3}),
                ({"expert": 2, "shard": 2, "zero": 2}, {"expert": 0.15, "data": 5e-3}),
                ({"expert": 2, "pipeline": 2}, {"expert": 0.15, "pipeline": 1e-6, "data": 1e-3}),
                ({"expert": 2, "tensor": 2}, {"expert": 0.15, "tensor": 1e-3, "data": 1e-3}),
            ],
        ),
    ],
)
def test_ranks_send_what_is_planned(make_recipe: Any, runner: RankRunner, family: str, n: int, cases: list[Case]) -> None:
    """Stages differ, and the one that sends most is planned. Of experts all ranks together are."""
    sizes = {"family": family, "n_layers": 4, "d_model": 256, "n_heads": 4, "n_kv_heads": 4, "d_ff": 64}
    recipe = make_recipe("run", sizes, steps=STEPS, grad_accumulation=4, sequence_length=64, dtype="fp32")
    recipes = [laid_out(recipe, str(parallel), **parallel) for parallel, _ in cases]
    answers = runner.call(_train_each, n, recipes)
    for number, (parallel, within) in enumerate(cases):
        found = RunDirectory(Path(recipes[number].output)).open(recipes[number], resume=True)
        assert found is not None
        shape, layout = TrainingShape.from_recipe(recipes[number]), layout_of(ParallelRecipe(**parallel), found.spec)
        plan = plan_training(found.spec, shape, load_hardware("h100"), layout)
        by_kind = {kind: [sent[number].get(kind, 0) / STEPS for _, sent, _ in answers] for kind in within}
        assert set(within) == {traffic.parallel for traffic in plan.traffic} == set().union(*(s[number] for _, s, _ in answers))
        for kind, by_rank in by_kind.items():
            wanted = sum(traffic.sent_bytes for traffic in plan.traffic if traffic.parallel == kind)
            sent = sum(by_rank) / n if kind == "expert" else max(by_rank)
            assert sent == pytest.approx(wanted, rel=within[kind]), (parallel, kind, sent / wanted)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_tensor_parallel_leaves_whole_is_counted(family: str) -> None:
    spec = SPECS[family]
    cut, layout = cuts(spec), Layout(tensor=2)
    parameters = Decoder(spec, device="meta").named_parameters()
    whole = sum(p.numel() for name, p in parameters if name not in cut)
    shape = TrainingShape(method="full", sequence_length=32)
    assert whole_parameters(spec, shape, layout, Stage(0, spec.n_layers, True, True)) == whole
