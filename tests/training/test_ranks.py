"""Runs over ranks: the same bits for any number of them, in every layout, also across a resume; and what ends them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ranked import RankRunner, assert_bits_of_one_rank, end_of, laid_out, values_of

from small_models import FEATURES, SPECS
from twostroke.core.parallel_recipe import CUTS, ParallelRecipe
from twostroke.core.recipe import TrainRecipe, recipe_from_dict
from twostroke.planner.training.layout import Layout, layout_of
from twostroke.planner.training.shape import TrainingShape
from twostroke.training.checkpoint import list_checkpoints, load_checkpoint
from twostroke.training.start import train

LAYOUTS = {"data": {}, "zero2": {"zero": 2}, "zero3": {"zero": 3}}


@pytest.mark.parametrize(
    ("settings", "layouts"),
    [
        ({"dtype": "bf16"}, [(2, {}), (4, {}), (2, {"shard": 2, "zero": 2}), (4, {"shard": 4})]),
        ({"dtype": "fp32", "optimizer": "muon", "ema_decay": 0.9}, [(2, {"shard": 2}), (4, {"shard": 2}), (4, {"shard": 4})]),
        ({"dtype": "fp16", "optimizer": "sgd"}, [(2, {}), (4, {"shard": 4, "zero": 2})]),
        ({"dtype": "bf16", "optimizer": "muon", "activation_checkpointing": "full"}, [(4, {"shard": 4, "zero": 2})]),
        ({"dtype": "pure_bf16", "optimizer": "adam"}, [(4, {})]),
        ({"dtype": "bf16", "optimizer": "lamb"}, [(2, {"shard": 2})]),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_every_layout_comes_to_the_bits_of_one_rank(
    make_recipe: Any, runner: RankRunner, settings: dict[str, Any], layouts: list[tuple[int, dict[str, Any]]]
) -> None:
    """Rows that no number of ranks divides: a vocabulary of 300 on 4 and norms of 36."""
    sizes = {"family": "llama", "n_layers": 2, "d_model": 36, "n_heads": 2, "d_ff": 52, "head_dim": 16, "dropout": 0.1}
    recipe = make_recipe("run", sizes, steps=4, grad_accumulation=8, batch_size=1, **settings)
    assert_bits_of_one_rank(runner, recipe, layouts)


def test_a_run_saved_by_two_ranks_is_resumed_by_one_and_by_four(make_recipe: Any, runner: RankRunner) -> None:
    """It is stopped by its last rank alone, and goes on in other layouts to the bits of a run that nobody stopped."""
    recipe = make_recipe("run", steps=6, grad_accumulation=4, batch_size=1, checkpoint_every=2, optimizer="muon")
    whole = laid_out(recipe, "whole")
    train(whole)
    stopped = laid_out(recipe, "stopped", shard=2)
    answers = runner.train(2, stopped, stop_after=3)
    assert [(kind, is_told) for kind, _, is_told in answers] == [("Interrupted", False), ("Interrupted", True)]
    assert "stopped at step 3 of 6" in answers[0][1]
    train(dataclasses.replace(stopped, parallel=ParallelRecipe()), resume=True, should_stop=None)
    assert end_of(stopped) == end_of(whole)
    again = laid_out(recipe, "again")
    runner.train(1, again, stop_after=3)
    for n, parallel in ((4, {"shard": 4, "zero": 2}),):
        other = dataclasses.replace(again, parallel=ParallelRecipe(**parallel))
        assert [kind for kind, *_ in runner.train(n, other, resume=True)] == ["done"] * n
        assert end_of(other) == end_of(whole)


def test_gradients_are_those_of_a_run_without_ranks(make_recipe: Any, runner: RankRunner) -> None:
    """SGD without momentum: weights move by the gradients themselves."""
    settings = {"optimizer": "sgd", "momentum": 0.0, "dtype": "fp32", "steps": 1, "grad_accumulation": 4, "learning_rate": 0.5}
    recipe = make_recipe("run", **settings)
    train(recipe)
    wanted = load_checkpoint(list_checkpoints(Path(recipe.output) / "checkpoints")[-1][1]).weights
    for name, parallel in LAYOUTS.items():
        several = laid_out(recipe, name, **parallel, shard=1 if name == "data" else 2)
        assert runner.train(2, several)[0][0] == "done"
        found = load_checkpoint(list_checkpoints(Path(several.output) / "checkpoints")[-1][1]).weights
        assert found.keys() == wanted.keys()
        for key, weight in wanted.items():
            torch.testing.assert_close(found[key], weight, rtol=0, atol=2e-7)
        assert json.loads((Path(several.output) / "summary.json").read_text())["tokens"] == 4 * 2 * 32


def test_built_in_sums_come_close(make_recipe: Any, runner: RankRunner) -> None:
    recipe = make_recipe("run", dtype="fp32", steps=3, grad_accumulation=4)
    train(recipe)
    wanted = values_of(Path(recipe.output))
    for name, shard in (("data", 1), ("shard", 2)):
        several = laid_out(recipe, name, shard=shard, exact=False)
        assert runner.train(2, several)[0][0] == "done"
        for found, line in zip(values_of(Path(several.output)), wanted, strict=True):
            assert found[1:3] == pytest.approx(line[1:3], rel=1e-5)


def _without_a_number(ranks: Any, recipe: TrainRecipe) -> str:
    """The last rank's loss is not a number in the second step."""
    from twostroke.training.step import TrainStep

    original, calls = TrainStep.forward_backward, []

    def poisoned(self: Any, *arguments: Any) -> Any:
        calls.append(0)
        loss = original(self, *arguments)
        return loss * float("nan") if ranks.rank == ranks.n - 1 and len(calls) == 2 * 2 else loss

    TrainStep.forward_backward = poisoned  # type: ignore[method-assign]
    return str(train(recipe, ranks=ranks).summary["skipped_steps"])


