"""Layer dropout and exit losses against plain passes of the first layers alone; runs with them resume exactly."""

from __future__ import annotations

import itertools
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from same_run import assert_same_run
from torch import Tensor
from torch.func import functional_call

from machines import ideal_machine
from twostroke.core.errors import ConfigError, Interrupted
from twostroke.core.families import read_spec
from twostroke.core.rates import TrainingRates
from twostroke.core.recipe import recipe_from_dict
from twostroke.core.spec import Departures, ModelSpec
from twostroke.core.train_settings import TrainSettings
from twostroke.data.loader import Batch
from twostroke.model.attention import attends_natively
from twostroke.model.decoder import Decoder
from twostroke.planner.training.plan import plan_training, training_memory
from twostroke.planner.training.shape import TrainingShape
from twostroke.training.clock import StepClock
from twostroke.training.early_exit import EarlyExit, dropout_rates, exits_of_step, loss_shares
from twostroke.training.loss import IGNORE_INDEX
from twostroke.training.optimizers import Optimizers
from twostroke.training.precision import MasterWeights
from twostroke.training.resolve import resolve_spec
from twostroke.training.start import train
from twostroke.training.step import TrainStep

SPEC = ModelSpec("qwen3", 50, 4, 32, 4, 2, 8, 48, 64, qk_norm=True, tied_embeddings=True)
CAPPED = ModelSpec(
    "gemma2", 50, 4, 32, 4, 2, 8, 48, 64, activation="gelu_tanh", tied_embeddings=True, sliding_window=5,
    sliding_window_layers=(0, 2),
    departures=Departures(norm_offset=True, norms_per_block=4, logit_cap=3.0, embedding_scale=5.0, attention_scale=0.3),
)  # fmt: skip


