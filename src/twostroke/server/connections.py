"""The connections of the HTTP process: how many there may be, and how long one may stay silent or leave an answer unread.

uvicorn closes a connection that is silent after an answer. A connection that never sent a whole request, or that does not read
what was sent to it, it keeps for ever; `Connections` ends those. It is asked at every change of a connection's state and once
a second by `Connections.watch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from uvicorn.config import Config

log = logging.getLogger("twostroke.server")

HEADERS_TIMEOUT_S = 10.0
"""From a connection's first moment, or the end of its last answer, to the last byte of the next request's headers."""
SEND_TIMEOUT_S = 60.0
"""For a client that takes nothing of what is sent to it."""
STOPPING_SEND_TIMEOUT_S = 10.0
"""The same while the server stops: what is in flight is finished for those who read it."""
BACKLOG = 128
"""Connections the kernel holds before they are accepted; also how often asyncio's loop tries again when an accept fails."""
UNSENT_BYTES = 2**17
"""Of one connection that the kernel holds for its client, else up to some megabytes: how far a client has read shows sooner."""
MAX_HEAD_BYTES = 2**16
"""Of a request's line and headers, for httptools, which has no limit of its own (h11's is 16 KiB)."""
ABORT = "twostroke.abort"
"""In a request's ``extensions``; closes its connection without sending what is left."""
WHILE_OPEN = "twostroke.while_open"
"""In a request's ``extensions``: a `Departures.cancels` of its connection."""
_RESERVED_FILES = 64
_TICK_S = 1.0


def raise_file_limit() -> int:
    """The number of files this process may have open, after the soft limit was raised to the hard one (at most 65,536)."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return 65_536 if soft == resource.RLIM_INFINITY else soft


def most_connections(max_concurrent: int, file_limit: int) -> int:
    """Sixteen a place: in an overload of ten times the places every client can still be told to come back. Fewer where the
    process may not have as many files open, less some for its own."""
    return max(16, min(64 + 16 * max_concurrent, file_limit - _RESERVED_FILES))


class ClientGoneError(Exception):
    """The client closed its connection; nothing that is sent would be read."""


class Departures:
    """Cancels what is done for a connection when it is lost. It starts no task: one for the work and one that
    watches took a seventh of the HTTP process's time for an answer of 32 tokens."""

    def __init__(self) -> None:
        self._gone = False
        self._tasks: dict[asyncio.Task[object], bool] = {}  # whether it was this that cancelled it

    def lost(self) -> None:
        self._gone = True
        for task in self._tasks:
            self._tasks[task] = True
            task.cancel()

    @contextlib.contextmanager
    def cancels(self) -> Iterator[None]:
        """What the current task awaits inside is cancelled when the client goes, and ClientGoneError is raised for it."""
        if self._gone:
            raise ClientGoneError
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = False
        try:
            yield
        except asyncio.CancelledError:
            if self._tasks[task] and not task.uncancel():  # else the server itself cancelled it as well
                raise ClientGoneError from None
            raise
        finally:
            del self._tasks[task]


