"""What the caches hold, as routers are told it: every page once, behind what it continues, and again to late readers."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from serving import echo_server

from small_models import saved
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError
from twostroke.engine.core import EngineCore
from twostroke.scheduling.prefix_tree import ROOT, chain_key
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.server import kv_events, wire
from twostroke.server.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvents
from twostroke.server.kv_sockets import KVSockets

PAGE = 4
Event = BlockStored | BlockRemoved | AllBlocksCleared


def hash_of(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")


def pages(tokens: Sequence[int], begins: str = "") -> list[wire.Page]:
    found, key = [], ROOT
    for i in range(0, len(tokens) - len(tokens) % PAGE, PAGE):
        before, key = key, chain_key(key, tokens[i : i + PAGE])
        found.append(wire.Page(key, before, list(tokens[i : i + PAGE]), None if i else begins))
    return found


def blocks(stored: list[wire.Page], removed: list[bytes] = []) -> wire.Blocks:  # noqa: B006
    return wire.Blocks([page.key for page in stored], removed, stored)


class Reader:
    """What a router makes of the events: the prompt's beginning that each block stands for."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[int, ...]] = {}
        self.numbers: list[int] = []

    def read(self, number: int, payload: bytes) -> None:
        self.numbers.append(number)
        for event in msgspec.msgpack.decode(payload, type=kv_events.Batch).events:
            self.take(event)

    def take(self, event: Event) -> None:
        match event:
            case BlockStored(hashes, parent, tokens, size):
                before = () if parent is None else self.held[parent]
                for i, name in enumerate(hashes):
                    before = self.held[name] = (*before, *tokens[i * size : (i + 1) * size])
            case BlockRemoved(hashes):
                for name in hashes:
                    del self.held[name]
            case AllBlocksCleared():
                self.held.clear()


def test_a_router_knows_what_the_engines_hold_whatever_comes_and_goes() -> None:
    rng, events, reader = random.Random(3), KVEvents(), Reader()
    events.outlets.append(reader.read)
    engines = [events.of_engine(i) for i in range(3)]
    for engine in engines:
        engine.begin(PAGE)
    held: list[dict[bytes, wire.Page]] = [{} for _ in engines]
    prefixes: dict[bytes, tuple[int, ...]] = {}
    for _ in range(400):
        i = rng.randrange(3)
        if rng.random() < 0.05:
            held[i].clear()
            engines[i].forget()
        else:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(5 * PAGE))]
            new = [page for page in pages(tokens) if page.key not in held[i]]
            for n, page in enumerate(pages(tokens), 1):
                prefixes[page.key] = tuple(tokens[: n * PAGE])
            parents = {page.parent for page in held[i].values()}
            gone = [key for key in held[i] if key not in parents and rng.random() < 0.2]
            gone = [key for key in gone if not any(page.parent == key for page in new)]
            rng.shuffle(new)
            held[i] |= {page.key: page for page in new}
            for key in gone:
                held[i].pop(key, None)
            engines[i].change(blocks(new, gone))
        expected = {hash_of(key): prefixes[key] for own in held for key in own}
        assert reader.held == expected
    assert reader.numbers == list(range(len(reader.numbers)))


def test_the_form_is_vllms() -> None:
    """The arrays that vLLM's ``EventBatch`` and events are encoded to."""
    events, payloads = KVEvents(), []
    events.outlets.append(lambda _, payload: payloads.append(msgspec.msgpack.decode(payload)))
    engine = events.of_engine(0)
    engine.begin(PAGE)
    first, second, third = pages(range(12), "polite")
    engine.change(blocks([first, second]))
    (other,) = pages(range(50, 54))
    engine.change(blocks([third]))
    engine.change(blocks([other], [third.key, b"never stored"]))
    engine.forget()
    a, b, c, d = (hash_of(page.key) for page in (first, second, third, other))
    assert [batch[1:] for batch in payloads] == [
        [[["BlockStored", [a, b], None, list(range(8)), PAGE, None, None, "polite"]], 0],
        [[["BlockStored", [c], b, [8, 9, 10, 11], PAGE, None, None, "polite"]], 0],
        [[["BlockRemoved", [c], None], ["BlockStored", [d], None, [50, 51, 52, 53], PAGE, None, None, None]], 0],
        [[["AllBlocksCleared"]], 0],
    ]
    assert abs(payloads[0][0] - time.time()) < 60


def test_late_readers_get_what_they_missed_or_all_that_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "KEPT_BATCHES", 3)
    monkeypatch.setattr(kv_events, "BLOCKS_A_BATCH", 1)

    async def scenario() -> None:
        events, whole = KVEvents(), Reader()
        events.outlets.append(whole.read)
        engine = events.of_engine(0)
        engine.begin(PAGE)
        for i in range(6):
            engine.change(blocks(pages([i, 1, 2, 3, 9, 9, 9, i])))
        assert [number for number, _ in events.kept(4)] == [4, 5]
        for since, first in ((None, 5), (1, 5), (3, 3), (99, 5), (6, None)):
            reader = Reader()
            if since in (3, 6):  # it has seen the others
                reader.held = {name: tokens for name, tokens in whole.held.items() if tokens[0] < since}
            numbers = []
            async for found in events.follow(since, 0.01):
                if found is None:
                    break
                numbers.append(found[0])
                for event in found[1].events:
                    reader.take(event)
            assert reader.held == whole.held
            assert (numbers or [None])[0] == first

    asyncio.run(scenario())