def _batch(rows: int = 3, length: int = 24) -> Batch:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(1, SPEC.vocab_size, (rows, length + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets.flatten()[::7] = IGNORE_INDEX
    cut = length // 3  # two documents a row
    documents = (torch.arange(length) >= cut).int().expand(rows, length)
    positions = (torch.arange(length) - cut * (torch.arange(length) >= cut)).expand(rows, length)
    return Batch(tokens[:, :-1], targets, positions, documents, n_valid=int((targets != IGNORE_INDEX).sum()))


def _step(spec: ModelSpec, settings: TrainSettings, steps: int = 10, from_scratch: bool = False) -> TrainStep:
    decoder = Decoder(spec).train()
    masters = MasterWeights(decoder, torch.float32)
    optimizers = Optimizers(masters, spec, TrainSettings(steps=steps))
    early_exit = EarlyExit.of(decoder, settings, steps, from_scratch)
    return TrainStep(decoder, masters, optimizers, 1e9, False, lambda line: None, early_exit=early_exit)


def test_dropout_grows_exponentially_with_depth_and_over_a_run_from_scratch() -> None:
    rates = dropout_rates(5, 0.2)
    assert rates[0] == 0
    assert rates[-1] == pytest.approx(0.2)
    growth = [1 + rate / 0.2 for rate in rates]  # exp(l·ln 2/(L − 1))
    assert [b / a for a, b in itertools.pairwise(growth)] == pytest.approx([2**0.25] * 4)
    assert dropout_rates(1, 0.2) == [0]
    settings = TrainSettings(steps=9, layer_dropout=0.2)
    of_run = [EarlyExit(Decoder(SPEC), settings, 9, from_scratch) for from_scratch in (True, False)]
    for step, share in ((0, 0.0), (4, math.sqrt(2) - 1), (8, 1.0)):
        for early_exit, wanted in zip(of_run, (share, 1.0), strict=True):
            early_exit.begin(step)
            assert early_exit._share == pytest.approx(wanted)


@pytest.mark.parametrize(("n_layers", "per_step"), [(2, 1), (5, 1), (6, 2), (7, 4), (4, 3)])
def test_every_layer_but_the_last_has_its_turn_equally_often(n_layers: int, per_step: int) -> None:
    seen = [0] * (n_layers + 1)
    for step in range(10, 10 + n_layers - 1):
        exits = exits_of_step(n_layers, per_step, step)
        assert len(set(exits)) == per_step
        for layer in exits:
            seen[layer] += 1
    assert seen == [0, *[per_step] * (n_layers - 1), 0]


def test_losses_weigh_more_with_depth_and_sum_to_one() -> None:
    shares = loss_shares(4, 0.5, (1, 2, 3))
    assert sum(shares) == pytest.approx(1)
    assert [share / shares[1] for share in shares] == pytest.approx([(4 + 0.5 * 6) / 0.5, 1, 3, 6])
    assert loss_shares(4, 0.5, ()) == (1.0,)


@pytest.mark.parametrize("spec", [SPEC, CAPPED], ids=["qwen3", "gemma2"])
def test_loss_and_gradient_are_those_of_models_of_the_first_layers(spec: ModelSpec) -> None:
    """Each exit by itself: a decoder of so many layers, which computes all logits."""
    batch, step = _batch(), _step(spec, TrainSettings(steps=5, exit_loss=0.7, exits_per_step=2))
    assert step.early_exit is not None
    step.early_exit.begin(1)
    assert step.early_exit.exits == (1, 3)
    loss = step.forward_backward(batch, 0.25, StepClock(torch.device("cpu")))
    assert step.early_exit.outputs == []  # nothing outlives the pass
    weights = {name: p.detach().clone().requires_grad_() for name, p in step.decoder.named_parameters()}
    total = torch.zeros(())
    for layers, share in zip((4, 1, 3), loss_shares(4, 0.7, (1, 3)), strict=True):
        first = Decoder(spec.with_(n_layers=layers), device="meta").train()
        own = {name: weights[name] for name, _ in first.named_parameters()}
        logits = functional_call(first, own, (batch.tokens, batch.positions, batch.documents))
        alone = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)
        if layers == 4:
            torch.testing.assert_close(loss, alone.detach())
        total = total + share * alone
    gradients = torch.autograd.grad(0.25 * total, list(weights.values()))
    for (name, parameter), wanted in zip(step.decoder.named_parameters(), gradients, strict=True):
        assert parameter.grad is not None
        # the same fp32 sums in another order
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-5, msg=name)


def test_a_dropped_row_passes_by_the_layer_and_no_other_row_does() -> None:
    batch, settings = _batch(rows=6), TrainSettings(steps=5, layer_dropout=0.9)
    step = _step(SPEC, settings)
    decoder = step.decoder
    torch.manual_seed(7)
    found = decoder.hidden(batch.tokens, batch.positions, batch.documents)
    torch.manual_seed(7)
    passes = [torch.rand(6, 1, 1).flatten() >= rate for rate in dropout_rates(4, 0.9)[1:]]
    assert 0 < sum(int(row.sum()) for row in passes) < 18
    for row in range(6):
        dropped = {layer for layer, passing in enumerate(passes, start=1) if not passing[row]}

        def after_block(layer: int, before: Tensor, after: Tensor, dropped: set[int] = dropped) -> Tensor:
            return before if layer in dropped else after

        decoder.after_block = after_block
        one = decoder.hidden(*(t[row : row + 1] for t in (batch.tokens, batch.positions, batch.documents)))
        torch.testing.assert_close(found[row : row + 1], one)


def test_scoring_passes_every_layer_and_draws_nothing() -> None:
    batch, step = _batch(), _step(SPEC, TrainSettings(steps=5, layer_dropout=0.9, exit_loss=1.0))
    state = torch.get_rng_state()
    with torch.no_grad():
        found = step.decoder.hidden(batch.tokens)
    assert torch.equal(torch.get_rng_state(), state)
    assert step.early_exit is not None
    assert step.early_exit.outputs == []
    step.decoder.after_block = None
    assert torch.equal(found, step.decoder.hidden(batch.tokens))


