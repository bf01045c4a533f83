"""Whole runs in each precision: stopped and resumed they end in the bits of a run that was not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from twostroke.core.errors import Interrupted
from twostroke.core.recipe import TrainRecipe
from twostroke.data.shards import PreparedData
from twostroke.model.decoder import Decoder
from twostroke.model.load import load_model
from twostroke.training.checkpoint import Checkpoint, list_checkpoints, load_checkpoint
from twostroke.training.start import train

MakeRecipe = Callable[..., TrainRecipe]

WAYS: list[dict[str, Any]] = [
    {"dtype": "pure_bf16", "optimizer": "adamw", "activation_checkpointing": "selective"},
    {"dtype": "pure_bf16", "optimizer": "muon", "ema_decay": 0.5},
    {"dtype": "fp16", "optimizer": "adam", "grad_accumulation": 2},
    {"dtype": "fp32", "optimizer": "sgd", "nesterov": True, "ema_decay": 0.9, "schedule": "wsd"},
    {"dtype": "bf16", "optimizer": "adamw", "activation_checkpointing": "full", "decay_norms": True},
]


def _last(output: str) -> Checkpoint:
    return load_checkpoint(list_checkpoints(Path(output) / "checkpoints")[-1][1])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(str(value) for value in way.values()))
def test_a_resumed_run_ends_in_the_same_bits(make_recipe: MakeRecipe, way: dict[str, Any]) -> None:
    dropping = {"family": "llama", "n_layers": 2, "d_model": 32, "n_heads": 2, "d_ff": 48, "dropout": 0.1}
    whole = make_recipe("whole", model=dropping, steps=5, **way)
    cut = make_recipe("cut", model=dropping, steps=5, **way)
    train(whole)
    with pytest.raises(Interrupted):
        train(cut, should_stop=lambda step: step == 3)
    train(cut, resume=True)
    expected, found = _last(whole.output), _last(cut.output)
    for one, other in ((expected.weights, found.weights), (expected.optimizer, found.optimizer)):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    stored = torch.bfloat16 if way["dtype"] == "pure_bf16" else torch.float32
    assert {weight.dtype for weight in found.weights.values()} == {stored}


def test_the_average_is_scored_beside_the_weights_and_written_as_a_model(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(steps=4, ema_decay=0.5, evaluate_every=2, dtype="fp32")
    scored: list[torch.Tensor] = []

    def evaluate(decoder: Decoder, prepared: PreparedData) -> dict[str, float]:
        scored.append(decoder.embed.weight.detach().clone())
        return {"score": float(len(scored))}

    result = train(recipe, evaluate=evaluate)
    lines = [json.loads(line) for line in (result.directory / "log.jsonl").read_text().splitlines()]
    assert [(line.get("score"), line.get("ema_score")) for line in lines] == [(None, None), (1, 2), (None, None), (3, 4)]
    assert not torch.equal(scored[2], scored[3])
    average = load_model(result.directory / "model-ema")
    saved = _last(recipe.output).optimizer
    for name, parameter in average.named_parameters():
        assert torch.equal(parameter, saved[f"ema::{name}"]), name
    assert torch.equal(scored[3], saved["ema::embed.weight"])  # the fourth step was the last
    own = load_model(result.model)
    assert not torch.equal(own.embed.weight, average.embed.weight)


def test_a_pure_bf16_run_writes_a_bf16_model(make_recipe: MakeRecipe) -> None:
    result = train(make_recipe(steps=2, dtype="pure_bf16"))
    config = json.loads((result.model / "config.json").read_text())
    assert "bfloat16" in (config.get("torch_dtype"), config.get("dtype"))
    assert not (result.directory / "model-ema").exists()
    n = result.summary["n_trained_parameters"]
    assert result.summary["measurement"]["weights_bytes"] == 2 * n
    assert result.summary["measurement"]["gradients_bytes"] == 2 * n
