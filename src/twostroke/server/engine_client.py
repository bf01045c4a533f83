"""Starts, watches and restarts the engine process, and turns its frames into streams of tokens.

An engine is *lost* when its process ends, its connection closes, no heartbeat has come for ``heartbeat_timeout_s`` (longer
while it loads), or one turn of its loop takes longer than ``step_timeout_s``. Then every open stream gets an EngineLostError,
the process is killed if it still lives, and a new one is started after a growing pause. ``ready`` is False from then until the
new one has loaded, and also while a turn has already taken longer than ``heartbeat_timeout_s``: the engine may only be slow,
but it does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from twostroke.core.errors import CapacityError, EngineError, InputError, TwostrokeError
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.server import wire
from twostroke.server.kv_events import EnginePages
from twostroke.server.launch import EngineChild
from twostroke.server.token_stream import TokenStream

log = logging.getLogger("twostroke.server")

HEARTBEAT_TIMEOUT_S = 6.0
LOADING_TIMEOUT_S = 120.0
"""The heartbeat's timeout while the engine loads. Importing torch from a cold, busy disk can hold the interpreter, and with it
the heartbeat's thread, for longer than six seconds."""
STEP_TIMEOUT_S = 120.0
BACKOFF_S = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STEADY_S = 60.0
"""The back-off starts anew after an engine that lived this long."""
_TICK_S = 0.25


class EngineLostError(EngineError):
    """The engine process that held a request has ended or hangs."""


class NotReadyError(EngineError):
    """The engine is loading or being restarted."""


