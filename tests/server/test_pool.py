"""Several models within a memory budget: engines are a few lines here, which load and end when they are told."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from twostroke.core.errors import EngineError, InputError
from twostroke.server import wire
from twostroke.server.callers import Caller, Visit
from twostroke.server.errors import ApiError
from twostroke.server.model_memory import ModelMemory
from twostroke.server.pool import Member, ModelPool

READY = wire.Ready("fp32", 64, 4, 0, 0, 0.0)


class Engine:
    """A client whose engine loads in ``load_s``."""

    def __init__(self, load_s: float = 0.002, error: Exception | None = None) -> None:
        self.load_s, self.error = load_s, error
        self.loaded, self.closing = asyncio.Event(), asyncio.Event()
        self.adapters: dict[str, str] = {}
        self.info, self.pid, self.restarts, self.streams, self.asleep = READY, 1, 0, (), 0

    @property
    def ready(self) -> bool:
        return self.loaded.is_set() and not self.asleep

    async def sleep(self, level: int, wakes: bool) -> None:
        await asyncio.sleep(0.001)
        self.asleep = level

    async def wake(self) -> None:
        await asyncio.sleep(self.load_s / 10)
        if self.closing.is_set():
            raise EngineError("it was lost.")
        self.asleep = 0

    async def run(self) -> None:
        await asyncio.sleep(self.load_s)
        if self.error is not None:
            raise self.error
        self.loaded.set()
        await self.closing.wait()
        self.loaded.clear()

    async def wait_loaded(self) -> wire.Ready:
        await self.loaded.wait()
        return READY

    def close(self) -> None:
        self.closing.set()

    kill = close


class OneService:
    """As much of a service as the pool asks of it."""

    def __init__(self, name: str) -> None:
        self.names = self.own_names = (name,)
        self.draining, self.pool, self.client, self.totals = False, None, Engine(), {}

    @contextlib.contextmanager
    def place(self, caller: Caller) -> Iterator[None]:
        yield

    def require_model(self, name: str, param: str) -> None:
        assert self.pool is not None
        if name not in self.pool.names:
            raise ApiError(404, "no such model", param, "model_not_found")


def member(name: str, size: float, connect: Callable[..., Any] = lambda adapters: Engine(), **options: Any) -> Member:
    service: Any = OneService(name)
    service.client = connect({})
    return Member(service, service.client, connect, ModelMemory(size, 0), **options)


@contextlib.asynccontextmanager
async def running(pool: ModelPool) -> Any:
    task = asyncio.create_task(pool.run())
    await pool.wait_loaded()
    try:
        yield
    finally:
        pool.close()
        await task


def unseen(pid: int) -> None:
    return None


async def ask(pool: ModelPool, name: str, took_s: float = 0.0, caller: Caller | None = None) -> None:
    """A request that is answered by an engine that lives from its beginning to its end."""
    one = pool.member_of(name)
    await pool.hold(one, caller or Caller())
    engine: Any = one.client
    try:
        assert one.state == "loaded"
        await asyncio.sleep(took_s)
        assert engine.ready, "it was ended, or sent to sleep, under a request"
    finally:
        pool.release(one)


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_loaded_models_never_exceed_the_budget_and_no_request_is_cut(seed: int, sleeps: bool) -> None:
    chance = random.Random(seed)
    sizes = [chance.randint(1, 6) for _ in range(5)]
    budget = max(*sizes, chance.randint(6, 12))

    async def scenario() -> None:
        pool = ModelPool([member(f"m{i}", n) for i, n in enumerate(sizes)], budget, 5.0, turn_s=0.01, resident=unseen)
        most = 0.0
        for one in pool.members if sleeps else ():
            one.memory.asleep = 0.5

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, pool.held_bytes)
                assert pool.held_bytes <= budget
                await asyncio.sleep(0)

        async with running(pool):
            watching = asyncio.create_task(watch())

            async def user(k: int) -> None:
                own = random.Random(100 * seed + k)
                for _ in range(12):
                    asking = asyncio.create_task(ask(pool, f"m{own.randrange(5)}", own.random() * 0.01))
                    if own.random() < 0.1:
                        await asyncio.sleep(own.random() * 0.01)
                        asking.cancel()  # its client went away
                    with contextlib.suppress(asyncio.CancelledError):
                        await asking

            await asyncio.gather(*(user(k) for k in range(8)))
            watching.cancel()
            assert all(one.requests == 0 and not any(not w.done() for w in one.waiting) for one in pool.members)
            assert sum(one.loads for one in pool.members) > 1
            assert sleeps or not any(one.wakes for one in pool.members)
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        assert most > 0

    asyncio.run(scenario())


def test_the_least_recently_used_model_makes_room() -> None:
    async def scenario() -> None:
        pool = ModelPool([member(name, 1) for name in "abcd"], 3, resident=unseen)
        async with running(pool):
            for name in "abca":
                await ask(pool, name)
            await ask(pool, "d")
            assert [one.state for one in pool.members] == ["loaded", "unloaded", "loaded", "loaded"]
            await ask(pool, "b")
            assert [one.name for one in pool.members if one.state == "unloaded"] == ["c"]
            assert [one.evictions for one in pool.members] == [0, 1, 1, 0]

    asyncio.run(scenario())


def test_a_busy_model_finishes_before_it_makes_room_and_comes_back_after_the_other() -> None:
    async def scenario() -> None:
        pool = ModelPool([member("a", 1), member("b", 1)], 1, turn_s=0.02, resident=unseen)
        order: list[str] = []

        async def told(name: str, took_s: float) -> None:
            await ask(pool, name, took_s)
            order.append(f"{name} {took_s}")

        async with running(pool):
            first = asyncio.create_task(told("a", 0.3))
            await asyncio.sleep(0.05)
            other = asyncio.create_task(told("b", 0.0))
            await asyncio.sleep(0.05)
            again = asyncio.create_task(told("a", 0.01))
            await asyncio.gather(first, other, again)
        assert order == ["a 0.3", "b 0.0", "a 0.01"]

    asyncio.run(scenario())


def test_a_model_that_cannot_be_loaded_is_an_error_of_its_name_alone() -> None:
    async def scenario() -> None:
        broken = InputError("model.safetensors is cut short.")
        bad = member("bad", 1, lambda adapters: Engine(error=broken))
        pool = ModelPool([member("good", 1), bad, member("huge", 9)], 3, resident=unseen)
        async with running(pool):
            for name, why in (("bad", "cut short"), ("bad", "cut short"), ("huge", "--models-memory-gib")):
                with pytest.raises(ApiError, match=why) as error:
                    await ask(pool, name)
                assert (error.value.status, error.value.code) == (503, "model_not_loaded")
                assert error.value.headers["retry-after"] == "30"
            assert bad.loads == 1, "it is not tried at each request"
            await ask(pool, "good")

    asyncio.run(scenario())


def test_a_first_model_that_cannot_be_loaded_ends_the_server() -> None:
    async def scenario() -> None:
        bad = member("bad", 1, lambda adapters: Engine(error=InputError("it is cut short.")))
        with pytest.raises(InputError, match="cut short"):
            await ModelPool([bad, member("good", 1)], 3, resident=unseen).run()

    asyncio.run(scenario())


def test_a_wait_that_is_predicted_too_long_is_refused_at_once_and_the_load_goes_on() -> None:
    async def scenario() -> None:
        slow = member("slow", 1, lambda adapters: Engine(0.3), load_s=50.0)
        pool = ModelPool([member("a", 1), slow], 2, resident=unseen)
        async with running(pool):
            with pytest.raises(ApiError, match="predicted") as error:
                await ask(pool, "slow", caller=Caller(read_timeout_s=2.0))
            assert (error.value.status, error.value.code) == (503, "model_loading")
            assert float(error.value.headers["retry-after"]) == 30
            await asyncio.sleep(0.5)
            assert slow.state == "loaded"
            await ask(pool, "slow", caller=Caller(read_timeout_s=2.0))
            assert slow.load_s is not None
            assert slow.load_s < 1.0, "what was measured is predicted from now on"

    asyncio.run(scenario())


def test_a_wait_is_bounded_where_the_prediction_was_too_short() -> None:
    async def scenario() -> None:
        late = member("late", 1, lambda adapters: Engine(5.0), load_s=0.01)
        pool = ModelPool([member("a", 1), late], 2, wait_s=0.1, resident=unseen)
        async with running(pool):
            async with asyncio.timeout(2):
                with pytest.raises(ApiError, match="being loaded"):
                    await ask(pool, "late")
            assert not late.requests
            late.client.close()

    asyncio.run(scenario())


def test_bytes_are_corrected_by_what_the_process_holds() -> None:
    async def scenario() -> None:
        held = {"bytes": 3.0}
        pool = ModelPool([member("a", 1), member("b", 1)], 4, resident=lambda pid: held["bytes"])
        async with running(pool):
            assert pool.held_bytes == 3.0
            await ask(pool, "b")  # predicted 1: it fits until it is seen to hold 3
            async with asyncio.timeout(5):
                while pool.held_bytes > 4:
                    await asyncio.sleep(0.01)
            assert [one.state for one in pool.members] == ["unloaded", "loaded"]
            held["bytes"] = 9.0
            async with asyncio.timeout(5):
                while pool.held_bytes:
                    await asyncio.sleep(0.01)
            with pytest.raises(ApiError, match="may take"):
                await ask(pool, "b")

    asyncio.run(scenario())


def test_a_model_sleeps_where_that_is_enough_and_ends_where_it_is_not() -> None:
    async def scenario() -> None:
        pool = ModelPool([member("a", 4), member("b", 4), member("c", 6)], 9, resident=unseen)
        for one in pool.members:
            one.memory.asleep = 1.0
        a, b, c = pool.members
        async with running(pool):
            await ask(pool, "b")
            assert pool.held_bytes == 8
            await ask(pool, "c")  # a sleeps, which is not enough; so it ends, and b sleeps
            assert [one.state for one in pool.members] == ["unloaded", "asleep", "loaded"]
            assert pool.held_bytes == 7
            await ask(pool, "b")  # wakes, and c, which then is the only other one, sleeps
            assert [one.state for one in pool.members] == ["unloaded", "loaded", "asleep"]
            assert (b.loads, b.wakes) == (1, 1)
            await ask(pool, "a")
            assert [one.state for one in pool.members] == ["loaded", "loaded", "asleep"]
            c.client.close()
            c.client.asleep = 0  # its process was lost, and another has loaded all of it
            async with asyncio.timeout(5):
                while c.state != "unloaded":
                    await asyncio.sleep(0.01)
            await ask(pool, "c")
            assert (a.loads, c.loads) == (2, 2)

    asyncio.run(scenario())


def test_a_model_that_does_not_wake_is_loaded_anew() -> None:
    async def scenario() -> None:
        pool = ModelPool([member("a", 4), member("b", 4)], 6, resident=unseen)
        for one in pool.members:
            one.memory.asleep = 1.0
        async with running(pool):
            await ask(pool, "b")
            assert pool.members[0].state == "asleep"
            pool.members[0].client.close()
            await ask(pool, "a")
            assert (pool.members[0].loads, pool.members[0].wakes) == (2, 0)

    asyncio.run(scenario())


def test_adapters_come_back_with_their_model() -> None:
    async def scenario() -> None:
        made: list[dict[str, str]] = []

        def connect(adapters: Any) -> Engine:
            made.append(dict(adapters))
            engine = Engine()
            engine.adapters = dict(adapters)
            return engine

        one = member("a", 1, connect)
        pool = ModelPool([one, member("b", 1)], 1, resident=unseen)
        async with running(pool):
            one.client.adapters["poet"] = "/poet"
            await ask(pool, "b")
            await ask(pool, "a")
        assert made == [{}, {"poet": "/poet"}]

    asyncio.run(scenario())


def test_a_visit_holds_its_model_to_its_end() -> None:
    async def scenario() -> None:
        pool = ModelPool([member("a", 1)], 1, resident=unseen)
        async with running(pool):
            visit = Visit()
            await pool.serve(None, Caller(visit=visit), b"{}")
            assert pool.members[0].requests == 1
            visit.holds.close()
            assert pool.members[0].requests == 0
            with pytest.raises(ApiError, match="no such model"):
                await pool.serve("z", Caller(visit=visit), b"{}")

    asyncio.run(scenario())
