"""Progress where nobody watches: a log gets a line a stage and one every ten seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from small_models import saved
from twostroke.cli import console
from twostroke.cli.console import LINE_EVERY_S, emit, folded, progress
from twostroke.interop.import_model import CheckedState
from twostroke.quantization.convert import quantize_model


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_a_short_stage_is_one_line(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    with progress("quantising model", 1.0) as advance:
        for i in range(500):
            clock[0] += 0.01
            advance(i / 500, f"tensor {i} of 500")
    assert capsys.readouterr().err == "quantising model ...\n"


def test_a_long_stage_is_a_line_every_ten_seconds_with_the_time_left(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    with progress("scoring", 200) as advance:
        for i in range(1, 201):
            clock[0] += 0.5
            advance(i, "task")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "scoring ..."
    assert lines[1] == "scoring: 10% task, 1 min 30 s left"
    assert lines[-1] == "scoring: done in 1 min 40 s"
    assert len(lines) <= 2 + 100 / LINE_EVERY_S


def test_work_of_no_units_divides_by_nothing(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    with progress("load", 0) as advance:
        clock[0] += 11
        advance(0)
    assert capsys.readouterr().err == "load ...\nload: done in 11 s\n"


def test_a_failure_claims_no_end(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    def fail() -> None:
        with progress("scoring", 1.0) as advance:
            clock[0] += 20
            advance(0.5)
            raise ValueError("torn")

    with pytest.raises(ValueError, match="torn"):
        fail()
    assert "done" not in capsys.readouterr().err


def test_weights_are_counted_and_not_named() -> None:
    notes: list[str] = []
    state = CheckedState({"model.layers.0.mlp.weight": torch.zeros(1)}, lambda done, note: notes.append(note))
    assert state["model.layers.0.mlp.weight"].numel() == 1
    assert notes == ["tensor 1 of 1"]


def test_quantising_names_no_weights(tmp_path: Path) -> None:
    notes: list[str] = []
    _, source = saved("llama", tmp_path / "model")
    quantize_model(source, tmp_path / "out", progress=lambda done, note: notes.append(note))
    assert notes
    assert not any("weight" in note or "layers" in note for note in notes)


def test_a_long_line_goes_on_below_its_last_column() -> None:
    table = "TTFT    6.2 ms  time to first token, from the request to its first chunk\nshort\n\nend  1"
    assert folded(table, 50).split("\n") == [
        "TTFT    6.2 ms  time to first token, from the",
        "                request to its first chunk",
        "short",
        "",
        "end  1",
    ]
    assert folded("  a sentence without columns that is long", 24).split("\n") == [
        "  a sentence without",
        "    columns that is long",
    ]
    assert folded("run        " + "/a/path/without/a/space" * 4, 60) == "run        " + "/a/path/without/a/space" * 4


def test_a_terminal_folds_and_a_pipe_and_a_models_text_do_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = "word " * 19 + "word"
    emit({}, text, as_json=False)
    assert capsys.readouterr().out == f"{text}\n"
    monkeypatch.setattr(console.sys.stdout, "isatty", lambda: True)
    emit({}, text, as_json=False, verbatim=True)
    assert capsys.readouterr().out == f"{text}\n"
    emit({}, text, as_json=False)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40
