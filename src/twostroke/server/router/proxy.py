"""The router's application: passes requests to a server and its answer back, byte by byte as it comes.

A request is sent to a second server if the first does not answer it: the connection fails or ends, the server dies, or it says
that it is busy (429) or not there (502, 503, 504). That happens once, and only while the client has been sent nothing; of a
stream that is its first piece, of another answer its whole body, as far as that fits into ``WHOLE_BYTES``. So no client sees
two answers. An answer that ends in its middle ends the client's connection, because a clean end would look like a whole answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from twostroke.server.admission import INCOMING_BYTES, ByteBudget
from twostroke.server.errors import ApiError
from twostroke.server.gate import ANSWER_ROUTES
from twostroke.server.keys import ApiKeys
from twostroke.server.passing import answering, checked_headers, send_json, send_whole
from twostroke.server.router.endpoint import Endpoint, Sent, block_keys, choose, prompt_text
from twostroke.server.router.health import Watch
from twostroke.server.transfer import abort_of, read_body, while_open

PASSED = ANSWER_ROUTES | {"/v1/rerank", "/rerank"}
"""Routes whose requests any of the servers may answer: they leave nothing behind that a later request would look for."""
WHOLE_BYTES = 2**23
"""Largest body of an answer that is not a stream which is kept until it is whole."""
AGAIN = frozenset({429, 502, 503, 504})
"""A server's answers after which another is asked."""
_OF_A_CONNECTION = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
     b"transfer-encoding", b"upgrade"}
)  # fmt: skip


class Metrics:
    """What the router's ``/metrics`` shows, by server."""

    GAUGES: tuple[tuple[str, str, Callable[[Endpoint], float | None]], ...] = (
        ("up", "1 while the server takes requests.", lambda e: e.up),
        ("requests_in_flight", "Requests that it has.", lambda e: e.in_flight),
        ("requests", "Requests that were sent there.", lambda e: e.requests),
        ("requests_moved", "Requests that another server answered after it did not.", lambda e: e.moved),
        ("failures", "Connections that failed or ended before an answer was whole.", lambda e: e.failures),
        ("pace_seconds", "Measured seconds to a first byte, a character of work.", lambda e: e.measured_pace_s),
        ("predicted_wait_seconds", "Sum of the predicted times to first bytes.", lambda e: e.predicted_s),
        ("measured_wait_seconds", "Sum of the measured times of the same requests.", lambda e: e.measured_s),
    )

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self.responses = Counter("twostroke_router_responses", "Responses by status.", ["status"], registry=self._registry)
        self._gauges = [
            (Gauge(f"twostroke_endpoint_{name}", text, ["endpoint"], registry=self._registry), read)
            for name, text, read in self.GAUGES
        ]

    def render(self, endpoints: Sequence[Endpoint]) -> bytes:
        for endpoint in endpoints:
            for gauge, read in self._gauges:
                gauge.labels(endpoint.url).set(float(read(endpoint) or 0.0))
        return generate_latest(self._registry)


class _Unanswered(Exception):
    """A server did not answer a request, and the client was sent nothing. ``response`` is what it said instead, if anything."""

    def __init__(self, response: Held | None = None) -> None:
        super().__init__()
        self.response = response


