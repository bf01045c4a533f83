"""Runs over ranks: the same bits for any number of them, in every layout, also across a resume; and what ends them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import RankRunner, values_of

from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.core.recipe import TrainRecipe
from twostroke.training.checkpoint import list_checkpoints, load_checkpoint
from twostroke.training.start import train

LAYOUTS = {"data": {}, "zero2": {"zero": 2}, "zero3": {"zero": 3}}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> RankRunner:
    return RankRunner(tmp_path_factory.mktemp("ledger"))


def laid_out(recipe: TrainRecipe, name: str, **parallel: Any) -> TrainRecipe:
    return dataclasses.replace(recipe, output=f"{recipe.output}-{name}", parallel=ParallelRecipe(**parallel))


def end_of(recipe: TrainRecipe) -> tuple[Any, ...]:
    """Everything that a run leaves that must not depend on its layout."""
    directory = Path(recipe.output)
    end = load_checkpoint(list_checkpoints(directory / "checkpoints")[-1][1])
    state = {k: v for k, v in end.state.items() if k != "elapsed_s"}
    tensors = [(name, t.dtype, t.numpy().tobytes() if t.dtype != torch.bfloat16 else t.float().numpy().tobytes())
               for part in (end.weights, end.optimizer) for name, t in sorted(part.items())]  # fmt: skip
    return tensors, state, values_of(directory)


@pytest.mark.parametrize(
    ("settings", "layouts"),
    [
        ({"dtype": "bf16"}, [(2, {}), (4, {}), (2, {"shard": 2, "zero": 2}), (4, {"shard": 4})]),
        ({"dtype": "fp32", "optimizer": "muon", "ema_decay": 0.9}, [(2, {"shard": 2}), (4, {"shard": 2}), (4, {"shard": 4})]),
        ({"dtype": "fp16", "optimizer": "sgd"}, [(2, {}), (4, {"shard": 4, "zero": 2})]),
        ({"dtype": "bf16", "optimizer": "muon", "activation_checkpointing": "full"}, [(4, {"shard": 4, "zero": 2})]),
        ({"dtype": "pure_bf16", "optimizer": "adam"}, [(4, {})]),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_every_layout_comes_to_the_bits_of_one_rank(
    make_recipe: Any, runner: RankRunner, settings: dict[str, Any], layouts: list[tuple[int, dict[str, Any]]]
) -> None:
    """Rows that no number of ranks divides: a vocabulary of 300 on 4 and norms of 36."""
    sizes = {"family": "llama", "n_layers": 2, "d_model": 36, "n_heads": 2, "d_ff": 52, "head_dim": 16, "dropout": 0.1}
    recipe = make_recipe("run", sizes, steps=4, grad_accumulation=8, batch_size=1, **settings)
    torch.set_num_threads(1)
    alone = laid_out(recipe, "alone")
    train(alone)
    wanted = end_of(alone)
    for n, parallel in layouts:
        several = laid_out(recipe, f"{n}-{parallel}", **parallel)
        answers = runner.train(n, several)
        assert [kind for kind, *_ in answers] == ["done"] * n, answers
        assert len({value for _, value, _ in answers}) == 1
        assert end_of(several) == wanted, (n, parallel)
        assert (Path(several.output) / "model" / "model.safetensors").read_bytes() == (
            Path(alone.output) / "model" / "model.safetensors"
        ).read_bytes()
