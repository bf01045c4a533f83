"""Reads bodies and sends answers, in bounded memory however slowly clients send or read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from fastapi import Request, Response
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from twostroke.server.admission import ByteBudget
from twostroke.server.answers import Answer, whole_answer
from twostroke.server.callers import CALLER, Caller
from twostroke.server.connections import ABORT, WHILE_OPEN, ClientGoneError
from twostroke.server.errors import ApiError
from twostroke.server.gate import MAX_BODY_BYTES, too_large
from twostroke.server.generation import Generation
from twostroke.server.protocol import CommonRequest
from twostroke.server.response_cache import MAX_ANSWER_BYTES, marked
from twostroke.server.service import Service

A = TypeVar("A", bound=Answer)

CACHE_HEADER = "x-twostroke-cache"
"""Says "hit" or "miss" where answers are kept and this request's may be."""
BODY_TIMEOUT_S = 30.0
PIECE_BYTES = 2**16
"""Bytes of a whole answer that are handed to the connection at once: as many as it holds before it asks to wait."""


def abort_of(scope: Scope) -> Callable[[], None]:
    """The function that closes a request's connection at once and drops its unsent bytes."""
    abort: Callable[[], None] = scope["extensions"][ABORT]
    return abort


def caller_of(request: Request) -> Caller:
    """Who sent a request, as the gate found out."""
    found: Caller = request.scope[CALLER]
    return found


