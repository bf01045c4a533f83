"""One replica: an engine process and the whole HTTP application before it, in a process that Ray Serve starts and ends.

What a replica answers is what ``twostroke serve`` answers, because the same application does: routes, limits, errors and
streams. `EngineReplica.answer` is its door; `chat`, `completions` and `embeddings` ask it from Python code on the cluster.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from twostroke.server.launch import ServeSettings
from twostroke.server.ray_serve.passed import Head, Passed
from twostroke.server.ray_serve.scaling import PREDICTED_WAIT_S

HELD_BYTES = 2**16
"""Bytes of a stream that wait here for Ray to take them, before the stream itself waits."""


class EngineReplica:
    """What a deployment's class does. It counts as running when its model is loaded. Raises TwostrokeError if that fails."""

    async def __init__(self, settings: ServeSettings, local_only: bool) -> None:  # type: ignore[misc]  # Ray awaits it
        child = settings.launches()[0]()  # first: it needs seconds to import torch, and this process imports meanwhile
        try:
            from twostroke.server.admission import Admission
            from twostroke.server.http import make_app
            from twostroke.server.keys import ApiKeys
            from twostroke.server.launch import process_age_s
            from twostroke.server.run import ServedModel, engines_of
            from twostroke.server.traces import Traces, exporter_to

            keys = None if settings.api_key_file is None else ApiKeys.read(settings.api_key_file)
            model = ServedModel(settings)
            self._record = model.record
            self._client = engines_of(settings, child)
            self._service = model.service(self._client, settings, Admission(settings.max_concurrent), keys, local_only)
            if settings.otlp_endpoint is not None:
                self._service.traces = Traces(exporter_to(settings.otlp_endpoint))
            self._app = make_app(self._service)
            self._engine = asyncio.create_task(self._client.run())
            loaded = asyncio.create_task(self._client.wait_loaded())
            await asyncio.wait({self._engine, loaded}, return_when=asyncio.FIRST_COMPLETED)
            if not loaded.done():
                loaded.cancel()
                await self._engine
            ready = loaded.result()
        except BaseException:
            child.kill()
            raise
        self._lag = asyncio.create_task(self._service.waiting.watch_lag())
        self._record.started(ready, process_age_s())
        self._about = {
            "dtype": ready.dtype,
            "load_s": ready.load_s,
            "weights_bytes": ready.weights_bytes,
            "kv_cache_bytes": ready.kv_cache_bytes,
            "max_model_len": ready.max_model_len,
            "notes": list(ready.notes),
        }

    # What Ray asks.

    async def check_health(self) -> None:
        """Raises what ended the engine for good. A lost engine is restarted here, sooner than Ray would replace this."""
        if self._engine.done():
            self._engine.result()
            raise RuntimeError("the engine has ended.")

    async def record_routing_stats(self) -> dict[str, Any]:
        return {"ready": self._service.ready}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        from twostroke.server.wait import Asked

        waiting = self._service.waiting
        return {PREDICTED_WAIT_S: waiting.first_token_s([Asked()]) if waiting.predicts else 0.0}

    async def shutdown(self) -> None:
        """End the engine. The requests are done, or their time is up."""
        if not hasattr(self, "_lag"):
            return
        self._lag.cancel()
        if not self._engine.done():
            self._record.ended(self._service.served, await self._client.stats())
        self._client.close()
        try:
            await self._engine
        finally:
            self._client.kill()
            self._record.stopped(self._service.totals)
            if self._service.traces is not None:
                self._service.traces.close()

    # What the ingress asks.

    async def about(self) -> dict[str, Any]:
        """What the engine said when it had loaded."""
        return self._about

    async def metrics(self, passed: Passed) -> tuple[str, Head]:
        """This replica's name, and its answer to ``passed``, which asks for ``/metrics``."""
        from ray import serve

        heads = [part async for part in self.answer(passed)]
        head = heads[-1]
        assert isinstance(head, Head)
        return str(serve.get_replica_context().replica_id.unique_id), head

    async def answer(self, passed: Passed) -> AsyncIterator[Head | bytes]:
        """A `Head`, which of a whole answer has all of its body, then the pieces of a stream as they come."""
        call = _Call(passed)
        work = asyncio.ensure_future(self._app(call.scope, call.receive, call.send))
        work.add_done_callback(lambda _: call.changed.set())
        call.work = work
        try:
            while not call.can_begin and not work.done():
                call.changed.clear()
                await call.changed.wait()
            if not call.can_begin:
                work.result()
                raise RuntimeError("the application ended without an answer.")
            yield Head(call.status, call.headers, call.taken(), not call.ended)
            while not call.ended:
                call.changed.clear()
                if not call.body and not work.done():
                    await call.changed.wait()
                if call.body:
                    yield call.taken()
                elif work.done() and not call.ended:
                    work.result()
                    raise RuntimeError("the application ended in the middle of an answer.")
            if call.body:
                yield call.taken()
            await work
        finally:
            if not work.done():
                call.lost()
                await asyncio.wait({work})

    # What other programs on the cluster ask.

    async def chat(self, request: dict[str, Any], authorization: str = "") -> AsyncIterator[Any]:
        """Server-sent events as texts if ``request`` has ``stream``; else one object of OpenAI's form, be it an error."""
        async for each in self._ask("/v1/chat/completions", request, authorization):
            yield each

    async def completions(self, request: dict[str, Any], authorization: str = "") -> AsyncIterator[Any]:
        """The same for completions."""
        async for each in self._ask("/v1/completions", request, authorization):
            yield each

    async def embeddings(self, request: dict[str, Any], authorization: str = "") -> AsyncIterator[Any]:
        """The same for embeddings, which are never streamed."""
        async for each in self._ask("/v1/embeddings", request, authorization):
            yield each

    async def _ask(self, path: str, request: dict[str, Any], authorization: str) -> AsyncIterator[Any]:
        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        if authorization:
            headers.append((b"authorization", authorization.encode("latin-1")))
        rest, streams = b"", False
        async for piece in self.answer(Passed("POST", path, b"", headers, "", json.dumps(request).encode())):
            if isinstance(piece, Head):
                streams = is_stream(piece.headers)
                if not streams:
                    yield json.loads(piece.body)
                    return
                piece = piece.body
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                yield event.decode() + "\n\n"


