"""Several engines of one model, used as one: requests go where their first token is predicted to come first (``routing``).

An engine that is lost is replaced by its `EngineClient`. Requests of which nothing was passed on go to another engine, once; a
second loss is an error, because the request itself may be what ends engines. The same is done for the requests of an engine
that answers no more (a step takes longer than a heartbeat's timeout), long before that engine is given up. What an engine sends
of a request that it has lost is dropped, so nothing is answered twice.

A whole answer is passed on when it is complete, so one that is half computed can still go to another engine. `roll` replaces
the engines one after another, each when it has finished what it had, while the others take what is new.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from twostroke.core.errors import EngineError, TwostrokeError
from twostroke.core.policy import TOKEN_BUDGET
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.server import wire
from twostroke.server.engine_client import HEARTBEAT_TIMEOUT_S, STEP_TIMEOUT_S, EngineClient, NotReadyError
from twostroke.server.launch import EngineChild
from twostroke.server.routing import Known, Pace, first_token_s
from twostroke.server.token_stream import TokenStream

log = logging.getLogger("twostroke.server")

LOOK_S = 1.0
"""Time between two looks at the engines' counters."""
DRAIN_S = 90.0
"""Longest time that an engine gets to finish what it has before it is replaced."""
_TICK_S = 0.1


class Replica(EngineClient):
    """One of the engines, and what is known of it."""

    def __init__(
        self,
        launch: Callable[[], EngineChild],
        first: EngineChild | None,
        adapters: Mapping[str, str],
        timeouts: tuple[float, float],
    ) -> None:
        super().__init__(launch, first, *timeouts, adapters=adapters, holds=True)
        self.known = Known()
        self.draining = False
        self.last_turn = -1
        self.uncached: dict[TokenStream, int] = {}  # prompt tokens to compute, by the first stream of requests without a token
        self.counts = dict.fromkeys(("routed", "taken_over", "known_tokens", "predicted_ttft_s", "measured_ttft_s"), 0.0)

    @property
    def takes(self) -> bool:
        """Whether requests are sent to it."""
        return self.ready and not self.draining

    @property
    def stalled(self) -> bool:
        """Whether it has loaded and answers no more."""
        return self._loaded.is_set() and not self.ready

    def first_token_s(self, uncached: int, pace: Pace, budget: int) -> float:
        """Predicted seconds until a prompt of which ``uncached`` tokens must be computed has its first token."""
        self.uncached = {stream: n for stream, n in self.uncached.items() if stream.first_s is None and not stream.finished}
        decoding = sum(stream.first_s is not None for stream in self.streams)
        busy_s = self._busy_s if self._streams else 0.0
        return first_token_s(pace, sum(self.uncached.values()), uncached, decoding, budget, busy_s)

    def follow(self, stream: TokenStream, uncached: int, predicted_s: float) -> None:
        """Count the request of ``stream``, its first answer's: as waiting until its first token comes, and then how long that
        took beside what was predicted."""
        sent_s = time.perf_counter()

        def first(now_s: float) -> None:
            self.counts["predicted_ttft_s"] += predicted_s
            self.counts["measured_ttft_s"] += now_s - sent_s

        self.uncached[stream] = uncached
        stream.on_first = first

    def requests(self) -> list[list[TokenStream]]:
        """The streams of unfinished answers, by request."""
        found: dict[str, list[TokenStream]] = {}
        for stream in self.streams:
            found.setdefault(stream.request_id, []).append(stream)
        return list(found.values())

    def rows(self) -> list[dict[str, float]]:
        return [row | {"up": float(self.takes)} | self.counts for row in super().rows()]

    def _on_event(self, event: wire.Event) -> None:
        match event:
            case wire.Blocks(stored, removed):
                self.known.change(stored, removed)
            case wire.Ready():
                self.known.forget()
                if self._channel is not None and self.pages is None:  # else it is told all the more
                    self._channel.send(wire.WatchBlocks())
            case wire.WeightsChanged(_, None):
                self.known.weights = event.key
            case wire.AdapterChanged(_, None, name, key) if key:
                self.known.adapters[name] = key
        super()._on_event(event)


