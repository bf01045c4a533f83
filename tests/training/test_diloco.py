"""Replicas that train apart: the outer step by its formula, fragments in turn, resumes, and bytes."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import RankRunner, values_of
from test_compression import BIG, end_of, laid_out, load_last, planned_bytes, sent_of

from twostroke.core.errors import ConfigError
from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.core.recipe import TrainRecipe
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.training.layout import Layout
from twostroke.planner.training.plan import plan_training
from twostroke.planner.training.shape import TrainingShape
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


def _stepped(ranks: Any, recipe: TrainRecipe) -> Any:
    """(inner weights before, inner and outer weights after, fragments under way) of each step, and of the run's end."""
    from twostroke.training.diloco import LocalMasters

    originals, seen = (LocalMasters.took_step, LocalMasters.finish_run), []

    def copied(tensors: dict[str, Any]) -> dict[str, Any]:
        return {name: tensor.double().numpy().copy() for name, tensor in tensors.items()}

    def watch(original: Any) -> Any:
        def watched(self: Any) -> None:
            before = copied(self.weights)
            original(self)
            seen.append((before, copied(self.weights), copied(self.outer), sorted(self._under_way)))

        return watched

    LocalMasters.took_step, LocalMasters.finish_run = map(watch, originals)  # type: ignore[method-assign]
    train(recipe, ranks=ranks)
    return seen


