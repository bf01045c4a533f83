from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from same_run import assert_same_run, log_of

from twostroke.core.errors import ConfigError, InputError, Interrupted
from twostroke.core.profile import MachineProfile
from twostroke.core.recipe import TrainRecipe
from twostroke.ledger.store import Ledger
from twostroke.model.load import load_model
from twostroke.planner.truth.restated import WAITED
from twostroke.planner.work.params import count_parameters
from twostroke.training import checkpoint as checkpoint_module
from twostroke.training.checkpoint import MODEL, list_checkpoints, load_checkpoint
from twostroke.training.finish import TrainingResult
from twostroke.training.loop import execute
from twostroke.training.measurement import medians
from twostroke.training.observers import Observer
from twostroke.training.start import find_finished, start, train


def _interrupted_at(recipe: TrainRecipe, *steps: int) -> TrainingResult:
    """The run stopped at each of ``steps`` and resumed each time."""
    for number, step in enumerate(steps):
        with pytest.raises(Interrupted, match=f"stopped at step {step} of"):
            train(recipe, resume=number > 0, should_stop=lambda done, at=step: done == at)
    return train(recipe, resume=True)


@pytest.mark.parametrize(("dtype", "optimizer"), [("fp32", "adamw"), ("bf16", "muon")])
def test_interrupted_and_resumed_is_the_uninterrupted_run_bit_for_bit(make_recipe, dtype: str, optimizer: str) -> None:
    sizes = {"family": "gpt2", "n_layers": 2, "d_model": 32, "n_heads": 2, "d_ff": 48, "dropout": 0.2}
    settings = {"steps": 6, "dtype": dtype, "optimizer": optimizer, "grad_accumulation": 2}
    whole = train(make_recipe("whole", model=sizes, **settings))
    resumed = _interrupted_at(make_recipe("resumed", model=sizes, **settings), 2, 3)
    assert_same_run(resumed, whole)
    assert len({record["loss"] for record in log_of(whole.directory)}) == 6  # dropout and data move on
    assert log_of(whole.directory)[-1]["loss"] < log_of(whole.directory)[0]["loss"]


class _Killed(BaseException):
    """Stands for the process's end."""


def test_killed_between_checkpoints_it_repeats_the_lost_steps_exactly(make_recipe) -> None:
    whole = train(make_recipe("whole", steps=6))
    recipe = make_recipe("killed", steps=6, checkpoint_every=2)

    def kill_at_five(record: Any, eta_s: float) -> None:
        if record.step == 5:
            raise _Killed

    with pytest.raises(_Killed):
        train(recipe, on_step=kill_at_five)
    assert len(log_of(Path(recipe.output))) == 5
    assert_same_run(train(recipe, resume=True), whole)