class Replicas:
    """The engines. ``launches`` start one each; ``first`` is the first one's, started before this object could be made. The
    others start when it has loaded: it has then left its packed weights, which all map. ``budget``: tokens of a step. With
    ``separate_prefixes`` an engine finds only prefixes that the same client has sent."""

    def __init__(
        self,
        launches: Sequence[Callable[[], EngineChild]],
        first: EngineChild | None = None,
        adapters: Mapping[str, str] | None = None,
        budget: int = TOKEN_BUDGET,
        separate_prefixes: bool = False,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        step_timeout_s: float = STEP_TIMEOUT_S,
    ) -> None:
        timeouts = heartbeat_timeout_s, step_timeout_s
        self.replicas = [Replica(launch, None if i else first, adapters or {}, timeouts) for i, launch in enumerate(launches)]
        self.pace = Pace()
        self._adapters = dict(adapters or {})
        self._budget = budget
        self._separate = separate_prefixes
        self._turns = itertools.count()
        self._closing = asyncio.Event()
        self._rolling: asyncio.Task[None] | None = None
        for replica in self.replicas:
            replica.rescue = self._rescued

    # What the service sees of one engine.

    @property
    def info(self) -> wire.Ready | None:
        """The first one's, with the shortest of the contexts and the sum of the caches of all that have loaded."""
        known = [replica.info for replica in self.replicas if replica.info is not None]
        if not known:
            return None
        cache = sum(info.kv_cache_bytes for info in known)
        return msgspec.structs.replace(known[0], max_model_len=min(i.max_model_len for i in known), kv_cache_bytes=cache)

    @property
    def fingerprints(self) -> set[str]:
        """Several while engines are being replaced by others that compute otherwise."""
        return set().union(*(replica.fingerprints for replica in self.replicas))

    @property
    def adapters(self) -> dict[str, str]:
        """Those that every engine serves."""
        return {name: path for name, path in self._adapters.items() if all(name in each.adapters for each in self.replicas)}

    @property
    def restarts(self) -> int:
        return sum(replica.restarts for replica in self.replicas)

    @property
    def ready(self) -> bool:
        return any(replica.takes for replica in self.replicas)

    @property
    def streams(self) -> tuple[TokenStream, ...]:
        return tuple(stream for replica in self.replicas for stream in replica.streams)

    def rows(self) -> list[dict[str, float]]:
        return [row for replica in self.replicas for row in replica.rows()]

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
        """As `EngineClient.submit`, to the engine whose first token is predicted to come first."""
        replica, uncached, predicted_s = self._choose(prompt_ids, client, lora)
        streams = replica.submit(prompt_ids, params, wake, priority, client, timeout_s, whole, lora)
        replica.counts["routed"] += 1
        replica.counts["known_tokens"] += len(prompt_ids) - uncached
        replica.follow(streams[0], uncached, predicted_s)
        return streams

    async def change_adapter(self, name: str, directory: str | None) -> None:
        """As `EngineClient.change_adapter`, in every engine; one that loads meanwhile gets it when it has loaded. If one
        refuses, none has it."""
        loaded = [replica for replica in self.replicas if replica.ready]
        if not loaded:
            raise NotReadyError("the engines are loading. Try again in a moment.")
        done: list[Replica] = []
        try:
            for replica in loaded:
                await replica.change_adapter(name, directory)
                done.append(replica)
        except TwostrokeError:
            if directory is not None:
                for replica in done:
                    with contextlib.suppress(TwostrokeError):
                        await replica.change_adapter(name, None)
            raise
        for replica in self.replicas:
            if directory is None:
                replica.adapters.pop(name, None)
            else:
                replica.adapters[name] = directory
        if directory is None:
            self._adapters.pop(name, None)
        else:
            self._adapters[name] = directory

    @property
    def weights(self) -> str | None:
        return self.replicas[0].weights

    @property
    def tags(self) -> bool:
        return any(replica.tags for replica in self.replicas)

    @property
    def asleep(self) -> int:
        """The level at which all sleep."""
        return min(replica.asleep for replica in self.replicas)

    @property
    def dozes(self) -> bool:
        return any(replica.dozes for replica in self.replicas)

    async def change_weights(self, directory: str, carry_on: bool) -> wire.WeightsChanged:
        """As `EngineClient.change_weights`, in one engine after another, while the others serve. If the first refuses, nothing
        has changed; another that cannot is started anew with them."""
        if not all(replica.info is not None and replica.takes for replica in self.replicas) and not self.asleep:
            raise NotReadyError("not all engines are there. Try again when they have loaded.")
        changed: list[wire.WeightsChanged] = []
        for i, replica in enumerate(self.replicas):
            try:
                changed.append(await replica.change_weights(directory, carry_on))
            except TwostrokeError as error:
                if not changed:
                    raise
                log.error("engine %d is started anew with the new weights: %s", i, error)
                replica.weights = directory
                replica.kill()
        first = changed[0]
        pause_s, prepare_s = max(each.pause_s for each in changed), sum(each.prepare_s for each in changed)
        finishing = sum(each.finishing for each in changed)
        return msgspec.structs.replace(first, pause_s=pause_s, prepare_s=prepare_s, finishing=finishing)

    async def sleep(self, level: int, wakes: bool) -> wire.Slept:
        """As `EngineClient.sleep`, of all. If one refuses, none sleeps."""
        freed = 0
        try:
            for replica in self.replicas:
                freed += (await replica.sleep(level, wakes)).freed_bytes
        except TwostrokeError:
            await self.wake()
            raise
        return wire.Slept(0, None, freed)

    async def wake(self) -> None:
        """As `EngineClient.wake`, of all that sleep."""
        for replica in self.replicas:
            await replica.wake()

    async def stats(self) -> dict[str, float]:
        """The sums of the engines' counters; of an expert's load the largest."""
        total: dict[str, float] = {}
        for values in await asyncio.gather(*(replica.stats() for replica in self.replicas)):
            for name, value in values.items():
                total[name] = max(total.get(name, 0.0), value) if name == "expert_load" else total.get(name, 0.0) + value
        return total

    async def run(self) -> None:
        """Keep all engines running until `close`. Raises TwostrokeError if the first of any cannot load its model."""
        tasks = [asyncio.create_task(self._run_one(i)) for i in range(len(self.replicas))]
        watch = asyncio.create_task(self._watch())
        try:
            await asyncio.gather(*tasks)
        finally:
            self.close()
            for task in (watch, *tasks, *filter(None, [self._rolling])):
                task.cancel()
            await asyncio.gather(watch, *tasks, *filter(None, [self._rolling]), return_exceptions=True)

    async def wait_loaded(self) -> wire.Ready:
        """Wait until all have loaded."""
        for replica in self.replicas:
            await replica.wait_loaded()
        assert self.info is not None
        return self.info

    def close(self) -> None:
        self._closing.set()
        for replica in self.replicas:
            replica.close()

    def kill(self) -> None:
        for replica in self.replicas:
            replica.kill()

    # Keeping them in order.

    def roll(self) -> None:
        """Begin to replace the engines one after another. Does nothing while that is going on."""
        if self._rolling is None or self._rolling.done():
            self._rolling = asyncio.create_task(self._roll())

    async def _roll(self) -> None:
        for i, replica in enumerate(self.replicas):
            while not any(other.takes for other in self.replicas if other is not replica):
                await asyncio.sleep(_TICK_S)
            replica.draining = True
            try:
                log.info("engine %d is being replaced: it finishes %d answers first.", i, len(replica.streams))
                deadline = time.monotonic() + DRAIN_S
                while replica.streams and time.monotonic() < deadline:
                    await asyncio.sleep(_TICK_S)
                if not await replica.replace():
                    log.error("engine %d could not be replaced. The others go on as they are.", i)
                    return
            finally:
                replica.draining = False
        log.info("all %d engines were replaced.", len(self.replicas))

    async def _run_one(self, i: int) -> None:
        if i > 0:
            waits = [asyncio.create_task(self.replicas[0].wait_loaded()), asyncio.create_task(self._closing.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in waits:
                    task.cancel()
        if not self._closing.is_set():
            await self.replicas[i].run()

    async def _watch(self) -> None:
        looked_s = 0.0
        while True:
            await asyncio.sleep(_TICK_S)
            for replica in self.replicas:
                if replica.stalled:
                    self._move(replica)
            if time.monotonic() - looked_s > LOOK_S:
                looked_s = time.monotonic()
                self.pace.look(await self.stats())

    def _choose(self, prompt_ids: Sequence[int], client: str, lora: str | None) -> tuple[Replica, int, float]:
        """The engine, how many tokens of the prompt it must compute, and in how many seconds it is predicted to have the first
        token. Of engines that are predicted alike the one with fewer answers is taken, then the one that had its turn before.
        Raises NotReadyError if none takes requests."""
        chosen: tuple[Replica, int, float] | None = None
        least: tuple[float, int, int] | None = None
        for replica in self.replicas:
            if not replica.takes or replica.info is None:
                continue
            owner = client if self._separate else None
            cached = replica.known.cached_tokens(prompt_ids, replica.info.page_tokens, owner, lora)
            uncached = len(prompt_ids) - cached
            predicted_s = replica.first_token_s(uncached, self.pace, self._budget)
            rank = predicted_s, len(replica.streams), replica.last_turn
            if least is None or rank < least:
                least, chosen = rank, (replica, uncached, predicted_s)
        if chosen is None:
            raise NotReadyError("the engines are loading. Try again in a moment.")
        chosen[0].last_turn = next(self._turns)
        return chosen

    def _rescued(self, streams: Iterable[TokenStream]) -> list[TokenStream]:
        """Send the requests of a lost engine to others. Returns the streams of those that cannot be sent."""
        requests: dict[str, list[TokenStream]] = {}
        for stream in streams:
            requests.setdefault(stream.request_id, []).append(stream)
        return [stream for request in requests.values() if not self._send_elsewhere(request) for stream in request]

    def _move(self, stalled: Replica) -> None:
        """Send elsewhere what ``stalled`` has, as far as nothing of it was passed on and another engine takes it."""
        for request in stalled.requests():
            old = request[0].request_id
            if self._send_elsewhere(request):
                stalled.forget(old, [stream.index for stream in request])

    def _send_elsewhere(self, request: list[TokenStream]) -> bool:
        """Whether another engine computes the request now. It does so once at most, and only if nothing was passed on."""
        asked = request[0].asked
        if self._closing.is_set() or asked is None or any(s.asked is None or s.retried for s in request):
            return False
        try:
            replica, uncached, predicted_s = self._choose(asked.prompt_ids, asked.client, asked.lora)
            replica.adopt(request)
        except EngineError:
            return False
        replica.counts["taken_over"] += 1
        replica.follow(request[0], uncached, predicted_s)
        return True
