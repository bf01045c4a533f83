from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from each_step import EachStep
from same_run import assert_same_run

from twostroke.core.errors import Interrupted, TwostrokeError
from twostroke.ledger.store import Ledger
from twostroke.training import checkpoint as checkpoint_module
from twostroke.training import finish as finish_module
from twostroke.training import loss_scale
from twostroke.training.checkpoint import CheckpointError
from twostroke.training.start import train
from twostroke.training.step import TrainStep
from twostroke.training.tensor_file import HashedFile


@pytest.mark.parametrize(
    ("dtype", "micro_batches", "step"), [("fp32", 1, 0), ("fp32", 2, 0), ("fp32", 4, 1), ("fp32", 8, 2), ("fp16", 5, 0)]
)
def test_a_stop_between_micro_batches_drops_the_window_and_the_resumed_run_does_it_again(
    make_recipe, monkeypatch: pytest.MonkeyPatch, dtype: str, micro_batches: int, step: int
) -> None:
    sizes = {"family": "gpt2", "n_layers": 2, "d_model": 32, "n_heads": 2, "d_ff": 48, "dropout": 0.2}
    settings = {"steps": 4, "grad_accumulation": 3, "dtype": dtype}
    # fp16 overflows at its first scale: the stop comes in the window's second computation, which draws other dropout
    monkeypatch.setattr(loss_scale, "FIRST_SCALE", 2.0**40)
    whole = train(make_recipe("whole", model=sizes, **settings))
    done: list[None] = []
    forward_backward = TrainStep.forward_backward

    def counted(*args: Any) -> torch.Tensor:
        done.append(None)
        return forward_backward(*args)

    recipe = make_recipe("stopped", model=sizes, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "forward_backward", counted)
        patch.setattr("twostroke.training.loop.ABANDON_S", -1e9)  # as if the rest of every step took long
        with pytest.raises(Interrupted, match=f"stopped at step {step} of 4"):
            train(recipe, should_stop=lambda now: len(done) == micro_batches)
    assert len(done) == micro_batches
    assert_same_run(train(recipe, resume=True), whole)


@pytest.mark.parametrize("at", [0, 2])
def test_a_signal_before_the_first_step_of_a_process_stops_at_once(
    make_recipe, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The first step may compile for a minute, and there is nothing to save."""
    whole, recipe = train(make_recipe("whole")), make_recipe("stopped")
    if at:
        with pytest.raises(Interrupted):
            train(recipe, should_stop=lambda step: step == at)

    def compiling(*args: Any) -> torch.Tensor:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the compilation went on")

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "forward_backward", compiling)
        with pytest.raises(Interrupted, match=f"stopped before step {at + 1} was done, so nothing is lost"):
            train(recipe, resume=at > 0)
    assert Ledger().runs()[0].status == "interrupted"
    assert_same_run(train(recipe, resume=True), whole)


def test_a_signal_while_the_model_is_written_does_not_stop_that(make_recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, lines = train(make_recipe("whole")), []
    original = finish_module.save_model

    def signalled(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return original(*args, **kwargs)

    monkeypatch.setattr(finish_module, "save_model", signalled)
    assert_same_run(train(make_recipe("signalled"), log=lines.append), whole)
    assert "all steps are done, and the model is being written." in lines


def test_a_short_step_is_finished_before_the_stop(make_recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[None] = []
    forward_backward = TrainStep.forward_backward
    monkeypatch.setattr(TrainStep, "forward_backward", lambda *args: (done.append(None), forward_backward(*args))[1])
    with pytest.raises(Interrupted, match="stopped at step 2 of"):
        train(make_recipe(steps=4, grad_accumulation=3), should_stop=lambda step: len(done) >= 4)
    assert len(done) == 6


SAVES_OF_TWO_TO_FOUR = [f".saving-step-0000000{step}" for step in (2, 3, 4)]


class TestFullDisk:
    @pytest.mark.parametrize("in_background", [False, True])
    def test_in_the_middle_training_goes_on_and_the_old_checkpoint_stays(
        self, make_recipe, monkeypatch: pytest.MonkeyPatch, in_background: bool
    ) -> None:
        whole = train(make_recipe("whole", steps=6))
        recipe = make_recipe("full", steps=6, checkpoint_every=1, checkpoint_in_background=in_background)
        original = checkpoint_module.write_tensors

        def full_at_two_to_four(file: HashedFile, tensors: Any) -> None:
            if Path(os.readlink(f"/proc/self/fd/{file._descriptor}")).parent.name in SAVES_OF_TWO_TO_FOUR:
                raise OSError(28, "No space left on device")
            original(file, tensors)

        monkeypatch.setattr(checkpoint_module, "write_tensors", full_at_two_to_four)
        lines: list[str] = []
        settle = EachStep(lambda run, record: run.saver.settle())  # each save ends within its step
        assert_same_run(train(recipe, log=lines.append, observers=[settle]), whole)
        told = [line for line in lines if "No space left on device" in line]
        assert len(told) == 1  # it is not said again within a minute
        assert "Checkpoint step-00000001 is kept. Training continues." in told[0]
        assert any("written again, after 3 that were not" in line for line in lines)

    def test_when_stopped_it_does_not_claim_a_checkpoint(self, make_recipe, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*args: Any, **kwargs: Any) -> None:
            raise CheckpointError("no room.")

        monkeypatch.setattr("twostroke.training.saver.save_checkpoint", full)
        with pytest.raises(TwostrokeError, match=r"stopped at step 2, but no room\. No earlier checkpoint exists") as caught:
            train(make_recipe(), should_stop=lambda step: step == 2)
        assert not isinstance(caught.value, Interrupted)
        assert Ledger().runs()[0].status == "failed"

    def test_at_the_end_the_run_can_be_resumed_to_its_model(self, make_recipe, monkeypatch: pytest.MonkeyPatch) -> None:
        whole, recipe = train(make_recipe("whole", steps=2)), make_recipe("full", steps=2)

        def full(*args: Any, **kwargs: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("twostroke.model.save._write_flushing", full)
            with pytest.raises(
                TwostrokeError, match=r"all 2 steps are done, but .* No space left on device.*step-00000002 is kept"
            ):
                train(recipe)
        assert_same_run(train(recipe, resume=True), whole)
