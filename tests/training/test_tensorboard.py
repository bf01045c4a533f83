from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from twostroke.core.errors import InputError, Interrupted
from twostroke.training.start import start, train
from twostroke.training.tensorboard import scalars

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def _events(directory: Path) -> EventAccumulator:
    found = EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return found


def test_what_is_no_finite_number_is_left_out_and_the_rest_shown() -> None:
    line = {"step": 1, "loss": None, "block_grad_norms": {"embed": 1.5, "blocks.0": None}}
    assert list(scalars(line)) == [("gradient norm/embed", 1.5)]


def test_numbers_of_ranks_are_of_speed() -> None:
    line = {
        "peak_sent_5ms_bytes": 3,
        "peak_sent_50ms_bytes": 20,
        "wire_s": 0.5,
        "waiting_s": 0.25,
        "rank_waiting_s": [0.5, 1.0],
    }
    assert list(scalars(line)) == [
        ("speed/most bytes in 5 ms", 3.0),
        ("speed/most bytes in 50 ms", 20.0),
        ("speed/seconds of waiting for the wire", 0.5),
        ("speed/seconds of waiting for others", 0.25),
        ("seconds of waiting/rank 0", 0.5),
        ("seconds of waiting/rank 1", 1.0),
    ]


def test_every_logged_number_is_read_back(make_recipe) -> None:
    result = train(make_recipe(steps=3, tensorboard=True, diagnostics_every=2))
    events = _events(result.directory)
    lines = [json.loads(line) for line in (result.directory / "log.jsonl").read_text().splitlines()]
    for tag, name in {
        "train/loss": "loss",
        "train/learning rate": "learning_rate",
        "speed/tokens per second": "tok_per_s",
        "speed/bytes sent": "sent_bytes",
    }.items():
        assert [e.step for e in events.Scalars(tag)] == [1, 2, 3]
        # stored as 32-bit floats
        assert [e.value for e in events.Scalars(tag)] == pytest.approx([line[name] for line in lines], rel=1e-6)
    norms = [e.value for e in events.Scalars("gradient norm/blocks.1")]
    assert norms == pytest.approx([line["block_grad_norms"]["blocks.1"] for line in lines], rel=1e-6)
    assert [e.step for e in events.Scalars("residual rms/blocks.0")] == [2]
    assert [e.step for e in events.Scalars("update to weight/embed")] == [2]


def test_a_resumed_run_has_no_point_twice(make_recipe) -> None:
    recipe = make_recipe("killed", steps=6, checkpoint_every=2, tensorboard=True)

    class Killed(BaseException):
        pass

    def kill_at_five(record: Any, eta_s: float) -> None:
        if record.step == 5:
            raise Killed

    with pytest.raises(Killed):
        train(recipe, on_step=kill_at_five)
    assert [e.step for e in _events(Path(recipe.output)).Scalars("train/loss")] == [1, 2, 3, 4, 5]
    result = train(recipe, resume=True)
    assert len(list((result.directory / "tensorboard").iterdir())) == 2
    assert [e.step for e in _events(result.directory).Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]


def test_where_tensorboard_is_missing_a_sentence_says_so_before_anything_is_made(
    make_recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("tensorboard"):
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return real(name, *args, **kwargs)

    recipe = make_recipe("none", tensorboard=True)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r'pip install "twostroke\[train\]"'):
        start(recipe)
    assert not Path(recipe.output).exists()


def test_a_folder_that_cannot_be_written_is_logged_once_and_the_run_goes_on(make_recipe) -> None:
    said: list[str] = []
    recipe = make_recipe("blocked", steps=3, tensorboard=True)
    with pytest.raises(Interrupted):
        train(recipe, should_stop=lambda step: step == 0, log=said.append)
    folder = Path(recipe.output) / "tensorboard"
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    folder.write_text("a file in the folder's place")
    assert train(recipe, resume=True, log=said.append).summary["steps"] == 3
    assert len([line for line in said if "cannot be written" in line]) == 1
