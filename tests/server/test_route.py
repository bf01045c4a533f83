"""``twostroke route`` before real servers, and before ones that break off."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Served, echo_server, environment

ASK = {"model": "echo", "prompt": [1, 2, 3, 4], "max_tokens": 8}


@dataclass
class Routed:
    process: subprocess.Popen[str]
    url: str
    up: list[str]
    models: list[str]
    stderr: Path

    def metric(self, name: str, endpoint: str | None = None) -> float:
        shown = httpx.get(f"{self.url}/metrics", trust_env=False).text
        found = [line for line in shown.splitlines() if line.startswith((f"twostroke_{name} ", f"twostroke_{name}{{"))]
        return sum(float(line.rpartition(" ")[2]) for line in found if endpoint is None or f'"{endpoint}"' in line)


@contextlib.contextmanager
def router(home: Path, *words: str) -> Iterator[Routed]:
    home.mkdir(exist_ok=True)
    stderr = home / "router.txt"
    command = [sys.executable, "-m", "twostroke", "route", *words, "--port", "0", "--json"]
    with stderr.open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment(home))
    try:
        assert process.stdout is not None
        document = ""
        while not document.rstrip().endswith("}"):
            line = process.stdout.readline()
            assert line, stderr.read_text()
            document += line
        said = json.loads(document)
        yield Routed(process, said["url"], said["up"], said["models"], stderr)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]]


class Fake:
    """A server whose answers to POST are ``answer``'s, and which says that it is ready."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.asked, self.gone = answer, 0, 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop).result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        async def end() -> None:
            self._server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0.05)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"GET"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                    continue
                length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
                self.asked += 1
                await self.answer(reader, writer, head + await reader.readexactly(length))
        writer.close()


@contextlib.contextmanager
def fake(answer: Answer) -> Iterator[Fake]:
    found = Fake(answer)
    try:
        yield found
    finally:
        found.stop()


