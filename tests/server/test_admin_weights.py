"""Weights replaced over HTTP: guarded, told apart in answers, kept by later engines, and refused without harm."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from echo_engine import HELD_TOKENS, SLOW
from serving import Served, echo_server, environment, held, metric, until

from small_models import decoder_of
from twostroke.data.tokenizer import train_tokenizer
from twostroke.model.save import save_model

WEIGHTS = "/admin/weights"
HOLD = "hold"
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def served(echo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("admin")
    with echo_server(echo_model, home, ["--admin", f"--engine=--hold={home / HOLD}"]) as served:
        yield served


@pytest.fixture
def web(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=30, trust_env=False) as client:
        yield client


def body(n: int = 1, first: int = 5, **fields: Any) -> dict[str, Any]:
    return {"model": "echo", "prompt": [first], "max_tokens": n, **fields}


def answer(web: httpx.Client, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = web.post("/v1/completions", json=body(**fields)).json()
    return found


def made(folder: Path, name: str = "new") -> tuple[str, str]:
    """A directory of its own, and the fingerprint of the echo engine's weights in it."""
    directory = folder / f"{name}-{next(NUMBERS)}"
    directory.mkdir()
    return str(directory), f"fp_{directory.name}"


def served_by(web: httpx.Client) -> str:
    return str(web.get(WEIGHTS).json()["fingerprint"])


def test_answers_say_which_weights_computed_them(web: httpx.Client, tmp_path: Path) -> None:
    before, (path, name) = served_by(web), made(tmp_path)
    assert answer(web)["system_fingerprint"] == before
    changed = web.post(WEIGHTS, json={"path": path})
    assert (changed.status_code, changed.json()["fingerprint"]) == (200, name)
    assert {"prepare_s", "pause_s", "finishing", "path"} <= changed.json().keys()
    assert answer(web)["system_fingerprint"] == name
    assert web.get(WEIGHTS).json() == {"path": path, "fingerprint": name, "state": "serving"}
    again = web.post(WEIGHTS, json={"path": path}).json()
    assert (again["fingerprint"], again["prepare_s"]) == (name, 0), "they were served already"


@pytest.mark.parametrize("in_flight", ["finish", "continue"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_under_way_names_the_weights_of_both_or_its_own(
    served: Served, web: httpx.Client, tmp_path: Path, in_flight: str, stream: bool
) -> None:
    found: list[str] = []
    before, (path, name) = served_by(web), made(tmp_path)

    def ask() -> None:
        response = web.post("/v1/completions", json=body(20, stream=stream))
        if stream:
            lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
            found.extend(dict.fromkeys(json.loads(line)["system_fingerprint"] for line in lines))
        else:
            found.append(response.json()["system_fingerprint"])

    asking, computed = threading.Thread(target=ask), metric(web, "twostroke_engine_output_tokens")
    with held(served.stderr.with_name(HOLD)):
        asking.start()
        until(lambda: metric(web, "twostroke_engine_output_tokens") == computed + HELD_TOKENS)
        changed = web.post(WEIGHTS, json={"path": path, "in_flight": in_flight}).json()
    asking.join()
    assert changed["finishing"] == (1 if in_flight == "finish" else 0)
    said = before if in_flight == "finish" else f"{before}+{name}"
    assert found == ([before, said] if stream and in_flight == "continue" else [said])


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"path": "/nowhere"}, "/nowhere does not exist"),
        ({}, "path is missing"),
        ({"path": 3}, "path is not valid"),
        ({"path": "/", "in_flight": "drop"}, "in_flight is not valid"),
        ({"path": "/", "speed": 1}, "speed is not a known field"),
        ([], "not valid"),
    ],
)
def test_what_cannot_be_served_is_said_and_changes_nothing(web: httpx.Client, asked: object, says: str) -> None:
    before = served_by(web)
    refused = web.post(WEIGHTS, json=asked)
    assert (refused.status_code, says in refused.json()["error"]["message"]) == (400, True), refused.text
    assert answer(web)["system_fingerprint"] == before


