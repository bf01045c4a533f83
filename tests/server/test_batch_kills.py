"""kill -9 at any moment of a batch: resumed, each request is answered once, with the bytes of a run that nothing disturbed."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from echo_engine import EXIT
from serving import HERE, environment

from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import InputError
from twostroke.server.batch.job import BatchPaths, about, opened_job

N = 60


def requests(n: int = N) -> list[dict[str, Any]]:
    """Of all three kinds, with answers of 1 to 30 tokens; each seventh is refused when it is computed."""
    found: list[dict[str, Any]] = []
    for i in range(n):
        body: dict[str, Any] = {"model": "echo", "max_tokens": 1 + 13 * i % 30}
        if i % 7 == 3:
            body["nonsense"] = 1
        url = ("/v1/completions", "/v1/chat/completions", "/v1/score")[i % 3]
        if url == "/v1/completions":
            body |= {"prompt": [35 + i, 36], "logprobs": 2, "n": 1 + i % 2}
        elif url == "/v1/chat/completions":
            body |= {"messages": [{"role": "user", "content": f"the fox {i}"}]}
        else:
            body = {"model": "echo", "text": f"the dog {i}"} | ({"nonsense": 1} if i % 7 == 3 else {})
        found.append({"custom_id": f"é-{i}", "method": "POST", "url": url, "body": body})
    return found


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def start(model: Path, given: Path, output: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "echo_batch.py"), str(model), str(given), str(output), *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment(output.parent))


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def lines_of(output: Path) -> dict[str, bytes]:
    """The line of each custom_id, of both files. None comes twice."""
    found: dict[str, bytes] = {}
    for path in (output, output.with_suffix(".errors")):
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
            name = json.loads(line)["custom_id"]
            assert name not in found
            assert line.endswith(b"\n")
            found[name] = line
    return found


@pytest.fixture(scope="module")
def undisturbed(echo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """An input, and its answers."""
    folder = tmp_path_factory.mktemp("batch")
    given, output = written(folder / "in.jsonl", requests()), folder / "out.jsonl"
    code, errors = ended(start(echo_model, given, output))
    assert code == 0, errors
    assert not (folder / "out.jsonl.job").exists()
    found = lines_of(output)
    assert found.keys() == {row["custom_id"] for row in requests()}
    failed = {json.loads(line)["custom_id"] for line in output.with_suffix(".errors").read_bytes().splitlines()}
    assert failed == {f"é-{i}" for i in range(N) if i % 7 == 3}
    return given, found


def test_killed_and_stopped_at_random_moments_it_ends_with_the_same_bytes(
    echo_model: Path, undisturbed: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    given, expected = undisturbed
    rng, output = random.Random(4), tmp_path / "out.jsonl"
    limits = sorted(rng.sample(range(1, sum(map(len, expected.values())) // 2), 3))
    for limit, number in zip(limits, (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM), strict=True):
        resume, before = (["--resume"], output.stat().st_size) if output.exists() else ([], 0)
        process = start(echo_model, given, output, "--at-once", "5", "--engine=--step-s", "--engine=0.01", *resume)
        while process.poll() is None and (not output.exists() or output.stat().st_size < max(limit, before + 1)):
            time.sleep(0.001)
        process.send_signal(number)
        code, errors = ended(process)
        assert code == (75 if number == signal.SIGTERM else -signal.SIGKILL), errors
        if number == signal.SIGKILL:  # the kernel may write a part of a line: what follows must not be taken for it
            with output.open("ab") as stream:
                stream.write(b'{"id":"batch_req_')
    done = lines_of(output)
    assert 0 < len(done) < N
    with pytest.raises(InputError, match=r"exists already\. Continue that batch with --resume"):
        opened(echo_model, given, output, resume=False)
    assert lines_of(output) == done
    code, errors = ended(start(echo_model, given, output, "--resume"))
    assert code == 0, errors
    assert lines_of(output) == expected
    assert not opened(echo_model, given, output, resume=True), "nothing is left to do"
    assert lines_of(output) == expected


def opened(model: Path, given: Path, output: Path, resume: bool) -> bool:
    """Whether something is left to do. Raises InputError."""
    facts = about(model, EngineSettings(), ("echo",), {})
    with opened_job(BatchPaths(given, output, output.with_suffix(".errors")), facts, ("echo",), resume) as job:
        return job is not None


def test_a_request_that_ends_the_engine_is_named_and_the_others_are_answered(echo_model: Path, tmp_path: Path) -> None:
    rows = requests(5)
    rows.insert(2, {"custom_id": "poison", "method": "POST", "url": "/v1/completions",
                    "body": {"model": "echo", "prompt": [EXIT], "max_tokens": 3}})  # fmt: skip
    given, output = written(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    code, errors = ended(start(echo_model, given, output))
    assert code == 0, errors
    found = {name: json.loads(line) for name, line in lines_of(output).items()}
    assert found.keys() == {row["custom_id"] for row in rows}
    assert found["poison"]["response"]["status_code"] == 500
    assert found["poison"]["response"]["body"]["error"]["code"] == "engine_lost"
    assert [found[f"é-{i}"]["response"]["status_code"] for i in range(5)] == [200, 200, 200, 400, 200]
