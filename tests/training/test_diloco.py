"""Replicas that train apart: the outer step by its formula, fragments in turn, resumes, and bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import RankRunner, values_of
from test_compression import BIG, end_of, laid_out, load_last, planned_bytes, sent_of

from twostroke.core.recipe import TrainRecipe
from twostroke.training.checkpoint import list_checkpoints, load_checkpoint
from twostroke.training.diloco import fragments_of
from twostroke.training.start import train


def _watched(ranks: Any, recipe: TrainRecipe) -> Any:
    """(outer weights before, inner weights at the exchange, outer weights after) of each exchange of this rank."""
    from twostroke.training.diloco import LocalMasters

    original, seen = LocalMasters._exchange, []

    def watched(self: Any, numbers: list[int]) -> None:
        before = {k: v.double().numpy().copy() for k, v in self.outer.items()}
        inner = {k: v.double().numpy().copy() for k, v in self.weights.items()}
        original(self, numbers)
        if numbers:
            seen.append((numbers, before, inner, {k: v.double().numpy().copy() for k, v in self.outer.items()}))

    LocalMasters._exchange = watched  # type: ignore[method-assign]
    train(recipe, ranks=ranks)
    return seen


@pytest.mark.parametrize("fragments", [1, 2])
def test_outer_steps_are_those_of_the_formula(make_recipe: Any, runner: RankRunner, fragments: int) -> None:
    """7 steps, an exchange every 3 of each fragment: against v ← μv + Δ, θ ← θ − η(Δ + μv) in float64."""
    recipe = make_recipe("run", dtype="fp32", steps=7, grad_accumulation=2, learning_rate=3e-3)
    several = laid_out(recipe, "diloco", outer_every=3, fragments=fragments)
    answers = [what for _, what, _ in runner.call(_watched, 2, several)]
    exchanged = [numbers for numbers, *_ in answers[0]]
    # Fragment 1 begins 1 step ahead, and after the last step both are exchanged.
    assert exchanged == ([[0], [0], [0]] if fragments == 1 else [[1], [0], [1], [0], [0, 1]])
    names = fragments_of({k: v.shape for k, v in answers[0][0][1].items()}, fragments)
    momentum: dict[str, Any] = {}
    for one, other in zip(*answers, strict=True):
        for number, fragment in enumerate(names):
            for name in fragment:
                assert (one[3][name] == other[3][name]).all()  # outer weights are the same on all ranks
                if number not in one[0]:
                    assert (one[3][name] == one[1][name]).all()
                    continue
                delta = one[1][name] - (one[2][name] + other[2][name]) / 2
                v = momentum[name] = 0.9 * momentum.get(name, 0.0) + delta
                torch.testing.assert_close(
                    torch.from_numpy(one[3][name]), torch.from_numpy(one[1][name] - 0.7 * (delta + 0.9 * v)), rtol=0, atol=1e-6
                )
                if one[1][name].ndim > 1:
                    assert (one[2][name] != other[2][name]).any()  # replicas were apart
    last = load_checkpoint(list_checkpoints(Path(several.output) / "checkpoints")[-1][1])
    for name, weight in last.weights.items():
        assert (weight.double().numpy() == answers[0][-1][3][name]).all()


@pytest.mark.parametrize("parallel", [{"outer_every": 3}, {"outer_every": 4, "fragments": 2, "compress": "int4"}])
def test_a_resumed_run_ends_in_the_same_bits(make_recipe: Any, runner: RankRunner, parallel: dict[str, Any]) -> None:
    """It is stopped between two exchanges, when replicas are apart."""
    recipe = make_recipe("run", dtype="bf16", steps=8, grad_accumulation=2, checkpoint_every=5)
    whole, stopped = laid_out(recipe, "whole", **parallel), laid_out(recipe, "stopped", **parallel)
    runner.train(2, whole)
    assert {kind for kind, *_ in runner.train(2, stopped, stop_after=5)} == {"Interrupted"}
    inner = load_last(stopped)["inner::embed.weight"]
    assert not torch.equal(inner[0], inner[1])
    assert [kind for kind, *_ in runner.train(2, stopped, resume=True)] == ["done"] * 2
    assert end_of(stopped) == end_of(whole)


def test_another_number_of_replicas_is_refused(make_recipe: Any, runner: RankRunner) -> None:
    recipe = laid_out(make_recipe(steps=4, grad_accumulation=4, checkpoint_every=2), "diloco", outer_every=3)
    runner.train(2, recipe, stop_after=2)
    kind, sentence, _ = runner.train(4, recipe, resume=True)[0]
    assert kind == "InputError"
    assert sentence == "the checkpoint is of 2 replicas that train apart (parallel.outer_every), and 4 resume. Start 2 ranks."


def test_it_learns_as_data_parallel_does_and_sends_what_is_planned(make_recipe: Any, runner: RankRunner) -> None:
    """Twelve rounds of four steps. Between exchanges nothing is sent."""
    recipe = make_recipe("run", BIG, dtype="fp32", steps=48, grad_accumulation=4, learning_rate=3e-3)
    plain, apart = laid_out(recipe, "plain"), laid_out(recipe, "diloco", outer_every=4)
    streaming = laid_out(recipe, "streaming", outer_every=4, fragments=2)
    for one in (plain, apart, streaming):
        assert [kind for kind, *_ in runner.train(2, one)] == ["done"] * 2
    wanted, found, in_turn = (
        sum(line[1] for line in values_of(Path(one.output))[-4:]) / 4 for one in (plain, apart, streaming)
    )
    assert wanted < 0.7 * values_of(Path(plain.output))[0][1]
    assert found == pytest.approx(wanted, rel=0.1)
    assert in_turn == pytest.approx(wanted, rel=0.1)
    sent, streamed = sent_of(apart), sent_of(streaming)
    assert [step for step, n in enumerate(sent, 1) if n] == list(range(4, 49, 4))
    assert [step for step, n in enumerate(streamed, 1) if n] == list(range(2, 49, 2))
    assert max(streamed) < 0.7 * max(sent)
    assert sum(sent) / 48 == pytest.approx(planned_bytes(apart), rel=0.01)


def test_a_replica_alone_takes_outer_steps(make_recipe: Any) -> None:
    recipe = laid_out(make_recipe(steps=4, grad_accumulation=2, dtype="fp32"), "alone", outer_every=2)
    train(recipe)
    assert values_of(Path(recipe.output))[-1][1] > 0


def test_fragments_hold_every_weight_once() -> None:
    shapes = {
        "embed.weight": (100, 8),
        **{f"blocks.{i}.{m}": (16, 8) for i in range(4) for m in ("a", "b")},
        "final_norm.weight": (8,),
    }
    found = fragments_of(shapes, 3)
    assert sorted(name for names in found for name in names) == sorted(shapes)
    assert found[0][0] == "embed.weight"
    assert all(found)
