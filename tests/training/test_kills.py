"""kill -9 at any moment: what is resumed ends hash-equal to the run that nothing disturbed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from killing import Killer, fingerprint, kill_until_done

GPT2 = {"family": "gpt2", "n_layers": 2, "d_model": 32, "n_heads": 2, "d_ff": 48, "dropout": 0.2}
RUNS: list[tuple[dict[str, Any] | None, dict[str, Any]]] = [
    (GPT2, {"dtype": "fp32", "optimizer": "adamw", "grad_accumulation": 3, "checkpoint_every": 2}),
    (None, {"dtype": "bf16", "optimizer": "muon", "grad_accumulation": 2, "checkpoint_every": 3, "keep_checkpoints": 1}),
    (GPT2, {"dtype": "fp16", "optimizer": "sgd", "learning_rate": 0.01, "ema_decay": 0.9, "checkpoint_every": 3}),
    (None, {"dtype": "pure_bf16", "activation_checkpointing": "full", "grad_accumulation": 2, "checkpoint_every": 5}),
    # spikes are found in the noise itself, so there are rollbacks
    (GPT2, {"dtype": "fp32", "checkpoint_every": 4, "anomaly_policy": "rollback", "spike_factor": 1.15, "anomaly_limit": 1000}),
]


def _kill(make_recipe: Any, tmp_path: Path, steps: int, runs: int, kills_a_run: int) -> list[tuple[bool, bool]]:
    draw, killer = random.Random(0), Killer(tmp_path)
    model, settings = RUNS[0]
    killer.run(make_recipe("warm-up", model=model, steps=1), None)  # the fork server imports torch
    whole: dict[int, tuple[dict[str, str], float]] = {}
    places = []
    for number in range(runs):
        kind = number % len(RUNS)
        model, settings = RUNS[kind]
        if kind not in whole:
            reference = make_recipe(f"whole-{kind}", model=model, steps=steps, **settings)
            length_s = killer.time_of(reference)
            whole[kind] = fingerprint(Path(reference.output)), length_s
        wanted, length_s = whole[kind]
        recipe = make_recipe(f"killed-{number}", model=model, steps=steps, **settings)
        places += kill_until_done(killer, recipe, length_s, kills_a_run, draw)
        assert fingerprint(Path(recipe.output)) == wanted, f"run {number} of kind {kind}"
    return places


def test_killed_at_random_moments_runs_end_as_the_undisturbed_ones(make_recipe, tmp_path: Path) -> None:
    assert len(_kill(make_recipe, tmp_path, steps=20, runs=len(RUNS), kills_a_run=1)) >= 2


@pytest.mark.soak
def test_a_hundred_killed_runs_end_as_the_undisturbed_ones(make_recipe, tmp_path: Path) -> None:
    places = _kill(make_recipe, tmp_path, steps=48, runs=100, kills_a_run=3)
    in_window, in_save = (sum(place[i] for place in places) for i in range(2))
    print(f"{len(places)} kills, {in_window} inside an accumulation window, {in_save} inside a save")
    assert len(places) >= 150
    assert in_window >= 20
    assert in_save >= 20
