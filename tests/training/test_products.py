"""Layouts that share a replica's work in more than one way: as one rank or close to it, checkpoints, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from ranked import RankRunner, assert_bits_of, assert_bits_of_one_rank, furthest, laid_out

from twostroke.core.errors import ConfigError
from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.core.recipe import spec_from_recipe
from twostroke.training.start import train
from twostroke.training.tensor_parallel import check_tensor

LLAMA = {"family": "llama", "n_layers": 4, "d_model": 36, "n_heads": 2, "d_ff": 52, "head_dim": 16, "dropout": 0.1}
TIED = {"family": "llama", "n_layers": 3, "d_model": 36, "n_heads": 4, "n_kv_heads": 2, "d_ff": 52, "head_dim": 16} | {
    "tied_embeddings": True
}
GLM4_MOE = {"family": "glm4_moe", "n_layers": 3, "d_model": 32, "n_heads": 4, "d_ff": 32, "n_experts": 4}
EIGHT = (pytest.mark.soak,)


@pytest.mark.parametrize(
    ("model", "settings", "layouts"),
    [
        (LLAMA, {"dtype": "fp32", "clip_norm": 0.1}, [{"pipeline": 2, "shard": 2}]),
        (
            LLAMA | {"tied_embeddings": True},
            {"dtype": "bf16", "optimizer": "muon", "ema_decay": 0.9, "activation_checkpointing": "full"},
            [{"pipeline": 2, "shard": 2, "interleave": 2}, {"pipeline": 2, "shard": 2, "zero": 2}],
        ),
    ],
    ids=["llama", "tied-muon"],
)
def test_shards_of_stages_come_to_the_bits_of_one_rank(
    make_recipe: Any, runner: RankRunner, model: dict[str, Any], settings: dict[str, Any], layouts: list[Any]
) -> None:
    recipe = make_recipe("run", model, steps=3, grad_accumulation=8, batch_size=1, **settings)
    assert_bits_of_one_rank(runner, recipe, [(4, layout) for layout in layouts])


@pytest.mark.parametrize(
    ("model", "settings", "shared"),
    [
        (
            GLM4_MOE | {"tied_embeddings": True, "dropout": 0.1},
            {"optimizer": "muon", "ema_decay": 0.9, "clip_norm": 0.1, "balance_weight": 0.1, "balance_bias_rate": 0.01},
            [{"expert": 2}],
        ),
        (TIED, {"clip_norm": 0.1}, [{"context": 2}, {"tensor": 2}]),
    ],
    ids=["experts", "sequences-matrices"],
)
def test_stages_and_replicas_keep_the_bits_of_what_ranks_share(
    make_recipe: Any, runner: RankRunner, model: dict[str, Any], settings: dict[str, Any], shared: list[dict[str, int]]
) -> None:
    """Ranks that share experts, sequences or matrices come close to one. Stages of them, and replicas, then change nothing."""
    recipe = make_recipe("run", model, **{"steps": 3, "grad_accumulation": 4, "batch_size": 1, "dtype": "fp32", **settings})
    alone = [laid_out(recipe, str(parallel), **parallel) for parallel in shared]
    runner.train_each(2, alone)
    for parallel, one in zip(shared, alone, strict=True):
        assert_bits_of(one, runner, recipe, [(4, parallel | {"pipeline": 2}), (4, parallel | {"data": 2})])


@pytest.mark.parametrize(
    ("n", "model", "settings", "layouts", "limits"),
    [
        (
            4,
            TIED,
            {"clip_norm": 0.1, "ema_decay": 0.9, "activation_checkpointing": "full"},
            [
                {"tensor": 2, "pipeline": 2},
                {"tensor": 2, "shard": 2},
                {"context": 2, "shard": 2, "zero": 2},
                {"context": 2, "tensor": 2},
                {"context": 2, "pipeline": 2},
            ],
            (1e-5, 1e-5),
        ),
        (4, TIED, {"optimizer": "muon"}, [{"tensor": 2, "shard": 2}, {"tensor": 2, "pipeline": 2}], (1e-4, 2e-2)),
        (
            4,
            GLM4_MOE,
            {"balance_weight": 0.1, "balance_bias_rate": 0.01, "clip_norm": 0.1, "activation_checkpointing": "full"},
            [
                {"expert": 2, "shard": 2},
                {"expert": 2, "context": 2},
                {"expert": 2, "tensor": 2},
                {"expert": 2, "pipeline": 2},
            ],
            (1e-5, 1e-5),
        ),
        (
            4,
            GLM4_MOE,
            {"optimizer": "muon"},
            [{"expert": 2, "shard": 2}, {"expert": 2, "tensor": 2}],
            (1e-4, 2e-2),
        ),
        pytest.param(8, TIED, {}, [{"tensor": 2, "pipeline": 2, "shard": 2}], (1e-5, 1e-5), marks=EIGHT),
        pytest.param(8, TIED, {"optimizer": "muon"}, [{"tensor": 2, "context": 2, "shard": 2}], (1e-4, 2e-2), marks=EIGHT),
        pytest.param(
            8,
            GLM4_MOE,
            {"balance_weight": 0.1},
            [
                {"expert": 2, "context": 2, "shard": 2},
                {"expert": 2, "tensor": 2, "pipeline": 2},
                {"expert": 2, "tensor": 2, "shard": 2},
                {"expert": 2, "pipeline": 2, "shard": 2},
                {"tensor": 2, "context": 2, "pipeline": 2},
            ],
            (1e-5, 1e-5),
            marks=EIGHT,
        ),
    ],
    ids=["adamw", "muon", "experts", "experts-muon", "stages-8", "sequences-8", "experts-8"],
)
def test_products_come_close_to_one_rank(
    make_recipe: Any, runner: RankRunner, n: int, model: Any, settings: Any, layouts: list[Any], limits: tuple[float, float]
) -> None:
    recipe = make_recipe("run", model, **{"steps": 4, "grad_accumulation": 4, "batch_size": 1, "dtype": "fp32", **settings})
    alone = laid_out(recipe, "alone")
    train(alone)
    several = [laid_out(recipe, str(parallel), **parallel) for parallel in layouts]
    runner.train_each(n, several)
    for found in several:
        loss, weight = furthest(found, alone)
        assert loss < limits[0], (found.parallel, loss, weight)
        assert weight < limits[1], (found.parallel, loss, weight)


def test_another_product_resumes_a_checkpoint(make_recipe: Any, runner: RankRunner) -> None:
    """Shards of stages save, matrices on stages go on, and one rank ends the run."""
    recipe = make_recipe("run", TIED, steps=6, grad_accumulation=4, batch_size=1, dtype="fp32", optimizer="muon", ema_decay=0.9)
    whole = laid_out(recipe, "whole")
    train(whole)
    several = laid_out(recipe, "several", pipeline=2, shard=2)
    assert runner.train(4, several, stop_after=2)[0][0] == "Interrupted"
    matrices = dataclasses.replace(several, parallel=ParallelRecipe(pipeline=2, tensor=2))
    assert runner.train(4, matrices, resume=True, stop_after=4)[0][0] == "Interrupted"
    train(dataclasses.replace(several, parallel=ParallelRecipe()), resume=True)
    assert furthest(several, whole) < (1e-4, 2e-2)


def test_a_product_that_does_not_divide_is_one_sentence(make_recipe: Any, runner: RankRunner) -> None:
    recipe = make_recipe("run", TIED | {"n_layers": 2}, sequence_length=20, grad_accumulation=4)
    answers = runner.train(4, laid_out(recipe, "bad", tensor=4, shard=4))
    assert [(kind, is_told) for kind, _, is_told in answers] == [("ConfigError", False)] + [("ConfigError", True)] * 3
    assert "parallel.shard=4 · tensor=4 are 16 ranks of a replica, which must divide the 4 ranks" in answers[0][1]
    wide = make_recipe("run", TIED | {"n_kv_heads": 4}, sequence_length=20)
    with pytest.raises(ConfigError, match=r"tensor=4 must divide the 10 tokens .*context=2 ranks .*=20. Use 1, 2, 5 or"):
        check_tensor(wide, spec_from_recipe(wide.model, 40, 20), 4, 2)
    with pytest.raises(ConfigError, match=r"2 groups of parallel\.pipeline=2 · tensor=2 ranks must divide .*accumulation=3"):
        ParallelRecipe(pipeline=2, tensor=2, shard=2).on(8, 3)
    settings = dataclasses.replace(recipe.train, exit_loss=0.1)
    with pytest.raises(ConfigError, match=r"exit_loss=0.1 .* parallel\.pipeline=2 cannot do"):
        dataclasses.replace(recipe, train=settings, parallel=ParallelRecipe(shard=2, pipeline=2))
