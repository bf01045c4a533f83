from __future__ import annotations

import io
import itertools
import math
import re
import sys
from typing import Any

import pytest

from twostroke.cli import training_progress as module
from twostroke.cli.console import log
from twostroke.cli.training_progress import LOSS_STEPS, Pace, quality_text, speed_text, training_progress
from twostroke.training.measurement import StepRecord


def _record(step: int, **more: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": step, "loss": 10.21456, "grad_norm": 12.345, "learning_rate": 0.000123456, "tok_per_s": 123456.0, "mfu": 0.456,
        "memory_bytes": 123 * 2**30, "peak_memory_bytes": 2**30, "step_time_s": 1.0, "forward_s": 0.3, "backward_s": 0.4,
        "optimizer_s": 0.1, "data_s": 0.123, "tokens": 1, "epoch": 0.0, "elapsed_s": 1.5 * step,
    }  # fmt: skip
    return StepRecord(**(values | more))


def test_both_lines_of_a_step_fit_in_80_columns() -> None:
    learning, speed = quality_text(_record(1), 10.30149), speed_text(_record(1))
    assert learning == "loss 10.215 (mean 10.301)  grad 12  lr 0.00012"
    assert speed == "123k tok/s  MFU 46%  123 GiB  data 12.3%"
    assert max(len(learning), len(speed)) <= 80
    assert "MFU" not in speed_text(_record(1, mfu=None))
    assert quality_text(_record(1, loss=float("nan"), grad_norm=float("inf")), float("nan")).startswith("loss nan  grad inf")


def test_time_left_counts_what_lies_between_steps_and_not_the_warm_up() -> None:
    pace = Pace(100)
    # The first step took a minute to compile: times a hundred it would promise an hour and a half.
    assert pace.left_s(_record(1, elapsed_s=60.0, warm_up=True), 6000.0) is None
    left = [pace.left_s(_record(step, elapsed_s=60.0 + 1.5 * step), 99.0) for step in range(2, 21)]
    assert left[0] == 99.0
    assert left[-1] == pytest.approx(1.5 * 80)
    assert Pace(100).left_s(_record(2), float("nan")) is None


def test_the_mean_loss_is_of_the_newest_steps_that_have_one() -> None:
    pace = Pace(1000)
    assert math.isnan(pace.mean_loss(_record(1, loss=float("nan"))))
    assert pace.mean_loss(_record(2, loss=4.0)) == 4.0
    assert pace.mean_loss(_record(3, loss=2.0)) == 3.0
    for step in range(4, 4 + LOSS_STEPS):
        mean = pace.mean_loss(_record(step, loss=1.0))
    assert mean == 1.0


def test_the_speed_shown_is_a_median() -> None:
    pace = Pace(100)
    shown = [pace.typical(_record(step, tok_per_s=v, mfu=v / 1000)) for step, v in enumerate((100.0, 100.0, 100.0, 1.0))]
    assert shown[-1].tok_per_s == 100.0
    assert shown[-1].mfu == pytest.approx(0.1)


def test_without_a_terminal_lines_are_spaced_by_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    shown_at = []
    with training_progress(4000) as show:
        for step in range(1, 4001):
            now += 0.1
            show(_record(step), 7.0)
            if capsys.readouterr().err:
                shown_at.append(step)
    assert shown_at[0] == 1
    assert shown_at[-1] == 4000
    gaps = [(b - a) / 10 for a, b in itertools.pairwise(shown_at)]
    assert gaps[0] == pytest.approx(10, abs=0.2)
    assert all(a <= b + 0.2 for a, b in itertools.pairwise(gaps[:-1]))  # ever rarer, the last one aside
    assert max(gaps) <= 60.2


class _Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_of_80_columns_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    with training_progress(123_456) as show:
        for step in (1, 61_728):
            show(_record(step), 4000.0)
    screen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()).replace("\r", "\n")
    lines = [text.rstrip() for text in screen.split("\n") if text.strip()]
    assert any(re.search(r"step 61,728 of 123,456 .* 50% .*ETA 1 d 1.7 h$", text) for text in lines)
    assert any(text.endswith("data 12.3%") for text in lines)
    assert max(map(len, lines)) <= 80


def test_a_line_logged_meanwhile_stands_above_the_bar_on_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    with training_progress(100) as show:
        show(_record(1), 5.0)
        log("step 1  def → return")
        show(_record(2), 5.0)
    screen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()).replace("\r", "\n")
    lines = [text.rstrip() for text in screen.split("\n") if text.strip()]
    assert "step 1  def → return" in lines
    assert any(text.startswith("step 2 of 100") for text in lines[lines.index("step 1  def → return") :])
