"""Several models behind one address, of which so many are loaded as a memory budget holds.

A model is loaded when a request names it. If the budget would be exceeded, the least recently used model without requests makes
room. It is put to sleep where that is enough: its process stays, without weights and cache, and wakes faster than another
starts. Otherwise its process is ended, as is the least recently used of those that sleep before another one has to.

A model with requests under way is never ended. Where all that are loaded are busy, the least recently used one takes no further
requests once it has been loaded for ``turn_s``, finishes what it has, and makes room. Loads happen one after another, in the
order in which they were asked for, so every model's turn comes.

The bytes of a model are predicted before it is first loaded (``model_memory``) and corrected by what its process is seen to
hold."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from twostroke.core.errors import InputError, TwostrokeError
from twostroke.core.units import format_bytes, format_seconds
from twostroke.server import wire
from twostroke.server.admission import MAX_RETRY_AFTER_S
from twostroke.server.callers import Caller
from twostroke.server.engine_client import EngineClient
from twostroke.server.errors import ApiError, not_ready
from twostroke.server.model_memory import ModelMemory, resident_bytes
from twostroke.server.service import Service
from twostroke.server.split import Rateable, Split

log = logging.getLogger("twostroke.server")

MODEL_WAIT_S = 60.0
"""Longest time that a request waits for its model, unless it is set otherwise."""
TURN_S = 10.0
"""A busy model keeps its memory at least so long: without it two busy models would take turns at every request."""
AGAIN_S = 30.0
"""A model that could not be loaded is tried again by the first request after so long."""
SLEEP_TRIES, SLEEP_AGAIN_S = 5, 0.05
"""How often an engine is asked to sleep that still computes the last step of a request whose client has gone, and after so
long."""
LOOK_S = 1.0
"""Time between two looks at what the processes hold."""

State = Literal["unloaded", "loading", "loaded", "leaving", "asleep", "failed"]


class Member:
    """One of the models. ``client`` is of its first engine, which starts when it is run, and ``connect`` makes those of later
    engines, with the adapters by name that they are to have. ``load_s``: planned seconds of a load. ``on_first`` hears of its
    first load, and of how long that took."""

    def __init__(
        self,
        service: Service,
        client: EngineClient,
        connect: Callable[[Mapping[str, str]], EngineClient],
        memory: ModelMemory,
        load_s: float | None = None,
        on_first: Callable[[wire.Ready, float], None] | None = None,
    ) -> None:
        self.on_first = on_first
        self.client = client
        self.service, self.memory, self.planned_load_s = service, memory, load_s
        self.name = service.names[0]
        self.state: State = "unloaded"
        self.requests = 0  # under way
        self.last_turn = -1
        self.loaded_s = 0.0  # when
        self.load_s: float | None = None  # what the last load took
        self.wake_s: float | None = None  # what it took to wake it
        self.loads = self.wakes = self.evictions = 0
        self.failure, self.failed_s = "", 0.0
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.ended: asyncio.Task[None] | None = None  # of its engine
        self.loading: asyncio.Task[None] | None = None
        self.ending: asyncio.Task[None] | None = None
        self.sleeps = False  # whether it is enough that it sleeps when it leaves
        self.is_asleep = False
        self.began_s = 0.0  # of the load under way
        self.stats: dict[str, float] = {}
        self._connect = connect

    @property
    def held_bytes(self) -> float:
        """What it takes now, as far as is known."""
        if self.state in ("asleep", "leaving") and self.is_asleep:
            return self.memory.asleep
        return self.memory.bytes if self.state in ("loading", "loaded", "leaving") else 0.0

    @property
    def can_sleep(self) -> bool:
        """Whether its engine can give its weights back: one that has adapters does not."""
        return self.client.ready and not self.client.adapters

    def connected(self) -> EngineClient:
        """The client of an engine that starts now, in the place of the last one."""
        if self.loads:
            self.client = self.service.client = self._connect(self.client.adapters)
        self.loads += 1
        return self.client

    def grant(self) -> None:
        """Let all that wait for it go on, each with the model held for it."""
        while self.waiting:
            waiter = self.waiting.popleft()
            if not waiter.done():
                self.requests += 1
                waiter.set_result(None)

    def refuse(self, error: ApiError) -> None:
        while self.waiting:
            waiter = self.waiting.popleft()
            if not waiter.done():
                waiter.set_exception(error)


class ModelPool:
    """The ``members``, the first of which is loaded at the start, within ``budget_bytes``. ``split``: an A/B test of two."""

    def __init__(
        self,
        members: Sequence[Member],
        budget_bytes: float,
        wait_s: float = MODEL_WAIT_S,
        split: Split | None = None,
        turn_s: float = TURN_S,
        resident: Callable[[int], float | None] = resident_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.members, self.budget_bytes, self.wait_s, self.split = list(members), budget_bytes, wait_s, split
        self.rateable = Rateable()
        self._turn_s, self._resident, self._clock = turn_s, resident, clock
        self._turns = itertools.count()
        self._wanted: deque[Member] = deque()
        self._changed = asyncio.Event()
        self._closing = asyncio.Event()
        self._opened = asyncio.Event()
        self._failed_first: TwostrokeError | None = None
        self._load_ratio = 1.0  # of measured to planned seconds, of the last load that was planned
        for member in self.members:
            member.service.pool = self

    # What routes ask.

    @property
    def names(self) -> tuple[str, ...]:
        """Of all models and adapters."""
        return tuple(name for member in self.members for name in member.service.own_names)

    @property
    def ready(self) -> bool:
        """Whether a request that is sent now would be answered, if need be after a load."""
        return self._opened.is_set() and not self._closing.is_set()

    @property
    def restarts(self) -> int:
        return sum(member.client.restarts for member in self.members)

    @property
    def held_bytes(self) -> float:
        return sum(member.held_bytes for member in self.members)

    def member_of(self, name: str | None, param: str = "model") -> Member:
        """The model that is called ``name``, or that has the adapter; the first if no name is given. Raises ApiError 404."""
        if name is None:
            return self.members[0]
        self.members[0].service.require_model(name, param)
        return next(member for member in self.members if name in member.service.own_names)

    async def serve(self, name: str | None, caller: Caller, body: bytes) -> Service:
        """The service that answers a request for ``name``: of that model, or of the arm of the test that the client belongs to.
        The model stays loaded until ``caller.visit`` ends. Raises ApiError."""
        member = self.member_of(name)
        visit, split = caller.visit, self.split
        assert visit is not None
        if split is not None and member is self.members[0] and (name is None or name in member.service.names):
            visit.arm, visit.unit = split.arm_of(caller, body)
            member = self.member_of(visit.arm)
        await self.hold(member, caller)
        visit.holds.callback(self.release, member)
        return member.service

    async def hold(self, member: Member, caller: Caller) -> None:
        """Wait until the model is loaded, and keep it so until `release`. Raises ApiError 503 if that takes too long, or if it
        cannot be loaded."""
        if self._closing.is_set() or member.service.draining:
            raise not_ready(retry_after_s=5)
        member.last_turn = next(self._turns)
        if member.state == "loaded":
            member.requests += 1
            return
        if member.state == "failed" and self._clock() - member.failed_s < AGAIN_S:
            raise self._not_loaded(member)
        self._want(member)
        left_s = self.wait_s if caller.read_timeout_s is None else min(self.wait_s, caller.read_timeout_s)
        predicted_s = self.predicted_s(member)
        if predicted_s > left_s:
            raise self._too_long(member, predicted_s, left_s)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with member.service.place(caller):
            member.waiting = deque(each for each in (*member.waiting, waiter) if not each.done())
            try:
                async with asyncio.timeout(left_s):
                    await waiter
            except BaseException as error:
                waiter.cancel()
                if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                    self.release(member)  # it came at the same moment
                if isinstance(error, TimeoutError):
                    raise self._too_long(member, self.predicted_s(member), left_s) from None
                raise

    def release(self, member: Member) -> None:
        """A request for it has ended."""
        member.requests -= 1
        self._changed.set()

    def predicted_s(self, member: Member) -> float:
        """Seconds until it is loaded: the loads before its own, its own, and the rest of the turn of a busy model that has to
        make room. How long that one's last requests take is not known."""
        now_s = self._clock()
        seconds = sum(max(0.0, self._load_s(each) - (now_s - each.began_s)) for each in self.members if each.state == "loading")
        if member.state == "loading":
            return seconds
        ahead = list(itertools.takewhile(lambda each: each is not member, self._wanted))
        seconds += sum(map(self._load_s, (*ahead, member)))
        idle = sum(each.held_bytes for each in self.members if not each.requests and each.state in ("loaded", "asleep"))
        if self.held_bytes - idle + member.memory.bytes > self.budget_bytes:
            busy = [each for each in self.members if each.state == "loaded" and each.requests]
            seconds += max(0.0, min((each.loaded_s + self._turn_s - now_s for each in busy), default=0.0))
        return seconds

    def _load_s(self, member: Member) -> float:
        """What its last load took, or else what is planned; of a machine that was not calibrated, what others' took."""
        if member.state == "asleep" and member.wake_s is not None:
            return member.wake_s
        if member.load_s is not None:
            return member.load_s
        if member.planned_load_s is not None:
            return member.planned_load_s * self._load_ratio
        return max((each.load_s for each in self.members if each.load_s is not None), default=0.0)

    def _too_long(self, member: Member, predicted_s: float, left_s: float) -> ApiError:
        message = (
            f"model {member.name!r} is being loaded, which is predicted to take {format_seconds(predicted_s)} more; this "
            f"request waits {format_seconds(left_s)}. Try again then."
        )
        wait_s = min(MAX_RETRY_AFTER_S, max(1.0, predicted_s))
        headers = {"retry-after": str(-int(-wait_s // 1)), "retry-after-ms": str(round(1000 * wait_s))}
        return ApiError(503, message, "model", "model_loading", headers)

    def _not_loaded(self, member: Member) -> ApiError:
        wait_s = max(1.0, AGAIN_S - (self._clock() - member.failed_s))
        message = f"model {member.name!r} cannot be loaded: {member.failure}"
        return ApiError(503, message, "model", "model_not_loaded", {"retry-after": str(-int(-wait_s // 1))})

    def _want(self, member: Member) -> None:
        if member not in self._wanted and member.state != "loading":
            self._wanted.append(member)
            self._changed.set()

    # What a server does with one engine, it does with all.

    async def run(self) -> None:
        """Load and end models until `close`. Raises TwostrokeError if the first one cannot be loaded at the start."""
        self._want(self.members[0])
        looked_s = self._clock()
        try:
            while not self._closing.is_set():
                self._changed.clear()
                if self._clock() - looked_s >= LOOK_S:
                    self._look()
                    looked_s = self._clock()
                self._advance()
                if self._failed_first is not None:
                    raise self._failed_first
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S / 4):
                        await self._changed.wait()
        finally:
            self._closing.set()
            for member in self.members:
                member.client.close()
                member.refuse(not_ready(retry_after_s=5))
            tasks = [task for member in self.members for task in (member.ended, member.loading, member.ending)]
            await asyncio.gather(*filter(None, tasks), return_exceptions=True)

    async def wait_loaded(self) -> wire.Ready:
        """Wait until the first model is loaded."""
        await self._opened.wait()
        info = self.members[0].client.info
        assert info is not None
        return info

    def close(self) -> None:
        self._closing.set()
        self._changed.set()

    def kill(self) -> None:
        for member in self.members:
            member.client.kill()

    def last_stats(self, service: Service) -> dict[str, float]:
        """The counters of a model's engine at the last look at `stats`; none where it is not loaded."""
        return next((member.stats for member in self.members if member.service is service), {})

    async def stats(self) -> dict[str, float]:
        """The sums of the counters of the engines that are loaded."""
        total: dict[str, float] = {}
        for member in self.members:
            member.stats = await member.client.stats() if member.state in ("loaded", "leaving") else {}
        for values in [member.stats for member in self.members]:
            for name, value in values.items():
                total[name] = max(total.get(name, 0.0), value) if name == "expert_load" else total.get(name, 0.0) + value
        return total

    def rows(self) -> Iterator[tuple[str, dict[str, float]]]:
        """What ``/metrics`` shows of each model, by the names of ``metrics.MODEL_GAUGES``."""
        for member in self.members:
            yield (
                member.name,
                {
                    "loaded": float(member.state in ("loaded", "leaving")),
                    "asleep": float(member.state == "asleep"),
                    "bytes": member.held_bytes,
                    "predicted_bytes": member.memory.predicted,
                    "under_way": float(member.requests),
                    "waiting": float(sum(not waiter.done() for waiter in member.waiting)),
                    "loads": float(member.loads),
                    "wakes": float(member.wakes),
                    "evictions": float(member.evictions),
                    "load_s": member.load_s or 0.0,
                    "wake_s": member.wake_s or 0.0,
                    **member.service.totals,
                },
            )

    # Making room.

    def _look(self) -> None:
        """Correct the bytes of what is loaded by what its process holds."""
        for member in self.members:
            pid = member.client.pid
            if member.state in ("loaded", "leaving") and pid is not None:
                member.memory.seen(self._resident(pid))
            if member.state == "asleep" and not member.client.asleep:
                member.state, member.sleeps, member.is_asleep = (
                    "leaving",
                    False,
                    False,
                )  # its process was lost, and another has loaded all

    def _advance(self) -> None:
        """Do what can be done now for the budget, and for the model that was asked for first."""
        for member in self.members:
            if member.state == "leaving" and not member.requests and member.ending is None:
                member.ending = asyncio.create_task(self._leave(member))
        if self.held_bytes > self.budget_bytes and not self._leaves:  # one holds more than was thought
            self._make_room(self.held_bytes - self.budget_bytes)
        while self._wanted and not any(member.state == "loading" for member in self.members):
            member = self._wanted[0]
            if member.state == "loaded":
                self._wanted.popleft()
                member.grant()
                continue
            if member.state == "leaving":
                return  # it has to have left before it can come back
            size, more = member.memory.bytes, member.memory.bytes - member.held_bytes
            if size > self.budget_bytes:
                self._wanted.popleft()
                self._fail(member, f"it takes {format_bytes(size)}, and all models together may take "
                                   f"{format_bytes(self.budget_bytes)} (--models-memory-gib). Raise that.")  # fmt: skip
                continue
            if self.held_bytes + more > self.budget_bytes:
                if not self._leaves:
                    self._make_room(self.held_bytes + more - self.budget_bytes, self._turn_s, member)
                return
            self._wanted.popleft()
            self._load(member)

    @property
    def _leaves(self) -> bool:
        return any(member.state == "leaving" for member in self.members)

    def _make_room(self, missing: float, turn_s: float = 0.0, wanted: Member | None = None) -> None:
        """Let one model leave, so that ``missing`` bytes less are held, or fewer are missing: the least recently used of those
        that sleep; or of those without requests; or of the others that have been loaded for ``turn_s``."""
        now_s = self._clock()
        others = sorted((each for each in self.members if each is not wanted), key=lambda each: each.last_turn)
        asleep = [each for each in others if each.state == "asleep"]
        idle = [each for each in others if each.state == "loaded" and not each.requests]
        turned = [each for each in others if each.state == "loaded" and now_s - each.loaded_s >= turn_s]
        for member in (*asleep, *idle, *turned)[:1]:
            member.sleeps = member.state == "loaded" and member.memory.bytes - member.memory.asleep >= missing
            member.state = "leaving"
            self._changed.set()

    async def _leave(self, member: Member) -> None:
        """Let a model without requests sleep, or end its engine."""
        log.info("model %r makes room.", member.name)
        member.evictions += 1
        state: State = "unloaded"
        if member.sleeps and member.can_sleep and await self._slept(member):
            state = "asleep"
        else:
            await self._end(member)
        member.state, member.is_asleep, member.ending = state, state == "asleep", None
        if any(not waiter.done() for waiter in member.waiting):
            self._want(member)
        self._changed.set()

    async def _slept(self, member: Member) -> bool:
        for _ in range(SLEEP_TRIES):
            try:
                await member.client.sleep(2, wakes=False)
            except InputError:
                await asyncio.sleep(SLEEP_AGAIN_S)
            except TwostrokeError:
                return False
            else:
                resident = None if member.client.pid is None else self._resident(member.client.pid)
                member.memory.slept(resident)
                return True
        return False

    async def _end(self, member: Member) -> None:
        member.client.close()
        if member.ended is not None:
            await asyncio.gather(member.ended, return_exceptions=True)

    def _load(self, member: Member) -> None:
        was_asleep = member.is_asleep
        member.state, member.is_asleep, member.began_s = "loading", False, self._clock()
        if was_asleep:
            member.loading = asyncio.create_task(self._woken(member))
            return
        client = member.connected()
        member.ended = asyncio.create_task(client.run())
        member.loading = asyncio.create_task(self._loaded(member, client, member.ended))

    async def _woken(self, member: Member) -> None:
        """Wake it; if it cannot be woken, it is loaded anew."""
        try:
            await member.client.wake()
        except TwostrokeError as error:
            log.error("model %r does not wake and is loaded anew: %s", member.name, error)
            await self._end(member)
            member.state = "unloaded"
            self._want(member)
            self._changed.set()
            return
        member.wakes += 1
        member.wake_s = self._clock() - member.began_s
        self._ready(member)

    def _ready(self, member: Member) -> None:
        member.state, member.loaded_s, member.failure = "loaded", self._clock(), ""
        member.grant()
        self._changed.set()

    async def _loaded(self, member: Member, client: EngineClient, ended: asyncio.Task[None]) -> None:
        """Wait for the end of a load."""
        loaded = asyncio.create_task(client.wait_loaded())
        await asyncio.wait({loaded, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not loaded.done():
            loaded.cancel()
            if not self._closing.is_set():
                error = ended.exception() if ended.done() and not ended.cancelled() else None
                self._fail(member, str(error) if isinstance(error, TwostrokeError) else "its engine ended.")
                if not self._opened.is_set():
                    self._failed_first = error if isinstance(error, TwostrokeError) else InputError(member.failure)
            self._changed.set()
            return
        member.load_s = self._clock() - member.began_s
        if member.planned_load_s:
            self._load_ratio = member.load_s / member.planned_load_s
        resident = None if client.pid is None else self._resident(client.pid)
        member.memory.loaded(loaded.result(), resident)
        if member.on_first is not None:
            member.on_first(loaded.result(), member.load_s)
            member.on_first = None
        log.info("model %r is loaded: %s, %.3g s.", member.name, format_bytes(member.memory.bytes), member.load_s)
        self._opened.set()
        self._ready(member)

    def _fail(self, member: Member, why: str) -> None:
        member.state, member.failure, member.failed_s = "failed", why, self._clock()
        log.error("model %r cannot be loaded: %s", member.name, why)
        member.refuse(self._not_loaded(member))
