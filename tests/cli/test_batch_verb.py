"""``twostroke batch``: the answers of the engine that serves, a kill in the middle, the ledger, and input that is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import machines
from real_model import greedy_reference
from twostroke.cli.main import main
from twostroke.core.profile import read_fingerprint, save_profile
from twostroke.data.tokenizer import load_tokenizer
from twostroke.ledger.scoring import compare
from twostroke.ledger.store import Ledger

pytestmark = pytest.mark.usefixtures("children_run_from_source")
PROMPT = "def add_argument(self, name):\n    return "


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["batch", *map(str, args), "--dtype", "fp32", "--threads", "1"])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return int(caught.value.code or 0), out, err


def request(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "tiny", **body}}


def written(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines_of(path: Path) -> dict[str, bytes]:
    lines = path.read_bytes().splitlines(keepends=True)
    found = {json.loads(line)["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


ROWS = [
    request("greedy", prompt=PROMPT, max_tokens=8, temperature=0, ignore_eos=True),
    request("a draw", prompt=PROMPT, max_tokens=8, ignore_eos=True),
    request("another draw", prompt=PROMPT, max_tokens=8, ignore_eos=True),
    request("chat", "/v1/chat/completions", messages=[{"role": "user", "content": PROMPT}], max_tokens=5, ignore_eos=True),
    request("score", "/v1/score", prompt=PROMPT, text="None"),
    request("refused", prompt=PROMPT, max_tokens=100_000),
    *(request(f"long {i}", prompt=f"{PROMPT}{i}", max_tokens=150 + i, ignore_eos=True, logprobs=1) for i in range(12)),
]


def test_a_batch_is_computed_recorded_and_the_same_after_a_kill(
    model: Path, tmp_path: Path, twostroke_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_profile(replace(machines.profile(), fingerprint=read_fingerprint()))
    given, whole, killed = written(tmp_path / "in.jsonl", *ROWS), tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    code, out, err = run(capsys, model, given, whole, "--json")
    assert code == 0, err
    document = json.loads(out)
    assert {name: document[name] for name in ("requests", "completed", "failed", "left")} == {
        "requests": 18, "completed": 17, "failed": 1, "left": 0,
    }  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "whole.errors.jsonl", "whole.jsonl"]
    rows = {name: json.loads(line)["response"] for name, line in lines_of(whole).items()}
    tokenizer = load_tokenizer(model)
    expected, _ = greedy_reference(model, tokenizer.encode(PROMPT).ids, 8)
    assert rows["greedy"]["body"]["choices"][0]["text"] == tokenizer.decode(expected)
    assert rows["greedy"]["body"]["created"] == int(given.stat().st_mtime)
    assert rows["a draw"]["body"]["choices"] != rows["another draw"]["body"]["choices"], "each has a seed of its own"
    assert rows["chat"]["body"]["object"] == "chat.completion"
    assert rows["score"]["body"]["data"][0]["score"] < 0
    (refused,) = lines_of(tmp_path / "whole.errors.jsonl").values()
    assert json.loads(refused)["response"]["body"]["error"]["code"] == "context_length_exceeded"

    found = Ledger(twostroke_home / "ledger.sqlite").get(document["run_id"])
    assert (found.kind, found.status) == ("batch", "finished")
    scored = {row.name for row in compare(found) if row.error_percent is not None}
    assert {"elapsed_s", "output_tok_per_s", "requests_per_s", "cost_usd"} <= scored
    assert found.measurement["output_tokens"] == 3 * 8 + 5 + sum(range(150, 162))
    # Both numbers of one machine that is written down by hand, so only that lengths and counts went in is held here.
    assert found.prediction["requests_per_s"]["value"] == pytest.approx(18 / found.prediction["elapsed_s"]["value"])

    command = [sys.executable, "-m", "twostroke", "batch", str(model), str(given), str(killed), "--dtype", "fp32"]
    process = subprocess.Popen([*command, "--threads", "1"], stderr=subprocess.DEVNULL, env=os.environ)
    while process.poll() is None and (not killed.exists() or killed.stat().st_size == 0):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 0 < killed.read_bytes().count(b"\n") < 17
    code, out, err = run(capsys, model, given, killed, "--resume", "--speculate", "ngram")  # drafts change no answer
    assert code == 0, err
    assert lines_of(killed) == lines_of(whole)
    assert (tmp_path / "killed.errors.jsonl").read_bytes() == refused
    assert f"answers   17 in {killed}" in out
    assert "elapsed_s" in out


def test_what_cannot_be_computed_is_one_sentence_and_nothing_is_written(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, output = written(tmp_path / "in.jsonl", ROWS[0]), tmp_path / "out.jsonl"
    twice = written(tmp_path / "twice.jsonl", ROWS[0], ROWS[1], ROWS[0])
    other = written(tmp_path / "other.jsonl", request("x", prompt="x") | {"body": {"model": "gpt", "prompt": "x"}})
    (tmp_path / "there.jsonl").write_text("mine\n")
    before = sorted(tmp_path.iterdir())
    cases: list[tuple[list[object], int, str]] = [
        ([model, twice, output], 2, f"{twice}, line 3: custom_id 'greedy' is an earlier line's."),
        ([model, other, output], 2, f"{other}, line 1: model 'gpt' is not served. Served: tiny."),
        ([model, other, output, "--served-name", "gpt", "--lora", "gpt=x"], 2, "x has no adapter_config.json"),
        ([model, tmp_path / "nowhere", output], 2, "nowhere: No such file or directory. Check the path."),
        ([model, tmp_path, output], 2, f"{tmp_path} is not a file."),
        ([model, given, given], 2, f"{given} is named twice."),
        ([model, given, tmp_path / "no" / "out"], 2, f"the folder {tmp_path / 'no'} does not exist."),
        ([model, given, tmp_path], 2, f"{tmp_path} is not a file. Name one."),
        ([model, given, tmp_path / "there.jsonl"], 2, "there.jsonl exists already."),
        ([model, given, tmp_path / "there.jsonl", "--resume"], 2, "holds something else than answers"),
        ([model, given, output, "--resume"], 2, f"{output} holds no batch to resume. Start it without --resume."),
        ([tmp_path / "no model", given, output], 2, "does not exist"),
    ]
    for args, expected, sentence in cases:
        code, out, err = run(capsys, *args)
        assert (code, out, err.count("\n")) == (expected, "", 1), err
        assert sentence in err
    assert sorted(tmp_path.iterdir()) == before


def test_a_batch_goes_on_only_with_what_it_began_with(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from twostroke.core.engine_settings import EngineSettings
    from twostroke.server.batch.job import BatchPaths, about, opened_job

    given, output = written(tmp_path / "in.jsonl", *ROWS[:2]), tmp_path / "out.jsonl"
    paths = BatchPaths(given, output, tmp_path / "out.errors.jsonl")
    settings = EngineSettings(dtype="fp32", n_threads=1)
    with opened_job(paths, about(model, settings, ("tiny",), {}), ("tiny",), resume=False) as job:
        assert job is not None
        assert job.left() == [0, 1]
        code, _, err = run(capsys, model, given, output, "--resume")
        assert (code, "another process is writing" in err) == (2, True)
    weights = model / "model.safetensors"
    changed_at = weights.stat().st_mtime_ns
    os.utime(weights, ns=(changed_at, changed_at + 1))
    code, _, err = run(capsys, model, given, output, "--resume")
    assert (code, "the model, or an adapter, is not what the batch" in err) == (2, True)
    os.utime(weights, ns=(changed_at, changed_at))
    code, _, err = run(capsys, model, given, output, "--resume", "--max-model-len", "256")
    assert (code, "an option of the engine is not what the batch" in err) == (2, True)
    written(given, *ROWS[:3])
    code, _, err = run(capsys, model, given, output, "--resume")
    assert (code, f"the input {given} is not what the batch" in err) == (2, True)
    job_file = tmp_path / "out.jsonl.job"
    job_file.write_text("{}")
    code, _, err = run(capsys, model, given, output, "--resume")
    assert (code, "does not describe a batch" in err) == (2, True)
    assert output.read_bytes() == b""