class Connections:
    """All open connections, at most ``limit``. At the limit a new one replaces the one that has been silent longest; if every
    connection has a request, the new one is closed. So silent clients, however many, keep nobody out."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.stopping = False
        self._all: set[Any] = set()
        self._silent: dict[Any, float] = {}  # since when, the longest first

    def __len__(self) -> int:
        return len(self._all)

    def admit(self, connection: Any, now: float) -> bool:
        """Take up a new connection; False where it must be closed."""
        if len(self._all) >= self.limit:
            longest = next(iter(self._silent), None)
            if longest is None:
                return False
            self.forget(longest)
            longest.transport.abort()
        self._all.add(connection)
        self._silent[connection] = now
        return True

    def working(self, connection: Any) -> None:
        """A request of this connection is being answered."""
        self._silent.pop(connection, None)

    def silent(self, connection: Any, now: float) -> None:
        """The last answer is complete and no other request has come."""
        self._silent.pop(connection, None)
        if connection in self._all:
            self._silent[connection] = now

    def forget(self, connection: Any) -> None:
        self._all.discard(connection)
        self._silent.pop(connection, None)

    async def watch(self) -> None:
        """End connections whose time is up, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_TICK_S)
            self.sweep(loop.time())

    def sweep(self, now: float) -> None:
        """End connections whose time is up. They are aborted: closing them would wait until what is unread has been read."""
        send_timeout_s = STOPPING_SEND_TIMEOUT_S if self.stopping else SEND_TIMEOUT_S
        for connection in tuple(self._all):
            transport = connection.transport
            if connection.full_since is not None:
                overdue = now - connection.full_since > send_timeout_s
            elif connection in self._silent:
                limit_s = send_timeout_s if transport.get_write_buffer_size() else HEADERS_TIMEOUT_S
                overdue = now - self._silent[connection] > limit_s
            else:
                overdue = False
                if transport.is_closing():  # its answer ended early, or its request was none; what was said may be unread
                    self._silent[connection] = now
            if overdue:
                self.forget(connection)
                transport.abort()


def guarded(base: type[Any], connections: Connections) -> type[asyncio.Protocol]:
    """uvicorn's protocol ``base`` (h11's or httptools'), reporting to ``connections``."""

    class Guarded(base):
        app: Any

        def __init__(self, config: Config, *args: Any, **options: Any) -> None:
            super().__init__(config, *args, **options)
            self.full_since: float | None = None
            self._refused = False
            self._departures = Departures()
            app = self.app

            async def extended(scope: dict[str, Any], receive: Any, send: Any) -> None:
                scope["extensions"] = {ABORT: self.transport.abort, WHILE_OPEN: self._while_open}
                await app(scope, receive, send)

            self.app = extended

        def _while_open(self) -> contextlib.AbstractContextManager[None]:
            self.flow.resume_reading()  # a long body may have paused it, and a client's going is read
            return self._departures.cancels()

        def connection_made(self, transport: asyncio.Transport) -> None:
            self.transport = transport
            self._refused = not connections.admit(self, self.loop.time())
            if self._refused:
                transport.abort()
            else:
                super().connection_made(transport)

        def connection_lost(self, exc: Exception | None) -> None:
            if not self._refused:
                connections.forget(self)
                super().connection_lost(exc)
                self._departures.lost()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._is_working():
                connections.working(self)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self._is_working():  # else the next request came before this answer ended
                connections.silent(self, self.loop.time())

        def pause_writing(self) -> None:
            self.full_since = self.loop.time()
            super().pause_writing()

        def resume_writing(self) -> None:
            self.full_since = None
            super().resume_writing()

        def _is_working(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

    class BoundedHeads(Guarded):
        """For a protocol that parses by callbacks: bytes that bring neither whole headers nor a body are counted."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._head_bytes = 0
            self._moved = False

        def data_received(self, data: bytes) -> None:
            self._moved = False
            super().data_received(data)
            self._head_bytes = 0 if self._moved else self._head_bytes + len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.abort()

        def on_headers_complete(self) -> None:
            self._moved = True
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._moved = True
            super().on_body(body)

    return BoundedHeads if hasattr(base, "on_headers_complete") else Guarded


def protocol_base() -> type[Any]:
    """uvicorn's protocol over httptools where that is installed, else over h11."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol

        return H11Protocol
    return HttpToolsProtocol


def say_once() -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """An exception handler that logs failing accepts once: asyncio reports each of up to ``BACKLOG`` tries a second."""
    said = False

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal said
        error = context.get("exception")
        if not isinstance(error, OSError) or "accept" not in context.get("message", ""):
            loop.default_exception_handler(context)
        elif not said:
            said = True
            log.error("connections cannot be accepted: %s. Raise the limit of open files (ulimit -n).", error.strerror)

    return handle