SIZES = {"family": "llama", "n_layers": 4, "d_model": 32, "n_heads": 2, "d_ff": 48}


def test_a_stopped_run_resumes_bit_for_bit_and_the_model_says_how_it_was_trained(make_recipe) -> None:
    settings: dict[str, Any] = {
        "steps": 5, "layer_dropout": 0.5, "exit_loss": 0.5, "exits_per_step": 2, "batch_size": 4, "grad_accumulation": 2,
    }  # fmt: skip
    whole = train(make_recipe("whole", model=SIZES, **settings))
    recipe = make_recipe("stopped", model=SIZES, **settings)
    with pytest.raises(Interrupted):
        train(recipe, should_stop=lambda done: done == 2)
    assert_same_run(train(recipe, resume=True), whole)
    assert read_spec(whole.model).early_exit
    plain = train(make_recipe("plain", model=SIZES, **settings | {"exit_loss": 0.0, "exits_per_step": 1}))
    assert "early_exit" not in json.loads((plain.model / "config.json").read_text())
    assert plain.summary["weights_sha256"] != whole.summary["weights_sha256"]


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"layer_dropout": 1.0}, "train.layer_dropout=1.0 must be at least 0 and less than 1"),
        ({"exit_loss": -1.0}, "train.exit_loss=-1.0 must be at least 0 and finite"),
        ({"exit_loss": 1.0, "exits_per_step": 0}, "train.exits_per_step=0 must be at least 1"),
        ({"exits_per_step": 2}, "needs train.exit_loss above 0"),
    ],
)
def test_impossible_values_are_refused(train: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        recipe_from_dict({"model": SIZES, "train": {"steps": 1} | train})


def test_a_model_with_too_few_layers_is_refused_before_the_run(make_recipe) -> None:
    data: Any = SimpleNamespace(vocab_size=300, n_train_tokens=1_000_000, eos_id=0)
    recipe = make_recipe(model=SIZES, exit_loss=1.0, exits_per_step=4)
    with pytest.raises(ConfigError, match="exits_per_step=4 must be less than the model's 4 layers"):
        resolve_spec(recipe, data, None)


def test_a_plan_counts_a_head_for_each_exit() -> None:
    plain, exits = (TrainingShape(2, 32, steps=3, exit_losses=n) for n in (0, 2))
    machine = ideal_machine()
    head = [sum(w.flops for w in plan_training(SPEC, s, machine).backward if w.component == "head") for s in (plain, exits)]
    assert head[1] == pytest.approx(3 * head[0])
    assert TrainingShape.from_settings(TrainSettings(steps=1, exit_loss=0.1, exits_per_step=2)).exit_losses == 2
    assert TrainingShape.from_settings(TrainSettings(steps=1)).exit_losses == 0


def test_planned_activations_are_what_a_step_with_exits_keeps() -> None:
    rows, length = 2, 24
    decoder = Decoder(SPEC).train()
    settings = TrainSettings(steps=5, exit_loss=0.7, exits_per_step=2)
    masters = MasterWeights(decoder, torch.bfloat16)
    optimizers = Optimizers(masters, SPEC, TrainSettings(steps=5))
    early_exit = EarlyExit.of(decoder, settings, 5, False)
    step = TrainStep(decoder, masters, optimizers, 1.0, False, lambda line: None, early_exit=early_exit)
    kept = step.activations_bytes(_batch(rows, length))
    shape = TrainingShape(rows, length, compile=False, exit_losses=2)
    natively = attends_natively(torch.device("cpu"), torch.bfloat16, SPEC, True)
    machine = ideal_machine(training=TrainingRates(attends_natively=natively))
    assert kept == pytest.approx(training_memory(SPEC, shape, machine)["activations"], rel=1e-3)