def test_a_loss_that_is_not_finite_on_one_rank_skips_the_step_on_all(make_recipe: Any, runner: RankRunner) -> None:
    recipe = laid_out(make_recipe(steps=3, grad_accumulation=4), "nan", shard=2)
    assert runner.call(_without_a_number, 2, recipe) == [("done", "1", False)] * 2
    assert [values[-1] for values in values_of(Path(recipe.output))] == [None, "loss is nan", None]


@pytest.mark.parametrize(
    ("n", "parallel", "settings", "sentence"),
    [
        (2, {"shard": 4}, {}, "parallel.shard=4 must divide the 2 ranks. Use 1 or 2."),
        (2, {"data": 4}, {}, "parallel.data=4 · parallel.shard=1 are 4 ranks, and 2 were started."),
        (
            2,
            {},
            {"grad_accumulation": 3},
            "2 ranks must divide train.grad_accumulation=3, the micro-batches of a step. Use 1 or 3",
        ),
    ],
)
def test_a_layout_that_does_not_divide_is_one_sentence(
    make_recipe: Any, runner: RankRunner, n: int, parallel: dict[str, Any], settings: dict[str, Any], sentence: str
) -> None:
    recipe = laid_out(make_recipe(**{"grad_accumulation": 4, **settings}), "bad", **parallel)
    answers = runner.train(n, recipe)
    assert [(kind, is_told) for kind, _, is_told in answers] == [("ConfigError", False)] + [("ConfigError", True)] * (n - 1)
    assert sentence in answers[0][1]
    assert not Path(recipe.output).exists()


def _apart(ranks: Any, recipe: TrainRecipe, what: str) -> Any:
    if ranks.rank == 1 and what == "recipe":
        recipe = dataclasses.replace(recipe, seed=1)
    if ranks.rank == 1 and what == "release":
        from twostroke.training import start

        start.code_version = lambda: "0.0.9"
    if ranks.rank == 1 and what == "data":
        from twostroke.core.errors import DataError
        from twostroke.training import start

        def gone(*arguments: Any) -> Any:
            raise DataError("the sources have changed.")

        start._same_data = gone
    return train(recipe, ranks=ranks)


@pytest.mark.parametrize(
    ("what", "teller", "words"),
    [
        ("recipe", 0, "seed=1 in the recipe of rank 1 differs from 0 in that of rank 0"),
        ("release", 0, "rank 1 runs twostroke 0.0.9"),
        ("data", 1, "the sources have changed."),
    ],
)
def test_ranks_that_differ_end_with_one_sentence(
    make_recipe: Any, runner: RankRunner, what: str, teller: int, words: str
) -> None:
    recipe = laid_out(make_recipe(grad_accumulation=2), what)
    answers = runner.call(_apart, 2, recipe, what)
    assert [is_told for *_, is_told in answers] == [rank != teller for rank in range(2)]
    assert all(kind in ("ConfigError", "DataError") and words in sentence for kind, sentence, _ in answers)


def _killed(ranks: Any, recipe: TrainRecipe, step: int) -> Any:
    def stop(at: int) -> bool:
        if ranks.rank == 1 and at == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    return train(recipe, ranks=ranks, should_stop=stop)


