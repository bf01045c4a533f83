"""Pipeline parallel: the bits of one rank, checkpoints that any layout resumes, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict, deque
from typing import Any

import pytest
from ranked import RankRunner, assert_bits_of_one_rank, end_of, laid_out

from small_models import SPECS
from twostroke.core.errors import ConfigError
from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.model.decoder import Decoder
from twostroke.training.ranks import Ranks
from twostroke.training.stages import Turn, layers_of, most_sending, stage_of, turns
from twostroke.training.start import train

LLAMA = {"family": "llama", "n_layers": 5, "d_model": 36, "n_heads": 2, "d_ff": 52, "head_dim": 16, "dropout": 0.1}
TIED = LLAMA | {"n_layers": 4, "tied_embeddings": True}
GLM4_MOE = {"family": "glm4_moe", "n_layers": 3, "d_model": 32, "n_heads": 2, "d_ff": 32, "n_experts": 4}
GPT2 = {"family": "gpt2", "n_layers": 2, "d_model": 32, "n_heads": 4, "d_ff": 64, "dropout": 0.1}


@pytest.mark.parametrize(
    ("model", "settings", "layouts"),
    [
        (
            LLAMA,
            {"dtype": "fp32", "clip_norm": 0.1},
            [(2, {"pipeline": 2}), (2, {"pipeline": 2, "interleave": 2}), (4, {"pipeline": 4})],
        ),
        (TIED, {"dtype": "bf16", "ema_decay": 0.9, "activation_checkpointing": "full"}, [(4, {"pipeline": 4})]),
        (TIED, {"dtype": "bf16", "optimizer": "muon"}, [(4, {"pipeline": 2, "data": 2})]),
        (GPT2, {"dtype": "fp16", "optimizer": "sgd", "momentum": 0.0}, [(2, {"pipeline": 2})]),
        (TIED, {"dtype": "pure_bf16", "optimizer": "lamb"}, [(2, {"pipeline": 2})]),
        (GLM4_MOE, {"dtype": "fp32", "balance_weight": 0.01, "balance_bias_rate": 0.01}, [(2, {"pipeline": 2})]),
    ],
    ids=["llama", "tied", "muon-data", "gpt2", "pure-bf16-lamb", "experts"],
)
def test_stages_come_to_the_bits_of_one_rank(
    make_recipe: Any, runner: RankRunner, model: dict[str, Any], settings: dict[str, Any], layouts: list[tuple[int, Any]]
) -> None:
    recipe = make_recipe("run", model, steps=4, grad_accumulation=8, batch_size=1, **settings)
    assert_bits_of_one_rank(runner, recipe, layouts)


def test_another_layout_resumes_a_pipelines_checkpoint(make_recipe: Any, runner: RankRunner) -> None:
    """Two stages save, two shards go on, and four stages end the run."""
    recipe = make_recipe("run", TIED, steps=7, grad_accumulation=4, batch_size=1, optimizer="muon", ema_decay=0.9)
    whole = laid_out(recipe, "whole")
    train(whole)
    several = laid_out(recipe, "several", pipeline=2)
    stopped = runner.train(2, several, stop_after=2)
    assert [(kind, is_told) for kind, _, is_told in stopped] == [("Interrupted", False), ("Interrupted", True)], stopped
    shards = dataclasses.replace(several, parallel=ParallelRecipe(shard=2))
    assert runner.train(2, shards, resume=True, stop_after=4)[0][0] == "Interrupted"
    stages = dataclasses.replace(several, parallel=ParallelRecipe(pipeline=4))
    answers = runner.train(4, stages, resume=True)
    assert [kind for kind, *_ in answers] == ["done"] * 4, answers
    assert end_of(several) == end_of(whole)


def test_what_stages_cannot_train_is_one_sentence(make_recipe: Any, runner: RankRunner) -> None:
    answers = runner.train(2, laid_out(make_recipe("run", GPT2 | {"n_layers": 1}), "bad", pipeline=2))
    assert [(kind, is_told) for kind, _, is_told in answers] == [("ConfigError", False), ("ConfigError", True)]
    assert "parallel.pipeline=2 must not exceed n_layers=1" in answers[0][1]
    recipe = make_recipe()
    train_settings = dataclasses.replace(recipe.train, exit_loss=0.1)
    with pytest.raises(ConfigError, match=r"train\.exit_loss=0\.1.* parallel\.pipeline=2 cannot do on parts of a model"):
        dataclasses.replace(recipe, train=train_settings, parallel=ParallelRecipe(pipeline=2))


def test_interleaved_stages_that_do_not_divide_are_one_sentence(make_recipe: Any, runner: RankRunner) -> None:
    answers = runner.train(2, laid_out(make_recipe("run", GPT2, grad_accumulation=2), "bad", pipeline=2, interleave=2))
    assert "parallel.pipeline=2 · interleave=2 must not exceed n_layers=2. Each chunk has" in answers[0][1]
    with pytest.raises(ConfigError, match=r"pipeline=2 must divide the 3 micro-batches of a pipeline's step"):
        ParallelRecipe(pipeline=2, interleave=2).on(4, 6)
    with pytest.raises(ConfigError, match=r"interleave=2 must be .* 1 without parallel\.pipeline"):
        ParallelRecipe(interleave=2)


def test_layers_are_shared_out_evenly_and_the_first_stages_have_more() -> None:
    assert [list(layers_of(stage, 3, 8)) for stage in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    ranks, decoder = Ranks(n=3), Decoder(dataclasses.replace(SPECS["gpt2"], n_layers=8), device="meta")
    ranks.lay_out(ParallelRecipe(data=1, pipeline=3))
    names = ("embed.weight", "position_embed.weight", "blocks.2.attn.out.weight", "blocks.6.mlp.up.bias", "final_norm.weight")
    assert [stage_of(name, decoder, ranks) for name in names] == [0, 0, 0, 2, 2]


def _run(orders: list[list[Turn]], interleave: int) -> None:
    """Stages take turns by ``orders``: each sends without waiting while it has room, and goes on when what it reads has come,
    in order. Fails if none of them can go on."""
    n_stages = len(orders)
    most = most_sending(n_stages, interleave) // 2  # with dropout half of the messages are states of the generator
    done, last = [0] * n_stages, n_stages * interleave - 1
    sent: dict[tuple[int, bool], deque[tuple[int, int]]] = defaultdict(deque)  # by stage and direction, not read yet
    held: list[deque[tuple[bool, int, int]]] = [deque() for _ in range(n_stages)]

    def goes_on(stage: int) -> bool:
        forward, number, micro_batch = orders[stage][done[stage]]
        chunk, step = number * n_stages + stage, 1 if forward else -1
        reads, sends = chunk != (0 if forward else last), chunk != (last if forward else 0)
        source = sent[(stage - step) % n_stages, forward]
        if reads and not source:
            return False
        if sends and len(held[stage]) == most:
            direction, *message = held[stage][0]
            if tuple(message) in sent[stage, direction]:
                return False
            held[stage].popleft()
        if reads:
            assert source.popleft() == (chunk - step, micro_batch)
        if sends:
            sent[stage, forward].append((chunk, micro_batch))
            held[stage].append((forward, chunk, micro_batch))
        done[stage] += 1
        return True

    while any(done[stage] < len(orders[stage]) for stage in range(n_stages)):
        moved = [goes_on(stage) for stage in range(n_stages) if done[stage] < len(orders[stage])]
        assert any(moved), done


@pytest.mark.parametrize("interleave", [1, 2, 3])
def test_no_order_of_passes_waits_in_a_circle(interleave: int) -> None:
    for n_stages, n in itertools.product((2, 3, 4, 8), (1, 3, 8, 24)):
        if interleave > 1 and n % n_stages:
            continue
        orders = [list(turns(stage, n_stages, interleave, n)) for stage in range(n_stages)]
        _run(orders, interleave)
        for stage, order in enumerate(orders):
            ahead = list(itertools.accumulate(1 if turn.is_forward else -1 for turn in order))
            after = n_stages - 1 - stage
            most_ahead = after if interleave == 1 else 2 * after + (interleave - 1) * n_stages
            assert max(ahead) == min(n * interleave, most_ahead + 1)
            for number in range(interleave):
                assert [turn.micro_batch for turn in order if turn.number == number and not turn.is_forward] == list(range(n))
