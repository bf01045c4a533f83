"""Sharded runs that send what an update changed: ranks hold the same, near the masters, and errors do not add up."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranked import RankRunner, values_of
from test_compression import BIG, laid_out, planned_bytes, sent_of

from twostroke.core.compressions import COMPRESSIONS
from twostroke.core.errors import ConfigError
from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.core.policy import computed_type, multiplies_bf16
from twostroke.core.profile import read_fingerprint
from twostroke.core.recipe import TrainRecipe
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.training.layout import Layout
from twostroke.planner.training.plan import plan_training
from twostroke.planner.training.shape import TrainingShape
from twostroke.training.checkpoint import list_checkpoints, load_checkpoint
from twostroke.training.compression import decoded, encoded
from twostroke.training.precision import COMPUTED_AND_STORED
from twostroke.training.start import train

DIFFERENCES = {"shard": 2, "zero": 2, "compress_weights": "int4"}


def coded(values: torch.Tensor, name: str) -> torch.Tensor:
    """``values`` as the others get them."""
    way, flat = COMPRESSIONS[name], values.float().flatten()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % way.multiple))
    return decoded(encoded(padded[None], way), way)[0, : flat.numel()].view(values.shape)


def _watched(ranks: Any, recipe: TrainRecipe) -> Any:
    """(what this rank holds whole, its rows of the masters, the same rows of what it holds) after each step."""
    from twostroke.training.weight_differences import DifferenceMasters

    original, seen = DifferenceMasters.took_step, []

    def watched(self: Any) -> None:
        original(self)
        held = {name: self.held(name) for name in self.weights}
        rows = {name: self.piece(name, whole) for name, whole in held.items()}
        seen.append([{k: t.detach().float().numpy().copy() for k, t in found.items()} for found in (held, self.weights, rows)])

    DifferenceMasters.took_step = watched  # type: ignore[method-assign]
    train(recipe, ranks=ranks)
    return seen


def _flat(tensors: dict[str, Any]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([tensors[name].ravel() for name in sorted(tensors)]))


@pytest.mark.parametrize(("n", "dtype", "parallel"), [(2, "fp32", {}), (3, "bf16", {"shard": 3}), (4, "fp32", {"data": 2})])
def test_ranks_hold_the_same_and_errors_do_not_add_up(
    make_recipe: Any, runner: RankRunner, n: int, dtype: str, parallel: dict[str, Any]
) -> None:
    """Beside it, from the masters of the same run: codes of what each update changed of the masters, whose errors add up, and
    codes of the weights. With three ranks rows do not divide."""
    recipe = make_recipe("run", BIG, dtype=dtype, steps=24, grad_accumulation=n, learning_rate=3e-3)
    answers = [what for _, what, _ in runner.call(_watched, n, laid_out(recipe, "held", **DIFFERENCES | parallel))]
    for each_rank in zip(*(answer for answer in answers), strict=True):
        for held, _, _ in each_rank[1:]:
            assert all((held[name] == each_rank[0][0][name]).all() for name in held)
    steps = [(_flat(masters), _flat(rows)) for _, masters, rows in answers[0]]
    left_out = [float((masters - rows).norm()) for masters, rows in steps]
    changed = [float((after[0] - before[0]).norm()) for before, after in itertools.pairwise(steps)]
    assert len(left_out) == 24
    assert min(left_out) > 0
    assert max(left_out[1:]) < 0.5 * max(changed)
    naive = steps[0][1].clone()
    for before, after in itertools.pairwise(steps):
        naive += coded(after[0] - before[0], "int4")
    masters = steps[-1][0]
    # bf16 weights are a last place from fp32 masters, whatever is sent.
    rounding = float((masters - masters.bfloat16().float()).norm()) if dtype == "bf16" else 0.0
    assert left_out[-1] - rounding < float((masters - naive).norm()) / 3
    assert left_out[-1] < float((masters - coded(masters, "int4")).norm()) / 5


APART = {"int8": 1e-3, "int4": 1e-2}
"""How far the mean loss of the last four of 24 steps on Python source may be from that of gathered weights, relatively."""


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_runs_learn_as_without_and_send_what_is_planned(make_recipe: Any, runner: RankRunner, dtype: str) -> None:
    recipe = make_recipe("run", BIG, dtype=dtype, steps=24, grad_accumulation=4, learning_rate=3e-3)
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, sources=(str(Path(asyncio.__file__).parent),)))
    ways: dict[str, dict[str, Any]] = {"none": {"shard": 2, "zero": 2}}
    ways |= {name: DIFFERENCES | {"compress_weights": name} for name in APART}
    ways["both"] = DIFFERENCES | {"compress": "int8"}
    found, sent = {}, {}
    for name, parallel in ways.items():
        one = laid_out(recipe, name, **parallel)
        assert [kind for kind, *_ in runner.train(2, one)] == ["done"] * 2
        lines = values_of(Path(one.output))
        found[name] = sum(line[1] for line in lines[-4:]) / 4
        assert found[name] < 0.8 * lines[0][1]
        sent[name] = sent_of(one)
        # Codes of gradients fill up each unit's pieces to blocks of 256.
        within = 2e-2 if "compress" in parallel else 5e-3
        assert sent[name][-1] == pytest.approx(planned_bytes(one, replicas=1), rel=within), name
    for name, apart in APART.items():
        assert found[name] == pytest.approx(found["none"], rel=apart), found
        assert found[name] != found["none"]
    assert found["both"] == pytest.approx(found["none"], rel=2e-2), found
    weights = computed(recipe).itemsize
    gathered, gradients = sent["none"][0] * weights / (weights + 8), sent["none"][0] * 8 / (weights + 8)  # of two passes
    for name in APART:  # weights are gathered once, and codes are sent from the first step on
        codes = gathered * COMPRESSIONS[name].bytes_per_element / weights
        assert sent[name][0] == pytest.approx(gathered + gradients + codes, rel=5e-3)
        assert sent[name][1] == pytest.approx(gradients + codes, rel=5e-3)


def computed(recipe: TrainRecipe) -> torch.dtype:
    """What ``recipe`` is computed in on this processor."""
    dtype = computed_type(recipe.train.dtype, multiplies_bf16("cpu", read_fingerprint().isa))
    return COMPUTED_AND_STORED[dtype][0]


@pytest.mark.parametrize("parallel", [{}, {"compress": "int4"}])
def test_a_resumed_run_ends_in_the_same_bits(make_recipe: Any, runner: RankRunner, parallel: dict[str, Any]) -> None:
    recipe = make_recipe("run", dtype="bf16", steps=6, grad_accumulation=4, checkpoint_every=2)
    whole, stopped = (laid_out(recipe, name, **DIFFERENCES | parallel) for name in ("whole", "stopped"))
    runner.train(2, whole)
    assert {kind for kind, *_ in runner.train(2, stopped, stop_after=3)} == {"Interrupted"}
    assert [kind for kind, *_ in runner.train(2, stopped, resume=True)] == ["done"] * 2
    assert _end_of(stopped) == _end_of(whole)
    end = load_checkpoint(list_checkpoints(Path(whole.output) / "checkpoints")[-1][1])
    for name, master in end.weights.items():
        held = end.optimizer[f"held::{name}"]
        assert held.dtype == computed(recipe)
        assert held.shape == master.shape
        # A run that gathered the masters again at a resume would have ended elsewhere.
        assert held.ndim < 2 or (held != master.to(held.dtype)).any()


def _end_of(recipe: TrainRecipe) -> tuple[Any, ...]:
    end = load_checkpoint(list_checkpoints(Path(recipe.output) / "checkpoints")[-1][1])
    tensors = [(k, t.float().numpy().tobytes()) for part in (end.weights, end.optimizer) for k, t in sorted(part.items())]
    return tensors, values_of(Path(recipe.output))


def test_more_ranks_go_on_from_the_same_weights(make_recipe: Any, runner: RankRunner) -> None:
    recipe = make_recipe("run", BIG, dtype="fp32", steps=6, grad_accumulation=4, checkpoint_every=3, learning_rate=3e-3)
    two, four = (laid_out(recipe, name, **DIFFERENCES) for name in ("two", "four"))
    runner.train(2, two)
    runner.train(2, four, stop_after=3)
    assert four.parallel is not None
    four = dataclasses.replace(four, parallel=dataclasses.replace(four.parallel, shard=4))
    assert [kind for kind, *_ in runner.train(4, four, resume=True)] == ["done"] * 4
    losses = [[line[1] for line in values_of(Path(one.output))] for one in (two, four)]
    assert losses[1][:4] == pytest.approx(losses[0][:4], rel=1e-6)  # of the fourth step still by the weights of the third
    assert losses[1][4:] == pytest.approx(losses[0][4:], rel=5e-3)


def test_scores_and_samples_change_nothing(make_recipe: Any, runner: RankRunner) -> None:
    looks = {"evaluate_every": 2, "sample_every": 3, "sample_prompts": ["if"], "diagnostics_every": 2}
    ends = []
    for name, more in (("plain", {}), ("looked", looks)):
        recipe = make_recipe("run", dtype="fp32", steps=5, grad_accumulation=2, checkpoint_every=5, **more)
        one = laid_out(recipe, name, **DIFFERENCES)
        assert [kind for kind, *_ in runner.train(2, one)] == ["done"] * 2
        ends.append((_end_of(one), sent_of(one)))
    assert ends[0] == ends[1]


def test_plans_hide_nothing_and_store_what_ranks_hold() -> None:
    spec = ModelSpec(
        family="llama", vocab_size=32_000, n_layers=4, d_model=1024, n_heads=8, n_kv_heads=8, head_dim=128, d_ff=2048,
        max_positions=2048, tied_embeddings=False,
    )  # fmt: skip
    layout = Layout(data=8, zero=2)
    shape = TrainingShape(grad_accumulation=2, dtype="bf16")
    hardware = load_hardware("h100-sxm", "train")
    plain = plan_training(spec, shape, hardware, layout)
    less = plan_training(spec, dataclasses.replace(shape, compress_weights="int4"), hardware, layout)
    weights, codes = (next(t for t in plan.traffic if t.what.startswith("all-gather")) for plan in (plain, less))
    assert codes.sent_bytes == pytest.approx(weights.sent_bytes * (0.5 + 1 / 128) / 2)
    assert codes.exposed_s == codes.seconds
    assert less.checkpoint_bytes - plain.checkpoint_bytes == 2 * plain.parameters.total
    assert less.memory_bytes == plain.memory_bytes


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({}, 'parallel.compress_weights="int4" rounds what ranks compute with, and exact=true promises the same bits'),
        ({"exact": False}, "with shard=1 each rank updates all of them. Use parallel.shard above 1"),
        ({"exact": False, "shard": 2}, "zero=3 drops these after each pass. Use parallel.zero=2."),
        ({"exact": False, "shard": 2, "zero": 2, "tensor": 2}, "and parallel.shard=2 · tensor=2 are not trained together yet"),
        ({"compress_weights": "bf16"}, "is not a way to send what an update changed. Use one of none, int8, int4."),
        ({"exact": False, "layout": "auto"}, 'which parallel.layout="auto" leaves to the planner'),
    ],
)
def test_what_cannot_be_is_a_sentence(parallel: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        ParallelRecipe(**{"compress_weights": "int4"} | parallel)
    assert words in str(error.value)


def test_averages_are_not_scored(make_recipe: Any) -> None:
    with pytest.raises(ConfigError, match=r"scores the averages of train\.ema_decay=0\.9 too"):
        laid_out(make_recipe(ema_decay=0.9, evaluate_every=2), "x", **DIFFERENCES)
    laid_out(make_recipe(ema_decay=0.9), "x", **DIFFERENCES)


def test_a_run_cannot_change_how_weights_are_sent(make_recipe: Any, runner: RankRunner) -> None:
    recipe = laid_out(make_recipe(steps=4, grad_accumulation=2, checkpoint_every=2), "int4", **DIFFERENCES)
    runner.train(2, recipe, stop_after=2)
    with pytest.raises(ConfigError, match=r"parallel\.compress_weights='none' in the recipe differs from 'int4'"):
        train(dataclasses.replace(recipe, parallel=ParallelRecipe()), resume=True)
