from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from twostroke.ledger.store import Ledger
from twostroke.report import growing_files, run_reader
from twostroke.report.run_reader import RunReader


def line(step: int, **more: Any) -> str:
    values = {
        "step": step, "loss": 8.0 - 0.01 * step, "grad_norm": 1.0, "learning_rate": 1e-3, "tok_per_s": 1000.0, "mfu": 0.25,
        "memory_bytes": 2**28, "peak_memory_bytes": 2**29, "step_time_s": 0.5, "forward_s": 0.1, "backward_s": 0.2,
        "optimizer_s": 0.1, "data_s": 0.05, "data_wait_share": 0.1, "elapsed_s": 0.6 * step, "tokens": 512 * step,
        "epoch": 0.1, "warm_up": step <= 3, "skipped": None, "sent_bytes": 0,
        "block_grad_norms": {"embed": 0.5, "blocks.0": 0.25},
    }  # fmt: skip
    return json.dumps(values | more) + "\n"


def begin_run(directory: Path, steps: int = 100, measured: dict[str, Any] | None = None) -> str:
    """A run's directory with a prediction in the ledger and no step yet."""
    prediction = {"step_time_s": {"value": 0.4, "low": 0.3, "high": 0.6}, "peak_memory_bytes": float(2**29), "mfu": 0.3}
    run_id = Ledger().freeze("train", str(directory), {"steps": steps}, prediction)
    directory.mkdir(parents=True, exist_ok=True)
    recipe = {
        "method": "pretrain",
        "train": {"batch_size": 4, "sequence_length": 128, "grad_accumulation": 1, "optimizer": "adamw", "dtype": "bf16"},
        "resolved": {
            "run_id": run_id,
            "steps": steps,
            "device": "cpu",
            "dtype": "fp32",
            "spec": {"family": "llama", "n_layers": 1, "d_model": 8},
        },
    }
    (directory / "recipe.json").write_text(json.dumps(recipe))
    if measured is not None:
        Ledger().measure(run_id, measured)
    return run_id


def append(directory: Path, text: str) -> None:
    with (directory / "log.jsonl").open("a") as stream:
        stream.write(text)


def state(reader: RunReader, **known: str) -> dict[str, Any]:
    reader.refresh()
    while reader.more:
        reader.refresh()
    document: dict[str, Any] = json.loads(json.dumps(reader.state(known), allow_nan=False))
    return document


def test_before_and_at_the_first_step(tmp_path: Path) -> None:
    reader = RunReader(tmp_path / "run")
    assert state(reader)["status"] == "starting"
    begin_run(tmp_path / "run")
    shown = state(reader)
    assert shown["status"] == "starting"
    assert shown["run"]["steps"] == 100
    assert shown["run"]["words"][:4] == ["pretrain", "llama 1 × 8", "adamw", "bf16 computed in fp32"]
    append(tmp_path / "run", line(1))
    assert state(reader)["status"] == "running"


def test_only_what_is_new_is_sent(tmp_path: Path) -> None:
    begin_run(tmp_path)
    reader = RunReader(tmp_path)
    append(tmp_path, "".join(line(step) for step in range(1, 6)))
    whole = state(reader)
    assert whole["points"]["step"] == [1, 2, 3, 4, 5]
    append(tmp_path, line(6) + line(7)[:20])  # the writer is in the middle of a line
    known = {"generation": whole["generation"], "have": "5", "samples": whole["samples_mark"]}
    later = state(reader, **known)
    assert (later["first"], later["points"]["step"]) == (4, [5, 6])
    assert "samples" not in later
    append(tmp_path, line(7)[20:])
    assert state(reader, **(known | {"have": "6"}))["points"]["step"] == [6, 7]
    assert state(reader, **(known | {"have": "six"}))["first"] == 0
    assert state(reader, **(known | {"have": "99999"}))["first"] == 6


def test_a_log_that_was_rewritten_is_read_from_its_beginning(tmp_path: Path) -> None:
    begin_run(tmp_path)
    reader = RunReader(tmp_path)
    append(tmp_path, "".join(line(step) for step in range(1, 9)))
    before = state(reader)
    (tmp_path / "new").write_text("".join(line(step, loss=1.0) for step in range(1, 4)))
    os.replace(tmp_path / "new", tmp_path / "log.jsonl")  # what a resumed run does
    after = state(reader, generation=before["generation"], have="8")
    assert after["generation"] != before["generation"]
    assert (after["first"], after["points"]["step"], after["points"]["loss"]) == (0, [1, 2, 3], [1.0, 1.0, 1.0])


def test_a_log_that_was_cut_and_has_grown_again_is_read_from_its_beginning(tmp_path: Path) -> None:
    begin_run(tmp_path)
    reader = RunReader(tmp_path)
    text = [line(step) for step in range(1, 9)]
    append(tmp_path, "".join(text))
    before = state(reader)
    again = [line(step, step_time_s=0.75) for step in range(3, 12)]
    (tmp_path / "log.jsonl").write_text("".join(text[:2] + again))  # the same file, as a rollback leaves it
    after = state(reader, generation=before["generation"], have="8")
    assert (after["first"], after["points"]["step"]) == (0, list(range(1, 12)))
    assert after["points"]["step_time_s"][1:4] == [0.5, 0.75, 0.75]