class _Channel(asyncio.Protocol):
    """One connection to one engine process."""

    def __init__(self, on_event: Callable[[wire.Event], None]) -> None:
        self._on_event = on_event
        self._reader = wire.FrameReader()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._reader.feed(data):
                self._on_event(wire.decode_event(payload))
        except wire.FrameError as error:
            self._end(f"it sent {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("its connection closed")

    def _end(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)
        if self.transport is not None:
            self.transport.close()

    def send(self, command: wire.Command) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(wire.encode(command))


class EngineClient:
    """Keeps one engine process running. ``launch`` starts one; ``first`` was started before this object could be made. Answers
    that nobody waits for token by token are held if ``holds``. ``rescue`` takes the streams of an engine that is lost and
    returns those for which nothing else can be done.

    Call `run` in a task of its own; it returns after `close`, or raises if the first engine fails to load.
    """

    def __init__(
        self,
        launch: Callable[[], EngineChild],
        first: EngineChild | None = None,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        step_timeout_s: float = STEP_TIMEOUT_S,
        adapters: Mapping[str, str] | None = None,
        holds: bool = False,
    ) -> None:
        self.info: wire.Ready | None = None
        self.rescue: Callable[[list[TokenStream]], list[TokenStream]] = list
        self.pages: EnginePages | None = None  # who is told what its cache holds
        self._holds = holds
        self._replacing = False
        self.adapters = dict(adapters or {})  # directories by name; every engine that is started gets them
        self.restarts = 0
        self._launch = launch
        self._child = first
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._step_timeout_s = step_timeout_s
        self._channel: _Channel | None = None
        self._loaded = asyncio.Event()
        self._closing = asyncio.Event()
        self._failure: wire.Failed | None = None
        self._last_beat = 0.0
        self._busy_s = 0.0
        self._streams: dict[tuple[str, int], TokenStream] = {}  # by request and index of the answer
        self._queries: dict[int, asyncio.Future[dict[str, float]]] = {}
        self._numbers = itertools.count()
        self._last_stats: dict[str, float] = {}
        self._changes: dict[int, asyncio.Future[str | None]] = {}
        self.weights: str | None = None  # directory of those that replaced the first ones
        self.relaunch: Callable[[str], EngineChild] | None = None  # starts an engine with the weights of a directory
        self.asleep = 0  # the level at which the engine sleeps
        self.wakes = False  # whether a request wakes it
        self._waking = asyncio.Lock()
        self.tags = False  # whether some answers have said which weights computed them
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._first_adapters: dict[int, str] = {}  # by query: those that a new engine has not answered for

    @property
    def fingerprints(self) -> set[str]:
        """Of what computes answers: its own, once it is known."""
        return {self.info.fingerprint} if self.info is not None and self.info.fingerprint else set()

    @property
    def pid(self) -> int | None:
        """Of the engine's process, if there is one."""
        return None if self._child is None else self._child.process.pid

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be worked on."""
        return not self.asleep and self._loaded.is_set() and self._busy_s < self._heartbeat_timeout_s

    @property
    def dozes(self) -> bool:
        """Whether it sleeps, and a request sent now would wake it."""
        return bool(self.asleep) and self.wakes and self._loaded.is_set()

    # Requests.

    def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        wake: asyncio.Event,
        priority: int = 0,
        client: str = "",
        timeout_s: float | None = None,
        whole: bool = False,
        lora: str | None = None,
    ) -> list[TokenStream]:
        """Hand a request to the engine, for the adapter ``lora`` if one is named, and return a stream for each of its
        ``params.n`` answers. If ``whole``, a stream gets the first token and then the others together. Raises NotReadyError
        while no engine is loaded."""
        if not self._loaded.is_set() or self._channel is None:
            raise NotReadyError("the engine is loading. Try again in a moment.")
        request_id = str(next(self._numbers))
        asked = wire.Add(request_id, prompt_ids, params, priority, client, timeout_s, whole, lora)
        self._channel.send(asked)
        held = self._holds and whole
        streams = [TokenStream(self, request_id, i, wake, asked, held) for i in range(params.n)]
        self._streams.update({(request_id, stream.index): stream for stream in streams})
        return streams

    def abort(self, stream: TokenStream) -> None:
        if self._streams.pop((stream.request_id, stream.index), None) is not None and self._channel is not None:
            self._channel.send(wire.Abort(stream.request_id, stream.index))

    def adopt(self, streams: list[TokenStream]) -> None:
        """Compute the unfinished answers to one request, of which nothing was taken and which no other engine computes. Raises
        NotReadyError while no engine is loaded."""
        asked = streams[0].asked
        if not self._loaded.is_set() or self._channel is None or asked is None:
            raise NotReadyError("the engine is loading. Try again in a moment.")
        request_id, left_s = str(next(self._numbers)), asked.timeout_s
        if left_s is not None:
            left_s = max(1e-3, left_s - (time.monotonic() - streams[0].asked_s))
        self._channel.send(msgspec.structs.replace(asked, request_id=request_id, timeout_s=left_s))
        for index in set(range(asked.params.n)).difference(stream.index for stream in streams):
            self._channel.send(wire.Abort(request_id, index))
        for stream in streams:
            stream.begin_again(self, request_id)
            self._streams[request_id, stream.index] = stream

    def forget(self, request_id: str, indices: list[int]) -> None:
        """Compute these answers no longer: another engine does."""
        for index in indices:
            if self._streams.pop((request_id, index), None) is not None and self._channel is not None:
                self._channel.send(wire.Abort(request_id, index))

    @property
    def streams(self) -> tuple[TokenStream, ...]:
        """Those of unfinished answers."""
        return tuple(self._streams.values())

    def rows(self) -> list[dict[str, float]]:
        """What ``/metrics`` shows of each engine, by the names of ``metrics.REPLICA_GAUGES``."""
        stats = self._last_stats
        known: dict[str, float] = {name: stats[name] for name in ("running", "waiting") if name in stats}
        if stats.get("pages_total"):
            known["kv_usage"] = stats["pages_used"] / stats["pages_total"]
        return [{"up": float(self.ready), "restarts": float(self.restarts), "in_flight": float(len(self._streams)), **known}]

    async def change_adapter(self, name: str, directory: str | None, timeout_s: float = 60.0) -> None:
        """Load the adapter in ``directory``, or with None unload it. Raises InputError if the engine refuses, NotReadyError
        while none is loaded, and EngineLostError if it is lost meanwhile or does not answer."""
        if not self._loaded.is_set() or self._channel is None:
            raise NotReadyError("the engine is loading. Try again in a moment.")
        query_id = next(self._numbers)
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._changes[query_id] = answer
        try:
            self._channel.send(wire.ChangeAdapter(query_id, name, directory))
            async with asyncio.timeout(timeout_s):
                error = await answer
        except TimeoutError:
            raise EngineLostError(f"the engine did not answer within {timeout_s:g} s.") from None
        finally:
            self._changes.pop(query_id, None)
        if error is not None:
            raise InputError(error)
        if directory is None:
            self.adapters.pop(name, None)
        else:
            self.adapters[name] = directory

    async def change_weights(self, directory: str, carry_on: bool) -> wire.WeightsChanged:
        """Let the engine compute with the weights in ``directory``, as every engine does that is started from then on. Raises
        InputError if the engine refuses, NotReadyError while none is loaded, and EngineLostError if it is lost meanwhile."""
        changed: wire.WeightsChanged = await self._ask(lambda query_id: wire.ChangeWeights(query_id, directory, carry_on))
        if changed.error is not None:
            raise InputError(changed.error, field="path")
        self.weights = directory
        self.asleep = 0
        if self.info is not None:
            self.info = msgspec.structs.replace(self.info, fingerprint=changed.fingerprint)
        return changed

    async def sleep(self, level: int, wakes: bool) -> wire.Slept:
        """Let the engine give memory back. ``wakes``: the next request wakes it, else `wake` alone does. Raises as
        `change_weights` does."""
        slept: wire.Slept = await self._ask(lambda query_id: wire.Sleep(query_id, level))
        if slept.error is not None:
            raise InputError(slept.error, field="level")
        self.asleep, self.wakes = level, wakes
        return slept

    async def wake(self) -> None:
        """Let a sleeping engine compute again. Raises as `change_weights` does."""
        async with self._waking:
            if not self.asleep:
                return
            woken: wire.Slept = await self._ask(lambda query_id: wire.Sleep(query_id, 0))
            if woken.error is not None:
                raise EngineError(woken.error)
            self.asleep = 0

    async def _ask(self, command: Callable[[int], wire.Command]) -> Any:
        """The engine's answer to a command with a query's number, however long it takes."""
        if not self._loaded.is_set() or self._channel is None:
            raise NotReadyError("the engine is loading. Try again in a moment.")
        query_id = next(self._numbers)
        self._asked[query_id] = asyncio.get_running_loop().create_future()
        try:
            self._channel.send(command(query_id))
            return await self._asked[query_id]
        finally:
            del self._asked[query_id]

    async def stats(self, timeout_s: float = 1.0) -> dict[str, float]:
        """The engine's counters, or the last known ones if it does not answer in time."""
        if self._channel is None or not self._loaded.is_set():
            return self._last_stats
        query_id = next(self._numbers)
        answer: asyncio.Future[dict[str, float]] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = answer
        try:
            self._channel.send(wire.AskStats(query_id))
            async with asyncio.timeout(timeout_s):
                self._last_stats = await answer
        except TimeoutError:
            pass
        finally:
            self._queries.pop(query_id, None)
        return self._last_stats

    # Supervision.

    async def run(self) -> None:
        """Keep an engine running until `close`. Raises TwostrokeError if the first one cannot load its model."""
        losses = 0
        ever_loaded = False
        try:
            while not self._closing.is_set():
                if self._child is None:
                    again = None if self.weights is None else self.relaunch
                    self._child = self._launch() if again is None else again(str(self.weights))
                started = time.monotonic()
                reason = await self._attend(self._child)
                was_loaded = self._loaded.is_set()
                ever_loaded = ever_loaded or was_loaded
                self._forget_engine(reason)
                if self._closing.is_set():
                    break
                if not ever_loaded:
                    raise self._load_error(reason)
                if self._replacing:
                    self._replacing = False
                    self.restarts += 1
                    continue
                if not was_loaded and self.weights is not None:
                    log.error("the weights in %s cannot be loaded: the first ones are served again.", self.weights)
                    self.weights = None
                losses = 1 if was_loaded and time.monotonic() - started > STEADY_S else losses + 1
                pause = BACKOFF_S[min(losses, len(BACKOFF_S)) - 1]
                log.error("engine lost: %s. Starting a new one in %.2g s.", reason, pause)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._closing.wait()
                self.restarts += 1
        finally:
            self._forget_engine("the server is stopping")

    async def wait_loaded(self) -> wire.Ready:
        await self._loaded.wait()
        assert self.info is not None
        return self.info

    async def replace(self) -> bool:
        """End the engine, and wait until another has loaded. Returns False if that one is lost before."""
        wanted = self.restarts + 1
        self._replacing = True
        if self._channel is not None:
            self._channel.send(wire.Shutdown())
        while self.restarts < wanted and not self._closing.is_set():
            await asyncio.sleep(_TICK_S / 10)
        while self.restarts == wanted and not self._loaded.is_set() and not self._closing.is_set():
            await asyncio.sleep(_TICK_S / 10)
        return self.restarts == wanted and self._loaded.is_set()

    def close(self) -> None:
        """End the engine; open streams fail. `run` returns soon after."""
        self._closing.set()
        if self._channel is not None:
            self._channel.send(wire.Shutdown())

    def kill(self) -> None:
        """End the engine's process without waiting for anything."""
        if self._child is not None:
            self._child.kill()

    async def _attend(self, child: EngineChild) -> str:
        """Connect to ``child`` and watch it; returns the reason why it is lost, or "closed"."""
        self._failure = None
        channel = await self._connect(child)
        if channel is None:
            return self._exit_reason(child)
        self._last_beat = time.monotonic()
        while True:
            before = time.monotonic()
            await asyncio.wait({channel.lost}, timeout=_TICK_S)
            now = time.monotonic()
            if now - before > 4 * _TICK_S:
                self._last_beat = now  # this process was stopped or starved, and heartbeats lie unread
            if channel.lost.done():
                return await self._reason_of_loss(child, channel)
            if self._closing.is_set() or self._replacing:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(2.0):
                        await asyncio.shield(channel.lost)
                return "closed" if self._closing.is_set() else "it is being replaced"
            if now - self._last_beat > (self._heartbeat_timeout_s if self._loaded.is_set() else LOADING_TIMEOUT_S):
                return f"no sign of life for {now - self._last_beat:.1f} s"
            if self._loaded.is_set() and self._busy_s > self._step_timeout_s:
                return f"one step has taken over {self._step_timeout_s:g} s"

    async def _connect(self, child: EngineChild) -> _Channel | None:
        """A channel as soon as the child listens; None if it ends first, or the server is closing."""
        loop = asyncio.get_running_loop()

        def made() -> _Channel:
            # Now: an engine may be ready before this task goes on, and is sent its adapters then.
            self._channel = _Channel(self._on_event)
            return self._channel

        while child.process.poll() is None and not self._closing.is_set():
            try:
                _, channel = await loop.create_unix_connection(made, str(child.socket_path))
                child.hide_socket()
                return channel
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(0.02)
        return None

    async def _reason_of_loss(self, child: EngineChild, channel: _Channel) -> str:
        for _ in range(50):  # an engine that has closed its socket ends at once; its exit code says more than the socket
            if child.process.poll() is not None:
                return self._exit_reason(child)
            await asyncio.sleep(0.01)
        return channel.lost.result()

    def _exit_reason(self, child: EngineChild) -> str:
        code = child.process.poll()
        if code is None:
            return "closed"
        return f"its process was ended by signal {-code}" if code < 0 else f"its process exited with {code}"

    def _load_error(self, reason: str) -> TwostrokeError:
        failure = self._failure
        if failure is None:
            return EngineError(f"the engine did not start: {reason}. Its messages are above.")
        return InputError(failure.message) if failure.kind == "input" else EngineError(failure.message)

    def _forget_engine(self, reason: str) -> None:
        """Kill what is left of the engine and fail everything that waited for it."""
        if self._child is not None:
            self._child.kill()
        self._child = None
        if self._channel is not None and self._channel.transport is not None:
            self._channel.transport.abort()
        self._channel = None
        if self.pages is not None:
            self.pages.forget()
        self._loaded.clear()
        self._busy_s = 0.0
        streams, self._streams = list(self._streams.values()), {}
        if not self._closing.is_set():
            streams = self.rescue(streams)
        for stream in streams:
            stream.fail(EngineLostError("the engine was lost while it worked on this request and is starting again."))
        for answer in self._queries.values():
            if not answer.done():
                answer.set_result(self._last_stats)
        for change in self._changes.values():
            if not change.done():
                change.set_exception(EngineLostError("the engine was lost while it changed an adapter and is starting again."))
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(EngineLostError("the engine was lost meanwhile and is starting again."))
        if streams:
            log.error("%d requests failed: %s.", len(streams), reason)

    def _on_event(self, event: wire.Event) -> None:
        match event:
            case wire.Tokens(deltas):
                for delta in deltas:
                    self._on_delta(delta)
            case wire.Heartbeat(_, busy_s):
                self._last_beat = time.monotonic()
                self._busy_s = busy_s
            case wire.Ready():
                self.info = event
                self.asleep = 0
                self._busy_s = 0.0
                if self.pages is not None and self._channel is not None:
                    self.pages.begin(event.page_tokens)
                    self._channel.send(wire.WatchBlocks(pages=True))
                self._first_adapters = {next(self._numbers): name for name in self.adapters}
                for query_id, name in self._first_adapters.items():
                    if self._channel is not None:
                        self._channel.send(wire.ChangeAdapter(query_id, name, self.adapters[name]))
                if not self._first_adapters:
                    self._loaded.set()
            case wire.Blocks():
                if self.pages is not None:
                    self.pages.change(event)
            case wire.AdapterChanged(query_id, error, _, _):
                self._on_adapter(query_id, error)
            case wire.WeightsChanged(query_id) | wire.Slept(query_id):
                if self.pages is not None and isinstance(event, wire.WeightsChanged) and event.error is None:
                    self.pages.forget()  # what the weights before computed is not found any more
                asked = self._asked.get(query_id)
                if asked is not None and not asked.done():
                    asked.set_result(event)
            case wire.StatsReport(query_id, values):
                answer = self._queries.get(query_id)
                if answer is not None and not answer.done():
                    answer.set_result(values)
            case wire.Failed(request_id, kind, message):
                self._on_failed(request_id, kind, message)

    def _on_adapter(self, query_id: int, error: str | None) -> None:
        change = self._changes.get(query_id)
        if change is not None and not change.done():
            change.set_result(error)
        name = self._first_adapters.pop(query_id, None)
        if name is None:
            return
        if error is not None and self.restarts == 0:  # asked for when the server was started
            self._failure = wire.Failed(None, "input", error)
            self.kill()
            return
        if error is not None:
            log.error("adapter %r is not served any more: %s", name, error)
            self.adapters.pop(name, None)
        if not self._first_adapters and self._failure is None:
            self._loaded.set()

    def _on_delta(self, delta: wire.TokenDelta) -> None:
        stream = self._streams.get((delta.request_id, delta.index))
        if stream is None:
            return  # aborted; these tokens were on their way
        if delta.finish_reason is not None:
            stream.finished = True
            del self._streams[delta.request_id, delta.index]
        stream.push(delta)

    def _on_failed(self, request_id: str | None, kind: str, message: str) -> None:
        if request_id is None:
            self._failure = wire.Failed(None, kind, message)  # type: ignore[arg-type]
            return
        errors: dict[str, type[TwostrokeError]] = {"input": InputError, "capacity": CapacityError}
        for name in [name for name in self._streams if name[0] == request_id]:
            self._streams.pop(name).fail(errors.get(kind, EngineError)(message))
