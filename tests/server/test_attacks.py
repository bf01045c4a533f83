"""Attacks that the server withstands: a small share in every run, the counts of the first attack in `make soak`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import echo_engine
import httpx
import psutil
import pytest
from attacks import answer_of, connect, post, silent_connections, status_of
from serving import Served, echo_server, held, is_open, metric, until

from twostroke.server.gate import OPEN_ROUTES

BODY: dict[str, Any] = {"model": "echo", "prompt": "the fox", "max_tokens": 4}
HOLD = "hold"
BOTH = pytest.mark.parametrize("options", [[], ["--plain"]], ids=["httptools", "h11"])


@pytest.fixture(scope="module", params=[[], ["--plain"]], ids=["httptools", "h11"])
def served(request: pytest.FixtureRequest, echo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("attacked")
    with echo_server(echo_model, home, [*request.param, f"--engine=--hold={home / HOLD}"]) as server:
        yield server


@pytest.fixture
def web(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=30, trust_env=False) as client:
        yield client


# Bodies and overload.


@BOTH
def test_bodies_that_are_never_finished_take_bounded_memory(echo_model: Path, tmp_path: Path, options: list[str]) -> None:
    """Ninety of 1.9 MB were 170 MB before they had a budget."""
    with echo_server(echo_model, tmp_path, [*options, "--set", "service.INCOMING_BYTES=20000000"]) as server:
        process = psutil.Process(server.process.pid)
        before = process.memory_info().rss
        unfinished = post(BODY, length=2_000_000) + b" " * 1_900_000
        with silent_connections(server.url, 90, unfinished):
            time.sleep(0.5)
            assert process.memory_info().rss - before < 80 * 2**20  # the budget, 64 KiB a connection, what an allocator keeps
            large = BODY | {"user": "x" * 1_000_000}
            answer = httpx.post(f"{server.url}/v1/completions", json=large, trust_env=False, timeout=20)
            assert answer.status_code == 200, "a body that moves finds room"


@BOTH
def test_an_overload_is_refused_by_its_headers_alone(echo_model: Path, tmp_path: Path, options: list[str]) -> None:
    with echo_server(echo_model, tmp_path, [*options, "--max-concurrent", "1"]) as server, connect(server.url) as slow:
        with httpx.Client(base_url=server.url, timeout=20, trust_env=False) as web:
            slow.sendall(post(BODY | {"prompt": [echo_engine.SLOW], "max_tokens": 4000}))
            until(lambda: metric(web, "twostroke_http_requests_active") == 1)
            with connect(server.url) as peer:
                for _ in range(2):  # the connection is kept: its next request is refused as well
                    peer.sendall(post({"broken": "x"}, length=100_000)[:-1])
                    answer = answer_of(peer)
                    assert status_of(answer) == 429
                    assert b"retry-after: " in answer
                    assert b"retry-after-ms: " in answer
                    peer.sendall(b" " * (100_000 - len(b'{"broken":"x"}')))
            assert web.post("/v1/chat/completions", content=b"{").status_code == 429


def test_log_probabilities_of_a_whole_answer_are_limited_and_a_streams_are_not(web: httpx.Client) -> None:
    many = BODY | {"prompt": [35, 36], "n": 64, "max_tokens": 500, "logprobs": 20}
    refused = web.post("/v1/completions", json=many)
    assert refused.status_code == 400
    assert "672000" in refused.json()["error"]["message"]
    with web.stream("POST", "/v1/completions", json=many | {"stream": True}) as stream:
        assert stream.status_code == 200
    chat = {"model": "echo", "messages": [{"role": "user", "content": "x"}], "n": 32, "logprobs": True, "top_logprobs": 20}
    counts = [len(choice["logprobs"]["content"]) for choice in web.post("/v1/chat/completions", json=chat).json()["choices"]]
    assert counts == [2**18 // (21 * 32)] * 32, "without max_tokens the answer is as long as fits"


# Disconnects and the end.


def test_answers_of_clients_that_go_away_free_their_pages(served: Served, web: httpx.Client) -> None:
    body = BODY | {"prompt": [35], "max_tokens": 4000}
    with held(served.stderr.with_name(HOLD)):  # no answer ends by itself, however slowly the others come
        with (
            silent_connections(served.url, 30, post(body | {"n": 2})),
            silent_connections(served.url, 30, post(body | {"n": 2, "stream": True})),
        ):
            until(lambda: metric(web, "twostroke_requests_running") == 120, within_s=150)
        until(lambda: metric(web, "twostroke_requests_running") == 0)
        until(lambda: metric(web, "twostroke_kv_pages_used") == 0)
        until(lambda: metric(web, "twostroke_http_requests_active") == 0)


@BOTH
def test_the_end_finishes_streams_and_waits_for_no_idle_connection(
    echo_model: Path, tmp_path: Path, options: list[str]
) -> None:
    hold = tmp_path / HOLD
    with echo_server(echo_model, tmp_path, [*options, f"--engine=--hold={hold}"]) as server, ThreadPoolExecutor(60) as pool:
        body = BODY | {"prompt": [35], "max_tokens": 100, "stream": True}

        def stream(_: int) -> str:
            with connect(server.url) as peer:
                peer.sendall(post(body, headers="connection: close\r\n"))
                return answer_of(peer, to_the_end=True).decode()

        with idle_connections(server.url):
            with held(hold):
                answers = [pool.submit(stream, n) for n in range(60)]
                with httpx.Client(base_url=server.url, trust_env=False, timeout=20) as web:
                    until(lambda: metric(web, "twostroke_http_requests_active") == 60)
                server.process.send_signal(signal.SIGTERM)
                until(lambda: not is_open(server.url))
            assert all("data: [DONE]" in answer.result() for answer in answers)
            assert server.process.wait(60) == 0


def idle_connections(url: str) -> Any:
    """21 connections that are idle or half a request."""
    stack = contextlib.ExitStack()
    for say in (b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nhost: localhost\r\n"):
        stack.enter_context(silent_connections(url, 7, say))
    return stack


def soup(served: Served, n: int, seed: int) -> None:
    rng = random.Random(seed)
    with httpx.Client(base_url=served.url, timeout=30, trust_env=False) as web:
        for _ in range(n):
            # Answer i of the echo engine begins 10 i tokens on, and must not begin with one of its commands.
            prompt = [rng.randrange(echo_engine.VOCAB - 30) for _ in range(rng.randrange(1, 8))]
            body = {"model": "echo", "prompt": prompt, "max_tokens": rng.randrange(1, 300), "n": rng.randrange(1, 4)}
            whole = web.post("/v1/completions", json=body).json()
            text = [""] * body["n"]
            for line in web.post("/v1/completions", json=body | {"stream": True}).text.split("\n\n"):
                if line.startswith("data: {"):
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        text[choice["index"]] += choice["text"]
            assert text == [choice["text"] for choice in whole["choices"]]


def test_streams_of_any_bytes_are_the_whole_answers(served: Served) -> None:
    soup(served, 10, seed=1)


@pytest.mark.soak
def test_many_streams_of_any_bytes_are_the_whole_answers(served: Served) -> None:
    soup(served, 400, seed=2)


# Keys, names, smuggling.

PATHS = (
    "/v1", "/v1/", "/v1/models", "/v1/models/echo", "/v1/models/../models", "/v1/completions", "/v1/completions/",
    "/v1/chat/completions", "/metrics", "/openapi.json", "/docs", "/redoc", "//v1/models", "/%76%31/models", "/health/",
    "/ready/x", "/v1/models/%00", "/tokenize", "/detokenize", "/v1/embeddings", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/responses", "/score", "/v1/score", "/page/", "/page/../metrics", "/page/%2e%2e/page.py", "/page.py",
)  # fmt: skip


OPEN = (
    "/health", "/ready", "/", "/page/answer.js", "/page/chat.css", "/page/chat.js", "/page/panel.js", "/page/requests.js",
)  # fmt: skip
"""Every route that needs no key where one is set (docs/http.md says why)."""


@BOTH
def test_no_path_is_open_without_a_key_but_the_probes_and_the_page(
    echo_model: Path, tmp_path: Path, options: list[str]
) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("sesame\n")
    with echo_server(echo_model, tmp_path, [*options, "--api-key-file", str(key_file)]) as server:
        with httpx.Client(base_url=server.url, trust_env=False, timeout=20) as web:
            for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS"):
                found = {path: web.request(method, path).status_code for path in PATHS}
                assert set(found.values()) == {401}, (method, found)
            for path in OPEN:
                assert web.get(path).status_code == 200, path
            assert set(OPEN) == OPEN_ROUTES, "a further route without a key is decided on, not added"
        with connect(server.url) as peer:  # refused by its headers: the body is not waited for
            peer.sendall(post(BODY, headers="authorization: Bearer guess\r\n", length=1_900_000))
            assert status_of(answer_of(peer, to_the_end=True)) == 401


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example"])
def test_a_foreign_name_for_this_machine_is_refused(web: httpx.Client, host: str) -> None:
    assert web.get("/v1/models", headers={"host": host, "origin": "https://evil.example"}).status_code == 403
    assert web.options("/v1/completions", headers={"origin": "https://evil.example"}).status_code == 405


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
HIDDEN = b"GET /v1/models/hidden HTTP/1.1\r\nhost: localhost\r\n\r\n"
SMUGGLED = {
    "length and chunks": HEAD + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "two lengths": HEAD + b"content-length: 2\r\ncontent-length: 60\r\n\r\n{}" + HIDDEN,
    "a length of 5,000 digits": HEAD + b"content-length: " + b"9" * 5000 + b"\r\n\r\n" + HIDDEN,
    "a signed length": HEAD + b"content-length: +2\r\n\r\n{}" + HIDDEN,
    "a bad end of a chunk": HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}XX0\r\n\r\n" + HIDDEN,
    "a chunk of no number": HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n" + HIDDEN,
    "a space before the colon": HEAD + b"content-length : 2\r\n\r\n{}" + HIDDEN,
    "an unknown coding": HEAD + b"transfer-encoding: xchunked\r\n\r\n" + HIDDEN,
}


@pytest.mark.parametrize("kind", SMUGGLED)
def test_a_request_is_not_smuggled_in_another(served: Served, kind: str) -> None:
    with connect(served.url) as peer:
        peer.sendall(SMUGGLED[kind])
        answer = answer_of(peer, to_the_end=True)
    assert status_of(answer) in (0, 400, 413, 501), answer
    assert b"hidden" not in answer, "the second request was answered"


# Schemathesis.


def schemathesis(served: Served, folder: Path, phases: str, n: int, timeout_s: float, paths: str = ".*") -> int:
    """How many requests were made from the server's own description, by all checks but one: that what the schema admits is
    accepted, since it does not know the model's context and which fields exclude each other."""
    command = [str(Path(sys.executable).with_name("st")), "run", f"{served.url}/openapi.json", "--no-color", "--checks", "all"]
    command += ["--exclude-checks", "positive_data_acceptance", "--phases", phases, "--max-examples", str(n), "--seed", "1"]
    command += ["--suppress-health-check", "too_slow"]  # of making requests, on a machine that others use
    command += ["--include-path-regex", paths]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-6000:]
    counted = re.search(r"([\d,]+) generated", done.stdout)
    assert counted is not None, done.stdout[-2000:]
    cases = int(counted[1].replace(",", ""))
    print(f"schemathesis: {cases:,} cases")
    return cases


