"""Several engines used as one: where requests go, and what becomes of them when an engine ends, hangs or is replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import echo_engine
import pytest
from serving import tokens_of

from twostroke.core.errors import InputError
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.server import engine_client, replicas
from twostroke.server.engine_client import EngineLostError, NotReadyError
from twostroke.server.launch import launch_engine, shares
from twostroke.server.replicas import Replica, Replicas
from twostroke.server.token_stream import TokenStream

ECHO = [sys.executable, str(Path(__file__).with_name("echo_engine.py"))]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "BACKOFF_S", (0.05,))


@asynccontextmanager
async def replicas_of(n: int, *options: str, **settings: Any) -> AsyncIterator[Replicas]:
    found = Replicas([partial(launch_engine, [*ECHO, *options])] * n, **settings)
    task = asyncio.create_task(found.run())
    try:
        async with asyncio.timeout(40):
            await found.wait_loaded()
        yield found
    finally:
        found.close()
        await task


def ask(engines: Replicas, prompt: list[int], whole: bool = False, **params: Any) -> tuple[TokenStream, asyncio.Event]:
    wake = asyncio.Event()
    (stream,) = engines.submit(prompt, SamplingParams(**params), wake, whole=whole)
    return stream, wake


def holder(engines: Replicas, stream: TokenStream) -> Replica:
    (found,) = [replica for replica in engines.replicas if stream in replica.streams]
    return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


def kill(replica: Replica, number: signal.Signals = signal.SIGKILL) -> None:
    assert replica._child is not None
    os.kill(replica._child.process.pid, number)


def expected(prompt: list[int], n: int) -> list[int]:
    return [(prompt[-1] + 1 + i) % (echo_engine.VOCAB - 10) for i in range(n)]


def test_a_prompt_goes_where_its_prefix_is_unless_too_much_waits_there() -> None:
    async def scenario() -> None:
        async with replicas_of(2, "--caches", "--step-s", "0.02") as engines:
            prefix = [5, 6, 7, 8] * 10
            first, wake = ask(engines, [*prefix, 1], max_tokens=2)
            place = holder(engines, first)
            await tokens_of(first, wake)
            await until(lambda: len(place.known) == 10)
            for i in range(3):  # nobody else asks: always there
                again, wake = ask(engines, [*prefix, 2 + i], max_tokens=2)
                assert holder(engines, again) is place
                await tokens_of(again, wake)
                assert again.cached_tokens == 40
            assert place.counts["known_tokens"] == 120
            # A long queue of prompts there: the same prompt is computed sooner elsewhere, though nothing of it is cached.
            queue = [ask(engines, [*prefix, *[9] * 1000], max_tokens=3)[0] for _ in range(4)]
            assert len({holder(engines, stream) for stream in queue}) == 2
            for stream in queue:
                stream.close()

    asyncio.run(scenario())


def test_known_pages_follow_the_engines_evictions_and_its_end() -> None:
    async def scenario() -> None:
        async with replicas_of(1, "--caches") as engines:
            (replica,) = engines.replicas
            for i in range(20):
                stream, wake = ask(engines, [i] * 21, max_tokens=1)
                await tokens_of(stream, wake)
            await until(lambda: replica.known.cached_tokens([19] * 21, 4, None, None) == 20)  # the last that the engine says
            await until(lambda: len(replica.known) == echo_engine.CACHED_PAGES)
            assert replica.known.cached_tokens([0] * 21, 4, None, None) == 0
            kill(replica)
            await until(lambda: replica.restarts == 1)
            await replica.wait_loaded()
            assert len(replica.known) == 0

    asyncio.run(scenario())


def test_what_an_ended_engine_had_is_computed_elsewhere_once_and_a_begun_stream_fails() -> None:
    async def scenario() -> None:
        async with replicas_of(2, "--step-s", "0.01") as engines:
            prompts = [[1, i] for i in range(20)]
            whole = [(prompt, *ask(engines, prompt, whole=True, max_tokens=60)) for prompt in prompts]
            begun = [ask(engines, prompt, max_tokens=200) for prompt in prompts]
            for _, wake in begun:
                await wake.wait()
            lost = engines.replicas[0]
            assert any(holder(engines, s) is lost for _, s, _ in whole)
            taken = [stream for stream, _ in begun if holder(engines, stream) is lost]
            assert taken
            assert all(stream.take() for stream in taken), "tokens of these were passed on"
            kill(lost)
            for prompt, stream, wake in whole:
                assert await tokens_of(stream, wake) == expected(prompt, 60), "each once, whole"
            for stream, wake in begun:
                if stream in taken:
                    with pytest.raises(EngineLostError):
                        await tokens_of(stream, wake)
            assert engines.replicas[1].counts["taken_over"] > 0
            await until(lambda: lost.restarts == 1 and lost.takes)

    asyncio.run(scenario())


def test_answers_of_one_request_that_ended_before_the_loss_are_not_given_again() -> None:
    async def scenario() -> None:
        async with replicas_of(2, "--step-s", "0.01") as engines:
            wake = asyncio.Event()
            streams = engines.submit([1, 2], SamplingParams(max_tokens=40, n=3), wake, whole=True)
            lost = holder(engines, streams[0])
            engine_client.EngineClient._on_delta(lost, _last(streams[1]))
            first = streams[1].take()
            assert [delta.token_ids for delta in first] == [[77]]
            kill(lost)
            for i in (0, 2):
                async with asyncio.timeout(30):
                    while not streams[i].finished:
                        await asyncio.sleep(0.02)
                tokens = [token for delta in streams[i].take() for token in delta.token_ids]
                assert tokens == [3 + 10 * i + k for k in range(40)]
            assert streams[1].take() == []
            (other,) = [replica for replica in engines.replicas if replica is not lost]
            assert (await other.stats())["running"] == 0, "the ended answer is not computed there either"

    asyncio.run(scenario())


def _last(stream: TokenStream) -> Any:
    from twostroke.server import wire

    return wire.TokenDelta(stream.request_id, [77], finish_reason="stop", index=stream.index)


def test_a_request_that_ends_engines_ends_two_at_most() -> None:
    async def scenario() -> None:
        async with replicas_of(3) as engines:
            stream, wake = ask(engines, [echo_engine.EXIT], max_tokens=2)
            with pytest.raises(EngineLostError):
                await tokens_of(stream, wake)
            assert engines.ready, "the third goes on"
            await until(lambda: engines.restarts == 2)
            again, wake = ask(engines, [4], max_tokens=2)
            assert await tokens_of(again, wake) == [5, 6]

    asyncio.run(scenario())


@pytest.mark.parametrize("how", [echo_engine.HANG_IN_STEP, echo_engine.STOP_PROCESS])
def test_what_waits_behind_a_hanging_engine_is_computed_elsewhere(how: int) -> None:
    async def scenario() -> None:
        async with replicas_of(3, heartbeat_timeout_s=1.5, step_timeout_s=60.0) as engines:
            bad, bad_wake = ask(engines, [how], max_tokens=2)
            place = holder(engines, bad)
            wake = asyncio.Event()
            (behind,) = place.submit([7], SamplingParams(max_tokens=3), wake)
            assert await tokens_of(behind, wake) == [8, 9, 10]
            assert behind not in place.streams
            bad.close()
            assert bad_wake is not None

    asyncio.run(scenario())


def test_replacing_all_engines_under_load_fails_nothing() -> None:
    async def scenario() -> None:
        async with replicas_of(2, "--step-s", "0.002") as engines:
            pids = {replica._child.process.pid for replica in engines.replicas if replica._child}
            stop, n = False, 0

            async def load(i: int) -> None:
                nonlocal n
                while not stop:
                    stream, wake = ask(engines, [1, i], max_tokens=20)
                    assert await tokens_of(stream, wake) == expected([1, i], 20)
                    n += 1

            users = [asyncio.create_task(load(i)) for i in range(6)]
            engines.roll()
            engines.roll()  # while one is going on: nothing
            assert engines._rolling is not None
            async with asyncio.timeout(60):
                await engines._rolling
            stop = True
            await asyncio.gather(*users)
            assert n > 0
            assert engines.restarts == 2
            assert not pids & {replica._child.process.pid for replica in engines.replicas if replica._child}
            assert all(replica.takes for replica in engines.replicas)

    asyncio.run(scenario())


def test_an_engine_that_does_not_finish_is_replaced_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "DRAIN_S", 0.2)

    async def scenario() -> None:
        async with replicas_of(2, "--step-s", "0.01") as engines:
            endless, wake = ask(engines, [1], max_tokens=100_000)
            fresh, fresh_wake = ask(engines, [2], whole=True, max_tokens=60)
            await wake.wait()
            endless.take()
            engines.roll()
            assert await tokens_of(fresh, fresh_wake) == expected([2], 60)
            with pytest.raises(EngineLostError):
                await tokens_of(endless, wake)
            assert engines._rolling is not None
            async with asyncio.timeout(60):
                await engines._rolling
            assert engines.restarts == 2

    asyncio.run(scenario())


def test_adapters_are_in_every_engine_or_in_none(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with replicas_of(2) as engines:
            await engines.change_adapter("a", str(tmp_path))
            assert engines.adapters == {"a": str(tmp_path)}
            for replica in engines.replicas:
                wake = asyncio.Event()
                (stream,) = replica.submit([5], SamplingParams(max_tokens=1), wake, lora="a")
                assert await tokens_of(stream, wake) == [106]
                assert replica.known.adapters == {"a": b"a"}
            with pytest.raises(InputError):
                await engines.change_adapter("b", str(tmp_path / "none"))
            assert engines.adapters == {"a": str(tmp_path)}
            await engines.change_adapter("a", None)
            assert engines.adapters == {}

    asyncio.run(scenario())


def test_without_an_engine_that_takes_requests_they_are_refused() -> None:
    async def scenario() -> None:
        async with replicas_of(2, "--load-s", "0.3") as engines:
            for replica in engines.replicas:
                kill(replica)
            await until(lambda: not engines.ready)
            with pytest.raises(NotReadyError):
                ask(engines, [1])
            await until(lambda: engines.ready)

    asyncio.run(scenario())


def test_a_later_engine_that_cannot_load_ends_the_start_with_its_sentence() -> None:
    async def scenario() -> None:
        launches = [partial(launch_engine, ECHO), partial(launch_engine, [*ECHO, "--load-error", "input"])]
        engines = Replicas(launches)
        async with asyncio.timeout(30):
            with pytest.raises(InputError, match="cannot be used"):
                await engines.run()
        assert all(replica._child is None for replica in engines.replicas), "no process is left"

    asyncio.run(scenario())


def test_shares_are_disjoint_whole_and_of_nearly_equal_size() -> None:
    mine = os.sched_getaffinity(0)
    for n in range(1, len(mine) + 1):
        found = shares(n)
        assert sorted(p for share in found for p in share) == sorted(mine)
        assert max(map(len, found)) - min(map(len, found)) <= 1
    assert shares(len(mine) + 1) == [()] * (len(mine) + 1)
