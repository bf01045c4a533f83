"""State and activations on disk: the same runs to the last bit, and what happens when the disk fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from each_step import EachStep
from same_run import assert_same_run

from twostroke.core.described import plain
from twostroke.core.errors import ConfigError, Interrupted
from twostroke.core.profile import MachineProfile
from twostroke.core.recipe import TrainRecipe, recipe_from_dict
from twostroke.core.train_settings import TrainSettings
from twostroke.training import offloaded_activations, offloaded_state, stochastic_rounding
from twostroke.training.checkpoint import list_checkpoints, verify_checkpoint
from twostroke.training.run import RunState
from twostroke.training.scratch import ScratchError, ScratchFile, check_offload
from twostroke.training.start import train

STATE, ACTIVATIONS = {"offload_optimizer": "disk"}, {"offload_activations": "disk"}
GPT2 = {"family": "gpt2", "n_layers": 2, "d_model": 32, "n_heads": 2, "d_ff": 48, "dropout": 0.2}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, tensors that are cut, and small tensors on disk, in models of 27,000 parameters."""
    for module in (offloaded_state, stochastic_rounding):
        monkeypatch.setattr(module, "PIECE", 2**11)
    monkeypatch.setattr(offloaded_state, "OFFLOAD_BLOCK", 2**12)
    monkeypatch.setattr(offloaded_activations, "LEAST_OFFLOADED_BYTES", 2**8)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (None, {"optimizer": "adamw", "dtype": "fp32", "decay_embeddings": True}),
        (GPT2, {"optimizer": "adam", "dtype": "bf16", "grad_accumulation": 2, "ema_decay": 0.9}),
        (GPT2, {"optimizer": "sgd", "dtype": "fp16", "learning_rate": 0.01}),
        (None, {"optimizer": "muon", "activation_checkpointing": "full"}),
        (None, {"optimizer": "lamb"}),
        (None, {"optimizer": "adamw", "dtype": "pure_bf16"}),
        (None, {"optimizer": "muon", "dtype": "pure_bf16"}),
    ],
)
def test_a_run_on_disk_is_the_same_run(make_recipe: Any, model: dict[str, Any] | None, settings: dict[str, Any]) -> None:
    here, there = (train(make_recipe(name, model=model, **settings, **how)) for name, how in KINDS)
    assert_same_run(there, here)
    written = [list_checkpoints(run.directory / "checkpoints")[-1][1] for run in (here, there)]
    assert (written[0] / "optimizer.safetensors").read_bytes() == (written[1] / "optimizer.safetensors").read_bytes()
    assert there.summary["measurement"]["optimizer_bytes"] < here.summary["measurement"]["optimizer_bytes"]
    assert there.summary["measurement"]["activations_bytes"] < here.summary["measurement"]["activations_bytes"]


KINDS = [("here", {}), ("there", STATE | ACTIVATIONS)]


@pytest.mark.soak
def test_a_compiled_run_with_its_activations_on_disk_is_the_same_run(make_recipe: Any) -> None:
    here, there = (train(make_recipe(name, compile=True, **how)) for name, how in KINDS)
    assert there.summary["compiled"]
    assert_same_run(there, here)


def test_a_run_resumes_in_either_kind(make_recipe: Any) -> None:
    whole = train(make_recipe("whole"))
    for first, then in (({}, STATE), (STATE, {}), (STATE, STATE)):
        name = f"{len(first)}{len(then)}"
        with pytest.raises(Interrupted):
            train(make_recipe(name, **first), should_stop=lambda step: step == 2)
        assert_same_run(train(make_recipe(name, **then), resume=True), whole)


def test_replicas_keep_their_state_on_disk(make_recipe: Any) -> None:
    """One rank with a layout takes another path through the code than a process by itself."""

    here, there = (train(_laid_out(make_recipe(name, **how), data=1)) for name, how in KINDS)
    assert_same_run(there, here)


def _laid_out(recipe: TrainRecipe, **parallel: int) -> TrainRecipe:
    return recipe_from_dict(plain(recipe) | {"parallel": parallel})


# -- the disk -------------------------------------------------------------------------------------------------------------


def _flip_a_byte(run: RunState) -> None:
    """On the disk, in the middle of the file."""
    for file in run.scratch:
        middle = os.fstat(file.descriptor).st_size // 3
        byte = os.pread(file.descriptor, 1, middle)
        os.pwrite(file.descriptor, bytes([byte[0] ^ 1]), middle)