def test_weights_are_replaced_one_after_another(served: Served, web: httpx.Client, tmp_path: Path) -> None:
    first: list[int] = []
    before, (slow, name), (other, _) = served_by(web), made(tmp_path, "slow"), made(tmp_path)  # slow: as long as it is held
    asking = threading.Thread(target=lambda: first.append(web.post(WEIGHTS, json={"path": slow}).status_code))
    with held(served.stderr.with_name(HOLD)):
        asking.start()
        until(lambda: web.get(WEIGHTS).json()["state"] == "preparing")
        assert answer(web)["system_fingerprint"] == before, "the old weights serve meanwhile"
        refused = web.post(WEIGHTS, json={"path": other})
    asking.join()
    assert (refused.status_code, refused.json()["error"]["code"], first) == (409, "busy", [200])
    assert answer(web)["system_fingerprint"] == name


def test_several_engines_take_new_weights_one_after_another_and_sleep_together(echo_model: Path, tmp_path: Path) -> None:
    path, name = made(tmp_path)
    with echo_server(echo_model, tmp_path, ["--admin", "--replicas", "2"]) as served:
        with httpx.Client(base_url=served.url, timeout=30, trust_env=False) as web:
            changed = web.post(WEIGHTS, json={"path": path})
            assert (changed.status_code, changed.json()["fingerprint"]) == (200, name)
            assert [answer(web, first=first)["system_fingerprint"] for first in range(5, 11)] == [name] * 6
            assert web.post(WEIGHTS, json={"path": "/nowhere"}).status_code == 400
            assert web.post("/admin/sleep", json={"level": 2}).json()["freed_bytes"] == 4000
            assert web.post("/v1/completions", json=body()).status_code == 503
            assert web.post("/admin/wake", json={}).status_code == 200
            assert [answer(web, first=first)["system_fingerprint"] for first in range(5, 11)] == [name] * 6


def test_there_are_no_such_routes_without_the_option(echo: Served) -> None:
    with httpx.Client(base_url=echo.url, timeout=30, trust_env=False) as web:
        assert web.post(WEIGHTS, json={"path": "/"}).status_code == 404
        assert WEIGHTS not in web.get("/openapi.json").json()["paths"]


