"""Tensor with sequence parallel: close to one rank, checkpoints that any layout resumes, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from ranked import RankRunner, assert_close_to_one_rank, furthest, laid_out

from twostroke.core.errors import ConfigError
from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.training.start import train
from twostroke.training.tensor_parallel import Cut

LLAMA = {"family": "llama", "n_layers": 2, "d_model": 36, "n_heads": 4, "n_kv_heads": 2, "d_ff": 52, "head_dim": 16}
GPT2 = {"family": "gpt2", "n_layers": 2, "d_model": 32, "n_heads": 4, "d_ff": 64}
QWEN3 = {"family": "qwen3", "n_layers": 2, "d_model": 32, "n_heads": 4, "n_kv_heads": 4, "d_ff": 64, "head_dim": 8}


@pytest.mark.parametrize(
    ("model", "settings", "n", "parallel", "limits"),
    [
        (LLAMA, {"steps": 20}, 2, {"tensor": 2}, (1e-5, 1e-5)),
        (LLAMA | {"n_kv_heads": 4}, {"steps": 20, "clip_norm": 0.1, "ema_decay": 0.9}, 4, {"tensor": 4}, (1e-5, 1e-5)),
        (QWEN3, {"steps": 8, "optimizer": "muon"}, 2, {"tensor": 2}, (1e-4, 2e-2)),  # orthogonalises in bf16
        # SGD: a bias of keys has no gradient but rounding, whose sign Adam would follow.
        (
            GPT2,
            {"steps": 20, "activation_checkpointing": "full", "optimizer": "sgd"},
            4,
            {"tensor": 2, "data": 2},
            (1e-5, 1e-5),
        ),
        (LLAMA, {"steps": 8, "dtype": "bf16"}, 2, {"tensor": 2}, (5e-3, 5e-2)),
    ],
    ids=["llama", "clipped-4", "qwen3-muon", "gpt2-data", "bf16"],
)
def test_a_run_on_several_ranks_is_close_to_one(
    make_recipe: Any, runner: RankRunner, model: Any, settings: Any, n: int, parallel: Any, limits: tuple[float, float]
) -> None:
    recipe = make_recipe("run", model, **{"grad_accumulation": 2, "dtype": "fp32", **settings})
    assert_close_to_one_rank(runner, recipe, n, parallel, limits)


def test_another_layout_resumes_a_checkpoint(make_recipe: Any, runner: RankRunner) -> None:
    """Two tensor ranks save, one rank goes on, is stopped, and two shards end the run."""
    recipe = make_recipe("run", LLAMA, steps=9, grad_accumulation=2, dtype="fp32", optimizer="muon", clip_norm=0.5)
    whole = laid_out(recipe, "whole")
    train(whole)
    several = laid_out(recipe, "several", tensor=2)
    stopped = runner.train(2, several, stop_after=3)
    assert [(kind, is_told) for kind, _, is_told in stopped] == [("Interrupted", False), ("Interrupted", True)]
    alone = dataclasses.replace(several, parallel=ParallelRecipe())
    assert runner.train(1, alone, resume=True, stop_after=6)[0][0] == "Interrupted"
    shards = dataclasses.replace(several, parallel=ParallelRecipe(shard=2))
    assert [kind for kind, *_ in runner.train(2, shards, resume=True)] == ["done"] * 2
    assert furthest(several, whole) < (1e-4, 1e-2)
    back = laid_out(recipe, "back")
    assert runner.train(1, back, stop_after=3)[0][0] == "Interrupted"
    answers = runner.train(2, dataclasses.replace(back, parallel=ParallelRecipe(tensor=2)), resume=True)
    assert [kind for kind, *_ in answers] == ["done"] * 2, answers
    assert furthest(back, whole) < (1e-4, 1e-2)


@pytest.mark.parametrize(
    ("model", "settings", "sentence"),
    [
        (LLAMA | {"n_kv_heads": 1}, {}, "parallel.tensor=2 must divide n_kv_heads=1. Use 1."),
        (LLAMA | {"d_ff": 51}, {}, "parallel.tensor=2 must divide d_ff=51. Use 1, 3, 17 or 51."),
        (LLAMA, {"sequence_length": 33}, "parallel.tensor=2 must divide train.sequence_length=33. Use 1, 3, 11 or 33."),
        (LLAMA | {"dropout": 0.1}, {}, "the model has dropout, which parallel.tensor=2 does not cut yet."),
        (
            LLAMA,
            {"grad_accumulation": 3, "data": 2},
            "2 groups of parallel.tensor=2 ranks must divide train.grad_accumulation=3",
        ),
    ],
)
def test_what_tensor_ranks_do_not_divide_is_one_sentence(
    make_recipe: Any, runner: RankRunner, model: Any, settings: dict[str, Any], sentence: str
) -> None:
    data = settings.pop("data", 1)
    recipe = laid_out(make_recipe("run", model, **settings), "bad", tensor=2, data=data)
    answers = runner.train(2 * data, recipe)
    assert [(kind, is_told) for kind, _, is_told in answers] == [("ConfigError", False)] + [("ConfigError", True)] * (
        2 * data - 1
    )
    assert sentence in answers[0][1]


def test_pieces_of_a_packed_matrix_are_joined_to_it() -> None:
    """Two matrices of rows that three ranks do not divide, and columns."""
    whole = torch.arange(12 * 5).reshape(12, 5)
    for cut in (Cut((12, 5), 0, (7, 5)), Cut((12, 5), 1, (5,))):
        pieces = [cut.piece(whole, rank, 3) for rank in range(3)]
        assert [tuple(piece.shape) for piece in pieces] == [cut.piece_shape(rank, 3) for rank in range(3)]
        assert torch.equal(cut.joined(pieces), whole)
    assert Cut((12, 5), 0, (7, 5)).piece(whole, 1, 3)[:, 0].tolist() == [15, 20, 25, 45, 50]


def test_what_does_not_combine_is_said_by_the_recipe(make_recipe: Any) -> None:
    recipe = make_recipe()
    for settings, words in (
        ({"diagnostics_every": 1}, "train.diagnostics_every=1"),
        ({"optimizer": "muon", "dtype": "pure_bf16"}, "muon"),
    ):
        train_settings = dataclasses.replace(recipe.train, **settings)
        with pytest.raises(ConfigError, match=f"{words}.* parallel.tensor=2 cannot do"):
            dataclasses.replace(recipe, train=train_settings, parallel=ParallelRecipe(tensor=2))
