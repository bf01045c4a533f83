"""Expert parallel: rows find their experts on other ranks, runs are close to one rank, checkpoints fit any layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import RankRunner, values_of

from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.core.recipe import TrainRecipe
from twostroke.training.checkpoint import list_checkpoints, load_checkpoint
from twostroke.training.start import train


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> RankRunner:
    return RankRunner(tmp_path_factory.mktemp("ledger"))


def laid_out(recipe: TrainRecipe, name: str, **parallel: Any) -> TrainRecipe:
    return dataclasses.replace(recipe, output=f"{recipe.output}-{name}", parallel=ParallelRecipe(**parallel))


def weights_of(recipe: TrainRecipe) -> dict[str, torch.Tensor]:
    return dict(load_checkpoint(list_checkpoints(Path(recipe.output) / "checkpoints")[-1][1]).weights)


def furthest(found: TrainRecipe, wanted: TrainRecipe) -> tuple[float, float]:
    """The largest relative difference of a step's loss, and of a weight by its tensor's norm."""
    losses = [values_of(Path(recipe.output)) for recipe in (found, wanted)]
    loss = max(abs(a[1] - b[1]) / b[1] for a, b in zip(*losses, strict=True))
    ends = weights_of(found), weights_of(wanted)
    assert ends[0].keys() == ends[1].keys()
    weight = max(float((ends[0][name] - w).norm() / w.norm().clamp_min(1e-3)) for name, w in ends[1].items())
    return loss, weight


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
    alone = laid_out(recipe, "alone")
    train(alone)
    several = laid_out(recipe, "several", **parallel)
    answers = runner.train(n, several)
    assert [kind for kind, *_ in answers] == ["done"] * n, answers
    loss, weight = furthest(several, alone)
    assert loss < limits[0], (loss, weight)
    assert weight < limits[1], (loss, weight)


def test_another_layout_resumes_a_checkpoint(make_recipe: Any, runner: RankRunner) -> None:
    """Two ranks share the experts and are stopped, and tensors of all shapes are whole for a single one; and back."""
    recipe = make_recipe("run", MIXTRAL, steps=6, grad_accumulation=2, dtype="fp32", optimizer="muon")
    whole = laid_out(recipe, "whole")
    train(whole)
    for name, first, then in (("there", (2, {"expert": 2}), (1, {})), ("back", (1, {}), (2, {"expert": 2}))):
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
