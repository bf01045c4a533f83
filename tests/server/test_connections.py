"""Silent and unread connections: how many there may be and how long they last, over both of uvicorn's protocols."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from attacks import connect, health_s, is_closed, post, silent_connections, status_of
from serving import Served, echo_server

from twostroke.server import connections
from twostroke.server.connections import ClientGoneError, Connections, Departures, most_connections, say_once

BODY: dict[str, Any] = {"model": "echo", "prompt": [33] * 3000, "max_tokens": 1}
HALVES = (b"", b"POST /v1/compl", b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-a: b\r\n")
FAST = ["--set", "connections.HEADERS_TIMEOUT_S=1", "--set", "connections.SEND_TIMEOUT_S=3"]


class Transport:
    """As much of a transport as is asked for."""

    def __init__(self) -> None:
        self.unsent = 0
        self.closing = self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.aborted = True


class Connection:
    def __init__(self) -> None:
        self.transport = Transport()
        self.full_since: float | None = None


def test_at_the_limit_the_longest_silent_connection_is_replaced() -> None:
    open_ones = Connections(2)
    first, second, third, fourth = (Connection() for _ in range(4))
    assert all(open_ones.admit(connection, now) for now, connection in enumerate((first, second, third)))
    assert [c.transport.aborted for c in (first, second, third)] == [True, False, False]
    open_ones.working(second)
    open_ones.working(third)
    assert not open_ones.admit(fourth, 4.0), "nobody's request is ended for a newcomer"
    open_ones.silent(second, 5.0)
    assert open_ones.admit(fourth, 6.0)
    assert second.transport.aborted
    assert len(open_ones) == 2


def test_a_connection_has_its_time_for_headers_and_none_while_it_is_worked_for() -> None:
    open_ones = Connections(10)
    silent, working, unread = (Connection() for _ in range(3))
    for connection in (silent, working, unread):
        open_ones.admit(connection, 0.0)
    open_ones.working(working)
    unread.transport.unsent = 1
    open_ones.sweep(connections.HEADERS_TIMEOUT_S)
    assert not silent.transport.aborted
    open_ones.sweep(connections.HEADERS_TIMEOUT_S + 0.1)
    assert (silent.transport.aborted, working.transport.aborted, unread.transport.aborted) == (True, False, False)
    open_ones.sweep(connections.SEND_TIMEOUT_S + 0.1)
    assert (working.transport.aborted, unread.transport.aborted) == (False, True)


def test_a_full_connection_is_aborted_sooner_while_the_server_stops() -> None:
    open_ones = Connections(10)
    full = Connection()
    open_ones.admit(full, 0.0)
    open_ones.working(full)
    full.full_since = 0.0
    now = connections.STOPPING_SEND_TIMEOUT_S + 0.1
    open_ones.sweep(now)
    assert not full.transport.aborted
    open_ones.stopping = True
    open_ones.sweep(now)
    assert full.transport.aborted


def test_a_connection_that_was_closed_with_something_unread_is_aborted_in_the_end() -> None:
    open_ones = Connections(10)
    ended = Connection()
    open_ones.admit(ended, 0.0)
    open_ones.working(ended)
    ended.transport.closing, ended.transport.unsent = True, 100
    open_ones.sweep(5.0)
    open_ones.sweep(5.0 + connections.SEND_TIMEOUT_S)
    assert not ended.transport.aborted
    open_ones.sweep(5.1 + connections.SEND_TIMEOUT_S)
    assert ended.transport.aborted


async def _departing(work_s: float, lost_after_s: float | None, cancelled_too: bool = False) -> tuple[str, int]:
    """How work for a connection ended, and the tasks that there were beside those of this function."""
    departures, n_tasks = Departures(), 0

    async def work() -> str:
        nonlocal n_tasks
        try:
            with departures.cancels():
                n_tasks = len(asyncio.all_tasks()) - 2
                await asyncio.sleep(work_s)
        except ClientGoneError:
            await asyncio.sleep(0)  # goes on: nothing of the cancelling is left
            return "gone"
        return "done"

    task = asyncio.create_task(work())
    if lost_after_s is not None:
        await asyncio.sleep(lost_after_s)
        departures.lost()
    if cancelled_too:
        task.cancel()
    await asyncio.wait({task})
    departures.lost()  # nothing is cancelled that has ended
    return "cancelled" if task.cancelled() else task.result(), n_tasks


def test_work_for_a_connection_ends_with_it_and_takes_no_task() -> None:
    assert asyncio.run(_departing(0.0, None)) == ("done", 0)
    assert asyncio.run(_departing(60.0, 0.01)) == ("gone", 0)
    assert asyncio.run(_departing(60.0, 0.01, cancelled_too=True)) == ("cancelled", 0)

    async def late() -> None:
        departures = Departures()
        departures.lost()
        with pytest.raises(ClientGoneError), departures.cancels():
            raise AssertionError("begun for a client that had gone")

    asyncio.run(late())


def test_connections_leave_files_for_the_process_itself() -> None:
    assert most_connections(128, 1024) == 960
    assert most_connections(128, 65_536) == 64 + 16 * 128
    assert most_connections(1, 20) == 16


def test_failing_accepts_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.new_event_loop()
    handle = say_once()
    for _ in range(1000):
        handle(loop, {"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many open files")})
    assert [record.message for record in caplog.records] == [
        "connections cannot be accepted: Too many open files. Raise the limit of open files (ulimit -n)."
    ]
    handle(loop, {"message": "something else"})
    assert len(caplog.records) == 2
    loop.close()


# Servers of their own.


@pytest.fixture(scope="module", params=[[], ["--plain"]], ids=["httptools", "h11"])
def fast(request: pytest.FixtureRequest, echo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with short timeouts."""
    with echo_server(echo_model, tmp_path_factory.mktemp("fast"), [*request.param, *FAST]) as served:
        yield served


