from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from twostroke.training.observers import Observer
from twostroke.training.start import train
from twostroke.training.step import TrainStep


class _Failing(Observer):
    name = "the clumsy one"

    def __init__(self, where: str) -> None:
        self.where, self.calls = where, 0

    def _maybe(self, where: str) -> None:
        if where == self.where:
            self.calls += 1
            raise RuntimeError("it broke\nin many lines")

    def begin(self, run: Any) -> None:
        self._maybe("begin")

    def after_step(self, run: Any, record: Any) -> dict[str, Any]:
        self._maybe("after_step")
        return {}

    def after_line(self, line: dict[str, Any]) -> None:
        self._maybe("after_line")

    def close(self) -> None:
        self._maybe("close")


@pytest.mark.parametrize("where", ["begin", "after_step", "after_line", "close"])
def test_an_observer_that_raises_is_logged_once_and_dropped(make_recipe, where: str) -> None:
    said: list[str] = []
    observer = _Failing(where)
    result = train(make_recipe(steps=3), log=said.append, observers=[observer])
    assert result.summary["steps"] == 3
    assert observer.calls == 1
    assert [line for line in said if "clumsy" in line] == [
        "the clumsy one failed and was dropped: it broke. Training continues without it."
    ]


def test_after_a_run_went_back_each_step_is_seen_once_as_it_was_in_the_end(
    make_recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = TrainStep.forward_backward, iter(range(1, 1000))

    def poisoned(self: TrainStep, *args: Any) -> torch.Tensor:
        loss = forward(self, *args)
        return loss * float("nan") if next(calls) == 6 else loss

    monkeypatch.setattr(TrainStep, "forward_backward", poisoned)
    seeing = {"diagnostics_every": 1, "sample_every": 1, "sample_prompts": ["if a"], "tensorboard": True}
    result = train(make_recipe(steps=8, checkpoint_every=2, anomaly_policy="rollback", **seeing))
    lines, samples = (
        [json.loads(line) for line in (result.directory / name).read_text().splitlines()]
        for name in ("log.jsonl", "samples.jsonl")
    )
    assert [line["step"] for line in lines] == [sample["step"] for sample in samples] == list(range(1, 9))
    assert all(line["update_ratios"]["embed"] > 0 for line in lines)
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(result.directory / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert shown == [(line["step"], pytest.approx(line["loss"])) for line in lines]
