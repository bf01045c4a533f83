"""Engine processes apart: one decodes, one prefills; and what becomes of requests when the latter ends or stops."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from serving import tokens_of

from small_models import saved
from twostroke.core.engine_settings import EngineSettings
from twostroke.engine.core import EngineCore
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.server import engine_client
from twostroke.server.launch import ServeSettings
from twostroke.server.prefill import DecodingEngine

SETTINGS = EngineSettings(dtype="fp32", kv_cache_bytes=2**20, n_threads=1)
DRAWN = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "BACKOFF_S", (0.05,))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def prompt(i: int) -> list[int]:
    return [i % 90 + 3, *range(2, 92), *range(5, 75)]


def joint(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    core = EngineCore(model, SETTINGS)
    found: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for name, each in zip(found, prompts, strict=True):
        core.add_request(name, each, DRAWN)
    while core.has_work:
        for event in core.step():
            found[event.request_id] += event.token_ids
    return list(found.values())


async def answers(engine: DecodingEngine, prompts: list[list[int]]) -> list[list[int]]:
    asked = []
    for each in prompts:
        wake = asyncio.Event()
        (stream,) = engine.submit(each, DRAWN, wake)
        asked.append((stream, wake))
    return [await tokens_of(stream, wake) for stream, wake in asked]


async def until(engine: DecodingEngine, condition: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    async with asyncio.timeout(40):
        while not condition(stats := await engine.stats()):
            await asyncio.sleep(0.02)
    return stats


@asynccontextmanager
async def started(model: Path, folder: Path) -> AsyncIterator[DecodingEngine]:
    settings = ServeSettings(model, SETTINGS, ("m",), prefill_at=(str(folder / "s"),))
    engine = DecodingEngine(settings.launches()[0], None, {}, settings.prefill_launches())
    task = asyncio.create_task(engine.run())
    try:
        async with asyncio.timeout(60):
            await engine.wait_loaded()
        await until(engine, lambda stats: stats["handover_peers"] == 1)
        yield engine
        await until(engine, lambda stats: stats["pages_used"] == 0)
    finally:
        engine.close()
        await task


def process_of(engine: Any) -> int:
    assert engine._child is not None
    pid: int = engine._child.process.pid
    return pid


def test_a_prefill_engine_that_is_killed_or_stopped_costs_no_answer(tmp_path: Path) -> None:
    model = saved("llama", tmp_path / "m")[1]
    prompts = [prompt(i) for i in range(40)]
    expected = joint(model, prompts)

    async def scenario() -> None:
        async with started(model, tmp_path) as engine:
            (prefill,) = engine.prefills
            assert await answers(engine, prompts[:10]) == expected[:10]
            stats = await until(engine, lambda stats: stats["lent_pinned"] == 0)
            assert stats["handover_requests"] >= 1
            assert stats["handover_incomplete"] == 0
            assert stats["handover_bytes"] == stats["lent_bytes"] > 0
            assert [row["up"] for row in engine.rows()] == [1.0, 1.0]

            # Killed while prompts are under way.
            running = asyncio.create_task(answers(engine, prompts[10:20]))
            await asyncio.sleep(0.005)
            os.kill(process_of(prefill), signal.SIGKILL)
            assert await running == expected[10:20]
            await until(engine, lambda stats: stats["handover_peers"] == 1 and prefill.restarts == 1)
            before = (await engine.stats())["handover_requests"]
            assert await answers(engine, prompts[20:30]) == expected[20:30]
            assert (await engine.stats())["handover_requests"] > before

            # Stopped: no heartbeat comes, neither to the engine that decodes nor to this process.
            stopped = process_of(prefill)
            os.kill(stopped, signal.SIGSTOP)
            assert await answers(engine, prompts[30:]) == expected[30:]
            assert (await engine.stats())["handover_peers"] == 0
            await until(engine, lambda stats: stats["handover_peers"] == 1 and prefill.restarts == 2)

            # Cancelled while they wait for another engine or decode: nothing is left of them.
            streams = [engine.submit(prompt(i + 50), DRAWN, asyncio.Event())[0] for i in range(10)]
            for i, stream in enumerate(streams):
                if i % 2:
                    await asyncio.sleep(0.003)
                stream.close()
            await until(engine, lambda stats: stats["pages_used"] == stats["running"] == stats["lent_pinned"] == 0)
            assert await answers(engine, prompts[:3]) == expected[:3]

    asyncio.run(scenario())
