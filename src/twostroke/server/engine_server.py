"""``EngineServer``: the loop between one engine and its connections.

One thread alternates between the socket and ``EngineCore.step``: it polls without waiting while there is work and sleeps
otherwise. A second thread sends a heartbeat once a second, so that the other side can tell a stopped process from a
step that never ends. It also ends the process when its parent has gone.

It survives a malformed or oversize frame (it closes that connection and aborts its requests), a request that the engine refuses
(that request gets an error), and a reader that disconnects or stalls.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from twostroke.core.errors import CapacityError, InputError, TwostrokeError
from twostroke.server import wire
from twostroke.server.engine_connection import RECEIVE_BYTES, Connection
from twostroke.server.outgoing import Owner, in_frames, wire_logprobs
from twostroke.server.served import peak_memory_bytes

if TYPE_CHECKING:  # they import the engine, which takes seconds
    from twostroke.server.handover.borrower import Borrower, Handover
    from twostroke.server.handover.lender import Lender

HEARTBEAT_S = 1.0
MAX_UNSENT_BYTES = 8 * 2**20
"""With more than this unsent the engine takes no step until the reader has caught up, so that memory stays bounded."""
STALL_S = 30.0
"""A connection is closed if it reads nothing for this long while output waits."""
_KEYS_A_FRAME = 2**16
_PAGE_TOKENS_A_FRAME = 2**20


class Engine(Protocol):
    """The part of ``twostroke.engine.core.EngineCore`` that this module uses."""

    @property
    def has_work(self) -> bool: ...

    def add_request(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: Any,
        priority: int,
        client: str,
        timeout_s: float | None,
        lora: str | None,
    ) -> None: ...

    def prepare(self, params: Any) -> None: ...

    def load_adapter(self, name: str, directory: Path) -> bytes: ...

    def unload_adapter(self, name: str) -> None: ...

    def prepare_weights(self, directory: Path) -> Any: ...

    def use_weights(self, prepared: Any, carry_on: bool) -> Any: ...

    def sleep(self, level: int) -> int: ...

    @property
    def is_empty(self) -> bool: ...

    @property
    def directory(self) -> Path: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def weights_key(self) -> bytes: ...

    def abort(self, request_id: str, index: int | None = None) -> Any: ...

    def step(self) -> Iterable[Any]: ...

    def watch_blocks(self) -> list[bytes]: ...

    def changed_blocks(self) -> dict[bytes, bool]: ...

    def described_block(self, key: bytes) -> tuple[bytes, list[int], str | None] | None: ...

    def stats(self) -> Any: ...


@dataclass(eq=False)
class _Preparing:
    """A request whose constraint is compiled in a thread before the engine gets it, or whose prompt another engine computes,
    and its answers that were aborted since."""

    connection: Connection
    command: wire.Add
    compiled: Future[None] | None
    handover: Handover | None
    aborted: set[int] = field(default_factory=set)
    since: float = field(default_factory=time.monotonic)

    @property
    def done(self) -> bool:
        return (self.compiled is None or self.compiled.done()) and (self.handover is None or self.handover.done.done())

    @property
    def left_s(self) -> float | None:
        """What is left of its time."""
        limit = self.command.timeout_s
        return None if limit is None else max(1e-3, limit - (time.monotonic() - self.since))

    def end(self) -> None:
        """Nobody waits for it any more."""
        if self.handover is not None:
            self.handover.cancel()


@dataclass
class _ChangingWeights:
    """Weights that a thread prepares, and who asked for them."""

    connection: Connection
    command: wire.ChangeWeights | wire.Sleep
    prepared: Future[Any]


class EngineServer:
    """Runs one engine for the connections of one listening socket."""

    def __init__(self, listener: socket.socket, parent_pid: int | None = None) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._parent_pid = parent_pid
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._connections: dict[int, Connection] = {}
        self._accepted = 0
        self._ready: wire.Ready | None = None
        self._busy_since: float | None = time.monotonic()
        self._stopping = False
        self._owners: dict[str, Owner] = {}
        self._preparing: list[_Preparing] = []
        self._compiler: ThreadPoolExecutor | None = None
        self._changing: _ChangingWeights | None = None
        self._woken, self._waker = socket.socketpair()  # by the thread that compiles, when it is done
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self.lender: Lender | None = None
        self.borrower: Borrower | None = None
        self._handed: dict[str, Handover] = {}  # by the engine's id of their requests, which are unfinished
        self._selector.register(self._woken, selectors.EVENT_READ)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    # The heartbeat thread.

    def _beat(self) -> None:
        while True:
            if self._parent_pid is not None and os.getppid() != self._parent_pid:
                os._exit(1)  # the HTTP process was killed, and with it went the readers of this work
            if self._ready is None:
                self._accept()  # until the loop runs, which accepts itself, its thread loads the model
            beat = wire.Heartbeat(self._ready is not None, self.busy_s())
            for connection in tuple(self._connections.values()):
                connection.send(beat)
            time.sleep(HEARTBEAT_S)

    # The loop.

    def run(self, engine: Engine, ready: wire.Ready) -> None:
        """Serve until a ``Shutdown`` arrives. Raises what a step raises, after every open request has been told."""
        self._engine = engine
        self._ready = ready
        for connection in tuple(self._connections.values()):
            connection.send(ready)
        try:
            while not self._stopping:
                # The HTTP process is the one reader: if it is behind, so is every client.
                congested = any(c.unsent_bytes > MAX_UNSENT_BYTES for c in self._connections.values())
                step_now = engine.has_work and not congested
                self._poll(wait=not step_now)
                if self._preparing:
                    self._add_prepared()
                if self._changing is not None and self._changing.prepared.done():
                    self._take_weights(self._changing)
                events: Sequence[Any] = ()
                if step_now and engine.has_work:  # again, since the poll may have aborted the last request
                    events = tuple(engine.step())
                    self._deliver(events)
                    self._tell_blocks()
                if self.lender is not None:
                    self.lender.turn(events)
        except Exception:
            self.report_failure("engine", "the engine failed in a step and is starting again.")
            raise
        finally:
            for connection in self._connections.values():
                connection.flush()

    def wake(self) -> None:
        """Let the loop take a turn. Any thread may."""
        with contextlib.suppress(BlockingIOError):  # then it has enough to read
            self._waker.send(b"\0")

    def busy_s(self) -> float:
        """For how long the loop has been in its present turn."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def report_failure(self, kind: Any, message: str) -> None:
        """Tell every connection that the engine is about to end, as far as the sockets take it."""
        deadline = time.monotonic() + 2.0
        while not self._connections and time.monotonic() < deadline:
            self._accept()  # a model may fail before the parent has connected
            time.sleep(0.01)
        for connection in tuple(self._connections.values()):
            connection.send(wire.Failed(None, kind, message))

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            peer, _ = self._listener.accept()
            self._accepted += 1
            connection = Connection(peer, self._accepted)
            # Registered first: while the heartbeat's thread accepts, the loop may begin to look up each connection's events.
            self._selector.register(peer, selectors.EVENT_READ, connection)
            self._connections[connection.number] = connection
            if self._ready is not None:
                connection.send(self._ready)

    def _poll(self, wait: bool) -> None:
        for connection in tuple(self._connections.values()):
            self._watch(connection)
        if wait:
            self._busy_since = None
        # At most 1 s: meanwhile the heartbeat's thread may find a peer dead or fill its buffer.
        events = self._selector.select(1.0 if wait else 0)
        self._busy_since = time.monotonic()
        for key, mask in events:
            if key.fileobj is self._woken:
                self._woken.recv(RECEIVE_BYTES)
                continue
            if key.data is None:
                self._accept()
                continue
            if mask & selectors.EVENT_WRITE:
                key.data.flush()
            if mask & selectors.EVENT_READ:
                self._read(key.data)
        for connection in tuple(self._connections.values()):
            stalled = connection.stalled_since
            if not connection.open or (stalled is not None and time.monotonic() - stalled > STALL_S):
                self._drop(connection)

    def _watch(self, connection: Connection) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent_bytes else 0)
        if self._selector.get_key(connection.socket).events != wanted:
            self._selector.modify(connection.socket, wanted, connection)

    def _read(self, connection: Connection) -> None:
        try:
            commands = connection.receive()
        except wire.FrameError as error:
            connection.send(wire.Failed(None, "input", str(error)))
            self._drop(connection)
            return
        for command in commands:
            self._handle(connection, command)

    def _drop(self, connection: Connection) -> None:
        self._connections.pop(connection.number, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        for each in self._preparing:
            if each.connection is connection:
                each.end()
        self._preparing = [each for each in self._preparing if each.connection is not connection]
        for key in connection.requests:
            self._owners.pop(key, None)
            self._engine.abort(key)
            self._let_go(key)
        connection.close()

    def _handle(self, connection: Connection, command: wire.Command) -> None:
        match command:
            case wire.Add():
                self._prepare(connection, command)
            case wire.Abort(request_id, index):
                key = f"{connection.number}:{request_id}"
                owner = self._owners.get(key)
                if owner is not None:
                    self._engine.abort(key, index)
                    self._ended(key, owner.open if index is None else {index})
                for each in self._preparing:
                    if each.connection is connection and each.command.request_id == request_id:
                        answers = set(range(each.command.params.n))
                        each.aborted |= answers if index is None else {index}
                        if each.aborted >= answers:
                            each.end()
            case wire.AskStats(query_id):
                connection.send(wire.StatsReport(query_id, self._stats()))
            case wire.ChangeAdapter():
                connection.send(self._change_adapter(command))
            case wire.ChangeWeights():
                self._prepare_weights(connection, command, Path(command.directory))
            case wire.Sleep():
                self._sleep(connection, command)
            case wire.WatchBlocks(pages):
                self._tell_blocks()
                connection.watches, connection.watches_pages = True, pages
                for keys in _parts(self._engine.watch_blocks(), self._keys_a_frame(pages)):
                    connection.send(wire.Blocks(keys, [], self._pages(keys) if pages else []))
            case wire.Shutdown():
                self._stopping = True

    def _change_adapter(self, command: wire.ChangeAdapter) -> wire.AdapterChanged:
        key = b""
        try:
            if command.directory is None:
                self._engine.unload_adapter(command.name)
            else:
                key = self._engine.load_adapter(command.name, Path(command.directory))
        except (TwostrokeError, OSError) as error:
            return wire.AdapterChanged(command.query_id, str(error))
        return wire.AdapterChanged(command.query_id, name=command.name, key=key)

    def _tell_blocks(self) -> None:
        """Send what has changed in the cache to those who watch."""
        changes = self._engine.changed_blocks()
        if not changes:
            return
        watchers = [each for each in self._connections.values() if each.watches]
        with_pages = any(each.watches_pages for each in watchers)
        for keys in _parts(list(changes), self._keys_a_frame(with_pages)):
            stored = [key for key in keys if changes[key]]
            event = wire.Blocks(stored, [key for key in keys if not changes[key]])
            whole = wire.Blocks(event.stored, event.removed, self._pages(stored)) if with_pages else event
            for connection in watchers:
                connection.send(whole if connection.watches_pages else event)

    def _keys_a_frame(self, with_pages: bool) -> int:
        assert self._ready is not None
        return max(1, _PAGE_TOKENS_A_FRAME // self._ready.page_tokens) if with_pages else _KEYS_A_FRAME

    def _pages(self, keys: Iterable[bytes]) -> list[wire.Page]:
        found = ((key, self._engine.described_block(key)) for key in keys)
        return [wire.Page(key, *page) for key, page in found if page is not None]

    def _sleep(self, connection: Connection, command: wire.Sleep) -> None:
        if command.level == 0 and self._engine.is_empty:
            self._prepare_weights(connection, command, self._engine.directory)
            return
        freed, error = 0, None
        try:
            if command.level > 0 and (self._changing is not None or self._preparing):
                raise InputError("weights or a form are being prepared. Let the engine sleep when that has ended.")
            if command.level > 0 and self.lender is not None and not self.lender.is_idle:
                raise InputError("pages are being handed over. Let the engine sleep when that has ended.")
            freed = self._engine.sleep(command.level) if command.level > 0 else 0
            self._tell_blocks()
        except TwostrokeError as failure:
            error = str(failure)
        connection.send(wire.Slept(command.query_id, error, freed))

    def _prepare_weights(self, connection: Connection, command: wire.ChangeWeights | wire.Sleep, directory: Path) -> None:
        """In a thread of its own, beside steps."""
        answer = wire.WeightsChanged if isinstance(command, wire.ChangeWeights) else wire.Slept
        if self._changing is not None:
            connection.send(answer(command.query_id, "other weights are being prepared. Try again when they are served."))
            return
        prepared: Future[Any] = Future()

        def work() -> None:
            try:
                prepared.set_result(self._engine.prepare_weights(directory))
            except BaseException as error:
                prepared.set_exception(error)
            self.wake()

        self._changing = _ChangingWeights(connection, command, prepared)
        threading.Thread(target=work, name="weights", daemon=True).start()

    def _take_weights(self, changing: _ChangingWeights) -> None:
        """Compute with what was prepared, or tell why not."""
        self._changing = None
        command = changing.command
        made: tuple[Any, ...] = self._engine.fingerprint, 0.0, 0.0, 0  # where they were served already
        failed: str | None = None
        try:
            prepared = changing.prepared.result()
            if prepared is not None:
                made = self._engine.use_weights(prepared, isinstance(command, wire.ChangeWeights) and command.carry_on)
        except (TwostrokeError, OSError) as error:
            failed = str(error)
        except Exception as error:
            traceback.print_exc()
            failed = f"the weights could not be prepared ({type(error).__name__})."
        if isinstance(command, wire.Sleep):
            changing.connection.send(wire.Slept(command.query_id, failed))
        elif failed is not None:
            changing.connection.send(wire.WeightsChanged(command.query_id, failed))
        else:
            answer = wire.WeightsChanged(command.query_id, None, *made)
            answer.key = self._engine.weights_key
            changing.connection.send(answer)

    def _prepare(self, connection: Connection, command: wire.Add) -> None:
        """Hand the request to the engine, at once if nothing is to be done before. Its constraint is compiled in a thread,
        beside steps: some take a second. Its prompt may be computed by another engine."""
        compiled: Future[None] | None = None
        if command.params.constraint is not None:
            if self._compiler is None:
                self._compiler = ThreadPoolExecutor(1, "compile")
            compiled = self._compiler.submit(self._engine.prepare, command.params)
            compiled.add_done_callback(lambda _: self.wake())
        handover = None if self.borrower is None else self.borrower.ask(command)
        if compiled is None and handover is None:
            self._add(connection, command)
        else:
            self._preparing.append(_Preparing(connection, command, compiled, handover))

    def _add_prepared(self) -> None:
        """Hand the engine the requests for which everything has been done, or tell why not."""
        for each in self._preparing:
            if each.left_s is not None and each.left_s <= 1e-3:
                each.end()
        ready = [each for each in self._preparing if each.done]
        self._preparing = [each for each in self._preparing if each not in ready]
        for each in ready:
            answers = set(range(each.command.params.n))
            if each.aborted >= answers:
                continue
            self._add(each.connection, msgspec.structs.replace(each.command, timeout_s=each.left_s), each.compiled)
            key = f"{each.connection.number}:{each.command.request_id}"
            if each.handover is not None:
                if key in self._owners:
                    self._handed[key] = each.handover
                else:
                    each.end()
            if each.aborted and key in self._owners:
                for index in each.aborted:
                    self._engine.abort(key, index)
                self._ended(key, each.aborted)

    def _add(self, connection: Connection, command: wire.Add, compiled: Future[None] | None = None) -> None:
        key = f"{connection.number}:{command.request_id}"  # two connections may use the same id
        try:
            if compiled is not None:
                compiled.result()
            if key in self._owners:
                raise InputError(f"request id {command.request_id!r} is in use.")
            self._engine.add_request(
                key,
                command.prompt_ids,
                command.params,
                command.priority,
                command.client,
                command.timeout_s,
                command.lora,
            )
        except CapacityError as error:
            connection.send(wire.Failed(command.request_id, "capacity", str(error)))
        except TwostrokeError as error:
            connection.send(wire.Failed(command.request_id, "input", str(error)))
        else:
            connection.requests.add(key)
            self._owners[key] = Owner(connection, command.request_id, set(range(command.params.n)), command.whole)

    def _ended(self, key: str, indices: Iterable[int]) -> None:
        """Forget the answers ``indices`` to a request, which are finished or cancelled, and the request with its last one."""
        owner = self._owners[key]
        owner.open = owner.open.difference(indices)
        if not owner.open:
            del self._owners[key]
            owner.connection.requests.discard(key)
            self._let_go(key)

    def _let_go(self, key: str) -> None:
        """Drop what was handed over for a request and not loaded: it has ended."""
        handover = self._handed.pop(key, None)
        if handover is not None:
            handover.cancel()

    def _stats(self) -> dict[str, float]:
        values = stats_values(self._engine.stats())
        for side in (self.borrower, self.lender):
            if side is not None:
                values |= {name: float(value) for name, value in vars(side.counts()).items()}
        return values

    def _deliver(self, events: Iterable[Any]) -> None:
        outbox: dict[int, list[wire.TokenDelta]] = {}
        for event in events:
            owner = self._owners.get(event.request_id)
            if owner is None:
                continue  # aborted while the step was computed
            deltas = outbox.setdefault(owner.connection.number, [])
            for part in in_frames(wire_logprobs(event.prompt_logprobs) or []):
                deltas.append(wire.TokenDelta(owner.request_id, [], prompt_logprobs=part))
            if event.token_ids or event.finish_reason is not None:
                logprobs = wire_logprobs(event.logprobs)
                delta = owner.due(
                    wire.TokenDelta(
                        owner.request_id,
                        event.token_ids,
                        logprobs,
                        event.finish_reason,
                        event.index,
                        cached_tokens=event.cached_tokens,
                        embedding=None if event.embedding is None else event.embedding.tobytes(),
                        fingerprint=event.fingerprint,
                        started_s=event.started_s,
                    )
                )
                if delta is not None:
                    deltas.append(delta)
            if event.finish_reason is not None:
                self._ended(event.request_id, (event.index,))
        for number, deltas in outbox.items():
            for frame in in_frames(deltas):
                self._connections[number].send(wire.Tokens(frame))


def _parts(keys: list[bytes], n: int) -> Iterator[list[bytes]]:
    """``keys`` in parts of at most ``n``."""
    for i in range(0, len(keys), n):
        yield keys[i : i + n]


def stats_values(stats: Any) -> dict[str, float]:
    """The numbers of ``EngineStats``, by field name, and the most memory that this process has held."""
    values = {name: float(value) for name, value in vars(stats).items() if isinstance(value, int | float)}
    return values | {"peak_memory_bytes": peak_memory_bytes()}