def test_a_flipped_byte_of_the_state_ends_the_run_and_the_last_checkpoint_continues_it(make_recipe: Any) -> None:
    settings = {"steps": 5, "checkpoint_every": 1, "checkpoint_in_background": False}
    whole = train(make_recipe("whole", **settings))
    recipe = make_recipe("flipped", **settings, **STATE)
    flip = EachStep(lambda run, record: _flip_a_byte(run) if record.step == 3 else None)
    with pytest.raises(ScratchError, match=r"of the optimizer's state are not what was written") as raised:
        train(recipe, observers=[flip])
    assert "step 4 failed" in str(raised.value)
    assert "Checkpoint step-00000002 is kept. Continue with --resume." in str(raised.value), "the third would have held it"
    assert_same_run(train(recipe, resume=True), whole)


def test_a_flipped_byte_of_an_activation_ends_the_backward_pass(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, "offload_activations", "activations")
    x = torch.randn(64, 64, requires_grad=True)
    with offloaded_activations.OffloadedActivations(file, (x,)).of_a_pass():
        y = x.exp().sin().sum()
    os.pwrite(file.descriptor, b"\x01", 100)
    with pytest.raises(ScratchError, match="16 KiB of activations are not what was written"):
        y.backward()


def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_is_whole(
    make_recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, recipe = train(make_recipe("whole")), make_recipe("full", **STATE, **ACTIVATIONS)
    with pytest.raises(Interrupted):
        train(recipe, should_stop=lambda step: step == 2)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("twostroke.training.scratch.os.posix_fallocate", full)
        with pytest.raises(ScratchError, match=r'No space left on device: .* to write.*set train\.offload_optimizer="none"'):
            train(recipe, resume=True)
    with monkeypatch.context() as patch:
        patch.setattr("twostroke.training.scratch.os.pwrite", full)  # a file system that reserves nothing
        with pytest.raises(ScratchError, match="No space left on device"):
            train(recipe, resume=True)
    verify_checkpoint(Path(recipe.output) / "checkpoints" / "step-00000002")
    assert_same_run(train(recipe, resume=True), whole)


def test_scratch_files_have_no_name_so_a_kill_leaves_none(make_recipe: Any) -> None:
    recipe, links = make_recipe(**STATE, **ACTIVATIONS), []

    def look(run: RunState, record: object) -> None:
        links.extend(os.readlink(f"/proc/self/fd/{file.descriptor}") for file in run.scratch)
        assert not [name for name in os.listdir(recipe.output) if "scratch" in name]

    train(recipe, observers=[EachStep(look)])
    assert len(links) == 8
    assert all(link.endswith("(deleted)") for link in links)


# -- what is planned, and what is refused -----------------------------------------------------------------------------------


def test_a_plan_says_the_bytes_that_a_step_moves_and_the_ledger_scores_them(make_recipe: Any, profile: MachineProfile) -> None:
    run = train(make_recipe(steps=5, **STATE, **ACTIVATIONS))
    planned, measured = run.summary["prediction"], run.summary["measurement"]
    for name in ("offload_read_bytes_per_step", "offload_written_bytes_per_step"):
        assert planned[name] == pytest.approx(measured[name], rel=0.1)
    alone = train(make_recipe("alone")).summary
    assert "offload_read_bytes_per_step" not in alone["prediction"] | alone["measurement"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"offload_optimizer": "cpu"}, "'none', 'disk'"),
        ({"offload_optimizer": "disk", "checkpoint_every": 2}, "Set train.checkpoint_in_background=false"),
        ({"offload_optimizer": "disk", "optimizer": "sgd", "momentum": 0.0}, "has nothing to keep"),
        ({"offload_activations": "disk", "activation_checkpointing": "selective"}, 'Use "none" or "full"'),
    ],
)
def test_what_cannot_be_is_refused_by_name(make_recipe: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_recipe(**settings)


def test_ranks_that_share_a_model_and_gpus_are_refused(make_recipe: Any) -> None:
    with pytest.raises(ConfigError, match=r"not yet with parallel\.shard=2"):
        _laid_out(make_recipe(grad_accumulation=2, **STATE), shard=2)
    with pytest.raises(ConfigError, match=r'train\.offload_activations="disk" is for training on a CPU'):
        check_offload(TrainSettings(steps=1, offload_activations="disk"), "cuda")
