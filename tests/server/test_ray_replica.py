"""How a replica asks the application: streams piece by piece, other answers whole, nothing for a client that left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from twostroke.server.connections import ABORT, WHILE_OPEN, ClientGoneError
from twostroke.server.ray_serve.passed import Head, Passed
from twostroke.server.ray_serve.replica import HELD_BYTES, EngineReplica

STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]


def replica_of(app: Any) -> EngineReplica:
    replica: EngineReplica = EngineReplica.__new__(EngineReplica)
    replica._app = app
    return replica


async def collected(pieces: AsyncIterator[Any]) -> list[Any]:
    return [piece async for piece in pieces]


def asked(app: Any, body: bytes = b"{}") -> list[Any]:
    return asyncio.run(collected(replica_of(app).answer(Passed("POST", "/v1/completions", b"", [], "", body))))


def test_an_answer_that_is_not_a_stream_comes_whole() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": JSON})
        for piece in (body, b"x" * 2 * HELD_BYTES):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"end"})

    assert asked(app, b"begin") == [Head(200, JSON, b"begin" + b"x" * 2 * HELD_BYTES + b"end", False)]


def test_a_stream_comes_as_it_is_written_and_waits_for_who_takes_it() -> None:
    written: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM})
        for i in range(40):
            written.append(i)
            await send({"type": "http.response.body", "body": b"x" * 10_000, "more_body": True})
        await send({"type": "http.response.body", "body": b"end"})

    async def slowly() -> bytes:
        got = b""
        async for piece in replica_of(app).answer(Passed("POST", "/", b"", [], "")):
            got += piece.body if isinstance(piece, Head) else piece
            await asyncio.sleep(0.01)
            assert len(written) * 10_000 <= len(got) + 2 * HELD_BYTES
        return got

    assert asyncio.run(slowly()) == b"x" * 400_000 + b"end"


def test_what_is_awaited_for_a_client_that_left_is_cancelled() -> None:
    outcome: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        try:
            with scope["extensions"][WHILE_OPEN]():
                await asyncio.sleep(60)
        except ClientGoneError:
            outcome.append("gone")

    async def leave() -> None:
        async with aclosing(replica_of(app).answer(Passed("POST", "/", b"", [], ""))) as pieces:
            async for piece in pieces:
                assert isinstance(piece, Head)
                assert (piece.body, piece.more) == (b"one", True)
                break

    asyncio.run(leave())
    assert outcome == ["gone"]


def test_a_connection_that_the_application_gives_up_ends_in_an_error() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["extensions"][ABORT]()
        await asyncio.sleep(60)

    with pytest.raises((RuntimeError, asyncio.CancelledError)):
        asked(app)


def test_an_application_that_says_nothing_is_an_error() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    with pytest.raises(RuntimeError, match="without an answer"):
        asked(app)


def test_code_on_the_cluster_gets_events_as_texts_and_answers_as_objects() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        streams = b"stream" in (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": STREAM if streams else JSON})
        for piece in (b"data: {}\n\ndata:", b" [DONE]\n\n") if streams else (b'{"a":', b"1}"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b""})

    replica = replica_of(app)
    assert asyncio.run(collected(replica.chat({}))) == [{"a": 1}]
    assert asyncio.run(collected(replica.completions({"stream": True}))) == ["data: {}\n\n", "data: [DONE]\n\n"]
