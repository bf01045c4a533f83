from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from small_recipe import write_recipe
from twostroke.cli.main import main
from twostroke.core.errors import Interrupted
from twostroke.ledger.store import Ledger
from twostroke.training.run_directory import StepLog


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path, "run", steps=3)


def _run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["train", *args])
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


def test_it_trains_scores_and_records(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = _run(capsys, str(recipe), "--json", "--set", "train.evaluate_every=2")
    assert code == 0
    document = json.loads(out)
    measured = document["measurement"]
    assert 0 < measured["heldout_bits_per_byte"] < 20
    assert 0 < measured["xz_bits_per_byte"] < 8
    assert Ledger().get(document["run_id"]).measurement == {**measured, "not_measured": {}}
    assert json.loads((recipe.parent / "run" / "summary.json").read_text())["measurement"] == measured
    lines = [json.loads(line) for line in (recipe.parent / "run" / "log.jsonl").read_text().splitlines()]
    assert ["heldout_bits_per_byte" in line for line in lines] == [False, True, False]
    # a step from the end, scored in windows without overlap and in bf16: near the final score, not equal to it
    assert lines[1]["heldout_bits_per_byte"] == pytest.approx(measured["heldout_bits_per_byte"], rel=0.1)
    assert "step 1/3 (33%)  loss " in err
    assert "step 3/3 (100%)  loss " in err
    code, out, err = _run(capsys, str(recipe), "--resume")
    assert code == 0
    assert "nothing is left to train" in err
    assert "bits per byte measured" in out


def test_a_finished_run_that_was_not_scored_is_scored(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(capsys, str(recipe), "--json")
    file = recipe.parent / "run" / "summary.json"
    summary = json.loads(file.read_text())
    score = summary["measurement"].pop("heldout_bits_per_byte")
    file.write_text(json.dumps(summary))
    code, out, _ = _run(capsys, str(recipe), "--resume", "--json")
    assert code == 0
    assert json.loads(out)["measurement"]["heldout_bits_per_byte"] == score


def test_watched_it_serves_its_page_while_it_runs_and_ends_as_it_does_unwatched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, watched = write_recipe(tmp_path, "plain", 4), write_recipe(tmp_path, "watched", 4)
    _run(capsys, str(plain))
    seen: list[dict[str, Any]] = []
    append = StepLog.append

    def look(log: StepLog, record: dict[str, Any]) -> None:
        append(log, record)
        url = re.search(r"http://127\.0\.0\.1:\d+/", capsys.readouterr().err + (seen[0]["url"] if seen else ""))
        assert url is not None
        with urllib.request.urlopen(url[0] + "state", timeout=20) as answer:
            seen.append(json.load(answer) | {"url": url[0]})

    monkeypatch.setattr(StepLog, "append", look)
    code, out, _ = _run(capsys, str(watched), "--watch-port", "0", "--json")
    assert code == 0
    assert json.loads(out)["steps"] == 4
    assert [document["last"]["step"] for document in seen] == [1, 2, 3, 4]
    assert {document["status"] for document in seen} == {"running"}
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(seen[0]["url"], timeout=20)
    models = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("plain", "watched")]
    assert models[0] == models[1]


def test_a_page_that_cannot_be_served_is_a_sentence_and_2_before_anything_is_made(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = _run(capsys, str(recipe), "--watch", "--watch-port", str(port))
    assert code == 2
    assert f"cannot be served on port {port}" in err
    assert not (recipe.parent / "run").exists()


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("train.learnin_rate=1", "Did you mean 'learning_rate'?"),
        ("train.steps=0", "exactly one of train.steps=0 and train.budget_s=0"),
        ("train.batch_size=-1", "train.batch_size=-1 must be at least 1"),
        ("model.n_heads=5", "must divide model.d_model=32"),
        ("model.family=bert", "not supported"),
        ("train.sequence_length=100000", "fewer than sequence_length"),
        ("train.batch_size=1000000000000000", "step 1 did not fit in memory"),
        ("data.sources=['nowhere']", "nowhere"),
        ("method=full", "give model.init_from"),
        ("train", "must look like section.key=value"),
    ],
)
def test_a_recipe_that_cannot_be_run_is_a_sentence_and_2(
    recipe: Path, setting: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = _run(capsys, str(recipe), "--set", setting)
    assert code == 2
    assert sentence in err
    assert "Traceback" not in err
    assert not (recipe.parent / "run").exists(), "the corrected recipe starts"


def test_a_model_that_does_not_fit_in_memory_is_a_sentence_and_2_and_leaves_no_run(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(_: object) -> None:  # as torch's allocator does for 2 TB; a system that promises any amount would not refuse it
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2000000000000 bytes.")

    monkeypatch.setattr("twostroke.training.loop.build", build)
    code, _, err = _run(capsys, str(recipe))
    assert code == 2
    assert "do not fit in memory. Take a smaller model" in err
    assert not (recipe.parent / "run").exists()


def test_a_recipe_that_is_not_there_or_not_toml_is_a_sentence_and_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = _run(capsys, str(tmp_path / "none.toml"))
    assert code == 2
    assert "does not exist" in err
    (tmp_path / "bad.toml").write_text("= nonsense")
    code, out, err = _run(capsys, str(tmp_path / "bad.toml"), "--json")
    assert code == 2
    assert "not valid TOML" in json.loads(out)["error"]


def test_a_wrong_recipe_is_answered_without_importing_torch(recipe: Path) -> None:
    code = (
        "import sys\nfrom twostroke.cli.main import main\n"
        f"try: main(['train', {str(recipe)!r}, '--set', 'seeed=1'])\n"
        "except SystemExit as e: sys.exit(10 * e.code + ('torch' in sys.modules))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 20


def _command(recipe: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "twostroke", "train", str(recipe), "--json", *more]


def _exact(directory: Path) -> list[tuple[Any, ...]]:
    lines = (json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines())
    return [(r["step"], r["loss"], r["grad_norm"], r["learning_rate"]) for r in lines]


STEPS = 60


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of ``STEPS`` that nothing stopped; its corpus and recipe are beside it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TWOSTROKE_HOME": str(folder / "home")}
    command = _command(write_recipe(folder, "whole", STEPS))
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return folder / "whole"


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_stopped_by_a_signal_it_exits_75_and_resumes_to_the_same_end(
    tmp_path: Path, undisturbed: Path, signals: list[signal.Signals]
) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    stopped = write_recipe(tmp_path, "stopped", STEPS)
    log = tmp_path / "stopped" / "log.jsonl"
    with subprocess.Popen(_command(stopped), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as child:
        deadline = time.monotonic() + 120
        while not (log.is_file() and log.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.002)
        for number in signals:
            child.send_signal(number)
            time.sleep(0.001)
        out, err = child.communicate(timeout=60)
    assert child.returncode == Interrupted.exit_code, err
    assert "Continue with --resume" in json.loads(out)["error"]
    assert 0 < len(_exact(tmp_path / "stopped")) < STEPS
    subprocess.run(_command(stopped, "--resume"), check=True, capture_output=True, env=environment)
    assert _exact(tmp_path / "stopped") == _exact(undisturbed)
    ends = [(directory / "model" / "model.safetensors").read_bytes() for directory in (tmp_path / "stopped", undisturbed)]
    assert ends[0] == ends[1]
