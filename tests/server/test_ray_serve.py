"""``serve --ray`` on a Ray cluster of this machine: the same answers and errors, prefixes, lost replicas, and scale to zero."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from serving import environment, until

from small_models import saved
from twostroke.core.errors import EngineError
from twostroke.data.tokenizer import train_tokenizer
from twostroke.server.ray_serve.run import _with_proxy

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray Serve (the extra ray) is not installed")

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
LONG = {"model": "tiny", "prompt": "the quick", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ray") / "tiny"
    saved("llama", directory, vocab_size=300, max_positions=8192)
    train_tokenizer(iter(["the quick brown fox jumps over the lazy dog " * 3]), 300, directory / "tokenizer.json")
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}))
    return directory


@contextlib.contextmanager
def on_ray(model: Path, home: Path, options: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A server on a cluster of its own, and what it says of itself."""
    session = tempfile.mkdtemp(prefix="ray-")  # short, because sockets lie in it
    words = [sys.executable, "-m", "twostroke", "serve", str(model), "--ray", "--port", "0", "--json", *options]
    environ = environment(home) | {"RAY_TMPDIR": session, "HOME": str(home)}
    environ.pop("PYTHONWARNINGS")
    stderr = home / "stderr.txt"
    with stderr.open("w") as log:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True, env=environ)
    try:
        assert process.stdout is not None
        said = ""
        while line := process.stdout.readline():
            said += line
            if line == "}\n":
                break
        assert said, stderr.read_text()
        yield process, json.loads(said)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
        process.wait()
        process.stdout.close()
        shutil.rmtree(session, ignore_errors=True)


def web_of(said: dict[str, Any]) -> httpx.Client:
    return httpx.Client(base_url=said["url"], timeout=60, trust_env=False)


def replicas(process: subprocess.Popen[str]) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ServeReplica:twostroke:engine" in "".join(child.cmdline()[:1]):
                found.append(child)
    return found


def values(web: httpx.Client, name: str) -> list[float]:
    """Of every replica, or the one of the ingress."""
    lines = web.get("/metrics").text.splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " "))]


