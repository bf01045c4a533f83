"""Supervision: an engine that ends, hangs or stops is noticed, its requests fail, and a new one takes over."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import echo_engine
import pytest
from serving import tokens_of

from twostroke.core.errors import CapacityError, EngineError, InputError
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.server import token_stream, wire
from twostroke.server.engine_client import EngineClient, EngineLostError, NotReadyError
from twostroke.server.launch import launch_engine
from twostroke.server.token_stream import SlowReaderError

ECHO = [sys.executable, str(Path(__file__).with_name("echo_engine.py"))]


@asynccontextmanager
async def client_of(*options: str, **timeouts: float) -> AsyncIterator[EngineClient]:
    client = EngineClient(lambda: launch_engine([*ECHO, *options]), **timeouts)  # type: ignore[arg-type]
    task = asyncio.create_task(client.run())
    try:
        async with asyncio.timeout(60):
            await client.wait_loaded()
        yield client
    finally:
        client.close()
        await task


async def read(client: EngineClient, prompt: list[int], **params: Any) -> list[int]:
    wake = asyncio.Event()
    (stream,) = client.submit(prompt, SamplingParams(**params), wake)
    return await tokens_of(stream, wake)


def pid_of(client: EngineClient) -> int:
    assert client._child is not None
    return client._child.process.pid


def test_streams_are_kept_apart() -> None:
    async def scenario() -> None:
        async with client_of() as client:
            answers = await asyncio.gather(*(read(client, [n], max_tokens=5) for n in range(1, 30)))
            assert answers == [[n + i for i in range(1, 6)] for n in range(1, 30)]
            assert not client._streams
            assert (await client.stats())["running"] == 0

    asyncio.run(scenario())


def test_a_refused_request_fails_alone() -> None:
    async def scenario() -> None:
        async with client_of() as client:
            good = asyncio.create_task(read(client, [1], max_tokens=50))
            with pytest.raises(InputError, match="refused"):
                await read(client, [echo_engine.REFUSE])
            with pytest.raises(CapacityError):
                await read(client, [echo_engine.TOO_LARGE])
            assert len(await good) == 50
            assert client.restarts == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("cause", ["step raises", "process exits", "killed from outside"])
def test_an_engine_that_ends_is_replaced_and_its_requests_fail(cause: str) -> None:
    async def scenario() -> None:
        async with client_of() as client:
            first = pid_of(client)
            innocent = asyncio.create_task(read(client, [1], max_tokens=100_000))
            await asyncio.sleep(0.05)
            if cause == "killed from outside":
                os.kill(first, signal.SIGKILL)
            else:
                poison = echo_engine.FAIL_IN_STEP if cause == "step raises" else echo_engine.EXIT
                with pytest.raises(EngineLostError):
                    await read(client, [poison])
            with pytest.raises(EngineLostError):
                await innocent
            assert not client.ready
            with pytest.raises(NotReadyError):
                client.submit([1], SamplingParams(), asyncio.Event())
            async with asyncio.timeout(60):
                await client.wait_loaded()
            assert pid_of(client) != first
            assert client.restarts == 1
            assert await read(client, [7], max_tokens=2) == [8, 9]

    asyncio.run(scenario())


def test_a_stopped_process_is_noticed_within_ten_seconds_and_replaced() -> None:
    async def scenario() -> None:
        async with client_of() as client:  # the defaults that the server uses
            start = time.monotonic()
            with pytest.raises(EngineLostError):
                await read(client, [echo_engine.STOP_PROCESS])
            assert time.monotonic() - start < 10
            async with asyncio.timeout(60):
                await client.wait_loaded()

    asyncio.run(scenario())


def test_an_engine_that_is_ready_at_once_gets_its_adapters(tmp_path: Path) -> None:
    """It is before the task that connected to it goes on."""

    async def scenario() -> None:
        client = EngineClient(lambda: launch_engine(ECHO), adapters={"a": str(tmp_path)})
        connect = client._connect

        async def late(child: Any) -> Any:
            channel = await connect(child)
            await asyncio.sleep(1.0)
            return channel

        client._connect = late  # type: ignore[method-assign]
        task = asyncio.create_task(client.run())
        try:
            async with asyncio.timeout(60):
                await client.wait_loaded()
        finally:
            client.close()
            await task

    asyncio.run(scenario())


def test_an_engine_that_is_silent_while_it_loads_is_waited_for() -> None:
    """A first engine that was given up would end the server with an error."""

    async def scenario() -> None:
        client = EngineClient(lambda: launch_engine([*ECHO, "--load-s", "3"]), heartbeat_timeout_s=2.0)
        task = asyncio.create_task(client.run())
        try:
            async with asyncio.timeout(60):
                while client._channel is None:
                    await asyncio.sleep(0.02)
            pid = pid_of(client)
            os.kill(pid, signal.SIGSTOP)  # as an import that holds the interpreter
            await asyncio.sleep(3.0)
            os.kill(pid, signal.SIGCONT)
            async with asyncio.timeout(60):
                await client.wait_loaded()
            assert client.restarts == 0
        finally:
            client.close()
            await task

    asyncio.run(scenario())


def test_a_step_that_hangs_makes_it_unready_and_then_ends_it() -> None:
    async def scenario() -> None:
        async with client_of(heartbeat_timeout_s=2.0, step_timeout_s=4.0) as client:
            lost = asyncio.create_task(read(client, [echo_engine.HANG_IN_STEP]))
            start = time.monotonic()
            while client.ready:
                await asyncio.sleep(0.05)
                assert time.monotonic() - start < 5
            assert not lost.done(), "a slow step is unready first, and given up only later"
            with pytest.raises(EngineLostError):
                await lost

    asyncio.run(scenario())


def test_a_reader_that_never_reads_is_cut_off_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_stream, "MAX_PENDING_BYTES", 20_000)

    async def scenario() -> None:
        async with client_of("--step-s", "0") as client:
            (stream,) = client.submit([1], SamplingParams(max_tokens=1_000_000), asyncio.Event())
            async with asyncio.timeout(60):
                while not stream.finished:
                    await asyncio.sleep(0.01)
            with pytest.raises(SlowReaderError):
                stream.take()
            assert (await client.stats())["running"] == 0

    asyncio.run(scenario())


def test_a_reader_that_takes_the_last_tokens_is_woken_for_the_error_behind_them() -> None:
    async def scenario() -> None:
        async with client_of() as client:
            wake = asyncio.Event()
            (stream,) = client.submit([1], SamplingParams(max_tokens=100_000), wake)
            await wake.wait()
            stream.fail(EngineLostError("as asked"))  # in the same turn of the loop as tokens
            wake.clear()
            assert stream.take()
            assert wake.is_set()
            with pytest.raises(EngineLostError):
                stream.take()

    asyncio.run(scenario())


def test_a_closed_stream_is_aborted_in_the_engine() -> None:
    async def scenario() -> None:
        async with client_of() as client:
            wake = asyncio.Event()
            streams = client.submit([1], SamplingParams(max_tokens=100_000, n=3), wake)
            await wake.wait()
            streams[1].close()
            assert (await client.stats())["running"] == 2, "one answer alone is ended"
            for stream in streams:
                stream.close()
            assert (await client.stats())["running"] == 0
            assert not client._streams

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("option", "error", "sentence"),
    [("input", InputError, "cannot be used"), ("crash", EngineError, "RuntimeError"), ("exit", EngineError, "exited with 9")],
)
def test_a_first_engine_that_cannot_load_is_an_error_and_not_a_restart(option: str, error: type, sentence: str) -> None:
    async def scenario() -> None:
        client = EngineClient(lambda: launch_engine([*ECHO, "--load-error", option]))
        async with asyncio.timeout(60):
            with pytest.raises(error, match=sentence):
                await client.run()
        assert client.restarts == 0

    asyncio.run(scenario())


def test_closing_ends_the_process_and_removes_its_directory() -> None:
    async def scenario() -> None:
        async with client_of() as client:
            child = client._child
            assert child is not None
        assert child.process.returncode == 0
        assert not child.directory.exists()

    asyncio.run(scenario())


def test_frames_that_are_no_events_lose_the_engine() -> None:
    async def scenario() -> None:
        async with client_of() as client:
            channel = client._channel
            assert channel is not None
            channel.data_received(wire.encode(wire.Heartbeat(True, 0.0))[:4] + b"\xc1" * 30)
            async with asyncio.timeout(60):
                while client.restarts == 0:
                    await asyncio.sleep(0.02)
                await client.wait_loaded()

    asyncio.run(scenario())