def test_a_request_that_is_never_completed_is_closed(fast: Served) -> None:
    peers = [connect(fast.url) for _ in HALVES]
    for peer, half in zip(peers, HALVES, strict=True):
        peer.sendall(half)
    for peer in peers:
        with peer:
            assert is_closed(peer, within_s=60)


def test_a_second_request_that_is_never_completed_is_closed(fast: Served) -> None:
    with connect(fast.url) as peer:
        peer.sendall(post(BODY) + HALVES[1])
        assert is_closed(peer, within_s=60)


def pieces_taken(peer: socket.socket, piece: bytes, n: int, pause_s: float = 0.0) -> int:
    """How many of ``n`` pieces the server lets a client send."""
    sent = 0
    with contextlib.suppress(OSError):
        while sent < n:
            peer.sendall(piece)
            time.sleep(pause_s)
            sent += 1
    return sent


def test_headers_that_drip_are_closed_too(fast: Served) -> None:
    with connect(fast.url) as peer:
        peer.sendall(HALVES[2])
        assert pieces_taken(peer, b"x-b: c\r\n", 200, pause_s=0.1) < 200


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"], ids=["first", "next"])
def test_headers_without_end_take_no_memory(fast: Served, before: bytes) -> None:
    rss = psutil.Process(fast.process.pid).memory_info().rss
    with connect(fast.url) as peer:
        peer.sendall(before + HALVES[2])
        assert pieces_taken(peer, b"x" * 2**16, 1000) < 1000
    assert psutil.Process(fast.process.pid).memory_info().rss - rss < 30 * 2**20


def test_an_answer_of_a_kept_connection_is_followed_by_the_next(fast: Served) -> None:
    with httpx.Client(base_url=fast.url, trust_env=False, timeout=20) as web:
        for _ in range(3):
            assert web.post("/v1/completions", json=BODY).status_code == 200
            time.sleep(0.3)


def wait_until_active(web: httpx.Client, n: int, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while f"twostroke_http_requests_active {float(n)}" not in web.get("/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.1)


UNREAD = BODY | {"prompt_logprobs": 20, "n": 8}  # 8 × 3,000 × 21 log-probabilities: 24 MB


def test_an_answer_nobody_reads_keeps_its_place_until_it_is_cut_off(fast: Served) -> None:
    with httpx.Client(base_url=fast.url, trust_env=False, timeout=20) as web, connect(fast.url, 4096) as peer:
        peer.sendall(post(UNREAD))
        wait_until_active(web, 8)
        wait_until_active(web, 0)
        assert is_closed(peer, within_s=60)


def test_an_answer_that_is_read_slowly_is_whole(fast: Served) -> None:
    with connect(fast.url, 2**16) as peer:
        peer.sendall(post(UNREAD | {"n": 2}, headers="connection: close\r\n"))
        data = bytearray()
        began = time.monotonic()
        while piece := peer.recv(2**16):
            data += piece
            if time.monotonic() - began < 5:  # longer than it may stand still
                time.sleep(0.05)
    head, _, body = bytes(data).partition(b"\r\n\r\n")
    assert status_of(head) == 200
    assert [len(choice["prompt_logprobs"]) for choice in json.loads(body)["choices"]] == [3000, 3000]


@pytest.mark.parametrize("options", [[], ["--plain"]], ids=["httptools", "h11"])
def test_unread_answers_take_bounded_memory_and_do_not_hold_up_the_end(
    echo_model: Path, tmp_path: Path, options: list[str]
) -> None:
    settings = [
        *options,
        "--grace-s",
        "90",
        "--set",
        "service.OUTGOING_BYTES=50000000",
        "--set",
        "connections.STOPPING_SEND_TIMEOUT_S=1",
    ]
    with echo_server(echo_model, tmp_path, settings) as served, contextlib.ExitStack() as open_ones:
        process = psutil.Process(served.process.pid)
        before = process.memory_info().rss
        whole = len(httpx.post(f"{served.url}/v1/completions", json=UNREAD | {"n": 4}, trust_env=False, timeout=20).content)
        peers = [open_ones.enter_context(connect(served.url, 4096)) for _ in range(10)]
        for peer in peers:
            peer.sendall(post(UNREAD | {"n": 4}))  # over 10 MB each
        with httpx.Client(base_url=served.url, trust_env=False, timeout=20) as web:
            wait_until_active(web, 4 * (50_000_000 // whole))  # those within the budget; the others have been cut
        # The budget, the sockets' buffers, what an allocator keeps of the raw scores of ten requests.
        assert process.memory_info().rss - before < 200 * 2**20
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(60) == 0  # the grace is 90 s


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


@pytest.mark.parametrize("options", [[], ["--plain"]], ids=["httptools", "h11"])
def test_more_silent_connections_than_files_keep_nobody_out(echo_model: Path, tmp_path: Path, options: list[str]) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("sesame\n")
    with echo_server(echo_model, tmp_path, [*options, "--api-key-file", str(key_file)], preexec=few_files) as served:
        process = psutil.Process(served.process.pid)
        with contextlib.ExitStack() as held:
            for half in HALVES:
                held.enter_context(silent_connections(served.url, 100, half))
            cpu = sum(process.cpu_times()[:2])
            assert min(health_s(served.url) for _ in range(5)) < 0.5  # a few milliseconds; the rest is for a busy machine
            time.sleep(1)
            assert sum(process.cpu_times()[:2]) - cpu < 0.5, "nothing is tried again and again"
            assert process.num_fds() < 256
        assert served.stop() == 0
        assert len(served.stderr.read_text()) < 2000