@dataclass
class Held:
    """The head of an answer and what has come of its body. ``rest`` is what still comes, if it is not whole."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    rest: AsyncIterator[bytes] | None = None
    response: httpx.Response | None = None

    async def close(self) -> None:
        if self.response is not None:
            await self.response.aclose()


@dataclass
class Router:
    """The ASGI application. ``local_only``: it listens on loopback, and without ``keys`` answers only to names of its own."""

    client: httpx.AsyncClient
    watch: Watch
    endpoints: Sequence[Endpoint]
    keys: ApiKeys | None = None
    local_only: bool = True
    draining: bool = False
    metrics: Metrics = field(default_factory=Metrics)
    incoming: ByteBudget = field(default_factory=lambda: ByteBudget(INCOMING_BYTES))

    @property
    def ready(self) -> bool:
        return not self.draining and any(endpoint.up for endpoint in self.endpoints)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            async with answering(scope, send, self.metrics.responses, "router") as counted:
                await self._answer(scope, receive, counted)
        except Exception:
            abort_of(scope)()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        headers = checked_headers(scope, self.keys, self.local_only)
        match method, path:
            case "GET", "/health":
                await send_json(send, {"status": "ok"})
            case "GET", "/ready":
                state = "ready" if self.ready else "draining" if self.draining else "no server takes requests"
                await send_json(send, {"status": state}, 200 if self.ready else 503)
            case "GET", "/metrics":
                text = self.metrics.render(self.endpoints)
                await send_whole(send, 200, [(b"content-type", b"text/plain; version=0.0.4")], text)
            case "GET", "/v1/models":
                await send_json(send, {"object": "list", "data": self._models()})
            case "POST", _ if path in PASSED:
                await self._pass(scope, receive, send, headers)
            case _, _ if path in PASSED or path in ("/health", "/ready", "/metrics", "/v1/models"):
                raise ApiError(405, f"{method} is not allowed on this route.")
            case _:
                raise ApiError(404, f"the router passes no requests to {path[:80]}; ask a server itself.")

    def _models(self) -> list[dict[str, Any]]:
        names = sorted({name for endpoint in self.endpoints if endpoint.up for name in endpoint.models or ()})
        return [{"id": name, "object": "model", "created": 0, "owned_by": "router"} for name in names]

    async def _pass(self, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, bytes]) -> None:
        if self.draining:
            raise _nobody(5)
        content = await read_body(Request(scope, receive), self.incoming)
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise ApiError(400, "the body is not a JSON object.")
        text = prompt_text(body)
        keys = block_keys(text, ApiKeys.name(headers.get(b"authorization")))
        model = body.get("model")
        model = model if isinstance(model, str) else ""
        wanted = _request_headers(scope["headers"])
        with contextlib.ExitStack() as stack:
            with while_open(scope):
                held, sent = await self._asked(scope, content, wanted, model, len(text), keys, stack)
            try:
                with while_open(scope):
                    await self._send_on(scope, send, held, sent)
            finally:
                await held.close()

    async def _asked(
        self, scope: Scope, content: bytes, headers: list[tuple[bytes, bytes]], model: str, n_chars: int, keys: list[bytes],
        stack: contextlib.ExitStack,
    ) -> tuple[Held, Sent]:  # fmt: skip
        """The first answer of a server, of which the client has been sent nothing, or the last refusal."""
        first: Endpoint | None = None
        refusal: tuple[Held, Sent] | None = None
        for _ in range(2):
            sent = choose(self.endpoints, model, n_chars, keys, first)
            if sent is None:
                break
            stack.callback(sent.ended)
            try:
                held = await self._ask(scope, sent, content, headers)
            except _Unanswered as missed:
                sent.ended()
                first = sent.endpoint
                refusal = None if missed.response is None else (missed.response, sent)
                continue
            if first is not None:
                first.moved += 1
            return held, sent
        if refusal is not None:
            return refusal
        if first is None:
            raise _nobody(1)
        raise ApiError(502, "no server answered this request.", code="endpoint_lost")

    async def _ask(self, scope: Scope, sent: Sent, content: bytes, headers: list[tuple[bytes, bytes]]) -> Held:
        """Send a request. Returns the head with the first piece, or the whole of a short answer. Raises _Unanswered."""
        endpoint, dead = sent.endpoint, self.watch.dead[sent.endpoint.url]
        query = scope["query_string"].decode("latin-1")
        url = endpoint.url + scope["path"] + (f"?{query}" if query else "")
        request = self.client.build_request("POST", url, headers=headers, content=content)
        work = asyncio.create_task(self._exchange(request, sent))
        death = asyncio.create_task(dead.wait())
        held: Held | None = None
        try:
            await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise httpx.ReadError("the server died")
            held = work.result()
        except (httpx.HTTPError, httpx.StreamError) as error:
            endpoint.failures += 1
            if isinstance(error, httpx.ConnectError):
                self.watch.lost(endpoint)
            raise _Unanswered from None
        finally:
            for task in (work, death):
                task.cancel()
            (came, _) = await asyncio.gather(work, death, return_exceptions=True)
            if held is None and isinstance(came, Held):  # it came just as the client went
                await came.close()
        if held.status in AGAIN and held.rest is None:
            raise _Unanswered(held)
        return held

    async def _exchange(self, request: httpx.Request, sent: Sent) -> Held:
        response = await self.client.send(request, stream=True)
        try:
            headers = [(name, value) for name, value in response.headers.raw if name.lower() not in _OF_A_CONNECTION]
            pieces = response.aiter_raw()
            streams = response.headers.get("content-type", "").startswith("text/event-stream")
            body = b""
            async for piece in pieces:
                sent.begun(response.status_code < 400)
                body += piece
                if streams or len(body) > WHOLE_BYTES:
                    return Held(response.status_code, headers, body, pieces, response)
            sent.begun(response.status_code < 400)
            await response.aclose()
            return Held(response.status_code, headers, body)
        except BaseException:
            await response.aclose()
            raise

    async def _send_on(self, scope: Scope, send: Send, held: Held, sent: Sent) -> None:
        await send({"type": "http.response.start", "status": held.status, "headers": held.headers})
        await send({"type": "http.response.body", "body": held.body, "more_body": held.rest is not None})
        if held.rest is None:
            return
        try:
            async for piece in held.rest:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except (httpx.HTTPError, httpx.StreamError):
            sent.endpoint.failures += 1
            abort_of(scope)()
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _request_headers(given: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """What is sent on: all but what concerns the connection. An id is added, under which both servers' logs know the request,
    and no encoding is asked for that the client did not ask for."""
    names = {name for name, _ in given}
    kept = [(n, v) for n, v in given if n not in _OF_A_CONNECTION and n not in (b"host", b"content-length", b"expect")]
    if b"x-request-id" not in names:
        kept.append((b"x-request-id", b"req-" + secrets.token_hex(12).encode()))
    if b"accept-encoding" not in names:
        kept.append((b"accept-encoding", b"identity"))
    return kept


def _nobody(retry_after_s: int) -> ApiError:
    return ApiError(
        503,
        "no server takes requests now. Try again in a moment.",
        code="no_endpoint",
        headers={"retry-after": str(retry_after_s)},
    )
