"""Expert parallel: rows find their experts on other ranks, runs are close to one rank, checkpoints fit any layout."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from ranked import RankRunner, assert_close_to_one_rank, furthest, laid_out

from twostroke.core.errors import ConfigError
from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.core.recipe import spec_from_recipe
from twostroke.training.expert_parallel import check_expert
from twostroke.training.start import train

MIXTRAL = {"family": "mixtral", "n_layers": 2, "d_model": 32, "n_heads": 2, "d_ff": 32, "n_experts": 4}
QWEN3_MOE = {"family": "qwen3_moe", "n_layers": 2, "d_model": 32, "n_heads": 2, "d_ff": 32, "n_experts": 8, "top_k": 3}


COMPILED = (pytest.mark.soak, pytest.mark.filterwarnings("ignore"))  # torch's compiler warns of torch


@pytest.mark.parametrize(
    ("model", "settings", "n", "parallel", "limits"),
    [
        (MIXTRAL, {"steps": 20, "balance_weight": 0.01, "evaluate_every": 20}, 2, {"expert": 2}, (1e-5, 1e-5)),
        (
            QWEN3_MOE,
            {"steps": 20, "clip_norm": 0.1, "activation_checkpointing": "full"},
            4,
            {"expert": 2, "data": 2},
            (1e-5, 1e-5),
        ),
        (MIXTRAL, {"steps": 8, "optimizer": "muon", "ema_decay": 0.9}, 4, {"expert": 4}, (1e-4, 2e-2)),
        (MIXTRAL, {"steps": 8, "dtype": "bf16"}, 2, {"expert": 2}, (5e-3, 5e-2)),
        pytest.param(MIXTRAL, {"steps": 3, "compile": True}, 2, {"expert": 2}, (1e-5, 1e-4), marks=COMPILED),
    ],
    ids=["mixtral", "qwen3-data", "muon-4", "bf16", "compiled"],
)
def test_a_run_on_several_ranks_is_close_to_one(
    make_recipe: Any, runner: RankRunner, model: Any, settings: Any, n: int, parallel: Any, limits: tuple[float, float]
) -> None:
    recipe = make_recipe("run", model, **{"grad_accumulation": 4, "dtype": "fp32", **settings})
    assert_close_to_one_rank(runner, recipe, n, parallel, limits)


def test_another_layout_resumes_a_checkpoint(make_recipe: Any, runner: RankRunner) -> None:
    """Two ranks share the experts and are stopped, and tensors of all shapes are whole for a single one; and back."""
    recipe = make_recipe("run", MIXTRAL, steps=6, grad_accumulation=2, dtype="fp32", optimizer="muon")
    whole = laid_out(recipe, "whole")
    train(whole)
    for name, first, then in (
        ("there", (2, {"expert": 2}), (1, {})),
        ("back", (1, {}), (2, {"expert": 2})),
        ("across", (4, {"expert": 2, "pipeline": 2}), (4, {"expert": 2, "tensor": 2})),
    ):
        begun = laid_out(recipe, name, **first[1])
        assert runner.train(first[0], begun, stop_after=3)[0][0] == "Interrupted"
        again = dataclasses.replace(begun, parallel=ParallelRecipe(**then[1]))
        assert [kind for kind, *_ in runner.train(then[0], again, resume=True)] == ["done"] * then[0]
        assert furthest(begun, whole) < (1e-4, 2e-2)


def test_what_ranks_cannot_share_is_one_sentence(make_recipe: Any, runner: RankRunner) -> None:
    dense = {"family": "llama", "n_layers": 1, "d_model": 32, "n_heads": 2, "d_ff": 48}
    for model, words in (
        (MIXTRAL | {"n_experts": 3}, "parallel.expert=2 must divide the model's 3 experts. Use 1 or 3."),
        (dense, "parallel.expert=2 shares out experts, and the model has none."),
    ):
        recipe = laid_out(make_recipe("run", model, grad_accumulation=2), "bad", expert=2)
        answers = runner.train(2, recipe)
        assert [(kind, is_told) for kind, _, is_told in answers] == [("ConfigError", False), ("ConfigError", True)]
        assert words in answers[0][1]
    recipe = make_recipe("run", MIXTRAL)
    with pytest.raises(ConfigError, match=r"expert=4 · tensor=2 must divide the model's 4 experts. Use 1, 2 or 4"):
        check_expert(recipe, spec_from_recipe(recipe.model, 40, 32), 4, 2)