@pytest.fixture(scope="module")
def pair(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """Two replicas of one processor each."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two replicas take two processors")
    with on_ray(tiny, tmp_path_factory.mktemp("home"), ["--replicas", "2", "--min-replicas", "2"]) as (process, said):
        assert (said["model"], said["min_replicas"], said["replicas"]) == ("tiny", 2, 2)
        assert said["max_model_len"] == 8192
        with web_of(said) as web:
            yield process, web


def test_answers_are_those_of_a_server(pair: tuple[Any, httpx.Client]) -> None:
    _, web = pair
    assert web.get("/health").json() == {"status": "ok"}
    assert web.get("/ready").json() == {"status": "ready"}
    assert [each["id"] for each in web.get("/v1/models").json()["data"]] == ["tiny"]
    messages = [{"role": "user", "content": "the quick brown fox"}]
    asked = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    whole = web.post("/v1/chat/completions", json=asked, headers={"x-request-id": "mine"})
    assert whole.headers.get_list("x-request-id") == ["mine"]
    streamed = web.post("/v1/chat/completions", json=asked | {"stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *events, last = [line.removeprefix("data: ") for line in streamed.text.split("\n\n")[:-1]]
    assert last == "[DONE]"
    pieces = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(pieces) == whole.json()["choices"][0]["message"]["content"]
    completion = web.post("/v1/completions", json={"model": "tiny", "prompt": "the", "max_tokens": 4, "ignore_eos": True})
    assert completion.json()["usage"]["completion_tokens"] == 4
    vectors = web.post("/v1/embeddings", json={"model": "tiny", "input": ["the quick", "the lazy"]}).json()["data"]
    assert [len(each["embedding"]) for each in vectors] == [len(vectors[0]["embedding"])] * 2


def test_errors_are_those_of_a_server(pair: tuple[Any, httpx.Client]) -> None:
    _, web = pair

    def refused(path: str, **how: Any) -> tuple[int, dict[str, Any]]:
        answer = web.request(how.pop("method", "POST"), path, **how)
        return answer.status_code, answer.json()["error"]

    status, error = refused("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": -1})
    assert (status, error["param"], error["type"]) == (400, "max_tokens", "invalid_request_error")
    status, error = refused("/v1/completions", json={"model": "other", "prompt": "a"})
    assert (status, error["code"]) == (404, "model_not_found")
    status, error = refused("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert (status, error["code"]) == (400, "invalid_json")
    assert refused("/v1/completions", content=b"{}")[0] == 415
    assert refused("/v1/completions", method="GET")[0] == 405
    assert refused("/nothing", method="GET")[0] == 404
    assert refused("/v1/completions", content=b"x" * (2**21 + 1), headers={"content-type": "application/json"})[0] == 413
    assert refused("/v1/completions", json={}, headers={"host": "attacker.example"})[0] == 403
    assert "changes one server" in refused("/v1/load_lora_adapter", json={})[1]["message"]
    anthropic = web.post("/v1/messages", json={"model": "tiny"})
    assert anthropic.json()["type"] == "error"


def test_prompts_share_the_replicas_and_each_finds_its_beginning(pair: tuple[Any, httpx.Client]) -> None:
    """Prompts are so long that a replica which does not know one is taken only where it seems 25 times as fast: with 1,200
    characters that was three times, which a replica is beside one that other programs hold up."""
    _, web = pair
    texts = [f"{word} quick brown fox " * 400 for word in ("the", "lazy", "dog", "over")]

    def all_at_once(extra: str, **more: Any) -> list[int]:
        found: list[int] = []

        def ask(text: str) -> None:
            answer = web.post("/v1/completions", json=LONG | {"prompt": text + extra, "max_tokens": 100} | more)
            found.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        threads = [threading.Thread(target=ask, args=(text,)) for text in texts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    all_at_once("", n=8)
    assert min(values(web, "twostroke_endpoint_requests")) > 0
    for extra in ("1", "2", "3"):
        assert min(all_at_once(extra)) >= 1600
    assert len(values(web, "twostroke_prefix_hit_tokens")) == 2


def test_a_client_that_leaves_frees_its_place(pair: tuple[Any, httpx.Client]) -> None:
    _, web = pair
    before = sum(values(web, "twostroke_engine_output_tokens"))
    with web.stream("POST", "/v1/completions", json=LONG | {"n": 16, "stream": True}) as answer:
        pieces = answer.iter_bytes()
        next(pieces)
        until(lambda: sum(values(web, "twostroke_requests_running")) > 0)  # an engine held up for a second: its last counters
    until(lambda: sum(values(web, "twostroke_requests_running")) == 0)
    until(lambda: sum(values(web, "twostroke_http_requests_active")) == 0)
    assert sum(values(web, "twostroke_engine_output_tokens")) - before < 16 * LONG["max_tokens"], "it did not end of itself"


def busier(found: Sequence[psutil.Process]) -> psutil.Process:
    """The replica whose engine computes."""

    def used_s(each: psutil.Process) -> float:
        return sum(sum(child.cpu_times()[:2]) for child in each.children(recursive=True))

    before = {each: used_s(each) for each in found}
    time.sleep(0.3)
    return max(found, key=lambda each: used_s(each) - before[each])


def test_a_lost_replica_costs_no_answer_of_which_nothing_was_sent(pair: tuple[Any, httpx.Client]) -> None:
    """Each client asks again as soon as it is answered, so that the replica has requests whenever the signal comes: of six that
    were asked once, the first had ended on a slow machine before the last began."""
    process, web = pair
    asked = LONG | {"max_tokens": 1000}
    wanted = web.post("/v1/completions", json=asked).json()["choices"][0]["text"]
    found: list[httpx.Response] = []
    lost = threading.Event()

    def ask() -> None:
        while not lost.is_set():
            found.append(web.post("/v1/completions", json=asked))

    moved = values(web, "twostroke_requests_moved_total")[0]
    with ThreadPoolExecutor(6) as pool:
        asking = [pool.submit(ask) for _ in range(6)]
        try:
            until(lambda: [n > 0 for n in values(web, "twostroke_requests_running")] == [True, True])
            busier(replicas(process)).kill()
            until(lambda: values(web, "twostroke_requests_moved_total")[0] > moved)
        finally:
            lost.set()
        for each in asking:
            each.result()
    assert len(found) >= 6
    assert {answer.status_code for answer in found} == {200}
    assert {answer.json()["choices"][0]["text"] for answer in found} == {wanted}


def test_a_signal_ends_it_when_what_is_under_way_is_answered(pair: tuple[Any, httpx.Client]) -> None:
    """The last of this server's tests."""
    process, web = pair
    cluster = psutil.Process(process.pid).children(recursive=True)
    with web.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
        pieces = answer.iter_text()
        text = next(pieces)
        process.send_signal(signal.SIGTERM)
        text += "".join(pieces)
    assert text.endswith("data: [DONE]\n\n")
    assert process.wait(60) == 0
    until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in cluster), 30)


@pytest.mark.soak
def test_nothing_runs_while_nobody_asks(tiny: Path, tmp_path: Path) -> None:
    """A minute: Ray's averages must fade before it ends a replica."""
    with on_ray(tiny, tmp_path, ["--min-replicas", "0", "--scale-down-s", "2"]) as (process, said), web_of(said) as web:
        assert "dtype" not in said
        for _ in range(2):
            until(lambda: not replicas(process), 90)
            assert web.get("/ready").status_code == 200  # a request would be answered
            assert values(web, "twostroke_ready") == []
            started = time.monotonic()
            assert web.post("/v1/completions", json=LONG | {"max_tokens": 4}).status_code == 200
            print(f"first answer after {time.monotonic() - started:.1f} s")
            assert len(replicas(process)) == 1


@pytest.mark.soak
def test_a_model_that_cannot_be_loaded_is_told(tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    session = tempfile.mkdtemp(prefix="ray-")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "twostroke", "serve", str(broken), "--ray", "--port", "0"],
            capture_output=True, text=True, timeout=120, check=False,
            env=environment(tmp_path) | {"RAY_TMPDIR": session, "HOME": str(tmp_path)},
        )  # fmt: skip
    finally:
        shutil.rmtree(session, ignore_errors=True)
    assert done.returncode == 1
    assert "no replica could start: " in done.stderr
    assert "model.safetensors" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_machine_too_busy_for_rays_proxy_is_told() -> None:
    """Ray ended the proxy before it ran, on two cores that other programs used."""
    from ray.exceptions import ActorDiedError

    def start(error: Exception) -> None:
        raise error

    for error in (ActorDiedError(), TimeoutError()):
        with pytest.raises(EngineError, match="HTTP proxy did not start within 60 s"):
            _with_proxy(partial(start, error))