def is_stream(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)


class _Call:
    """One request to the application, as a server that speaks ASGI would make it."""

    def __init__(self, passed: Passed) -> None:
        from twostroke.server.connections import ABORT, WHILE_OPEN, Departures

        self._departures = Departures()
        self._sent_body = passed.body
        self.work: asyncio.Future[None] | None = None
        self.status, self.headers, self.body = 0, list[tuple[bytes, bytes]](), b""
        self.ended = False
        self.changed = asyncio.Event()
        self._room = asyncio.Event()
        self._gone = asyncio.Event()
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": passed.method,
            "scheme": "http",
            "path": passed.path,
            "raw_path": passed.path.encode(),
            "root_path": "",
            "query_string": passed.query,
            "headers": passed.headers,
            "client": (passed.client, 0),
            "server": None,
            "extensions": {ABORT: self.abort, WHILE_OPEN: self._departures.cancels},
        }
        self._asked = False

    @property
    def can_begin(self) -> bool:
        """Whether the first piece of a stream has come, or the whole of another answer."""
        return bool(self.status) and (self.ended or (bool(self.body) and is_stream(self.headers)))

    def taken(self) -> bytes:
        body, self.body = self.body, b""
        self._room.set()
        return body

    async def receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._sent_body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", ()))
            return
        self.body += message.get("body", b"")
        self.ended = not message.get("more_body", False)
        self.changed.set()
        while len(self.body) > HELD_BYTES and not self.ended and is_stream(self.headers) and not self._gone.is_set():
            self._room.clear()
            await self._room.wait()

    def lost(self) -> None:
        """The client has gone, or the ingress that had asked for it."""
        self._gone.set()
        self._room.set()
        self._departures.lost()

    def abort(self) -> None:
        """The application gives the connection up."""
        self.lost()
        if self.work is not None:
            self.work.cancel()