def test_requests_made_from_the_description_find_nothing(echo: Served, tmp_path: Path) -> None:
    assert schemathesis(echo, tmp_path, "fuzzing", 15, 120) >= 60


CHANGING = "^/(admin|v1/files|v1/batches|v1/feedback)"


def test_requests_to_routes_that_change_something_find_nothing(echo_model: Path, tmp_path: Path) -> None:
    options = ["--admin", "--files-dir", str(tmp_path / "files"), "--capture", str(tmp_path / "chats")]
    with echo_server(echo_model, tmp_path, options) as served:
        assert schemathesis(served, tmp_path, "fuzzing", 20, 120, CHANGING) >= 60
        assert served.stop() == 0


@pytest.mark.soak
def test_many_requests_made_from_the_description_find_nothing(echo: Served, tmp_path: Path) -> None:
    assert schemathesis(echo, tmp_path, "coverage,fuzzing,stateful", 5000, 3600) >= 20_000


@pytest.mark.soak
@BOTH
def test_ten_times_the_load_gets_its_answers_or_is_told_when_to_return(
    echo_model: Path, tmp_path: Path, options: list[str]
) -> None:
    """Over `benchmarks/robustness/load.py`, whose run on the real model has the numbers."""
    load = Path(__file__).parents[2] / "benchmarks" / "robustness" / "load.py"
    with echo_server(echo_model, tmp_path, options) as server:
        command = [sys.executable, str(load), server.url, "--clients", "1280", "--seconds", "20", "--body", json.dumps(BODY)]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)
        assert found["answers_per_s"] > 0
        assert (found["broken_connections"], found["other_statuses"]) == (0, {})
        assert server.stop() == 0


def test_the_loop_has_turns_while_a_large_answer_is_built(web: httpx.Client, served: Served) -> None:
    """A turn for each slice of log-probabilities: two seconds' work does not keep /health waiting for as long."""
    body = {"model": "echo", "prompt": [33, 33], "n": 100, "max_tokens": 240, "logprobs": 20}

    async def scenario() -> int:
        async with httpx.AsyncClient(base_url=served.url, timeout=60, trust_env=False) as client:
            large = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.sleep(0)
            n = 0
            while not large.done():
                assert (await client.get("/health")).status_code == 200
                n += 1
            assert large.result().status_code == 200
            return n

    assert asyncio.run(scenario()) > 20