def test_a_long_log_is_read_in_pieces_and_sent_in_few_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_files, "MAX_BYTES_A_READ", 10_000)
    begin_run(tmp_path)
    append(tmp_path, "".join(line(step) for step in range(1, 3001)))
    reader = RunReader(tmp_path)
    reader.refresh()
    assert reader.state()["more"]
    shown = state(reader)
    assert not shown["more"]
    assert 1000 <= len(shown["points"]["step"]) <= run_reader.MOST_POINTS
    assert shown["bucket"] == 2
    assert shown["points"]["step"][:2] == [1.5, 3.5]
    assert shown["last"]["step"] == 3000
    assert len(shown["strip"]["steps"]) <= run_reader.MOST_STRIP_POINTS


def test_measured_stands_beside_predicted_while_it_runs_and_after(tmp_path: Path) -> None:
    run_id = begin_run(tmp_path)
    append(tmp_path, line(1, step_time_s=30.0) + "".join(line(step) for step in range(2, 51)))
    reader = RunReader(tmp_path)
    shown = state(reader)
    rows = {row["name"]: row for row in shown["table"]}
    assert rows["step_time_s"] == {
        "name": "step_time_s", "predicted": "400 ms [300–600]", "measured": "500 ms", "error": "-20.0%", "inside": "inside",
    }  # fmt: skip
    assert shown["eta_s"] == pytest.approx(0.6 * 50)  # with what lies between steps, not 0.5 s of step alone
    assert rows["train_time_s"]["measured"] == "1 min 0 s"
    Ledger().measure(run_id, {"step_time_s": 0.51, "train_time_s": 61.0})
    (tmp_path / "summary.json").write_text("{}")
    reader = RunReader(tmp_path)
    shown = state(reader)
    assert shown["status"] == "finished"
    assert {row["name"]: row["measured"] for row in shown["table"]} == {"step_time_s": "510 ms", "train_time_s": "1 min 1 s"}


def test_a_run_that_was_stopped_says_so_until_it_is_resumed(tmp_path: Path) -> None:
    run_id = begin_run(tmp_path)
    append(tmp_path, line(1))
    Ledger().measure(run_id, {"step_time_s": 0.5}, "interrupted", "stopped at step 1 of 100")
    shown = state(RunReader(tmp_path))
    assert (shown["status"], shown["sentence"]) == ("interrupted", "stopped at step 1 of 100")
    later = time.time() + 100
    os.utime(tmp_path / "log.jsonl", (later, later))
    assert state(RunReader(tmp_path))["status"] == "running"


def test_a_run_that_was_killed_is_called_quiet(tmp_path: Path) -> None:
    begin_run(tmp_path)
    append(tmp_path, "".join(line(step) for step in range(1, 9)))
    ago = time.time() - 300
    os.utime(tmp_path / "log.jsonl", (ago, ago))
    shown = state(RunReader(tmp_path))
    assert shown["status"] == "quiet"
    assert shown["age_s"] == pytest.approx(300, abs=5)


def test_a_run_that_never_took_a_step_is_called_quiet(tmp_path: Path) -> None:
    begin_run(tmp_path)
    ago = time.time() - 7200
    os.utime(tmp_path / "recipe.json", (ago, ago))
    shown = state(RunReader(tmp_path))
    assert (shown["status"], shown["sentence"]) == (
        "quiet",
        "No step has been logged in the 2 h 0 min since the run began: it may have been stopped.",
    )


def test_skipped_steps_scores_diagnostics_samples_and_checkpoints_are_found(tmp_path: Path) -> None:
    begin_run(tmp_path)
    statistics = {"residual_rms": [1.0, 2.0], "mlp_dead_share": [0.0, 0.5]}
    append(tmp_path, line(1) + line(2, loss=None, skipped="loss is nan") + line(3, heldout_bits_per_byte=1.5))
    append(tmp_path, line(4, activations=statistics, update_ratios={"embed": 1e-3}))
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".saving-step-00000004").mkdir()
    samples = [{"step": s, "prompt": "a", "greedy": "b", "sampled": "<script>"} for s in range(1, 20)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples) + '{"step": 9, "pr')
    reader = RunReader(tmp_path)
    shown = state(reader)
    assert shown["points"]["loss"][1] is None
    assert shown["events"] == [{"step": 2, "kind": "skipped", "text": "loss is nan"}]
    anomaly = {"number": 1, "step": 2, "reason": "loss is nan", "action": "rollback", "windows": [3, 4], "texts": ["x"]}
    (tmp_path / "anomalies.jsonl").write_text(json.dumps(anomaly) + "\n" + json.dumps(anomaly | {"step": 9}) + "\n")
    told = "loss is nan; windows 3 to 4 of the data"
    assert state(reader)["events"] == [{"step": s, "kind": "rolled back", "text": told} for s in (2, 9)]
    assert shown["scores"] == {"heldout_bits_per_byte": [[3], [1.5]]}
    assert shown["strips"] == ["block_grad_norms", "update_ratios", "residual_rms", "mlp_dead_share"]
    assert [c["step"] for c in shown["checkpoints"]] == [2]
    assert [s["step"] for s in shown["samples"]] == list(range(12, 20))
    dead = state(reader, strip="mlp_dead_share")["strip"]
    assert (dead["parts"], dead["steps"], dead["rows"]) == (["blocks.0", "blocks.1"], [4], [[0], [0.5]])


@pytest.mark.parametrize("content", ["", "null", "[1]", "{", '{"resolved": 3}', '{"train": {}, "resolved": {"steps": "x"}}'])
def test_damaged_files_show_less_and_never_fail(tmp_path: Path, content: str) -> None:
    for name in ("recipe.json", "log.jsonl", "samples.jsonl"):
        (tmp_path / name).write_text(content)
    assert state(RunReader(tmp_path))["points"]["step"] == []
