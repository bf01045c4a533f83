"""Limits the connections of the HTTP process: how many there are, and how long one may stay silent or leave an answer unread.

uvicorn closes a connection that is silent after an answer. It keeps for ever a connection that never sends a whole request, or
that does not read what was sent to it. `Connections` ends those. It hears of every change of a connection's state, and looks
at all of them once a second.
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
"""Longest time from a connection's first moment, or the end of its last answer, to the end of the next request's headers."""
SEND_TIMEOUT_S = 60.0
"""Longest time in which a client takes nothing of what is sent to it."""
STOPPING_SEND_TIMEOUT_S = 10.0
"""The same while the server stops, when requests in flight are finished for clients that read."""
BACKLOG = 128
"""Connections that the kernel holds before they are accepted. asyncio also tries so many accepts a second when one fails."""
UNSENT_BYTES = 2**17
"""Unsent bytes that the kernel holds of one connection. By default it holds megabytes, and hides how far a client has read."""
MAX_HEAD_BYTES = 2**16
"""Most bytes of a request's line and headers. httptools has no limit of its own (h11's is 16 KiB)."""
ABORT = "twostroke.abort"
"""Name in a request's ``extensions`` of a function that closes its connection without sending what is left."""
WHILE_OPEN = "twostroke.while_open"
"""Name in a request's ``extensions`` of `Departures.cancels` of its connection."""
_RESERVED_FILES = 64
_TICK_S = 1.0


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one, at most 65,536, and return it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return 65_536 if soft == resource.RLIM_INFINITY else soft


def most_connections(max_concurrent: int, file_limit: int) -> int:
    """Sixteen connections a place: in an overload of ten times the places every client can still be told to come back. Fewer if
    the process may not have as many files open, of which it needs some itself."""
    return max(16, min(64 + 16 * max_concurrent, file_limit - _RESERVED_FILES))


class ClientGoneError(Exception):
    """The client closed its connection, so it would read no answer."""


class Departures:
    """Cancels the work for a connection when the connection is lost. Starts no task: a task for the work and one that watched
    took a seventh of the HTTP process's time for an answer of 32 tokens."""

    def __init__(self) -> None:
        self._gone = False
        self._tasks: dict[asyncio.Task[object], bool] = {}  # whether `lost` has cancelled it

    def lost(self) -> None:
        self._gone = True
        for task in self._tasks:
            self._tasks[task] = True
            task.cancel()

    @contextlib.contextmanager
    def cancels(self) -> Iterator[None]:
        """Cancel what the current task awaits inside if the client disconnects, and raise ClientGoneError for it."""
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
    connection has a request, the new one is closed. So silent clients, however many, do not keep others out."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.stopping = False
        self._all: set[Any] = set()
        self._silent: dict[Any, float] = {}  # by connection since when, the longest first

    def __len__(self) -> int:
        return len(self._all)

    def admit(self, connection: Any, now: float) -> bool:
        """Admit a new connection. False if it must be closed."""
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
                if transport.is_closing():  # its answer ended early, or its bytes were no request: the reply may be unread
                    self._silent[connection] = now
            if overdue:
                self.forget(connection)
                transport.abort()


def guarded(base: type[Any], connections: Connections) -> type[asyncio.Protocol]:
    """A subclass of uvicorn's protocol ``base`` (h11's or httptools') that reports to ``connections``."""

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
            self.flow.resume_reading()  # a long body may have paused it, and only reading shows that the client went
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
        """For a protocol that parses by callbacks. Aborts after ``MAX_HEAD_BYTES`` without the
        end of headers or a part of a body."""

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
    """uvicorn's protocol over httptools if that is installed, else over h11."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol

        return H11Protocol
    return HttpToolsProtocol


def say_once() -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """An exception handler that logs failing accepts once. asyncio reports each of up to ``BACKLOG`` tries a second."""
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
