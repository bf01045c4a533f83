"""The application behind Ray Serve's HTTP proxy: checks who asks, and passes whole requests to a replica and its answer back.

A request goes to a second replica if the first dies, loses its engine, is full or does not take requests: once, and only while
the client has been sent nothing. Of a stream that is its first event, of another answer its whole body. While no replica runs,
requests wait here until one does, which is what starts the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from twostroke.server.admission import INCOMING_BYTES, ByteBudget
from twostroke.server.connections import ABORT
from twostroke.server.errors import ApiError, encode_error, not_ready
from twostroke.server.gate import ANSWER_ROUTES, BATCHES, CHANGE_ROUTES, FILES
from twostroke.server.keys import ApiKeys
from twostroke.server.passing import answering, checked_headers, send_json, send_whole
from twostroke.server.ray_serve.passed import Fleet, Head, Passed, Question
from twostroke.server.router.endpoint import block_keys, prompt_text
from twostroke.server.router.proxy import AGAIN, Metrics
from twostroke.server.transfer import read_body

RETRY_AFTER_S = 5
"""When a caller may come again who finds this application ending."""
STATE_FRESH_S = 1.0
"""For so long the number of running replicas is not asked for again."""


class Ingress:
    """The ASGI application. ``replicas`` is Ray's handle of `EngineReplica`, ``running`` counts those that run. ``starts``: a
    request starts a replica where none runs. ``local_only``: as for `twostroke.server.service.Service`."""

    def __init__(self, replicas: Any, running: Callable[[], int], keys: ApiKeys | None, local_only: bool, starts: bool) -> None:
        self._answers = replicas.options(method_name="answer", stream=True)
        self._replicas = replicas
        self._running, self._keys, self._local_only, self._starts = running, keys, local_only, starts
        self.fleet = Fleet()
        self.metrics = Metrics()
        self.draining = False
        self.in_flight = self.requests = 0
        self._incoming = ByteBudget(INCOMING_BYTES)
        self._counted, self._counted_s = 0, 0.0
        self._registry = CollectorRegistry()
        text = "Requests that another replica answered after the first did not."
        self._moved = Counter("twostroke_requests_moved", text, registry=self._registry)
        self._of_replicas = _OfReplicas()
        self._registry.register(self._of_replicas)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        if scope["type"] != "http":
            return
        path = scope["path"] = scope["path"] or "/"
        task = asyncio.current_task()
        assert task is not None
        scope["extensions"] = {**(scope.get("extensions") or {}), ABORT: task.cancel}
        async with answering(scope, send, self.metrics.responses, "server") as counted:
            await self._answer(scope, receive, counted, path)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        method, headers = scope["method"], checked_headers(scope, self._keys, self._local_only)
        if path in CHANGE_ROUTES or path.startswith((FILES, BATCHES)):
            raise ApiError(
                404, f"{path[:80]} changes one server, and Ray starts and ends replicas of this one as it needs them."
            )
        peer = scope.get("client")
        passed = Passed(method, path, scope["query_string"], list(scope["headers"]), peer[0] if peer else "")
        match method, path:
            case "GET", "/health":
                await send_json(send, {"status": "ok"})
            case "GET", "/ready":
                state = await self._state()
                await send_json(send, {"status": state}, 200 if state == "ready" else 503)
            case "GET", "/metrics":
                await send_whole(send, 200, [(b"content-type", b"text/plain; version=0.0.4")], await self._metrics(passed))
            case _:
                with self._counting(path):
                    await self._pass(scope, receive, send, passed, headers)

    async def _state(self) -> str:
        if self.draining:
            return "draining"
        return "ready" if self._starts or await self._count() else "loading"

    async def _count(self) -> int:
        """Replicas that run."""
        if time.monotonic() - self._counted_s > STATE_FRESH_S:
            self._counted = await asyncio.to_thread(self._running)
            self._counted_s = time.monotonic()
        return self._counted

    @contextlib.contextmanager
    def _counting(self, path: str) -> Iterator[None]:
        if self.draining and path in ANSWER_ROUTES:
            raise not_ready(RETRY_AFTER_S)
        self.in_flight += 1
        self.requests += path in ANSWER_ROUTES
        try:
            yield
        finally:
            self.in_flight -= 1

    async def _pass(self, scope: Scope, receive: Receive, send: Send, passed: Passed, headers: dict[bytes, bytes]) -> None:
        n_chars, keys = 0, list[bytes]()
        if passed.method == "POST":
            passed = passed._replace(body=await read_body(Request(scope, receive), self._incoming))
            text = _prompt_of(passed.body)
            n_chars, keys = len(text), block_keys(text, ApiKeys.name(headers.get(b"authorization")))
        head, pieces, question = await self._asked(passed, n_chars, keys)
        try:
            # Ray's proxy gives each request an id, under which replicas know it too, and writes it into the answer itself.
            headers_out = [(name, value) for name, value in head.headers if name != b"x-request-id"]
            await send({"type": "http.response.start", "status": head.status, "headers": headers_out})
            await send({"type": "http.response.body", "body": head.body, "more_body": head.more})
            if head.more:
                await self._send_on(send, pieces, question)
        finally:
            self.fleet.ended(question.sent)
            pieces.cancel()

    async def _send_on(self, send: Send, pieces: Any, question: Question) -> None:
        try:
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except (RayError, RayServeException):
            self.fleet.ended(question.sent, failed=True)
            # As the replica itself ends a stream in which something fails: a last event, without [DONE] behind it.
            lost = ApiError(500, "the replica was lost while it worked on this request.", code="engine_lost")
            event = b"data: " + encode_error(lost, question.passed.path) + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _asked(self, passed: Passed, n_chars: int, keys: list[bytes]) -> tuple[Head, Any, Question]:
        """The first answer of a replica, or the last refusal, with what follows."""
        been_at: str | None = None
        for last in (False, True):
            question = Question(self.fleet, passed, n_chars, keys, been_at)
            pieces = self._answers.remote(question)
            try:
                head: Head = await anext(pieces)
            except BaseException as error:
                lost = isinstance(error, RayActorError)
                self.fleet.ended(question.sent, failed=lost)
                pieces.cancel()
                if isinstance(error, BackPressureError):
                    raise _full() from None
                if isinstance(error, DeploymentUnavailableError):
                    raise not_ready() from None
                if not lost:
                    raise
                if last:
                    raise ApiError(502, "no replica answered this request.", code="engine_lost") from None
            else:
                if last or not _is_refusal(head) or not self.fleet.has_other(question.at):
                    self.fleet.begun(question.sent, head.status < 400)
                    if been_at is not None:
                        self._moved.inc()
                    return head, pieces, question
                self.fleet.ended(question.sent, failed=head.status == 500)
                pieces.cancel()
            been_at = question.at
        raise AssertionError

    async def _metrics(self, passed: Passed) -> bytes:
        """What this application counts, and what each replica does, with its name as a label."""
        found = []
        if await self._count():
            asked = self._replicas.broadcast("metrics", passed)
            found = [each for each in await asked.results_async(return_exceptions=True) if not isinstance(each, BaseException)]
        self._of_replicas.texts = {name: head.body.decode() for name, head in found}
        return self.metrics.render(self.fleet.endpoints) + generate_latest(self._registry)


class _OfReplicas(Collector):
    """The metrics in ``texts``, by the name of the replica that wrote each, with that name as a label."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, text in self.texts.items():
            for family in text_string_to_metric_families(text):
                found = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    found.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
        yield from families.values()


def _prompt_of(body: bytes) -> str:
    """The text by which a request is routed. A replica says what is wrong with a body."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    return prompt_text(asked) if isinstance(asked, dict) else ""


def _is_refusal(head: Head) -> bool:
    """Whether another replica may answer what this one did not: it is full, loading, or has lost its engine."""
    if head.status in AGAIN:
        return True
    return head.status == 500 and not head.more and b'"engine_lost"' in head.body


def _full() -> ApiError:
    message = "as many requests wait as may. Try again later."
    return ApiError(429, message, code="too_many_requests", headers={"retry-after": "1", "retry-after-ms": "1000"})


async def _live(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
