"""The engine process seen from its socket: what it survives, what ends it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from twostroke.scheduling.constraint import Constraint
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.server import wire
from twostroke.server.launch import EngineChild, launch_engine

HERE = Path(__file__).resolve().parent
ECHO = [sys.executable, str(HERE / "echo_engine.py")]


class Peer:
    """A blocking connection that waits for one kind of event."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(60)
        deadline = time.monotonic() + 60
        while True:
            try:
                self.socket.connect(str(path))
                break
            except (FileNotFoundError, ConnectionRefusedError):
                assert time.monotonic() < deadline, "the engine never listened"
                time.sleep(0.02)
        self._reader = wire.FrameReader()
        self._events: list[wire.Event] = []

    def send(self, *commands: wire.Command) -> None:
        self.socket.sendall(b"".join(wire.encode(c) for c in commands))

    def wait(self, wanted: Callable[[wire.Event], bool]) -> wire.Event:
        """The next event that is wanted; EOFError where the connection ends first."""
        while True:
            while self._events:
                event = self._events.pop(0)
                if wanted(event):
                    return event
            data = self.socket.recv(65536)
            if not data:
                raise EOFError
            self._events += [wire.decode_event(p) for p in self._reader.feed(data)]

    def kind(self, kind: type[wire.Event]) -> wire.Event:
        return self.wait(lambda event: isinstance(event, kind))

    def tokens(self, request_id: str) -> list[int]:
        found: list[int] = []
        while True:
            event = self.kind(wire.Tokens)
            assert isinstance(event, wire.Tokens)
            for delta in event.deltas:
                if delta.request_id == request_id:
                    found += delta.token_ids
                    if delta.finish_reason is not None:
                        return found

    def deltas(self, request_id: str) -> list[wire.TokenDelta]:
        """All deltas of a request's first answer."""
        found: list[wire.TokenDelta] = []
        while not found or found[-1].finish_reason is None:
            event = self.kind(wire.Tokens)
            assert isinstance(event, wire.Tokens)
            found += [delta for delta in event.deltas if (delta.request_id, delta.index) == (request_id, 0)]
        return found

    def stats(self) -> dict[str, float]:
        self.send(wire.AskStats(1))
        event = self.kind(wire.StatsReport)
        assert isinstance(event, wire.StatsReport)
        return event.values

    def close(self) -> None:
        self.socket.close()


@contextlib.contextmanager
def running(*options: str) -> Iterator[tuple[EngineChild, Peer]]:
    child = launch_engine([*ECHO, *options])
    peers = []
    try:
        peers.append(Peer(child.socket_path))
        yield child, peers[0]
    finally:
        for peer in peers:
            peer.close()
        child.kill()


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[EngineChild, Peer]]:
    with running() as (child, peer):
        peer.kind(wire.Ready)
        yield child, peer


def test_tokens_come_until_the_request_is_finished(engine: tuple[EngineChild, Peer]) -> None:
    _, peer = engine
    peer.send(wire.Add("a", [1, 2, 3], SamplingParams(max_tokens=4)), wire.Add("b", [10], SamplingParams(max_tokens=2)))
    assert peer.tokens("a") == [4, 5, 6, 7]


