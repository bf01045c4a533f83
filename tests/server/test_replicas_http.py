"""A server of several engines, of which some are killed under load: each request is answered whole, once, or refused."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from serving import Served, echo_server

N_TOKENS = 30
LOST = {"engine_lost", "engine_not_ready", "too_many_requests"}
"""Codes of errors that a request may get that no engine has answered."""


def engines(served: Served) -> list[int]:
    children = psutil.Process(served.process.pid).children()
    return [p.pid for p in children if any("echo_engine" in word or "engine_process" in word for word in p.cmdline())]


def sent(i: int) -> dict[str, Any]:
    fields = {"max_tokens": N_TOKENS, "ignore_eos": True, "temperature": 0, "stream": i % 2 == 0}
    return {"model": "echo", "prompt": [1, 2, 3, i % 200], **fields}


async def one(web: httpx.AsyncClient, i: int, outcomes: Counter[str], texts: dict[int, str]) -> None:
    """Send a request, and hold what came against the first whole answer to the same."""
    body = sent(i)
    async with web.stream("POST", "/v1/completions", json=body) as response:
        data = (await response.aread()).decode()
    if response.status_code != 200:
        assert json.loads(data)["error"]["code"] in LOST, data
        outcomes[f"refused {response.status_code}"] += 1
        return
    if body["stream"]:
        events = [line.removeprefix("data: ") for line in data.split("\n\n") if line]
        chunks = [json.loads(event) for event in events if event != "[DONE]"]
        errors = [chunk["error"]["code"] for chunk in chunks if "error" in chunk]
        text = "".join(choice["text"] for chunk in chunks for choice in chunk.get("choices", ()))
        if errors:
            assert errors == ["engine_lost"]
            assert i % 200 not in texts or texts[i % 200].startswith(text), "what came was right as far as it came"
            outcomes["ended with an error"] += 1
            return
        assert events.count("[DONE]") == 1
    else:
        (choice,) = json.loads(data)["choices"]
        text = choice["text"]
    assert text == texts.setdefault(i % 200, text), "whole, and once"
    outcomes["streamed" if body["stream"] else "whole"] += 1


async def kills_under_load(served: Served, n_kills: int, n_users: int, pause_s: float) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    texts: dict[int, str] = {}
    limits = httpx.Limits(max_connections=n_users, max_keepalive_connections=n_users)
    chance = random.Random(7)
    stop = False
    async with httpx.AsyncClient(base_url=served.url, timeout=60, trust_env=False, limits=limits) as web:

        async def user(k: int) -> None:
            i = k
            while not stop:
                await one(web, i, outcomes, texts)
                i += n_users + 1

        users = [asyncio.create_task(user(k)) for k in range(n_users)]
        for _ in range(n_kills):
            await asyncio.sleep(pause_s * (0.5 + chance.random()))
            while not (alive := engines(served)):
                await asyncio.sleep(0.05)
            os.kill(chance.choice(alive), signal.SIGKILL)
        await asyncio.sleep(pause_s)
        stop = True
        await asyncio.gather(*users)
        restarts = 0.0
        async with asyncio.timeout(30):
            while restarts < n_kills:
                restarts = metric((await web.get("/metrics")).text, "twostroke_engine_restarts")
                await asyncio.sleep(0.05)
    return outcomes


def metric(text: str, name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{")))


OPTIONS = ("--replicas", "3", "--engine=--step-s=0.004", "--set", "engine_client.BACKOFF_S=[0.05]")


def test_kills_under_load_leave_each_request_answered_once_or_refused(echo_model: Path, tmp_path: Path) -> None:
    with echo_server(echo_model, tmp_path, OPTIONS) as served:
        outcomes = asyncio.run(kills_under_load(served, 3, 12, 0.3))
        print(dict(outcomes))
        assert outcomes["whole"] > 0
        assert outcomes["streamed"] > 0
        with httpx.Client(base_url=served.url, trust_env=False, timeout=20) as web:
            shown = web.get("/metrics").text
        assert metric(shown, "twostroke_http_requests_active") == 0
        assert metric(shown, "twostroke_replica_answers_in_flight") == 0
        assert metric(shown, "twostroke_replica_requests_routed") > 0
        assert served.stop() == 0
    assert "Traceback" not in served.stderr.read_text()


@pytest.mark.soak
def test_fifty_kills_under_load(echo_model: Path, tmp_path: Path) -> None:
    with echo_server(echo_model, tmp_path, OPTIONS) as served:
        outcomes = asyncio.run(kills_under_load(served, 50, 32, 1.0))
        print(dict(outcomes))
        assert outcomes["whole"] + outcomes["streamed"] > 10 * (outcomes.total() - outcomes["whole"] - outcomes["streamed"])
        assert served.stop() == 0
    assert "Traceback" not in served.stderr.read_text()


def test_a_signal_replaces_the_engines_while_requests_are_answered(echo_model: Path, tmp_path: Path) -> None:
    with echo_server(echo_model, tmp_path, (*OPTIONS[:1], "2", *OPTIONS[2:])) as served:
        before = set(engines(served))

        async def scenario() -> Counter[str]:
            outcomes: Counter[str] = Counter()
            texts: dict[int, str] = {}
            async with httpx.AsyncClient(base_url=served.url, timeout=60, trust_env=False) as web:
                served.process.send_signal(signal.SIGUSR1)
                i = 0
                async with asyncio.timeout(60):
                    while metric((await web.get("/metrics")).text, "twostroke_replica_up") < 2 or before & set(engines(served)):
                        await asyncio.gather(*(one(web, i + k, outcomes, texts) for k in range(6)))
                        i += 7
            return outcomes

        outcomes = asyncio.run(scenario())
        assert set(outcomes) <= {"whole", "streamed"}, "none failed"
        assert not before & set(engines(served))
        assert served.stop() == 0


def test_weights_replaced_in_all_engines_under_load_fail_nothing(echo_model: Path, tmp_path: Path) -> None:
    names = [f"new-{i}" for i in range(3)]
    for name in names:
        (tmp_path / name).mkdir()
    with echo_server(echo_model, tmp_path, (*OPTIONS[:1], "2", "--admin", *OPTIONS[2:])) as served:

        async def scenario() -> Counter[str]:
            outcomes: Counter[str] = Counter()
            texts: dict[int, str] = {}
            stop = False
            async with httpx.AsyncClient(base_url=served.url, timeout=60, trust_env=False) as web:

                async def user(k: int) -> None:
                    i = k
                    while not stop:
                        await one(web, i, outcomes, texts)
                        i += 9

                users = [asyncio.create_task(user(k)) for k in range(8)]
                for name, in_flight in zip(names, ("finish", "continue", "finish"), strict=True):
                    await asyncio.sleep(0.3)
                    changed = await web.post("/admin/weights", json={"path": str(tmp_path / name), "in_flight": in_flight})
                    assert (changed.status_code, changed.json()["fingerprint"]) == (200, f"fp_{name}")
                stop = True
                await asyncio.gather(*users)
            return outcomes

        outcomes = asyncio.run(scenario())
        assert set(outcomes) == {"whole", "streamed"}, "none failed"
        assert served.stop() == 0


def test_metrics_show_each_engine_and_the_sum_of_all(echo_model: Path, tmp_path: Path) -> None:
    with echo_server(echo_model, tmp_path, OPTIONS) as served, httpx.Client(base_url=served.url, trust_env=False) as web:
        for i in range(6):
            assert web.post("/v1/completions", json=sent(2 * i + 1)).status_code == 200
        shown = web.get("/metrics").text
    for i in range(3):
        for name in ("up", "requests_running", "requests_waiting", "kv_usage", "answers_in_flight", "restarts"):
            if name != "requests_waiting":  # which the echo engine does not count
                assert f'twostroke_replica_{name}{{replica="{i}"}}' in shown
    assert metric(shown, "twostroke_replica_requests_routed") == 6
    assert metric(shown, "twostroke_replica_up") == 3
    assert metric(shown, "twostroke_kv_pages") == 3000
    assert 'twostroke_lora_info{max_lora="256",running_lora_adapters="",waiting_lora_adapters=""}' in shown
