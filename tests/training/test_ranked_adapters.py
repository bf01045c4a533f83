"""Adapters over ranks: bits of one rank where rows or layers are shared out, close where matrices or experts are."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import RankRunner, end_of, furthest, laid_out, last_checkpoint

from twostroke.core.errors import ConfigError, Interrupted
from twostroke.core.families import read_spec
from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.core.recipe import TrainRecipe, recipe_from_dict
from twostroke.core.spec import ModelSpec, MoeSpec
from twostroke.data.tokenizer import load_tokenizer
from twostroke.model.decoder import Decoder
from twostroke.model.initialise import initialise
from twostroke.model.save import save_model
from twostroke.training.parallelize import check_layout
from twostroke.training.start import train

Make = Callable[..., TrainRecipe]
SIZES = {"n_layers": 2, "d_model": 64, "n_heads": 4, "n_kv_heads": 4, "head_dim": 16, "d_ff": 64, "max_positions": 96}
EXPERTS = ["all-linear", "gate_up_proj", "down_proj"]


@pytest.fixture
def make(tokenizer: Path, corpus: Path, tmp_path: Path) -> Make:
    def recipe(name: str, method: str, lora: dict[str, Any], model: dict[str, Any] | None = None, **train: Any) -> TrainRecipe:
        of = SIZES | {"tied_embeddings": True} | (model or {})
        base = tmp_path / f"base-{of.get('family', 'llama')}"
        if not base.exists():
            spec = ModelSpec(**{"family": "llama", "vocab_size": load_tokenizer(tokenizer).get_vocab_size(), **of})  # type: ignore[arg-type]
            decoder = Decoder(spec)
            initialise(decoder, 7)
            save_model(decoder, spec, base, "fp32", tokenizer)
        settings = {"steps": 3, "batch_size": 1, "sequence_length": 32, "grad_accumulation": 2, "compile": False}
        return recipe_from_dict(
            {
                "method": method,
                "output": str(tmp_path / name),
                "model": {"init_from": str(base)},
                "data": {"sources": [str(corpus)]},
                "train": settings | {"learning_rate": 1e-2} | train,
                "lora": {"rank": 3, "nf4_block": 16} | lora,
            }
        )

    return recipe


def _train_each(ranks: Any, recipes: list[tuple[TrainRecipe, int | None]]) -> list[str]:
    """Train by each recipe in turn, some only to a step; how each ended."""
    ends = []
    for recipe, stop_after in recipes:
        resumes = Path(recipe.output).exists()
        try:
            train(recipe, resumes, ranks=ranks, should_stop=lambda step, at=stop_after: at is not None and step >= at)
            ends.append("done")
        except Interrupted:
            ends.append("stopped")
    return ends


def test_adapters_on_parts_of_a_base(make: Make, runner: RankRunner) -> None:
    """Rows and stages come to the bits of one rank, a run that stages began and rows go on with too.
    Cut matrices come close."""
    lora = make("lora", "lora", {"rank": 1, "dropout": 0.1}, dtype="bf16", optimizer="muon", ema_decay=0.9)
    qlora = make("qlora", "qlora", {"dropout": 0.1}, dtype="bf16", activation_checkpointing="full")
    close = [make(f"close-{method}", method, {}, dtype="fp32") for method in ("lora", "qlora")]
    alone = [laid_out(recipe, "alone") for recipe in (lora, qlora, *close)]
    torch.set_num_threads(1)
    for recipe in alone:
        train(recipe)
    begun = laid_out(lora, "begun", pipeline=2)
    several = [
        (laid_out(lora, "shard", shard=2), None),
        (begun, 2),
        (dataclasses.replace(begun, parallel=ParallelRecipe(shard=2, zero=2)), None),
        (laid_out(qlora, "shard", shard=2), None),
        (laid_out(qlora, "pipeline", pipeline=2), None),
        *((laid_out(recipe, "tensor", tensor=2), None) for recipe in close),
    ]
    answers = runner.call(_train_each, 2, several)
    assert [ends for _, ends, _ in answers] == [["done", "stopped", *["done"] * 5]] * 2, answers
    both = {"tensor": 2, "shard": 2}
    products = [(laid_out(qlora, "both", pipeline=2, shard=2), None), (laid_out(close[1], "both", **both), None)]
    answers = runner.call(_train_each, 4, products)
    assert [ends for _, ends, _ in answers] == [["done", "done"]] * 4, answers
    several += products
    for number, wanted in ((0, 0), (2, 0), (3, 1), (4, 1), (7, 1)):
        found, of = several[number][0], alone[wanted]
        assert end_of(found) == end_of(of), found.output
        files = [Path(recipe.output) / "model" / "adapter_model.safetensors" for recipe in (found, of)]
        assert files[0].read_bytes() == files[1].read_bytes()
    for number, wanted in ((5, 2), (6, 3), (8, 3)):
        assert furthest(several[number][0], alone[wanted]) < (1e-5, 1e-4)


def test_adapters_of_experts_are_where_the_experts_are(make: Make, runner: RankRunner) -> None:
    moe = MoeSpec(4, 2, 32, n_shared_experts=1, d_shared=32, layers=(1,), shared_gate=True)
    model = {"family": "qwen2_moe", "moe": moe, "qkv_bias": True, "n_layers": 2}
    recipes = [make(method, method, {"targets": EXPERTS}, model, dtype="fp32") for method in ("lora", "qlora")]
    alone = [laid_out(recipe, "alone") for recipe in recipes]
    for recipe in alone:
        train(recipe)
    several = [(laid_out(recipe, axis, **{axis: 2}), None) for axis in ("expert", "tensor") for recipe in recipes]
    answers = runner.call(_train_each, 2, several)
    assert [ends for _, ends, _ in answers] == [["done"] * 4] * 2, answers
    for (found, _), wanted in zip(several, 2 * alone, strict=True):
        assert furthest(found, wanted) < (1e-5, 1e-4)


def test_what_ranks_cannot_adapt_is_one_sentence(make: Make) -> None:
    for parallel, lora, words in (
        ({"tensor": 2}, {"dropout": 0.1}, r"adapters with dropout \(lora.dropout\), which parallel.tensor=2 does not cut yet"),
        ({"tensor": 2}, {"nf4_block": 64}, "lora.nf4_block=64 must divide the 32 columns that a rank has of out"),
    ):
        recipe = make("refused", "qlora", lora)
        with pytest.raises(ConfigError, match=words):
            check_layout(recipe, read_spec(Path(str(recipe.model.init_from))), ParallelRecipe(**parallel))


def test_adapters_alone_are_sent_as_differences(make: Make, runner: RankRunner) -> None:
    """The frozen base is gathered once, because nothing changes it."""
    recipe = make("run", "qlora", {"rank": 8}, grad_accumulation=4)
    several = laid_out(recipe, "int4", shard=2, zero=2, exact=False, compress_weights="int4")
    assert [kind for kind, *_ in runner.train(2, several)] == ["done"] * 2
    sent = [json.loads(line)["sent_bytes"] for line in (Path(several.output) / "log.jsonl").read_text().splitlines()]
    held = {k: t for k, t in last_checkpoint(several).optimizer.items() if k.startswith("held::")}
    elements = sum(t.numel() for t in held.values())
    assert elements == sum(t.numel() for t in last_checkpoint(several).weights.values())
    assert sent[1] == sent[2] == pytest.approx(elements * (2 * 4 + 0.5 + 1 / 128) / 2, rel=0.01)
    assert sent[0] > 1.5 * sent[1]