async def read_body(request: Request, incoming: ByteBudget) -> bytes:
    """The whole body. Raises ApiError 415 for another type than JSON (which a foreign web page could send without a preflight
    request), 413 above the limit, and 408 if it does not come in time. Raises ClientGoneError if the client disconnects, or if
    all arriving bodies exceed ``incoming`` and this one has not moved for longest."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, f"content-type {kind[:40]!r} is not supported; send application/json.", code="unsupported_media_type"
        )
    body = bytearray()
    held = incoming.hold(abort_of(request.scope))
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                piece = message.get("body", b"")
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise too_large()
                if not message.get("more_body", False):
                    return bytes(body)
                held.grow(len(piece))
    except TimeoutError:
        raise ApiError(
            408, f"the request body did not arrive within {BODY_TIMEOUT_S:g} s.", headers={"connection": "close"}
        ) from None
    finally:
        held.release()


def while_open(scope: Scope) -> contextlib.AbstractContextManager[None]:
    """A context in which what is awaited is cancelled if the client disconnects (ClientGoneError)."""
    found: contextlib.AbstractContextManager[None] = scope["extensions"][WHILE_OPEN]()
    return found


async def service_of(service: Service, request: Request, name: str, body: bytes) -> Service:
    """Of several models the service of the one that answers a request for ``name``, which stays loaded until the request ends.
    Raises ApiError."""
    if service.pool is None:
        return service
    with while_open(request.scope):
        return await service.pool.serve(name, caller_of(request), body)


async def parent_of(service: Service, request: Request, name: str | None) -> Service:
    """The service of the model ``name``, or that has the adapter of that name, without regard to an A/B test."""
    pool, caller = service.pool, caller_of(request)
    if pool is None:
        if name is not None:
            service.require_model(name)
        return service
    assert caller.visit is not None
    member = pool.member_of(name)
    with while_open(request.scope):
        await pool.hold(member, caller)
    caller.visit.holds.callback(pool.release, member)
    return member.service


def text_service_of(service: Service, name: str | None) -> Service:
    """The same for a request that needs no engine, so that nothing is loaded for it."""
    return service if service.pool is None else service.pool.member_of(name).service


async def respond_to(
    service: Service,
    request: Request,
    client: str,
    asked: Struct,
    chat: CommonRequest,
    compute: Callable[[], Awaitable[A]],
    events: Callable[[A], AsyncIterator[bytes]],
) -> Response:
    """The answer to ``asked``, which means ``chat``: the one that is kept of it, else that of ``compute``, whole or as
    ``events``."""
    kept, streamed, key = service.kept, bool(chat.stream), None
    computing = service.client.fingerprints
    if kept is not None and len(computing) == 1 and chat.model in service.names:
        tenant = "" if service.keys is None else client
        (fingerprint,) = computing
        key = kept.key(tenant, fingerprint, service.max_model_len, request.url.path, asked, chat)
    if kept is None or key is None:
        answer = await compute()
        if streamed:
            return await respond_streaming(request, answer.generation, events(answer))
        return await respond(request, answer, service.outgoing)
    found = await kept.get(key, client, streamed)
    response: Response
    if found is not None:
        parts = [marked(part) for part in found]
        if streamed:
            response = EventStream(parts[0], _each(parts[1:]), lambda: None)
        else:
            response = WholeAnswer(parts, lambda: None, service.outgoing)
    else:
        answer = await compute()

        def keep(parts: list[bytes]) -> None:
            if service.client.fingerprints == computing:  # else the engine may be another than the key's
                kept.put(key, client, streamed, parts)

        if streamed:
            stream = _watched(events(answer), answer.generation, keep)
            response = await respond_streaming(request, answer.generation, stream)
        else:
            response = await respond(request, answer, service.outgoing, keep)
    response.headers[CACHE_HEADER] = "miss" if found is None else "hit"
    return response


async def _each(parts: list[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def _watched(
    events: AsyncIterator[bytes], generation: Generation, keep: Callable[[list[bytes]], None]
) -> AsyncIterator[bytes]:
    """``events``, which are kept if they are all sent and the answer is whole."""
    parts: list[bytes] = []
    n_bytes = 0
    async for event in events:
        n_bytes += len(event)
        if n_bytes <= MAX_ANSWER_BYTES:
            parts.append(event)
        else:
            parts.clear()
        yield event
    if n_bytes <= MAX_ANSWER_BYTES and generation.is_whole:
        keep(parts)


async def respond(
    request: Request, answer: Answer, outgoing: ByteBudget, keep: Callable[[list[bytes]], None] | None = None
) -> Response:
    """The whole answer of one generation; ``keep`` gets a copy of one that is not cut short. Whatever happens, the generation
    is closed, when all is sent or on an error."""
    generation = answer.generation
    try:
        with while_open(request.scope):
            body = await whole_answer(answer)
        if keep is not None and generation.is_whole:
            keep([*body])
        generation.finish()  # its answers are in ``body``; its places stay taken until that is sent
        return WholeAnswer(body, generation.close, outgoing)
    except BaseException:
        generation.close()
        raise


async def respond_streaming(request: Request, generation: Generation, events: AsyncIterator[bytes]) -> Response:
    """The same as ``events``."""
    try:
        # The first event comes before the headers, so that a request that the engine refuses gets an error's status.
        with while_open(request.scope):
            first = await anext(events)
    except BaseException:
        generation.close()
        raise
    return EventStream(first, events, generation.close)


class WholeAnswer(Response):
    """Sends a body of several parts piece by piece, as fast as the client reads. ``connections.Connections`` closes a client
    that stops reading, and ``outgoing`` does so sooner if all unread answers exceed it."""

    media_type = "application/json"

    def __init__(self, parts: list[bytes], close: Callable[[], None], outgoing: ByteBudget) -> None:
        super().__init__()
        self._n_bytes = sum(map(len, parts))
        self.headers["content-length"] = str(self._n_bytes)
        self._parts = parts
        self._close = close
        self._outgoing = outgoing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = self._outgoing.hold(abort_of(scope))
        try:
            held.grow(self._n_bytes)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._parts.reverse()  # so that each part can be popped, and is free once it is sent
            while self._parts:
                part = self._parts.pop()
                for at in range(0, len(part), PIECE_BYTES):
                    piece = part[at : at + PIECE_BYTES]
                    last = not self._parts and at + PIECE_BYTES >= len(part)
                    await send({"type": "http.response.body", "body": piece, "more_body": not last})
                    held.shrink(len(piece))
        finally:
            held.release()
            self._close()


class EventStream(Response):
    """Sends events as they come, and stops at once when the client disconnects or no longer reads."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGoneError), while_open(scope):
                await self._send_all(send)
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
