"""Scores, samples and diagnostics in the middle of a run whose ranks hold parts of the model: what one rank finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import RankRunner, laid_out

from twostroke.core.recipe import TrainRecipe
from twostroke.data.shards import PreparedData
from twostroke.model.decoder import Decoder
from twostroke.training import samples
from twostroke.training.start import train

TIED = {"family": "llama", "n_layers": 4, "d_model": 36, "n_heads": 2, "d_ff": 52, "head_dim": 16}
FEW_TOKENS = 8
SCORES = ("heldout_bits_per_byte", "ema_heldout_bits_per_byte")


def _score(decoder: Decoder, prepared: PreparedData) -> dict[str, float]:
    from twostroke.evaluation.bits import bits_per_byte

    scored = bits_per_byte(decoder, prepared, ctx=29, stride=29, with_xz=False)
    return {"heldout_bits_per_byte": scored.bits_per_byte}


def _train_each(ranks: Any, recipes: list[TrainRecipe]) -> None:
    samples.NEW_TOKENS = FEW_TOKENS
    for recipe in recipes:
        train(recipe, ranks=ranks, evaluate=_score)


def _lines(recipe: TrainRecipe, file: str = "log.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(recipe.output) / file).read_text().splitlines()]


def test_a_run_on_parts_is_looked_into_as_one_rank_is(
    make_recipe: Any, runner: RankRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "NEW_TOKENS", FEW_TOKENS)
    looking = {"evaluate_every": 2, "sample_every": 2, "sample_prompts": ["if not in"], "diagnostics_every": 2}
    settings = {"steps": 2, "grad_accumulation": 4, "batch_size": 1, "dtype": "fp32", "ema_decay": 0.5}
    recipe = make_recipe("run", TIED, **settings, **looking)
    without = make_recipe("run", TIED, **settings, **looking | {"diagnostics_every": 0})
    alone = laid_out(recipe, "alone")
    torch.set_num_threads(1)
    train(alone, evaluate=_score)
    wanted, texts = _lines(alone)[-1], _lines(alone, "samples.jsonl")
    exact = [laid_out(recipe, "shard", shard=2), laid_out(recipe, "pipeline", pipeline=2)]
    close = laid_out(without, "tensor", tensor=2)
    products = [laid_out(recipe, "both", pipeline=2, shard=2, interleave=2), laid_out(without, "all", pipeline=2, tensor=2)]
    for n, recipes in ((2, [*exact, close]), (4, products)):
        answers = runner.call(_train_each, n, recipes)
        assert [kind for kind, *_ in answers] == ["done"] * n, answers
    exact.append(products[0])
    for several in exact:
        found = _lines(several)[-1]
        assert {name: found[name] for name in SCORES} == {name: wanted[name] for name in SCORES}, several.output
        assert found["activations"] == wanted["activations"]
        assert found["update_ratios"] == pytest.approx(wanted["update_ratios"], rel=1e-2)
        assert _lines(several, "samples.jsonl") == texts
    for several in (close, products[1]):
        scores = {name: _lines(several)[-1][name] for name in SCORES}
        assert scores == pytest.approx({name: wanted[name] for name in SCORES}, rel=1e-5)
        assert len(_lines(several, "samples.jsonl")) == 1
