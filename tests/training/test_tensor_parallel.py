"""Tensor with sequence parallel: close to one rank in every family's features, checkpoints of any layout, and what is refused."""

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


LLAMA = {"family": "llama", "n_layers": 2, "d_model": 36, "n_heads": 4, "n_kv_heads": 2, "d_ff": 52, "head_dim": 16}
GPT2 = {"family": "gpt2", "n_layers": 2, "d_model": 32, "n_heads": 4, "d_ff": 64}
QWEN3 = {"family": "qwen3", "n_layers": 2, "d_model": 32, "n_heads": 4, "n_kv_heads": 4, "d_ff": 64, "head_dim": 8}


@pytest.mark.parametrize(
    ("model", "settings", "n", "parallel", "limit"),
    [
        (LLAMA, {"steps": 20}, 2, {"tensor": 2}, 1e-5),
        (QWEN3, {"steps": 20, "optimizer": "muon", "ema_decay": 0.9, "clip_norm": 0.1}, 4, {"tensor": 4}, 1e-4),
        (GPT2, {"steps": 8, "activation_checkpointing": "full"}, 4, {"tensor": 2, "data": 2}, 1e-5),
        (LLAMA, {"steps": 8, "dtype": "bf16"}, 2, {"tensor": 2}, 5e-3),
    ],
    ids=["llama", "qwen3-muon-4", "gpt2-data", "bf16"],
)
def test_a_run_on_several_ranks_is_close_to_one(
    make_recipe: Any, runner: RankRunner, model: Any, settings: Any, n: int, parallel: Any, limit: float
) -> None:
    recipe = make_recipe("run", model, **{"grad_accumulation": 2, "dtype": "fp32", **settings})
    alone = laid_out(recipe, "alone")
    train(alone)
    several = laid_out(recipe, "several", **parallel)
    answers = runner.train(n, several)
    assert [kind for kind, *_ in answers] == ["done"] * n, answers
    loss, weight = furthest(several, alone)
    assert loss < limit, (loss, weight)
    assert weight < (100 if "optimizer" in settings else 10) * limit, (loss, weight)  # Muon orthogonalises in bf16
