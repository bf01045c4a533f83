"""Answers that are kept: what makes two requests one, files that are damaged, and what a client sees of it on every route."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import echo_engine
import httpx
import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Served, echo_server, metric, until

from twostroke.core.errors import ConfigError
from twostroke.core.private_folder import private_folder
from twostroke.server import protocol
from twostroke.server.admission import ByteBudget
from twostroke.server.connections import WHILE_OPEN
from twostroke.server.response_cache import MAX_ANSWER_BYTES, ResponseCache, marked, opened_cache
from twostroke.server.transfer import respond_to

CHAT: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "echo", "prompt": "the fox", "max_tokens": 5, "temperature": 1, "seed": 3, "n": 2},
    "/v1/messages": CHAT,
    "/v1/responses": {"model": "echo", "input": "x", "max_output_tokens": 5, "temperature": 0},
}
HEADER = "x-twostroke-cache"


# Without a server.


@contextlib.contextmanager
def opened(path: Path, most_bytes: int = 10**6) -> Iterator[ResponseCache]:
    with private_folder(path, create=True) as folder:
        yield ResponseCache(folder, most_bytes)


def keep(cache: ResponseCache, key: str, *parts: bytes, streamed: bool = False) -> None:
    async def put() -> None:
        cache.put(key, "", streamed, parts)
        await cache.written()

    asyncio.run(put())


def held(cache: ResponseCache, key: str, streamed: bool = False) -> list[bytes] | None:
    return asyncio.run(cache.get(key, "", streamed))


def key_of(n: int) -> str:
    return f"{n:064x}"


def request(**fields: Any) -> protocol.ChatRequest:
    return protocol.parse_chat(json.dumps(CHAT | fields).encode())


CHANGES: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "y"}]}, {"max_tokens": 6}, {"temperature": 0.5, "seed": 0},
    {"temperature": 0.5, "seed": 1}, {"top_p": 0.5}, {"top_k": 1}, {"n": 2}, {"stop": "x"}, {"stream": True},
    {"logit_bias": {"1": 1}}, {"guided_json": {"a": 1}}, {"guided_json": {"a": 2}},
    {"response_format": {"type": "json_object"}},
    {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"priority": 1}, {"timeout_s": 1}, {"logprobs": True},
    {"stream": True, "stream_options": {"include_usage": True}}, {"chat_template_kwargs": {"enable_thinking": False}},
    {"reasoning_effort": "low"}, {"ignore_eos": True}, {"prompt_logprobs": 1},
]  # fmt: skip


def test_two_requests_are_one_only_if_every_field_is_the_same(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as cache:

        def key(asked: protocol.ChatRequest, *names: Any) -> str | None:
            tenant, fingerprint, longest, route = [*names, *("", "fp", 4096, "/v1")[len(names) :]]
            return cache.key(tenant, fingerprint, longest, route, asked, asked)

        keys = [key(request(**change)) for change in [{}, *CHANGES]]
        keys += [
            key(request(), *names)
            for names in (("a",), ("b",), ("", "fq"), ("", "fp", 4095), ("", "fp", 4096, "/v2"), ("", "", 4096, "fp/v1"))
        ]
        assert None not in keys
        assert len(set(keys)) == len(keys)
        assert key(request()) == keys[0]
        assert key(request(logit_bias={"1": 1, "2": 2})) == key(request(logit_bias={"2": 2, "1": 1})), "an object has no order"
        assert key(request(user="me", metadata={"a": "b"})) == keys[0], "labels change nothing"
        assert key(request(temperature=0.5)) is key(request(temperature=None)) is None, "nothing fixes what is drawn"


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.binary(max_size=40), min_size=1, max_size=4), seed=st.integers(0, 10**6))
def test_a_damaged_file_is_a_miss(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], seed: int) -> None:
    rng, path = random.Random(seed), tmp_path_factory.mktemp("damaged")
    with opened(path / "c") as cache:
        keep(cache, key_of(1), *parts)
        assert held(cache, key_of(1)) == parts
        (file,) = (path / "c").iterdir()
        data = bytearray(file.read_bytes())
        at = rng.randrange(len(data))
        if rng.random() < 0.5:
            data[at] ^= 1 << rng.randrange(8)
        else:
            del data[at : at + rng.randrange(1, 9)]
        file.write_bytes(data)
        assert held(cache, key_of(1)) is None
        assert (cache.counts.damaged, len(cache), cache.n_bytes) == (1, 0, 0)
        assert not file.exists()
        keep(cache, key_of(1), *parts)
        assert held(cache, key_of(1)) == parts


def test_another_requests_file_is_a_miss(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with opened(folder) as cache:
        keep(cache, key_of(1), b"one")
        keep(cache, key_of(2), b"two")
    (folder / key_of(1)).replace(folder / key_of(3))
    (folder / key_of(2)).unlink()
    (folder / key_of(2)).symlink_to(folder / key_of(3))
    (folder / key_of(4)).mkdir()
    (folder / f"{key_of(5)}.partial").write_bytes(b"cut off")
    (folder / "else").write_bytes(b"another program's")
    with opened(folder) as cache:
        assert len(cache) == 1
        assert [held(cache, key_of(n)) for n in (1, 2, 3, 4)] == [None] * 4
        assert cache.counts.damaged == 1
    assert sorted(file.name for file in folder.iterdir()) == sorted([key_of(2), key_of(4), "else"])


def test_the_least_recently_used_go_first_over_a_restart(tmp_path: Path) -> None:
    folder, big = tmp_path / "c", b"x" * 1000
    with opened(folder, 4000) as cache:
        for n in (1, 2, 3):
            keep(cache, key_of(n), big)
            os.utime(folder / key_of(n), (n, n))
        assert held(cache, key_of(1)) == [big]
    with opened(folder, 4000) as cache:
        keep(cache, key_of(4), big)
        assert [held(cache, key_of(n)) is not None for n in (1, 2, 3, 4)] == [True, False, True, True]
        assert cache.counts.evicted == 1
        keep(cache, key_of(5), b"x" * 3990)
        assert len(cache) == 3, "what is larger than all together is not kept, and drives nothing out"
        assert cache.n_bytes == sum(file.stat().st_size for file in folder.iterdir()) <= 4000
    with opened(folder, 1500) as cache:
        assert len(cache) == 1, "a smaller limit holds from the start"
    with opened(tmp_path / "d", 10**9) as cache:
        keep(cache, key_of(1), b"x" * (MAX_ANSWER_BYTES + 1))
        assert len(cache) == 0


def test_an_answer_is_never_given_in_another_form(tmp_path: Path) -> None:
    with opened(tmp_path / "c") as cache:
        keep(cache, key_of(1), b"data: 1\n\n", streamed=True)
        assert held(cache, key_of(1), streamed=False) is None


@pytest.mark.parametrize(
    ("template", "kept"),
    [
        ("{{ m }}", True), ("{{ strftime_now('%d %b %Y') }}", True),
        ("{%- if x %}{{ strftime_now('%Y-%m-%d') }}{% endif %}", True),
        ("{{ strftime_now('%H:%M') }}", False), ("{{ strftime_now('%d %B %c') }}", False), ("{{ strftime_now(form) }}", False),
    ],
)  # fmt: skip
def test_a_template_that_reads_the_clock_keeps_no_chats(tmp_path: Path, template: str, kept: bool) -> None:
    with opened_cache(tmp_path / "c", 10**6, tmp_path, template) as cache:
        assert cache is not None
        asked = request()
        assert (cache.key("", "fp", 4096, "/v1", asked, asked) is not None) == kept
        with pytest.raises(ConfigError, match="is another server's"), opened_cache(tmp_path / "c", 10**6, tmp_path, None):
            pass
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"), opened_cache(tmp_path / "file", 10**6, tmp_path, None):
        pass
    with opened_cache(tmp_path / "c", 10**6, tmp_path, f"{template} ") as cache:
        assert cache is not None
        other = cache.key("", "fp", 4096, "/v1", asked, asked)
    with opened_cache(tmp_path / "c", 10**6, tmp_path, template) as cache:
        assert cache is not None
        assert not kept or cache.key("", "fp", 4096, "/v1", asked, asked) != other, "another template, another answer"


def test_only_the_usage_is_marked() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 2}}
    text = 'é "usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}'
    schema = {"properties": {"usage": {"type": "object", "total_tokens": 1}}}
    document = {"tools": [schema], "text": text, "usage": usage, "more": [text, {"usage": None}]}
    found = json.loads(marked(msgspec.json.encode(document)))
    assert found["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 7}, "from_response_cache": True}
    assert found | {"usage": usage} == document
    assert marked(b'{"usage":{"a":') == b'{"usage":{"a":'


# Over HTTP.


@contextlib.contextmanager
def server(model: Path, tmp_path: Path, *options: str) -> Iterator[tuple[Served, httpx.Client]]:
    with echo_server(model, tmp_path, ["--response-cache", str(tmp_path / "answers"), *options]) as served:
        with httpx.Client(base_url=served.url, timeout=60, trust_env=False) as web:
            yield served, web
        served.stop()


def counted(web: httpx.Client, name: str) -> float:
    return metric(web, f"twostroke_response_cache_{name}")


def plain(text: str) -> str:
    """The answer without its usage."""
    documents = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith(("data: {", "{"))]
    assert documents

    def cut(found: Any) -> Any:
        if isinstance(found, dict):
            return {name: cut(value) for name, value in found.items() if name != "usage"}
        return [cut(value) for value in found] if isinstance(found, list) else found

    return json.dumps([cut(json.loads(document)) for document in documents])


@pytest.fixture(scope="module")
def kept(echo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with server(echo_model, tmp_path_factory.mktemp("kept")) as (_, web):
        yield web


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
def test_the_second_answer_is_the_first_and_says_so(kept: httpx.Client, route: str, stream: bool) -> None:
    body = BODIES[route] | {"stream": stream, "top_p": 0.9}
    if stream and "completions" in route:
        body["stream_options"] = {"include_usage": True}
    stored = counted(kept, "stored")
    first = kept.post(route, json=body)
    assert (first.status_code, first.headers[HEADER]) == (200, "miss")
    assert "from_response_cache" not in first.text
    until(lambda: counted(kept, "stored") == stored + 1)
    computed = metric(kept, "twostroke_engine_output_tokens")
    second = kept.post(route, json=body)
    assert (second.status_code, second.headers[HEADER]) == (200, "hit")
    assert plain(second.text) == plain(first.text)
    assert second.text.count("\n\n") == first.text.count("\n\n"), "a stream comes in the same events"
    assert second.headers["content-type"] == first.headers["content-type"]
    assert '"from_response_cache":true' in second.text
    assert metric(kept, "twostroke_engine_output_tokens") == computed
    other = kept.post(route, json=body | {"top_p": 0.8})
    assert other.headers[HEADER] == "miss"
    until(lambda: counted(kept, "stored") == stored + 2)


def test_usage_of_an_answer_that_was_kept_counts_the_prompt_as_cached(kept: httpx.Client) -> None:
    def usage(route: str) -> Any:
        for _ in range(2):
            stored = counted(kept, "stored")
            answer = kept.post(route, json=BODIES[route] | {"top_p": 0.7})
            if answer.headers[HEADER] == "miss":
                until(lambda n=stored: counted(kept, "stored") == n + 1)  # type: ignore[misc]
        return answer.json()["usage"]

    chat, message, response = (usage(route) for route in ("/v1/chat/completions", "/v1/messages", "/v1/responses"))
    assert chat["prompt_tokens_details"]["cached_tokens"] == chat["prompt_tokens"] > 0
    assert (message["input_tokens"], message["cache_read_input_tokens"]) == (0, chat["prompt_tokens"])
    assert response["input_tokens_details"]["cached_tokens"] == response["input_tokens"] == chat["prompt_tokens"]


def test_what_is_drawn_fails_or_is_cut_short_is_not_kept(kept: httpx.Client) -> None:
    stored = counted(kept, "stored")
    drawn = BODIES["/v1/completions"] | {"seed": None}
    for _ in range(2):
        assert HEADER not in kept.post("/v1/completions", json=drawn).headers
    slow = {"model": "echo", "prompt": [echo_engine.SLOW], "max_tokens": 4000, "temperature": 0, "stream": True}
    with kept.stream("POST", "/v1/completions", json=slow) as stream:
        next(stream.iter_lines())
    refused = {"model": "echo", "prompt": [echo_engine.REFUSE], "temperature": 0}
    for _ in range(2):
        assert kept.post("/v1/completions", json=refused).status_code == 400
        assert kept.post("/v1/chat/completions", json=CHAT | {"model": "other"}).status_code == 404
        assert kept.post("/v1/chat/completions", json=CHAT | {"max_tokens": 10**6}).status_code == 400
    last = kept.post("/v1/chat/completions", json=CHAT | {"top_p": 0.123})
    assert last.headers[HEADER] == "miss"
    until(lambda: counted(kept, "stored") == stored + 1)


def test_keys_do_not_share_answers_and_a_restart_keeps_them(echo_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alpha\nbeta\n")
    found: list[str] = []
    ids = set[str]()
    for start in range(2):
        with server(echo_model, tmp_path, "--api-key-file", str(keys)) as (served, web):
            for key in ("alpha", "beta", "alpha"):
                client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0, timeout=60)
                with client:
                    raw = client.chat.completions.with_raw_response.create(**CHAT)  # type: ignore[call-overload]
                    found.append(raw.headers[HEADER])
                    ids.add(raw.parse().id)
                web.headers["authorization"] = f"Bearer {key}"
                until(lambda n=min(2, len(found)): counted(web, "answers") == n)  # type: ignore[misc]
            if start == 1:
                assert counted(web, "hits") == 3
    assert found == ["miss", "miss", "hit", "hit", "hit", "hit"]
    assert len(ids) == 2, "each key has its own answer"


@dataclass
class Engines:
    """As `Replicas` see theirs, some of which may be others than the rest."""

    fingerprints: set[str]


def test_an_answer_of_an_engine_that_was_replaced_meanwhile_is_not_kept(tmp_path: Path) -> None:
    async def scenario(before: set[str], after: set[str]) -> int:
        service: Any = SimpleNamespace(
            client=Engines(before), names=("echo",), keys=None, max_model_len=9, outgoing=ByteBudget(10**6)
        )
        call: Any = SimpleNamespace(scope={"extensions": {WHILE_OPEN: contextlib.nullcontext}}, url=SimpleNamespace(path="/"))

        async def no_deltas() -> Any:
            service.client.fingerprints = after
            for nothing in ():
                yield nothing

        async def whole(deltas: Any) -> list[bytes]:
            return [b"{}"]

        generation = SimpleNamespace(is_whole=True, finish=lambda: None, close=lambda: None, choices=[], deltas=no_deltas)

        async def compute() -> Any:
            return SimpleNamespace(generation=generation, whole=whole)

        with opened(tmp_path / "c") as cache:
            service.kept = cache
            await respond_to(service, call, "", request(), request(), compute, lambda answer: no_deltas())
            await cache.written()
            return cache.counts.stored

    assert asyncio.run(scenario({"a"}, {"b"})) == asyncio.run(scenario({"a"}, {"a", "b"})) == 0
    assert asyncio.run(scenario({"a", "b"}, {"a", "b"})) == asyncio.run(scenario(set(), {"a"})) == 0
    assert asyncio.run(scenario({"a"}, {"a"})) == 1


def test_damage_on_the_disk_changes_no_answer(echo_model: Path, tmp_path: Path) -> None:
    with server(echo_model, tmp_path) as (_, web):
        first = web.post("/v1/chat/completions", json=CHAT)
        until(lambda: counted(web, "answers") == 1)
    (file,) = (tmp_path / "answers").iterdir()
    file.write_bytes(file.read_bytes().replace(b"?@ABC", b"wrong"))
    with server(echo_model, tmp_path) as (_, web):
        again = web.post("/v1/chat/completions", json=CHAT)
        assert again.headers[HEADER] == "miss"
        assert again.json()["choices"] == first.json()["choices"]
        assert counted(web, "damaged") == 1
        until(lambda: counted(web, "answers") == 1)
        assert web.post("/v1/chat/completions", json=CHAT).headers[HEADER] == "hit"
        for kept_file in (tmp_path / "answers").iterdir():
            kept_file.unlink()  # as a disk that is emptied beneath it
        lost = web.post("/v1/chat/completions", json=CHAT)
        assert (lost.status_code, lost.headers[HEADER]) == (200, "miss")
        assert lost.json()["choices"] == first.json()["choices"]