def test_a_run_that_breaks_off_gives_up_its_directory_only_when_its_writer_is_done(
    make_recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run resumed in the same process would meet a half-written checkpoint and set it aside as damaged."""
    recipe, original = make_recipe(checkpoint_every=2), checkpoint_module._write

    def slowly(directory: Path, checkpoint: Any) -> None:
        time.sleep(0.3)
        original(directory, checkpoint)

    def break_off(record: Any, eta_s: float) -> None:
        if record.step == 3:
            raise _Killed

    monkeypatch.setattr(checkpoint_module, "_write", slowly)
    with pytest.raises(_Killed):
        train(recipe, on_step=break_off)
    assert [step for step, _ in list_checkpoints(Path(recipe.output) / "checkpoints")] == [2]


def test_killed_while_the_model_is_written_it_is_written_again(make_recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, recipe = train(make_recipe("whole", steps=3)), make_recipe("killed", steps=3)
    leftover = Path(recipe.output) / f".model.{32 * '0'}.partial"

    def kill(*args: Any, **kwargs: Any) -> None:
        leftover.mkdir()
        os.utime(leftover, (0, 0))  # long ago: a young one may belong to a process at work
        raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr("twostroke.training.finish.save_model", kill)
        with pytest.raises(_Killed):
            train(recipe)
    resumed = train(recipe, resume=True)
    assert not resumed.was_finished
    assert not leftover.exists()
    assert_same_run(resumed, whole)


def test_a_run_of_a_release_that_had_fewer_recipe_keys_is_resumed(make_recipe) -> None:
    recipe = make_recipe(steps=2)
    with pytest.raises(Interrupted):
        train(recipe, should_stop=lambda step: step == 1)
    file = Path(recipe.output) / "recipe.json"
    stored = json.loads(file.read_text())
    del stored["lora"], stored["data"]["layout"]
    file.write_text(json.dumps(stored))
    assert train(recipe, resume=True).summary["steps"] == 2


def test_a_run_killed_before_any_checkpoint_starts_again(make_recipe) -> None:
    def kill(record: Any, eta_s: float) -> None:
        raise _Killed

    whole, recipe = train(make_recipe("whole", steps=3)), make_recipe("killed", steps=3)
    with pytest.raises(_Killed):
        train(recipe, on_step=kill)
    assert_same_run(train(recipe, resume=True), whole)


def test_a_damaged_checkpoint_falls_back_and_ends_in_the_same_weights(make_recipe) -> None:
    whole = train(make_recipe("whole", steps=6))
    recipe = make_recipe("damaged", steps=6, checkpoint_every=2)
    with pytest.raises(Interrupted):
        train(recipe, should_stop=lambda step: step == 5)
    victim = list_checkpoints(Path(recipe.output) / "checkpoints")[-1][1] / MODEL
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    lines: list[str] = []
    resumed = train(recipe, resume=True, log=lines.append)
    assert_same_run(resumed, whole)
    assert any("step-00000005 is damaged" in line and MODEL in line for line in lines)


class TestRunDirectory:
    def test_a_run_is_not_begun_over_another(self, make_recipe) -> None:
        recipe = make_recipe(steps=1)
        train(recipe)
        before = {path: path.stat().st_mtime_ns for path in Path(recipe.output).rglob("*")}
        with pytest.raises(InputError, match="already holds a run"):
            train(recipe)
        assert {path: path.stat().st_mtime_ns for path in Path(recipe.output).rglob("*")} == before

    def test_a_directory_of_something_else_is_refused(self, make_recipe) -> None:
        recipe = make_recipe()
        Path(recipe.output).mkdir()
        (Path(recipe.output) / "thesis.tex").touch()
        for resume in (False, True):
            with pytest.raises(InputError, match="holds no run"):
                train(recipe, resume=resume)

    def test_there_must_be_a_run_to_resume(self, make_recipe) -> None:
        with pytest.raises(InputError, match=r"holds no run to resume"):
            train(make_recipe(), resume=True)

    def test_a_finished_run_says_so(self, make_recipe) -> None:
        recipe = make_recipe(steps=1)
        first = train(recipe)
        assert not first.was_finished
        again = train(recipe, resume=True)
        assert again.was_finished
        assert again.summary == first.summary
        assert find_finished(make_recipe("other"), resume=False) is None

    def test_another_recipe_is_refused_by_its_key(self, make_recipe) -> None:
        with pytest.raises(Interrupted):
            train(make_recipe(), should_stop=lambda step: step == 1)
        with pytest.raises(ConfigError, match=r"train\.learning_rate=0\.5 in the recipe differs from 0\.004"):
            train(make_recipe(learning_rate=0.5), resume=True)
        train(make_recipe(checkpoint_every=1, keep_checkpoints=3), resume=True)

    def test_a_directory_that_cannot_be_written_is_refused_with_a_remedy(self, make_recipe, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(InputError, match=r"output=.*/file/run cannot be written .*Name another directory"):
            train(dataclasses.replace(make_recipe(), output=str(tmp_path / "file" / "run")))

    def test_what_cannot_be_run_leaves_nothing_behind(self, make_recipe) -> None:
        recipe = make_recipe(steps=0, budget_s=10)  # no profile of this machine
        with pytest.raises(ConfigError, match="twostroke calibrate"):
            train(recipe)
        assert not Path(recipe.output).exists()
        assert Ledger().runs() == []


def test_the_prediction_is_frozen_before_and_measured_after(make_recipe, profile: MachineProfile) -> None:
    ledger = Ledger()
    during = []
    recipe = make_recipe(steps=5, dtype="bf16")
    result = train(recipe, on_step=lambda record, eta_s: during.append(ledger.runs()[0].status))
    assert during == ["frozen"] * 5
    run = ledger.get(result.run_id)
    assert run.status == "finished"
    assert run.inputs["steps"] == 5
    assert run.inputs["recipe"]["train"]["batch_size"] == 2
    reasons = run.measurement["not_measured"]
    assert set(run.prediction) - set(run.measurement) == set(reasons) == {"energy_kwh"} - set(run.measurement)
    assert run.measurement["cost_usd"] > 0
    measured = {name: value for name, value in run.measurement.items() if name != WAITED}  # where the system tells
    assert result.summary["measurement"] | {"not_measured": reasons} == measured


@pytest.mark.alone
def test_measured_numbers_are_what_they_say(make_recipe, profile: MachineProfile) -> None:
    recipe = make_recipe(steps=6, dtype="bf16", optimizer="adamw", grad_accumulation=2)
    run = start(recipe)
    result = execute(run)
    records = log_of(result.directory)
    measured = result.summary["measurement"]
    n = count_parameters(run.spec).total
    beside = 2 if result.summary["compute_dtype"] == "bf16" else 0  # the working copy and its gradients
    assert measured["weights_bytes"] == measured["gradients_bytes"] == (4 + beside) * n
    assert measured["optimizer_bytes"] == pytest.approx(8 * n, rel=0.01)  # and a step counter per tensor
    assert measured["checkpoint_bytes"] == pytest.approx(12 * n, rel=0.2)  # headers weigh at this size
    assert measured["model_bytes"] == pytest.approx(2 * n, rel=0.2)
    assert [r["warm_up"] for r in records] == [True] * 3 + [False] * 3
    assert measured["step_time_s"] == sorted(r["step_time_s"] for r in records[3:])[1]
    for r in records:
        assert r["tok_per_s"] == pytest.approx(128 / r["step_time_s"])
        parts = sum(r[name] for name in ("forward_s", "backward_s", "optimizer_s", "data_s"))
        assert parts <= r["step_time_s"] < parts + 0.05  # between the parts only a few Python lines
        spec = run.spec
        flops = 6 * count_parameters(spec).in_products + 6 * spec.n_layers * spec.n_heads * spec.head_dim * 32
        peak = profile.peak_flop_per_s[result.summary["compute_dtype"]]
        assert r["mfu"] == pytest.approx(flops * r["tok_per_s"] / peak)
        assert 0 < r["memory_bytes"] <= r["peak_memory_bytes"]
    assert [r["tokens"] for r in records] == [128 * step for step in range(1, 7)]
    assert measured["train_time_s"] >= sum(r["step_time_s"] for r in records)
    assert measured["startup_s"] >= records[0]["step_time_s"]


def test_time_before_an_interruption_counts(make_recipe) -> None:
    result = _interrupted_at(make_recipe(steps=4), 2)
    total = sum(record["step_time_s"] for record in log_of(result.directory))
    assert result.summary["measurement"]["train_time_s"] >= total
    statuses = [m.status for m in Ledger().get(result.run_id).measurements]
    assert statuses == ["interrupted", "finished"]


def test_without_a_profile_it_trains_and_says_what_is_missing(make_recipe) -> None:
    lines: list[str] = []
    result = train(make_recipe(steps=1), log=lines.append)
    assert log_of(result.directory)[0]["mfu"] is None
    assert "mfu" not in result.summary["measurement"]
    assert any("no profile" in line for line in lines)


def test_medians_leave_out_warm_up_and_skipped_steps() -> None:
    def record(seconds: float, **flags: Any) -> dict[str, Any]:
        names = ("step_time_s", "forward_s", "backward_s", "optimizer_s", "data_s")
        return dict.fromkeys(names, seconds) | flags

    steps = [record(90.0, warm_up=True), record(1.0), record(2.0), record(3.0), record(80.0, skipped="loss is nan")]
    assert medians(steps)["step_time_s"] == 2.0
    assert medians(steps[:1])["forward_s"] == 90.0
    assert medians([]) == {}


@pytest.mark.parametrize(("dtype", "family"), [("bf16", "llama"), ("fp32", "gpt2"), ("bf16", "qwen3")])
def test_the_saved_model_is_the_masters_in_the_training_format(make_recipe, dtype: str, family: str) -> None:
    sizes = {"family": family, "n_layers": 1, "d_model": 32, "n_heads": 2, "d_ff": 48}
    result = train(make_recipe(model=sizes, steps=2, dtype=dtype))
    masters = load_checkpoint(list_checkpoints(result.directory / "checkpoints")[-1][1]).weights
    loaded = dict(load_model(result.model).named_parameters())
    assert loaded.keys() == masters.keys()
    for name, weight in masters.items():
        stored = weight.bfloat16().float() if dtype == "bf16" else weight
        assert torch.equal(loaded[name].detach(), stored)
    assert (result.model / "tokenizer.json").is_file()


def test_fine_tuning_continues_a_model_with_its_own_tokenizer(make_recipe) -> None:
    first = train(make_recipe("first", steps=30, dtype="fp32", learning_rate=1e-2))
    recipe = make_recipe("second", model={"init_from": str(first.model)}, steps=2, dtype="fp32", learning_rate=1e-4)
    recipe = dataclasses.replace(recipe, method="full", data=dataclasses.replace(recipe.data, tokenizer=None))
    second = train(recipe)
    losses = [r["loss"] for r in log_of(first.directory)]
    # 30 steps took well over half a nat off; the second run begins about where they ended
    assert losses[-1] < losses[0] - 0.5
    assert log_of(second.directory)[0]["loss"] < losses[0] - 0.4
    assert (second.model / "tokenizer.json").read_bytes() == (first.model / "tokenizer.json").read_bytes()


def test_scores_in_the_middle_join_the_log_and_change_nothing(make_recipe) -> None:
    whole = train(make_recipe("whole", steps=4))

    def evaluate(decoder: Any, prepared: Any) -> dict[str, float]:
        decoder.eval()
        with torch.no_grad():
            value = decoder(torch.zeros(1, 4, dtype=torch.long)).float().mean().item()
        decoder.train()
        return {"heldout_bits_per_byte": value}

    scored = train(make_recipe("scored", steps=4, evaluate_every=2), evaluate=evaluate)
    assert_same_run(scored, whole)
    assert ["heldout_bits_per_byte" in r for r in log_of(scored.directory)] == [False, True, False, True]


class _Watcher(Observer):
    """Adds the first block's largest weight and the loss it was shown to each line."""

    def __init__(self) -> None:
        self.closed = 0

    def after_step(self, run: Any, record: Any) -> dict[str, Any]:
        assert run.last_result.loss == record.loss
        assert run.last_batch.tokens.shape == (2, 32)
        return {"watched_step": record.step, "largest": float(run.masters.weights["embed.weight"].abs().max())}

    def close(self) -> None:
        self.closed += 1


def test_what_observers_see_joins_the_log_and_changes_nothing(make_recipe) -> None:
    whole, watcher = train(make_recipe("whole")), _Watcher()
    watched = train(make_recipe("watched"), observers=[watcher])
    assert_same_run(watched, whole)
    assert [r["watched_step"] for r in log_of(watched.directory)] == [1, 2, 3, 4]
    assert len({r["largest"] for r in log_of(watched.directory)}) == 4
    assert watcher.closed == 1


def test_observers_are_closed_when_a_run_is_stopped(make_recipe) -> None:
    watcher = _Watcher()
    with pytest.raises(Interrupted):
        execute(start(make_recipe()), should_stop=lambda step: step == 1, observers=[watcher])
    assert watcher.closed == 1