@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_a_whole_answer_travels_in_its_first_token_and_few_messages(
    engine: tuple[EngineChild, Peer], logprobs: int | None
) -> None:
    _, peer = engine
    params = SamplingParams(max_tokens=1000, logprobs=logprobs)
    peer.send(wire.Add("s", [1, 2, 3], params))
    stream = peer.deltas("s")
    peer.send(wire.Add("w", [1, 2, 3], params, whole=True))
    whole = peer.deltas("w")
    n_messages = 1 + -(-999 * (1 + (logprobs or 0)) // 512)
    assert (len(stream), len(whole)) == (1000, n_messages)
    assert whole[0].token_ids == stream[0].token_ids
    for field in ("token_ids", "logprobs"):
        mine, theirs = ([x for delta in deltas for x in getattr(delta, field) or ()] for deltas in (whole, stream))
        assert mine == theirs
    assert [delta.finish_reason for delta in whole] == [None] * (len(whole) - 1) + ["length"]


def test_the_socket_is_reachable_for_its_owner_only(engine: tuple[EngineChild, Peer]) -> None:
    child, _ = engine
    assert stat.S_IMODE(child.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(child.socket_path.stat().st_mode) == 0o600


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff", struct.pack(">I", 3) + b"abc", b"GET / HTTP/1.1\r\n\r\n"])
def test_a_malformed_frame_closes_its_connection_and_no_other(engine: tuple[EngineChild, Peer], garbage: bytes) -> None:
    child, peer = engine
    stranger = Peer(child.socket_path)
    stranger.send(wire.Add("a", [1], SamplingParams(max_tokens=10_000)))
    stranger.kind(wire.Tokens)
    stranger.socket.sendall(garbage)
    failure = stranger.kind(wire.Failed)
    assert isinstance(failure, wire.Failed)
    assert failure.kind == "input"
    with pytest.raises((EOFError, ConnectionResetError)):
        stranger.kind(wire.Failed)
    stranger.close()
    assert peer.stats()["running"] == 0, "its request is aborted"
    peer.send(wire.Add("after", [5], SamplingParams(max_tokens=1)))
    assert peer.tokens("after") == [6]


def test_requests_of_a_peer_that_goes_away_are_aborted(engine: tuple[EngineChild, Peer]) -> None:
    child, peer = engine
    other = Peer(child.socket_path)
    other.send(wire.Add("a", [1], SamplingParams(max_tokens=10_000)))
    other.kind(wire.Tokens)
    assert peer.stats()["running"] == 1
    other.close()
    deadline = time.monotonic() + 60
    while peer.stats()["running"]:
        assert time.monotonic() < deadline


def of_form(text: str, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=2, constraint=Constraint.regex(text), **fields)


def test_a_constraint_is_compiled_beside_the_steps_of_others(engine: tuple[EngineChild, Peer]) -> None:
    child, peer = engine
    other = Peer(child.socket_path)
    other.send(wire.Add("gone", [1], of_form("slow")))
    peer.send(
        wire.Add("slow", [1], of_form("slow", n=2)), wire.Add("never", [1], of_form("a")),
        wire.Add("free", [7], SamplingParams(max_tokens=3)), wire.Abort("slow", 1), wire.Abort("never"),
    )  # fmt: skip
    assert peer.tokens("free") == [8, 9, 10]  # before "slow", whose tokens would have been passed over here
    other.close()
    assert peer.tokens("slow") == [2, 3]
    peer.send(wire.Add("bad", [1], of_form("refuse")))
    failed = peer.kind(wire.Failed)
    assert isinstance(failed, wire.Failed)
    assert (failed.request_id, failed.kind) == ("bad", "input")
    assert "the constraint is refused" in failed.message
    peer.send(wire.Add("after", [5], of_form("b")))
    assert peer.tokens("after") == [6, 7]
    assert peer.stats()["running"] == 0, "what was aborted, or whose peer has gone, was not begun"


def test_an_abort_frees_the_request_within_one_step(engine: tuple[EngineChild, Peer]) -> None:
    _, peer = engine
    peer.send(wire.Add("a", [1], SamplingParams(max_tokens=10_000)))
    peer.kind(wire.Tokens)
    peer.send(wire.Abort("a"))
    assert peer.stats()["running"] == 0, "the abort is handled before the question that follows it"


def test_an_id_in_use_is_refused_and_the_first_request_goes_on(engine: tuple[EngineChild, Peer]) -> None:
    _, peer = engine
    peer.send(*(wire.Add("a", [1], SamplingParams(max_tokens=20)) for _ in range(2)))
    failure = peer.kind(wire.Failed)
    assert isinstance(failure, wire.Failed)
    assert "in use" in failure.message
    assert peer.tokens("a")[-1] == 21


def test_heartbeats_come_while_loading_and_while_idle() -> None:
    with running("--load-s", "1.5") as (_, peer):
        first = peer.kind(wire.Heartbeat)
        assert isinstance(first, wire.Heartbeat)
        assert not first.loaded
        peer.kind(wire.Ready)
        idle = peer.wait(lambda event: isinstance(event, wire.Heartbeat) and event.loaded)
        assert isinstance(idle, wire.Heartbeat)
        assert idle.busy_s < 1.0


def test_an_idle_engine_uses_next_to_no_cpu(engine: tuple[EngineChild, Peer]) -> None:
    child, _ = engine

    def cpu_s() -> float:
        fields = Path(f"/proc/{child.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before = cpu_s()
    time.sleep(1.0)
    # Two heartbeats and a wake-up take well under a millisecond; polling without waiting would take the whole second.
    assert cpu_s() - before < 0.2


def test_a_shutdown_ends_it_with_exit_code_0() -> None:
    with running() as (child, peer):
        peer.kind(wire.Ready)
        peer.send(wire.Shutdown())
        assert child.process.wait(60) == 0


def test_signals_to_the_group_leave_the_end_to_the_parent() -> None:
    with running() as (child, peer):
        peer.kind(wire.Ready)
        child.process.send_signal(signal.SIGTERM)
        child.process.send_signal(signal.SIGINT)
        peer.send(wire.Add("a", [1], SamplingParams(max_tokens=2)))
        assert peer.tokens("a") == [2, 3]


def test_a_failing_step_tells_every_connection_and_ends_the_process() -> None:
    import echo_engine

    with running() as (child, peer):
        peer.kind(wire.Ready)
        peer.send(wire.Add("a", [echo_engine.FAIL_IN_STEP], SamplingParams()))
        failure = peer.kind(wire.Failed)
        assert isinstance(failure, wire.Failed)
        assert (failure.request_id, failure.kind) == (None, "engine")
        assert "as asked" not in failure.message
        assert child.process.wait(60) == 1


@pytest.mark.parametrize(("error", "kind", "code"), [("input", "input", 2), ("crash", "engine", 1)])
def test_a_model_that_cannot_be_loaded_is_told_before_the_exit(error: str, kind: str, code: int) -> None:
    with running("--load-error", error) as (child, peer):
        failure = peer.kind(wire.Failed)
        assert isinstance(failure, wire.Failed)
        assert failure.kind == kind
        assert child.process.wait(60) == code


def test_it_ends_when_its_parent_is_killed() -> None:
    program = (
        "import sys, time\n"
        "from twostroke.server.launch import launch_engine\n"
        f"child = launch_engine({ECHO!r})\n"
        "print(child.process.pid, child.socket_path, flush=True)\n"
        "time.sleep(60)\n"
    )
    env = os.environ | {"PYTHONPATH": str(HERE.parent.parent / "src")}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=env)
    assert parent.stdout is not None
    pid, path = parent.stdout.readline().split()
    peer = Peer(Path(path))
    peer.kind(wire.Ready)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    with pytest.raises((EOFError, ConnectionResetError)):
        peer.wait(lambda _: False)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    peer.close()
    shutil.rmtree(Path(path).parent)