def test_weights_are_replaced_by_holders_of_a_key_or_from_this_machine(echo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    (tmp_path / "new").mkdir()
    asked = {"path": str(tmp_path / "new")}
    with echo_server(echo_model, tmp_path, ["--admin", "--api-key-file", str(tmp_path / "keys")]) as served:
        with httpx.Client(base_url=served.url, timeout=30, trust_env=False) as web:
            assert web.post(WEIGHTS, json=asked).status_code == 401
            assert web.get(WEIGHTS).status_code == 401
            assert web.post(WEIGHTS, json=asked, headers={"authorization": "Bearer secret"}).status_code == 200
            assert WEIGHTS in web.get("/openapi.json", headers={"authorization": "Bearer secret"}).json()["paths"]
    with echo_server(echo_model, tmp_path, ["--admin", "--host", "0.0.0.0"]) as served:
        with httpx.Client(base_url=served.url, timeout=30, trust_env=False) as web:
            refused = web.post(WEIGHTS, json=asked)
            assert (refused.status_code, "with an API key" in refused.json()["error"]["message"]) == (403, True)


def model(directory: Path, seed: int) -> Path:
    decoder = decoder_of("llama", seed, vocab_size=300)
    save_model(decoder, decoder.spec, directory, dtype="fp32")
    train_tokenizer(iter(["the quick brown fox jumps over the lazy dog " * 3]), 300, directory / "tokenizer.json")
    return directory


def test_a_real_server_replaces_its_weights_and_a_new_engine_has_them(tmp_path: Path) -> None:
    old, new = model(tmp_path / "old", 0), model(tmp_path / "new", 7)
    words = [sys.executable, "-m", "twostroke", "serve", str(old), "--port", "0", "--admin", "--json", "--dtype", "fp32"]
    words += ["--kv-cache-gib", "1", "--threads", "1", "--served-name", "m"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True, env=environment(tmp_path))
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        while lines[-1] not in ("", "}\n"):
            lines.append(process.stdout.readline())
        assert lines[-1], (tmp_path / "log").read_text()
        with httpx.Client(base_url=json.loads("".join(lines))["url"], timeout=60, trust_env=False) as web:

            def asked() -> tuple[str, str]:
                fields = {"model": "m", "prompt": "the quick brown", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
                found = web.post("/v1/completions", json=fields)
                assert found.status_code == 200, found.text
                return found.json()["choices"][0]["text"], found.json()["system_fingerprint"]

            before = asked()
            refused = web.post(WEIGHTS, json={"path": str(tmp_path)})
            assert (refused.status_code, "holds no config.json" in refused.text) == (400, True)
            assert asked() == before
            changed = web.post(WEIGHTS, json={"path": str(new)}).json()
            after = asked()
            assert after[0] != before[0]
            assert after[1] == changed["fingerprint"] != before[1]
            assert "twostroke_weight_changes 1.0" in web.get("/metrics").text
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            (engine,) = [int(pid) for pid in children.read_text().split() if b"engine_process" in _command_line(pid)]
            os.kill(engine, signal.SIGKILL)
            deadline = time.monotonic() + 60
            while "twostroke_engine_restarts 1.0" not in web.get("/metrics").text or web.get("/ready").status_code != 200:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert asked() == after
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def _command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


SLEEP, WAKE = "/admin/sleep", "/admin/wake"


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_refuses_until_it_is_woken(web: httpx.Client, level: int) -> None:
    before = served_by(web)
    assert web.post(SLEEP, json={"level": level}).json() == {"level": level, "freed_bytes": 1000 * level}
    refused = web.post("/v1/completions", json=body())
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "asleep")
    assert int(refused.headers["retry-after"]) > 0
    ready = web.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "asleep")
    assert web.get(WEIGHTS).json()["state"] == "asleep"
    assert web.get("/health").status_code == web.get("/metrics").status_code == 200
    assert web.post(WAKE, json={}).json()["fingerprint"] == before
    assert answer(web)["system_fingerprint"] == before
    assert web.post(WAKE, json={}).status_code == 200, "it is awake already"


@pytest.mark.parametrize("level", [1, 2])
def test_requests_wake_an_engine_that_may_be_woken(web: httpx.Client, level: int) -> None:
    before = served_by(web)
    assert web.post(SLEEP, json={"level": level, "on_request": "wake"}).status_code == 200
    ready = web.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (200, "asleep")
    found: list[str] = []
    asking = [threading.Thread(target=lambda: found.append(answer(web)["system_fingerprint"])) for _ in range(4)]
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    assert found == [before] * 4
    assert web.get("/ready").json()["status"] == "ready"


def test_weights_that_are_replaced_wake_the_engine(web: httpx.Client, tmp_path: Path) -> None:
    path, name = made(tmp_path)
    assert web.post(SLEEP, json={"level": 2}).status_code == 200
    assert web.post(WEIGHTS, json={"path": path}).status_code == 200
    assert answer(web)["system_fingerprint"] == name


def test_an_engine_that_works_does_not_sleep(web: httpx.Client) -> None:
    with web.stream("POST", "/v1/completions", json=body(60, SLOW, stream=True)) as stream:
        lines = stream.iter_lines()
        next(lines)
        refused = web.post(SLEEP, json={"level": 1})
        assert (refused.status_code, "under way" in refused.json()["error"]["message"]) == (409, True)
    for wrong in ({"level": 3}, {"level": "1"}, {"deep": True}, []):
        assert web.post(SLEEP, json=wrong).status_code == 400
    assert web.post(WAKE, json={"now": 1}).status_code == 400
    assert answer(web)["choices"]
