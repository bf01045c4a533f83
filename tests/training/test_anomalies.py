from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from each_step import EachStep

from twostroke.core.errors import ConfigError, CorruptFileError, Interrupted, TwostrokeError
from twostroke.training import anomalies, build
from twostroke.training.anomalies import MIN_ACCEPTED, WINDOW, AnomalyLog, SpikeWatch
from twostroke.training.checkpoint import list_checkpoints, load_checkpoint
from twostroke.training.finish import TrainingResult
from twostroke.training.measurement import StepRecord
from twostroke.training.run import RunState
from twostroke.training.start import train
from twostroke.training.step import TrainStep


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _curve(directory: Path) -> list[tuple[Any, ...]]:
    names = ("step", "loss", "grad_norm", "learning_rate", "tokens", "epoch", "skipped")
    return [tuple(line[name] for name in names) for line in _lines(directory / "log.jsonl")]


def _end(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    end = load_checkpoint(list_checkpoints(directory / "checkpoints")[-1][1])
    return end.weights | end.optimizer, {name: value for name, value in end.state.items() if name != "elapsed_s"}


def _assert_same(found: TrainingResult, wanted: TrainingResult) -> None:
    assert _curve(found.directory) == _curve(wanted.directory)
    assert _lines(found.directory / "anomalies.jsonl") == _lines(wanted.directory / "anomalies.jsonl")
    (a, a_state), (b, b_state) = _end(found.directory), _end(wanted.directory)
    assert a_state == b_state
    assert all(torch.equal(a[name], b[name]) for name in a | b)


class TestSpikeWatch:
    def _steady(self, factor: float, steps: int = WINDOW) -> SpikeWatch:
        watch = SpikeWatch(factor)
        for step in range(steps):
            watch.took(2.0 + 0.01 * (-1) ** step, 1.0 + 0.1 * (-1) ** step)
        return watch

    def test_a_step_far_out_of_the_ordinary_range_is_refused_with_its_numbers(self) -> None:
        watch = self._steady(5)
        assert watch.accept(2.0, 1.5) is None
        assert "gradient norm 5.6 is more than 5 times the median 1" in (watch.accept(2.0, 5.6) or "")
        assert watch.accept(2.05, 1.0) is None  # the losses change by 0.02 from step to step
        assert "loss 2.5000 is above the median" in (watch.accept(2.5, 1.0) or "")
        assert watch.accept(1.0, 1.0) is None  # a better loss is no anomaly

    def test_without_a_factor_nothing_finite_is_refused(self) -> None:
        assert self._steady(0).accept(1e9, 1e9) is None

    def test_the_first_steps_have_no_ordinary_range(self) -> None:
        assert self._steady(5, MIN_ACCEPTED - 1).accept(100.0, 100.0) is None
        assert self._steady(5, MIN_ACCEPTED).accept(100.0, 100.0) is not None

    def test_only_the_last_steps_count(self) -> None:
        watch = self._steady(5)
        for _ in range(WINDOW):
            watch.took(20.0, 100.0)
        assert watch.accept(20.0, 400.0) is None

    def test_its_state_survives_json_and_decides_alike(self) -> None:
        watch, other = self._steady(3, 40), SpikeWatch(3)
        watch.took(1 / 3, math.pi)
        watch.in_a_row = 4
        other.load_state(json.loads(json.dumps(watch.state())))
        assert other.state() == watch.state()
        assert [other.accept(2 + x, x) for x in (0.1, 1.0, 9.0)] == [watch.accept(2 + x, x) for x in (0.1, 1.0, 9.0)]

    @pytest.mark.parametrize(
        "state",
        [
            {},
            {"in_a_row": 0, "losses": [1.0], "norms": []},
            {"in_a_row": 0, "losses": ["nan"], "norms": [1.0]},
            {"in_a_row": None},
        ],
    )
    def test_a_damaged_state_is_refused(self, state: dict[str, Any]) -> None:
        with pytest.raises(CorruptFileError, match="record of losses"):
            SpikeWatch(2).load_state(state)


def test_numbered_lines_are_cut_where_a_resumed_run_writes_them_again(tmp_path: Path) -> None:
    log = AnomalyLog(tmp_path / "anomalies.jsonl", print)
    for step in (3, 9, 4):
        log.append({"step": step})
    log = AnomalyLog(tmp_path / "anomalies.jsonl", print)
    log.restart(2)
    log.append({"step": 7})
    assert [(r["number"], r["step"]) for r in _lines(tmp_path / "anomalies.jsonl")] == [(1, 3), (2, 9), (3, 7)]


# -- what runs do -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Callable[[set[int]], None]:
    """``poisoned({5})``: the text of these of the loader's batches gives a loss that is not a number, whenever it is read."""

    def poison(batches: set[int]) -> None:
        original, forward = build.make_loader, TrainStep.forward_backward
        bad: list[torch.Tensor] = []

        def make_loader(*args: Any) -> Any:
            loader = original(*args)
            draw = loader.next_batch

            def next_batch() -> Any:
                number = loader.state()["next_window"] // loader.batch_size
                batch = draw()
                if number in batches:
                    bad.append(batch.tokens)
                return batch

            loader.next_batch = next_batch
            return loader

        def forward_backward(self: TrainStep, batch: Any, scale: float, clock: Any) -> torch.Tensor:
            loss = forward(self, batch, scale, clock)
            return loss * float("nan") if any(batch.tokens is tokens for tokens in bad) else loss

        monkeypatch.setattr(build, "make_loader", make_loader)
        monkeypatch.setattr(TrainStep, "forward_backward", forward_backward)

    return poison


def test_a_refused_step_changes_no_weight_and_its_text_is_written_down(make_recipe, poisoned) -> None:
    poisoned({2})
    lines: list[str] = []
    recipe = make_recipe(steps=4)
    seen: dict[int, torch.Tensor] = {}

    def look(run: RunState, record: StepRecord) -> None:
        moments = [value for name, value in run.optimizers.state().items() if not name.endswith("step")]
        seen[record.step] = torch.cat([t.flatten().clone() for t in (*run.masters.weights.values(), *moments)])

    result = train(recipe, log=lines.append, observers=[EachStep(look)])
    assert torch.equal(seen[3], seen[2])
    assert not torch.equal(seen[4], seen[3])
    (anomaly,) = _lines(result.directory / "anomalies.jsonl")
    assert (anomaly["step"], anomaly["windows"], anomaly["action"]) == (3, [4, 5], "skip")
    assert "nan" in anomaly["reason"]
    assert len(anomaly["texts"]) == 2
    words = "".join(file.read_text() for file in Path(recipe.data.sources[0]).iterdir())
    assert all(text.split("<")[0][:20] in words for text in anomaly["texts"])  # "<": a document's end
    assert any("step 3 was skipped" in line and "windows 4 to 5" in line for line in lines)
    assert result.summary["skipped_steps"] == 1


def test_a_rollback_continues_after_the_text_and_leaves_it_out(make_recipe, poisoned) -> None:
    poisoned({5})  # step 6; the checkpoint before it is of step 4
    lines: list[str] = []
    result = train(make_recipe(steps=8, checkpoint_every=2, anomaly_policy="rollback"), log=lines.append)
    curve = _curve(result.directory)
    assert [point[0] for point in curve] == list(range(1, 9))
    assert all(point[-1] is None for point in curve)
    assert any("The run went back to step 4" in line for line in lines)
    # windows: 6 batches of 2 rows were read when it went back, then steps 5 to 8 read 4 more
    assert _end(result.directory)[1]["loader"]["next_window"] == 20
    assert result.summary["tokens"] == 8 * 2 * 32
    # steps 5 to 8 are those of a run that reads batches 0 to 3 and then 6 to 9

    def jump(run: RunState, record: StepRecord) -> None:
        if record.step == 4:
            run.loader.restore(run.loader.state() | {"next_window": 12})

    wanted = train(make_recipe("reference", steps=8), observers=[EachStep(jump)])
    assert [point[:4] for point in curve] == [point[:4] for point in _curve(wanted.directory)]
    (a, _), (b, _) = _end(result.directory), _end(wanted.directory)
    assert all(torch.equal(a[name], b[name]) for name in a)


class _Killed(BaseException):
    """Stands for the process's end."""


@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize("at", [3, 5, 7])
def test_interrupted_or_killed_around_an_anomaly_it_ends_the_same(make_recipe, poisoned, policy: str, at: int) -> None:
    poisoned({4, 6})
    settings = {"steps": 8, "checkpoint_every": 2, "anomaly_policy": policy, "keep_checkpoints": 1}
    whole = train(make_recipe("whole", **settings))
    assert len(_lines(whole.directory / "anomalies.jsonl")) == 2
    interrupted = make_recipe("interrupted", **settings)
    with pytest.raises(Interrupted):
        train(interrupted, should_stop=lambda step: step == at)
    _assert_same(train(interrupted, resume=True), whole)
    killed = make_recipe("killed", **settings)
    steps = iter(range(100))

    def kill(record: Any, eta_s: float) -> None:
        if next(steps) == at:
            raise _Killed

    with pytest.raises(_Killed):
        train(killed, on_step=kill)
    _assert_same(train(killed, resume=True), whole)


def test_a_run_that_stops_at_an_anomaly_resumes_after_it(make_recipe, poisoned) -> None:
    poisoned({1})
    recipe = make_recipe(steps=4, anomaly_policy="stop")
    with pytest.raises(TwostrokeError, match=r'step 2 was an anomaly .*nan.*"stop".*step-00000002 is kept'):
        train(recipe)
    assert [step for step, _ in list_checkpoints(Path(recipe.output) / "checkpoints")] == [2]
    resumed = train(recipe, resume=True)
    assert [point[-1] is None for point in _curve(resumed.directory)] == [True, False, True, True]


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_run_that_does_not_get_better_gives_up(make_recipe, poisoned, policy: str) -> None:
    poisoned(set(range(6, 1000)))
    lines: list[str] = []
    recipe = make_recipe(steps=50, checkpoint_every=2, anomaly_policy=policy, anomaly_limit=5)
    with pytest.raises(TwostrokeError, match="5 anomalies in a row"):
        train(recipe, log=lines.append)
    records = _lines(Path(recipe.output) / "anomalies.jsonl")
    assert [r["number"] for r in records] == [1, 2, 3, 4, 5]
    assert [r["action"] for r in records] == [policy] * 4 + ["stop"]


def test_a_spike_is_refused_by_the_run_itself(make_recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anomalies, "MIN_ACCEPTED", 4)
    forward = TrainStep.forward_backward
    calls = iter(range(1, 1000))

    def spiking(self: TrainStep, batch: Any, scale: float, clock: Any) -> torch.Tensor:
        return forward(self, batch, scale * (1000.0 if next(calls) == 8 else 1.0), clock)

    monkeypatch.setattr(TrainStep, "forward_backward", spiking)
    result = train(make_recipe(steps=10, spike_factor=20.0, dtype="fp32"))
    assert [point[0] for point in _curve(result.directory) if point[-1]] == [8]
    assert "gradient norm" in _lines(result.directory / "anomalies.jsonl")[0]["reason"]


def test_the_recipe_says_what_does_not_go_together(make_recipe) -> None:
    with pytest.raises(ConfigError, match=r"train\.spike_factor=0\.5 must be above 1"):
        make_recipe(spike_factor=0.5)
    with pytest.raises(ConfigError, match=r"set train\.checkpoint_every above 0"):
        make_recipe(anomaly_policy="rollback")
    with pytest.raises(ConfigError, match=r"train\.anomaly_limit=0"):
        make_recipe(anomaly_limit=0)
    with pytest.raises(ConfigError, match="'skip', 'rollback', 'stop'"):
        make_recipe(anomaly_policy="ignore")
