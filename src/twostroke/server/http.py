"""The HTTP application: routes, authentication, limits, and answers whole or streamed.

Errors have OpenAI's shape and hold no traceback; logs hold neither prompts nor keys. A client that goes away has its request
aborted: the engine takes no further step for it than the one it is in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twostroke.core.version import __version__
from twostroke.server import protocol
from twostroke.server.answers import ENCODER, Answer, ChatAnswer, CompletionAnswer, answer_events, collect
from twostroke.server.errors import ApiError
from twostroke.server.launch import is_own_name
from twostroke.server.service import Service

log = logging.getLogger("twostroke.server")

MAX_BODY_BYTES = 2 * 2**20
BODY_TIMEOUT_S = 30.0
SEND_TIMEOUT_S = 60.0
"""A client that takes nothing from a full connection for this long is given up."""
OPEN_ROUTES = frozenset({"/health", "/ready"})
"""Answered without a key, for the probes of a service manager; they tell nothing but a state."""
ROUTES = ("/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/ready", "/metrics")

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed its connection; there is nobody to answer."""


def make_app(service: Service) -> ASGIApp:
    """The whole application, ready for an ASGI server."""
    app = FastAPI(title="Twostroke", version=__version__, docs_url=None, redoc_url=None)  # the docs pages load foreign scripts

    @app.get("/health")
    async def health() -> Response:
        """This process is alive."""
        return _json({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """A request sent now would be worked on."""
        state = "ready" if service.ready else "draining" if service.draining else "loading"
        return _json({"status": state}, 200 if service.ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        service.metrics.ready.set(service.ready)
        service.metrics.active.set(service.admission.active)
        service.metrics.restarts.set(service.client.restarts)
        return Response(service.metrics.render(await service.client.stats()), media_type=service.metrics.content_type)

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [_model(service, name) for name in service.names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.require_model(name)
        return _json(_model(service, name))

    @app.post("/v1/completions", openapi_extra=_body_schema(protocol.CompletionRequest))
    async def completions(request: Request) -> Response:
        started = time.perf_counter()
        parsed = protocol.parse_completion(await read_body(request))
        answer = CompletionAnswer(service, await service.complete(parsed, started, _client_of(service, request)), parsed)
        return await respond(request, answer, bool(parsed.stream))

    @app.post("/v1/chat/completions", openapi_extra=_body_schema(protocol.ChatRequest))
    async def chat_completions(request: Request) -> Response:
        started = time.perf_counter()
        parsed = protocol.parse_chat(await read_body(request))
        answer = ChatAnswer(service, await service.chat(parsed, started, _client_of(service, request)), parsed)
        return await respond(request, answer, bool(parsed.stream))

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return _error(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        texts = {404: f"there is no route {request.url.path[:80]}.", 405: f"{request.method} is not allowed on this route."}
        return _error(
            ApiError(error.status_code, texts.get(error.status_code, "the request was refused."), headers=error.headers)
        )

    @app.exception_handler(ClientGoneError)
    async def client_gone(_: Request, error: ClientGoneError) -> Response:
        return Response(status_code=499)  # nobody reads it; 499 is what the metrics show

    @app.exception_handler(Exception)
    async def internal_error(_: Request, error: Exception) -> Response:
        return _error(ApiError(500, "the server failed on this request.", code="internal_error"))

    return Gate(app, service)


class Gate:
    """Around the application: keys, body size by its announced length, counting, and the last resort for exceptions."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        route = path if path in ROUTES else "other"

        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._service.metrics.responses.labels(route, str(message["status"])).inc()
            await send(message)

        refusal = self._refusal(path, dict(scope["headers"]))
        if refusal is not None:
            await _error(refusal)(scope, receive, counted_send)
            return
        try:
            await self._app(scope, receive, counted_send)
        except Exception as error:
            # Without the message and the values: an exception may carry a prompt.
            where = "".join(traceback.format_tb(error.__traceback__))
            log.error("%s on %s\n%s", type(error).__name__, route, where)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        keys = self._service.keys
        if keys is not None and path not in OPEN_ROUTES and not keys.allow(headers.get(b"authorization")):
            message = "a valid API key is needed, as `Authorization: Bearer <key>`."
            return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer", "connection": "close"})
        host = headers.get(b"host", b"").decode("latin-1")
        if keys is None and self._service.local_only and not is_own_name(host):
            # A web page whose own name was made to point to 127.0.0.1 (DNS rebinding) could otherwise use the model.
            message = "this server listens on loopback without a key and answers only to localhost and to addresses."
            return ApiError(403, message, code="foreign_host", headers={"connection": "close"})
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            return too_large()
        return None


def too_large() -> ApiError:
    message = f"the request body is over {MAX_BODY_BYTES} bytes."
    return ApiError(413, message, code="request_too_large", headers={"connection": "close"})


async def read_body(request: Request) -> bytes:
    """The whole body. Raises ApiError 415 for another type than JSON (as a foreign web page would send without asking
    first), 413 above the limit, 408 where it does not come, and ClientGoneError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, f"content-type {kind[:40]!r} is not supported; send application/json.", code="unsupported_media_type"
        )
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                body += message.get("body", b"")
                if len(body) > MAX_BODY_BYTES:
                    raise too_large()
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise ApiError(
            408, f"the request body did not arrive within {BODY_TIMEOUT_S:g} s.", headers={"connection": "close"}
        ) from None


async def disconnected(receive: Receive) -> None:
    """Returns when the client closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled if the client goes away first (ClientGoneError)."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def respond(request: Request, answer: Answer, stream: bool) -> Response:
    """The HTTP response of one generation, which is closed whatever happens."""
    close = answer.generation.close
    if not stream:
        try:
            return _json(await unless_gone(request.receive, collect(answer)))
        finally:
            close()
    events = answer_events(answer)
    try:
        # The first event before the headers: what the engine refuses at once still gets a proper status.
        first = await unless_gone(request.receive, anext(events))
    except BaseException:
        close()
        raise
    return EventStream(first, events, close)


class EventStream(Response):
    """Sends events as they come and stops at once when the client goes or no longer reads."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGoneError, TimeoutError):
                await unless_gone(receive, self._send_all(send))
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await self._send(send, self._first, more=True)
        async for event in self._events:
            await self._send(send, event, more=True)
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, body: bytes, more: bool) -> None:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await send({"type": "http.response.body", "body": body, "more_body": more})


def _json(content: Any, status: int = 200) -> Response:
    return Response(ENCODER.encode(content), status, media_type="application/json")


def _error(error: ApiError) -> Response:
    response = _json(error.body(), error.status)
    response.headers.update(error.headers)
    return response


def _client_of(service: Service, request: Request) -> str:
    host = "" if request.client is None else request.client.host
    return service.client_name(dict(request.scope["headers"]).get(b"authorization"), host)


def _model(service: Service, name: str) -> dict[str, Any]:
    info = service.client.info
    length = None if info is None else info.max_model_len
    return {"id": name, "object": "model", "created": service.created, "owned_by": "twostroke", "max_model_len": length}


def _body_schema(kind: Any) -> dict[str, Any]:
    """The request's JSON schema for ``/openapi.json``."""
    (schema,), components = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _inline(schema, components)}}}}


def _inline(schema: Any, components: dict[str, Any]) -> Any:
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inline(components[schema["$ref"].rpartition("/")[2]], components)
        return {key: _inline(value, components) for key, value in schema.items()}
    if isinstance(schema, list):
        return [_inline(item, components) for item in schema]
    return schema