def test_an_engine_describes_its_full_pages(tmp_path: Path) -> None:
    core = EngineCore(saved("llama", tmp_path)[1], EngineSettings(dtype="fp32", n_threads=1, page_tokens=16))
    assert core.watch_blocks() == []
    core.add_request("a", list(range(5, 45)), SamplingParams(max_tokens=1))
    while core.has_work:
        core.step()
    changes = core.changed_blocks()
    described = {key: found for key in changes if (found := core.described_block(key)) is not None}
    key = chain_key(ROOT, range(5, 21))
    assert described == {
        key: (ROOT, list(range(5, 21)), ""),
        chain_key(key, range(21, 37)): (key, list(range(21, 37)), None),
    }
    core.sleep(1)
    assert set(core.changed_blocks()) >= set(described)
    assert core.described_block(key) is None


def events_of(text: str) -> list[tuple[int | None, dict[str, Any]]]:
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "data" in lines:
            found.append((int(lines["id"]) if "id" in lines else None, json.loads(lines["data"])))
    return found


def read_until(web: httpx.Client, done: str, **headers: str) -> list[tuple[int | None, dict[str, Any]]]:
    text = ""
    with web.stream("GET", "/admin/kv-events", headers=headers) as answer:
        assert answer.status_code == 200
        for piece in answer.iter_text():
            text += piece
            if done in text and text.endswith("\n\n"):
                return events_of(text)
    raise AssertionError(text)


def test_the_route_streams_and_goes_on_after_the_last_event(echo_model: Path, tmp_path: Path) -> None:
    with echo_server(echo_model, tmp_path, ["--kv-events", "http", "--engine=--caches", "--replicas", "2"]) as served:
        with httpx.Client(base_url=served.url, trust_env=False, timeout=20) as web:
            for first in (5, 6):
                body = {"model": "echo", "prompt": [first, 1, 2, 3, 4, 5, 6, 7, 8], "max_tokens": 1}
                assert web.post("/v1/completions", json=body).status_code == 200
            (start, *seen) = read_until(web, "[6,")
            assert start == (None, start[1]) or start[1]["events"][0] == {"type": "AllBlocksCleared"}
            stored = [event for _, batch in [start, *seen] for event in batch["events"] if event["type"] == "BlockStored"]
            key = chain_key(ROOT, [5, 1, 2, 3])
            first = next(event for event in stored if event["token_ids"][0] == 5)
            assert first["block_hashes"] == [hash_of(key), hash_of(chain_key(key, [4, 5, 6, 7]))]
            assert (first["parent_block_hash"], first["block_size"]) == (None, PAGE)
            again = read_until(web, "[6,", **{"last-event-id": "0"})
            assert [number for number, _ in again] == [1]
            assert web.get("/admin/kv-events", headers={"last-event-id": "x"}).status_code == 400
            shown = web.get("/metrics").text
            with web.stream("GET", "/admin/kv-events") as open_stream:
                next(open_stream.iter_text())
                assert served.stop() == 0, "a stream that is followed holds up no end"
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f'vllm:{name}{{model_name="echo"}} 0.0' in shown
    assert 'vllm:cache_config_info{block_size="4",num_gpu_blocks="2000"} 1.0' in shown
    assert 'vllm:lora_requests_info{max_lora="256",running_lora_adapters="",waiting_lora_adapters=""}' in shown


def test_the_route_is_not_there_without_the_option(echo_model: Path, tmp_path: Path) -> None:
    with echo_server(echo_model, tmp_path, ["--admin"]) as served:
        assert httpx.get(f"{served.url}/admin/kv-events", trust_env=False).status_code == 404
    with echo_server(echo_model, tmp_path, ["--kv-events", "http", "--host", "0.0.0.0"]) as served:
        assert httpx.get(f"{served.url}/admin/kv-events", trust_env=False).status_code == 403, "no keys, and not loopback"


def test_readers_of_vllms_events_read_ours(echo_model: Path, tmp_path: Path) -> None:
    zmq = pytest.importorskip("zmq")
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    options = ["--kv-events", endpoint, "--kv-events-replay", replay, "--engine=--caches"]
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber, context.socket(zmq.REQ) as asking:
        with echo_server(echo_model, tmp_path, options) as served:
            subscriber.connect(endpoint)
            subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@")
            subscriber.setsockopt(zmq.RCVTIMEO, 200)
            reader, deadline, i = Reader(), time.monotonic() + 30, 0
            while not reader.numbers:  # a subscription takes a moment
                assert time.monotonic() < deadline
                body = {"model": "echo", "prompt": [i, 1, 2, 3, 4], "max_tokens": 1}
                assert httpx.post(f"{served.url}/v1/completions", json=body, trust_env=False).status_code == 200
                i += 1
                try:
                    topic, number, payload = subscriber.recv_multipart()
                except zmq.Again:
                    continue
                assert topic == b"kv@here@echo"
                reader.read(int.from_bytes(number, "big"), payload)
            asking.setsockopt(zmq.RCVTIMEO, 5000)
            asking.connect(replay)
            asking.send((0).to_bytes(8, "big"))
            every = Reader()
            parts = asking.recv_multipart()
            every.read(int.from_bytes(parts[0], "big"), parts[1])
            assert every.numbers == [0]
            assert served.stop() == 0


def test_what_cannot_be_published_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("zmq")
    with pytest.raises(ConfigError, match=r"--kv-events ipc:///nowhere/at/all cannot be used: .*Give an address"):
        KVSockets(KVEvents(), "ipc:///nowhere/at/all", None, "t")
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"needs the package pyzmq, .* pip install 'twostroke\[kv-events\]'"):
        KVSockets(KVEvents(), "tcp://*:1", None, "t")