@pytest.fixture(scope="module")
def two(echo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    homes = [tmp_path_factory.mktemp("routed") for _ in range(2)]
    with echo_server(echo_model, homes[0]) as a, echo_server(echo_model, homes[1]) as b:
        yield a, b


@pytest.fixture(scope="module")
def routed(two: tuple[Served, Served], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    with router(tmp_path_factory.mktemp("router"), two[0].url, f"{two[1].url}/v1/") as found:
        yield found


def post(url: str, body: Any = ASK, path: str = "/v1/completions", **options: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=30, trust_env=False, **options)


def test_answers_are_those_of_the_servers_byte_by_byte(routed: Routed, two: tuple[Served, Served]) -> None:
    assert sorted(routed.up) == sorted(served.url for served in two)
    assert routed.models == ["echo"]
    chat = {"model": "echo", "messages": [{"role": "user", "content": "fox"}], "max_tokens": 6}
    for path, body in (
        ("/v1/completions", ASK),
        ("/v1/completions", ASK | {"stream": True}),
        ("/v1/chat/completions", chat | {"stream": True}),
        ("/v1/messages", chat),
        ("/tokenize", {"prompt": "the fox"}),
        ("/v1/completions", {"model": "none", "prompt": "x"}),
        ("/v1/completions", ASK | {"nonsense": 1}),
    ):
        here, there = post(routed.url, body, path), post(two[0].url, body, path)
        assert here.status_code == there.status_code
        assert _plain(here) == _plain(there)
        assert here.headers["content-type"] == there.headers["content-type"]
        assert here.headers["x-request-id"]


def _plain(response: httpx.Response) -> str:
    """Without what differs between two answers of one server: ids, times, and in which pieces a stream's text comes."""
    if response.headers["content-type"].startswith("text/event-stream"):
        *events, last = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        choices = [json.loads(event)["choices"][0] for event in events]
        return "".join(choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices) + last
    return re.sub(r'"(id|created)":("[^"]*"|\d+)', "", response.text)


def test_the_router_says_of_itself_and_of_its_servers(routed: Routed) -> None:
    with httpx.Client(base_url=routed.url, trust_env=False) as web:
        assert web.get("/health").json() == {"status": "ok"}
        assert web.get("/ready").json() == {"status": "ready"}
        assert [each["id"] for each in web.get("/v1/models").json()["data"]] == ["echo"]
        assert web.get("/v1/completions").status_code == 405
        gone = web.post("/v1/files", json={})
        assert (gone.status_code, "ask a server itself" in gone.json()["error"]["message"]) == (404, True)
        assert web.post("/v1/completions", content=b"[]", headers={"content-type": "application/json"}).status_code == 400
        assert web.post("/v1/completions", content=b"{", headers={"content-type": "application/json"}).status_code == 400
        assert web.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
        assert web.post("/v1/completions", json=ASK | {"user": "x" * 2**21}).status_code == 413
        assert web.get("/health", headers={"host": "evil.example"}).json()["error"]["code"] == "foreign_host"
    assert routed.metric("endpoint_up") == 2
    assert routed.metric("endpoint_measured_wait_seconds") >= 0


async def _hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    writer.transport.abort()


async def _busy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    writer.write(
        b'HTTP/1.1 429 no\r\ncontent-type: application/json\r\nretry-after-ms: 70\r\ncontent-length: 9\r\n\r\n{"no": 1}'
    )


async def _half_a_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"choices"')
    await writer.drain()
    writer.close()


async def _head_of_a_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    await writer.drain()
    writer.close()


async def _half_a_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n"
    )
    await writer.drain()
    writer.close()


async def _not_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    writer.write(b"I am no server.\r\n\r\n")
    await writer.drain()
    writer.close()


@pytest.mark.parametrize("answer", [_hang_up, _busy, _half_a_body, _head_of_a_stream, _not_http])
def test_a_request_that_was_sent_nothing_goes_to_the_other_server_once(
    two: tuple[Served, Served], tmp_path: Path, answer: Answer
) -> None:
    with fake(answer) as bad, router(tmp_path, bad.url, two[0].url) as routed:
        for i in range(6):
            found = post(routed.url, ASK | {"stream": i % 2 == 1})
            assert found.status_code == 200
            assert '"finish_reason":"length"' in found.text
        assert bad.asked > 0
        assert routed.metric("endpoint_requests_moved", bad.url) == bad.asked


def test_with_one_server_its_refusal_is_the_answer_and_a_loss_is_502(tmp_path: Path) -> None:
    with fake(_busy) as busy, router(tmp_path, busy.url) as routed:
        found = post(routed.url)
        assert (found.status_code, found.headers["retry-after-ms"], found.json()) == (429, "70", {"no": 1})
    with fake(_hang_up) as bad, router(tmp_path, bad.url) as routed:
        found = post(routed.url)
        assert (found.status_code, found.json()["error"]["code"]) == (502, "endpoint_lost")
        assert bad.asked == 1


def test_a_stream_that_breaks_off_is_cut_and_not_begun_again(two: tuple[Served, Served], tmp_path: Path) -> None:
    with fake(_half_a_stream) as bad, router(tmp_path, bad.url, two[0].url) as routed:
        pieces = []
        while bad.asked == 0:
            with contextlib.suppress(httpx.RemoteProtocolError):
                with httpx.stream(
                    "POST", routed.url + "/v1/completions", json=ASK | {"stream": True}, trust_env=False
                ) as found:
                    pieces = []
                    pieces += found.iter_raw()
                    assert b"".join(pieces).endswith(b"[DONE]\n\n"), "a clean end is a whole answer"
        assert bad.asked == 1
        assert routed.metric("endpoint_failures", bad.url) == 1
        assert routed.metric("endpoint_requests_moved") == 0
        assert routed.metric("endpoint_requests_in_flight") == 0


def test_pieces_of_a_stream_are_passed_on_as_they_come(tmp_path: Path) -> None:
    go = threading.Event()

    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
        assert b"authorization: Bearer mine" in request
        assert b"accept-encoding: identity" in request
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n7\r\ndata: \xc3\r\n"
        )
        while not go.is_set():
            await asyncio.sleep(0.01)
        writer.write(b"4\r\n\xa9\n\n \r\n0\r\n\r\n")

    with fake(slowly) as server, router(tmp_path, server.url) as routed:
        headers = {"authorization": "Bearer mine"}
        with httpx.Client(trust_env=False, timeout=30, headers=headers) as web:
            del web.headers["accept-encoding"]
            with web.stream("POST", routed.url + "/v1/completions", json=ASK) as found:
                pieces = found.iter_raw()
                assert next(pieces) == b"data: \xc3", "half a character, as it was sent"
                go.set()
                assert b"".join(pieces) == b"\xa9\n\n "


