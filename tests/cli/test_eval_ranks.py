"""`twostroke eval --ranks`: several processes give the report of one, and end with one sentence."""

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

from twostroke.cli.main import main
from twostroke.ledger.store import Ledger
from twostroke.quantization.convert import quantize_model

MEASURED_TIME = {"elapsed_s", "scored_tok_per_s", "run_id", "prediction", "ranks"}

pytestmark = pytest.mark.usefixtures("children_run_from_source")


@pytest.fixture
def words(model: Path, tmp_path: Path) -> list[str]:
    """Text, a task that is scored and one that is answered."""
    (tmp_path / "a.txt").write_text("import argparse\nparser = argparse.ArgumentParser()\n" * 400)
    records = [{"q": f"def f{i}(self,", "t": "name" if i % 2 else "prefix"} for i in range(9)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    for kind, rest in (("match", ""), ("answer", "max_tokens = 5\n")):
        text = f'kind = "{kind}"\nfile = "q.jsonl"\nprompt = "{{q}}"\ntarget = "{{t}}"\n{rest}'
        (tmp_path / f"{kind}.toml").write_text(text)
    tasks = [word for kind in ("match", "answer") for word in ("--task", str(tmp_path / f"{kind}.toml"))]
    return [str(model), "--data", str(tmp_path / "a.txt"), *tasks, "--context", "100", "--json"]


def started(words: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "twostroke", "eval", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(words: list[str]) -> tuple[int, str, str]:
    process = started(words)
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


def report(text: str) -> dict[str, Any]:
    return {name: value for name, value in json.loads(text).items() if name not in MEASURED_TIME}


@pytest.mark.parametrize("engine", ["decoder", "inference"])
def test_two_ranks_give_the_report_of_one_process(
    words: list[str], model: Path, engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    if engine == "inference":
        quantize_model(model, tmp_path / "int8", "int8")
        words[0] = str(tmp_path / "int8")
    with pytest.raises(SystemExit) as caught:
        main(["eval", *words])
    assert caught.value.code == 0
    alone = capsys.readouterr().out
    code, out, err = ended([*words, "--ranks", "2", *(["--layer-by-layer"] if engine == "decoder" else [])])
    assert code == 0, err
    assert report(out) == report(alone)
    found = json.loads(out)
    assert (found["engine"], found["ranks"]) == (engine, 2)
    entry = Ledger().get(found["run_id"])
    assert (entry.status, entry.inputs["ranks"]) == ("finished", 2)
    assert entry.measurement["bits_per_byte"] == found["bits_per_byte"]
    assert len(Ledger().runs("evaluate")) == 2, "one record each"


def test_bad_input_of_ranks_is_one_sentence(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["eval", *words, "--ranks", "0"])
    assert (caught.value.code, "--ranks 0 must be from 1 to 1024" in capsys.readouterr().err) == (2, True)
    with pytest.raises(SystemExit) as caught:
        main(["eval", *words, "--ranks", "1000000000"])
    assert (caught.value.code, "--ranks 1000000000 must be from 1 to 1024" in capsys.readouterr().err) == (2, True)
    code, out, err = ended([*words[:-1], "--context", "9999", "--ranks", "2"])
    assert (code, out, err.count("error: ")) == (2, "", 1)
    assert "--context 9999 must be between 1 and the model's max_positions=512" in err


def test_a_rank_that_is_killed_ends_the_others(words: list[str]) -> None:
    process = started([*words, "--ranks", "2"])
    deadline = time.monotonic() + 60
    ranks: list[psutil.Process] = []
    while len(ranks) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        ranks = psutil.Process(process.pid).children()
        time.sleep(0.01)
    ranks[1].send_signal(signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert json.loads(out)["error"] in err
    assert "was ended by SIGKILL" in err
    assert "and the others stopped. Nothing is kept: start again." in err
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
