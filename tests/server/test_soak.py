"""Real engines for a long time: clients that go away, and engines that are killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from serving import Served, echo_server, real_server
from test_replicas_http import kills_under_load, metric

from small_models import decoder_of
from twostroke.data.tokenizer import train_tokenizer
from twostroke.model.save import save_model

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]

SOAK_S = float(os.environ.get("TWOSTROKE_SOAK_S", "1800"))
N_USERS, GONE = 16, 0.3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("soaked")
    decoder = decoder_of("llama", 0, vocab_size=300)
    save_model(decoder, decoder.spec, directory, dtype="fp32")
    train_tokenizer(iter(["the quick brown fox jumps over the lazy dog " * 3]), 300, directory / "tokenizer.json")
    return directory


def memory(served: Served) -> dict[str, float]:
    """MiB that the HTTP process and its engines hold."""
    process = psutil.Process(served.process.pid)
    return {
        "http": process.memory_info().rss / 2**20,
        "engines": sum(p.memory_info().rss for p in process.children(recursive=True)) / 2**20,
    }


async def until_idle(web: httpx.AsyncClient) -> dict[str, float]:
    """What the engine holds when every request has ended, which it must within a second."""
    await asyncio.sleep(1.0)
    shown = (await web.get("/metrics")).text
    names = ("twostroke_kv_pages_used", "twostroke_requests_running", "twostroke_requests_waiting")
    return {name: metric(shown, name) for name in (*names, "twostroke_http_requests_active")}


async def load_with_disconnects(url: str, seconds: float, seed: int) -> Counter[str]:
    """``N_USERS`` clients, of whose requests ``GONE`` are left by closing the connection at any moment."""
    outcomes: Counter[str] = Counter()
    deadline, rng = time.monotonic() + seconds, random.Random(seed)

    def body() -> dict[str, Any]:
        prompt = [rng.randrange(2, 300) for _ in range(rng.randrange(1, 120))]
        return {
            "model": "echo", "prompt": prompt, "max_tokens": rng.randrange(1, 60), "ignore_eos": True,
            "n": rng.choice((1, 1, 2)), "stream": rng.random() < 0.5,
        }  # fmt: skip

    async def user() -> None:
        while time.monotonic() < deadline:
            limit = rng.uniform(0, 0.25) if rng.random() < GONE else None
            try:
                async with asyncio.timeout(limit), httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as web:
                    async with web.stream("POST", "/v1/completions", json=body()) as answer:
                        data = (await answer.aread()).decode()
            except TimeoutError:
                outcomes["gone"] += 1
                continue
            if answer.status_code == 429:
                outcomes["refused"] += 1
                continue
            assert answer.status_code == 200, data
            assert '"error"' not in data
            outcomes["answered"] += 1

    await asyncio.gather(*(user() for _ in range(N_USERS)))
    return outcomes


def test_clients_that_go_away_leave_pages_and_memory_as_they_were(model: Path, tmp_path: Path) -> None:
    """After a third of the time, in which caches and pools fill, memory stays: it may grow by 5% and 16 MiB until the end."""
    options = ["--kv-cache-gib", "0.004", "--threads", "1", "--dtype", "fp32", "--max-running", "16"]
    with real_server(model, tmp_path, options) as served:

        async def scenario() -> list[tuple[Counter[str], dict[str, float], dict[str, float]]]:
            found = []
            async with httpx.AsyncClient(base_url=served.url, timeout=60, trust_env=False) as web:
                for i in range(6):
                    outcomes = await load_with_disconnects(served.url, SOAK_S / 6, i)
                    found.append((outcomes, await until_idle(web), memory(served)))
            return found

        found = asyncio.run(scenario())
        for outcomes, left, held in found:
            print(json.dumps({**outcomes, **left, **{name: round(mib, 1) for name, mib in held.items()}}))
        assert served.stop() == 0
    assert all(not any(left.values()) for _, left, _ in found), "every page is free again"
    total = sum((outcomes for outcomes, _, _ in found), Counter[str]())
    assert total["gone"] > 0.15 * total.total(), "many were answered before they went"
    for name in ("http", "engines"):
        before, after = found[1][2][name], found[-1][2][name]
        assert after < 1.05 * before + 16, (name, before, after)
    assert "Traceback" not in served.stderr.read_text()


def test_fifty_kills_of_real_engines_under_load(model: Path, tmp_path: Path) -> None:
    """Every request is answered whole, once, as before the kill, or refused."""
    settings = json.dumps({"n_threads": 1, "dtype": "fp32", "kv_cache_bytes": 10**7})
    options = ["--replicas", "2", "--real", settings, "--set", "engine_client.BACKOFF_S=[0.05]"]
    with echo_server(model, tmp_path, options) as served:
        outcomes = asyncio.run(kills_under_load(served, 50, 16, 3.5))
        print(dict(outcomes))
        assert outcomes["whole"] > 0
        assert outcomes["streamed"] > 0
        assert served.stop() == 0
    assert "Traceback" not in served.stderr.read_text()
