"""`twostroke sweep`: every combination trained and ranked, the bits of `train`, stopped and resumed, and bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from small_recipe import write_recipe
from twostroke.cli.main import main
from twostroke.core.errors import Interrupted
from twostroke.ledger.store import Ledger

pytestmark = pytest.mark.usefixtures("children_run_from_source")

GRID = ("--vary", "train.learning_rate=1e-2,1e-5", "--vary", "train.optimizer=adamw,muon")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["sweep", *args])
    captured = capsys.readouterr()
    return int(stopped.value.code or 0), captured.out, captured.err


def test_every_combination_is_trained_two_at_once_and_ranked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # bits depend on the number of threads
    recipe = write_recipe(tmp_path, "grid", 8)
    code, out, err = run(capsys, str(recipe), *GRID, "--at-once", "2", "--json")
    assert code == 0, err
    document = json.loads(out)
    rows = document["points"]
    assert {row["name"] for row in rows} == {
        f"learning_rate={rate},optimizer={name}" for rate in ("1e-2", "1e-5") for name in ("adamw", "muon")
    }
    assert [row["score"] for row in rows] == sorted(row["score"] for row in rows)
    assert rows[0]["values"]["train.learning_rate"] == "1e-2"  # 8 steps at 1e-5 learn nothing
    ledger = Ledger()
    assert ledger.get(document["run_id"]).kind == "sweep"
    assert ledger.get(document["run_id"]).measurement["sweep_s"] == pytest.approx(document["elapsed_s"])

    best = rows[0]
    again = ["--set", "train.learning_rate=1e-2", "--set", f"train.optimizer={best['values']['train.optimizer']}"]
    with pytest.raises(SystemExit):
        main(["train", str(recipe), *again, "--set", f"output={tmp_path}/by-hand"])
    weights = [Path(folder) / "model" / "model.safetensors" for folder in (best["directory"], tmp_path / "by-hand")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    capsys.readouterr()

    wider = ("--vary", "train.learning_rate=1e-2,1e-5,1e-3", *GRID[2:])  # what has finished is not trained again
    stamps = {row["name"]: (Path(row["directory"]) / "summary.json").stat().st_mtime_ns for row in rows}
    code, out, err = run(capsys, str(recipe), *wider, "--resume")
    assert code == 0, err
    assert out.splitlines()[0].split() == [
        "train.learning_rate",
        "train.optimizer",
        "bits",
        "per",
        "byte",
        "loss",
        "tok/s",
        "time",
    ]
    assert len(out.split("\n\n")[0].splitlines()) == 1 + 6
    assert "best: " in out
    assert {name: (tmp_path / "grid" / name / "summary.json").stat().st_mtime_ns for name in stamps} == stamps


def test_a_point_that_is_killed_does_not_stop_the_others(tmp_path: Path) -> None:
    """As by the system, when memory ends."""
    recipe = write_recipe(tmp_path, "grid", 200)
    command = [sys.executable, "-m", "twostroke", "sweep", str(recipe), "--vary", "seed=1,2", "--at-once", "1", "--json"]
    log = tmp_path / "grid" / "seed=1" / "log.jsonl"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as sweep:
        deadline = time.monotonic() + 120
        while not (log.is_file() and log.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.005)
        for child in psutil.Process(sweep.pid).children():
            child.kill()
        out, err = sweep.communicate(timeout=120)
    assert sweep.returncode == 1, err
    document = json.loads(out)
    rows = {row["name"]: row for row in document["points"]}
    assert rows["seed=2"]["score"] is not None
    assert rows["seed=1"]["status"] == "failed"
    assert rows["seed=1"]["error"].startswith("it was ended by signal 9.")
    assert "seed=1 failed: it was ended by signal 9" in err
    assert "1 of 2 points failed: seed=1" in document["error"]


def test_a_signal_stops_it_with_checkpoints_and_it_resumes_to_the_same_bits(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    steps = 60
    recipe = write_recipe(tmp_path, "grid", steps)
    command = [
        sys.executable,
        "-m",
        "twostroke",
        "sweep",
        str(recipe),
        "--vary",
        "seed=1,2,3",
        "--at-once",
        "2",
        "--json",
    ]
    logs = [tmp_path / "grid" / f"seed={seed}" / "log.jsonl" for seed in (1, 2)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True) as child:
        deadline = time.monotonic() + 120
        while not all(log.is_file() and log.stat().st_size for log in logs) and time.monotonic() < deadline:
            time.sleep(0.005)
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=60)
    assert child.returncode == Interrupted.exit_code, err
    first: dict[str, Any] = json.loads(out)
    assert {row["status"] for row in first["points"]} <= {"stopped", "waiting", "finished"}
    assert {row["name"]: row["status"] for row in first["points"]}["seed=3"] == "waiting"
    assert "Go on with --resume" in err
    resumed = subprocess.run([*command, "--resume"], check=False, capture_output=True, env=environment, text=True)
    assert resumed.returncode == 0, resumed.stderr
    rows = json.loads(resumed.stdout)["points"]
    assert [row["status"] for row in rows] == ["finished"] * 3
    alone = [
        sys.executable,
        "-m",
        "twostroke",
        "train",
        str(recipe),
        "--set",
        "seed=1",
        "--set",
        f"output={tmp_path}/alone",
    ]
    subprocess.run(alone, check=True, capture_output=True, env=environment)
    weights = [folder / "model" / "model.safetensors" for folder in (tmp_path / "grid" / "seed=1", tmp_path / "alone")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ((), "a sweep varies something"),
        (("--vary", "train.learning_rat=1,2"), "learning_rat"),
        (("--vary", "model.n_heads=2,3"), "n_heads=3: model.n_heads=3 must divide"),
        (("--vary", "train.steps=3,none"), "train.steps"),
        (("--vary", "seed=1,2", "--resume"), "holds no sweep to resume"),
        (("--vary", "seed=1,2", "--at-once", "-1"), "--at-once"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], sentence: str
) -> None:
    recipe = write_recipe(tmp_path, "grid", 3)
    code, out, err = run(capsys, str(recipe), *args)
    assert (code, out) == (2, "")
    assert sentence in err
    assert not (tmp_path / "grid").exists()


def test_what_is_there_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, "grid", 2)
    with pytest.raises(SystemExit):
        main(["train", str(recipe)])
    code, _, err = run(capsys, str(recipe), "--vary", "seed=1,2")
    assert (code, "already holds a run" in err) == (2, True)
    other = ("--set", f"output={tmp_path}/other", "--vary", "seed=1")
    assert run(capsys, str(recipe), *other)[0] == 0
    code, _, err = run(capsys, str(recipe), *other)
    assert (code, "already holds a point" in err) == (2, True)
    code, _, err = run(capsys, str(recipe), *other, "--resume", "--set", "train.batch_size=3")
    assert (code, "train.batch_size=3" in err) == (2, True)