@pytest.mark.parametrize("shard", [1, 2])
def test_a_killed_rank_ends_the_others_and_the_last_checkpoint_is_whole(
    make_recipe: Any, runner: RankRunner, shard: int
) -> None:
    recipe = laid_out(make_recipe(steps=6, grad_accumulation=2, checkpoint_every=2), "killed", shard=shard)
    processes, answers = runner.start(_killed, 2, recipe, 3)
    rank, kind, sentence, _ = answers.get(timeout=60)
    for process in processes:
        process.join(60)
    assert (rank, kind) == (0, "RankLost")
    assert sentence == "rank 0 lost another one in step 4. Checkpoint step-00000002 is kept. Continue with --resume."
    whole = laid_out(make_recipe(steps=6, grad_accumulation=2, checkpoint_every=2), "whole")
    train(whole)
    assert runner.train(2, recipe, resume=True)[0][0] == "done"
    assert end_of(recipe) == end_of(whole)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_thousand_steps_come_to_the_same_bits(make_recipe: Any, runner: RankRunner, dtype: str, optimizer: str) -> None:
    recipe = make_recipe("run", steps=1000, grad_accumulation=4, batch_size=1, dtype=dtype, optimizer=optimizer)
    alone = laid_out(recipe, "alone")
    train(alone)
    for n in (2, 4):
        for name, parallel in LAYOUTS.items():
            several = laid_out(recipe, f"{n}-{name}", **parallel, shard=1 if name == "data" else n)
            assert runner.train(n, several)[0][0] == "done"
            assert end_of(several) == end_of(alone), (n, name)


def test_a_launcher_hands_its_stop_to_the_ranks(make_recipe: Any, tmp_path: Path) -> None:
    """`twostroke train --ranks 2`: SIGTERM ends it with 75 and a checkpoint; a killed rank is named."""
    recipe = make_recipe(steps=100_000, grad_accumulation=2, checkpoint_every=5)
    file = tmp_path / "recipe.toml"
    file.write_text("")
    sets = [f"output={recipe.output}", f"data.sources={list(recipe.data.sources)}", f"data.tokenizer={recipe.data.tokenizer}"]
    sets += ["model.n_layers=1", "model.d_model=32", "model.n_heads=2", "model.d_ff=48", "train.compile=false"]
    sets += [f"train.{name}={getattr(recipe.train, name)}" for name in ("steps", "batch_size", "sequence_length")]
    sets += ["train.grad_accumulation=2", "train.checkpoint_every=5"]
    words = [sys.executable, "-m", "twostroke", "train", str(file), "--ranks", "2", *(w for s in sets for w in ("--set", s))]

    def started(*more: str) -> subprocess.Popen[str]:
        checkpoints = Path(recipe.output) / "checkpoints"
        before = set(checkpoints.glob("step-*"))
        process = subprocess.Popen(
            [*words, *more], stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        deadline = time.monotonic() + 60
        while not set(checkpoints.glob("step-*")) - before and time.monotonic() < deadline:
            time.sleep(0.05)
        return process

    process = started()
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert said.count("error:") == 1
    assert "stopped at step" in said
    process = started("--resume")
    psutil.Process(process.pid).children()[-1].kill()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1, said
    assert said.count("error:") == 1
    assert "was ended by SIGKILL in step" in said
    assert "and the others stopped. Checkpoint step-" in said


def test_a_recipe_s_layout_is_what_is_planned() -> None:
    recipe = recipe_from_dict(
        {"model": {"n_layers": 1, "d_model": 8, "n_heads": 1, "d_ff": 8}, "parallel": {"data": 2, "shard": 2}}
        | {"train": {"steps": 1, "grad_accumulation": 8}}
    )
    dense, mixture = SPECS["llama"], FEATURES["qwen2_moe"]
    assert layout_of(recipe.parallel, dense) == Layout(data=4, zero=3, copies=2)
    assert TrainingShape.from_recipe(recipe).grad_accumulation == 2
    assert layout_of(None, dense) == layout_of(ParallelRecipe(), dense) == Layout()
    stages_of_matrices = ParallelRecipe(data=1, shard=2, tensor=2, pipeline=2)
    assert layout_of(ParallelRecipe(data=2, pipeline=4), dense) == Layout(data=2, pipeline=4)
    assert layout_of(ParallelRecipe(data=2, tensor=4), dense) == Layout(data=2, tensor=4)
    assert layout_of(stages_of_matrices, dense) == Layout(data=2, zero=3, tensor=2, pipeline=2)
    assert layout_of(ParallelRecipe(data=2, expert=4), mixture) == Layout(data=8, expert=4)
    assert layout_of(ParallelRecipe(data=2, expert=4, tensor=2), mixture) == Layout(data=8, expert=8, tensor=2)
    for cuts in itertools.chain.from_iterable(itertools.combinations(CUTS, n) for n in range(1, 6)):
        assert layout_of(ParallelRecipe(**dict.fromkeys(cuts, 2)), mixture).is_trained(mixture), cuts
    cut_experts = Layout(tensor=4, expert=2)
    assert not cut_experts.is_trained(mixture)
    assert cut_experts.is_trained(dense)