class Overlapped:
    """Exchanges of fragments ``names`` every 4 steps, which come in 3 later, by the formulas in float64."""

    def __init__(self, names: list[list[str]], outer: dict[str, Any], mixing: float) -> None:
        self.names, self.outer, self.mixing = names, outer, mixing
        self.momentum = dict.fromkeys(outer, 0.0)
        self.since = [4 * number // len(names) for number in range(len(names))]
        self.begun: dict[int, dict[str, Any]] = {}

    def step(self, replicas: list[dict[str, Any]]) -> None:
        """Follow a step that came to the weights of ``replicas``, which are moved."""
        self.since = [steps + 1 for steps in self.since]
        for number, steps in enumerate(self.since):
            if steps == 4:
                self.since[number], self.begun[number] = 0, self._changed(number, replicas)
        for number in [number for number in self.begun if self.since[number] == 3]:
            self._take_in(number, self.begun.pop(number), self.mixing, replicas)

    def end(self, replicas: list[dict[str, Any]]) -> None:
        for number in list(self.begun):
            self._take_in(number, self.begun.pop(number), self.mixing if self.since[number] else 0.0, replicas)
        for number, steps in enumerate(self.since):
            if steps:
                self._take_in(number, self._changed(number, replicas), 0.0, replicas)

    def _changed(self, number: int, replicas: list[dict[str, Any]]) -> dict[str, Any]:
        return {name: self.outer[name] - sum(own[name] for own in replicas) / len(replicas) for name in self.names[number]}

    def _take_in(self, number: int, delta: dict[str, Any], mixing: float, replicas: list[dict[str, Any]]) -> None:
        for name in self.names[number]:
            self.momentum[name] = 0.9 * self.momentum[name] + delta[name]
            self.outer[name] = self.outer[name] - 0.7 * (delta[name] + 0.9 * self.momentum[name])
            for own in replicas:
                own[name] = mixing * own[name] + (1 - mixing) * self.outer[name]


@pytest.mark.parametrize(("fragments", "steps"), [(1, 11), (1, 12), (2, 11)])
def test_what_is_under_way_comes_in_by_the_formula(make_recipe: Any, runner: RankRunner, fragments: int, steps: int) -> None:
    """With 12 steps the last exchange begins at the end, and with two fragments both are under way at once."""
    recipe = make_recipe("run", dtype="fp32", steps=steps, grad_accumulation=2, learning_rate=3e-3)
    several = laid_out(recipe, "overlap", outer_every=4, fragments=fragments, outer_overlap=3, outer_mixing=0.25)
    answers = [what for _, what, _ in runner.call(_stepped, 2, several)]
    shapes, outer = {k: v.shape for k, v in answers[0][0][0].items()}, answers[0][0][2]  # nothing comes in at the first step
    reference = Overlapped(fragments_of(shapes, fragments), dict(outer), 0.25)
    for number, seen in enumerate(zip(*answers, strict=True), 1):
        replicas = [dict(before) for before, *_ in seen]
        (reference.step if number <= steps else reference.end)(replicas)
        for (_, after, outer, under_way), wanted in zip(seen, replicas, strict=True):
            assert under_way == sorted(reference.begun)
            for name in shapes:
                assert (outer[name] == seen[0][2][name]).all()  # the same on all ranks
                torch.testing.assert_close(torch.from_numpy(after[name]), torch.from_numpy(wanted[name]), rtol=0, atol=2e-6)
                torch.testing.assert_close(
                    torch.from_numpy(outer[name]), torch.from_numpy(reference.outer[name]), rtol=0, atol=2e-6
                )
    assert max(len(under_way) for *_, under_way in answers[0]) == fragments
    for _, after, outer, under_way in (answer[-1] for answer in answers):
        assert not under_way
        assert all((after[name] == outer[name]).all() for name in shapes)


def _slow(ranks: Any, recipe: TrainRecipe) -> str:
    """Train where the second rank's exchanges begin late."""
    from twostroke.training.diloco import LocalMasters

    original = LocalMasters._summed

    def late(self: Any, deltas: Any) -> Any:
        time.sleep(0.2 * ranks.rank)
        return original(self, deltas)

    LocalMasters._summed = late  # type: ignore[method-assign]
    return str(train(recipe, ranks=ranks).summary["weights_sha256"])


def test_no_result_depends_on_how_long_an_exchange_takes(make_recipe: Any, runner: RankRunner) -> None:
    recipe = make_recipe("run", dtype="bf16", steps=8, grad_accumulation=2, checkpoint_every=3)
    ways = {"outer_every": 4, "fragments": 2, "compress": "int8", "outer_overlap": 2}
    plain, slow = laid_out(recipe, "plain", **ways), laid_out(recipe, "slow", **ways)
    hashes = {what for _, what, _ in (*runner.train(2, plain), *runner.call(_slow, 2, slow))}
    assert len(hashes) == 1
    assert end_of(slow) == end_of(plain)


def test_plans_hide_what_is_under_way_on_cpus_alone() -> None:
    spec = ModelSpec(
        family="llama", vocab_size=32_000, n_layers=4, d_model=1024, n_heads=8, n_kv_heads=8, head_dim=128, d_ff=2048,
        max_positions=2048, tied_embeddings=False,
    )  # fmt: skip
    shape = TrainingShape(dtype="bf16", outer_every=50)
    for hardware, hides in ((load_hardware("h100-sxm", "train"), False), (load_hardware("epyc-9654"), True)):
        at_once, little, all_of_it = (
            plan_training(spec, dataclasses.replace(shape, outer_overlap=steps), hardware, Layout(data=2)).traffic[0]
            for steps in (0, 1, 49)
        )
        assert at_once.exposed_s == pytest.approx(at_once.seconds)
        assert little.sent_bytes == at_once.sent_bytes
        assert (little.exposed_s < at_once.exposed_s) == hides
        assert (all_of_it.exposed_s == 0) == hides


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"outer_overlap": 4}, "parallel.outer_overlap=4 must be at least 0 and less than outer_every=4"),
        ({"outer_mixing": 1.0}, "parallel.outer_mixing=1.0 must be at least 0 and less than 1"),
    ],
)
def test_what_cannot_overlap_is_a_sentence(parallel: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        ParallelRecipe(**{"exact": False, "outer_every": 4} | parallel)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "parallel",
    [
        {"outer_every": 3},
        {"outer_every": 4, "fragments": 2, "compress": "int4"},
        {"outer_every": 4, "fragments": 2, "compress": "int4", "outer_overlap": 3},  # both are under way at the fifth step
    ],
)
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
    overlapped = laid_out(recipe, "overlapped", outer_every=4, fragments=2, outer_overlap=1)
    for one in (plain, apart, streaming, overlapped):
        assert [kind for kind, *_ in runner.train(2, one)] == ["done"] * 2
    wanted, found, in_turn, delayed = (
        sum(line[1] for line in values_of(Path(one.output))[-4:]) / 4 for one in (plain, apart, streaming, overlapped)
    )
    assert wanted < 0.7 * values_of(Path(plain.output))[0][1]
    assert found == pytest.approx(wanted, rel=0.1)
    assert in_turn == pytest.approx(wanted, rel=0.1)
    assert delayed == pytest.approx(wanted, rel=0.15)
    # The last exchange may end after the last step's line.
    assert 0.9 * sum(sent_of(streaming)) < sum(sent_of(overlapped)) <= sum(sent_of(streaming))
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