def test_a_client_that_goes_ends_its_request_at_the_server(tmp_path: Path) -> None:
    gone = threading.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
        if not await reader.read(1):
            gone.set()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
        if not await reader.read(1):
            gone.set()

    for answer in (endless, silent):
        gone.clear()
        with fake(answer) as server, router(tmp_path, server.url) as routed:
            with contextlib.suppress(httpx.ReadTimeout):
                httpx.post(routed.url + "/v1/completions", json=ASK, timeout=1.0, trust_env=False)
            assert gone.wait(20)
            assert routed.metric("endpoint_requests_in_flight") == 0


def test_a_server_that_dies_and_comes_back_is_left_out_meanwhile(
    echo_model: Path, two: tuple[Served, Served], tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    with echo_server(echo_model, tmp_path / "one") as mortal, router(tmp_path, mortal.url, two[0].url) as routed:
        os.kill(mortal.process.pid, signal.SIGSTOP)  # its port still takes connections, and nothing answers
        outcomes = [post(routed.url).status_code for _ in range(4)]
        assert outcomes == [200] * 4
        os.kill(mortal.process.pid, signal.SIGKILL)
        assert [post(routed.url).status_code for _ in range(4)] == [200] * 4
        deadline = time.monotonic() + 30
        while routed.metric("endpoint_up") > 1:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert routed.metric("endpoint_up", two[0].url) == 1


def test_a_signal_ends_the_router_when_its_requests_are_answered(two: tuple[Served, Served], tmp_path: Path) -> None:
    with router(tmp_path, two[0].url) as routed:
        with httpx.stream(
            "POST", routed.url + "/v1/completions", json=ASK | {"stream": True, "max_tokens": 1500}, timeout=30, trust_env=False
        ) as found:
            pieces = found.iter_raw()
            next(pieces)
            routed.process.send_signal(signal.SIGTERM)
            assert b"".join(pieces).endswith(b"[DONE]\n\n")
        assert routed.process.wait(20) == 0
        assert "Traceback" not in routed.stderr.read_text()


def test_keys_are_asked_for_and_passed_on(echo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    (tmp_path / "served").mkdir()
    options = ("--api-key-file", str(tmp_path / "keys"))
    with echo_server(echo_model, tmp_path / "served", options) as served:
        with router(tmp_path / "open", served.url, "--endpoint-key-file", str(tmp_path / "keys")) as routed:
            assert routed.models == ["echo"]
            assert post(routed.url).status_code == 401, "the router's key is not the clients'"
            assert post(routed.url, headers={"authorization": "Bearer secret"}).status_code == 200
            assert post(routed.url, headers={"x-api-key": "secret"}).status_code == 200
        with router(tmp_path / "closed", served.url, *options) as routed:
            assert routed.models == [], "which it tells only to holders of a key"
            assert httpx.get(f"{routed.url}/metrics", trust_env=False).status_code == 401
            assert httpx.get(f"{routed.url}/health", trust_env=False).status_code == 200
            found = post(routed.url, headers={"authorization": "Bearer wrong"})
            assert (found.status_code, found.json()["error"]["code"]) == (401, "invalid_api_key")
            assert post(routed.url, headers={"authorization": "Bearer secret"}).status_code == 200


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["ftp://x"], "must look like"),
        (["127.0.0.1:8000"], "must look like"),
        (["http://a", "http://a/v1"], "named twice"),
        (["http://a?b=c"], "must look like"),
        (["http://u:p@a"], "must look like"),
        (["http://a", "--host", "0.0.0.0"], "--without-key"),
        (["http://a", "--api-key-file", "/nonexistent"], "cannot be read"),
    ],
)
def test_bad_words_get_a_sentence(words: list[str], sentence: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "twostroke", "route", *words, "--port", "0"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(tmp_path))
    assert found.returncode == 2
    assert sentence in found.stderr
    assert "Traceback" not in found.stderr
