"""Turns of threads and of the event loop."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest

from twostroke.server.turns import LoopTurns, Turns


def test_a_client_with_much_to_do_holds_up_another_by_one_piece() -> None:
    async def scenario() -> list[str]:
        turns, done = Turns("test"), []

        async def one(client: str, name: str) -> None:
            await turns.run(client, lambda: done.append(name))

        busy = [asyncio.ensure_future(one("busy", f"busy{i}")) for i in range(5)]
        await asyncio.sleep(0)
        await asyncio.gather(one("other", "other0"), one("other", "other1"), one("third", "third0"), *busy)
        return done

    assert asyncio.run(scenario()) == ["busy0", "busy1", "other0", "third0", "busy2", "other1", "busy3", "busy4"]


def test_results_and_errors_come_to_those_who_asked() -> None:
    async def scenario() -> None:
        turns = Turns("test", 2)
        assert await asyncio.gather(*(turns.run("a", lambda i=i: i) for i in range(9))) == list(range(9))  # type: ignore[misc]
        with pytest.raises(ZeroDivisionError):
            await turns.run("a", lambda: 1 // 0)
        assert await turns.run("b", lambda: 5) == 5

    asyncio.run(scenario())


def test_who_gives_up_waiting_leaves_no_place_taken() -> None:
    async def scenario() -> None:
        turns, gate = Turns("test"), threading.Event()
        at_work = asyncio.ensure_future(turns.run("a", gate.wait))
        waiting = [asyncio.ensure_future(turns.run(client, lambda: None)) for client in "aabc"]
        await asyncio.sleep(0)
        for task in (at_work, waiting[0], waiting[2]):
            task.cancel()
        await asyncio.sleep(0)
        assert not waiting[1].done(), "the thread is still at work, whether or not its result is waited for"
        gate.set()
        await asyncio.gather(at_work, *waiting, return_exceptions=True)
        assert [task.cancelled() for task in waiting] == [True, False, True, False]
        assert await turns.run("d", lambda: 7) == 7
        assert not turns._waiting

    asyncio.run(scenario())


def test_a_turn_of_the_loop_does_few_pieces_of_work_in_the_order_they_came_and_sees_to_others_between() -> None:
    async def main() -> tuple[list[int], list[int]]:
        turns = LoopTurns(3)
        done: list[int] = []
        seen: list[int] = []

        async def piece(i: int) -> None:
            await turns.wait()
            done.append(i)

        async def other() -> None:
            while len(done) < 20:
                seen.append(len(done))
                await asyncio.sleep(0)

        await asyncio.gather(other(), *map(piece, range(20)))
        return done, seen

    done, seen = asyncio.run(main())
    assert done == list(range(20))
    assert max(later - sooner for sooner, later in itertools.pairwise([*seen, 20])) <= 3


def test_a_turn_that_is_given_up_is_the_next_ones() -> None:
    async def main() -> list[int]:
        turns = LoopTurns(1)
        done: list[int] = []

        async def piece(i: int) -> None:
            await turns.wait()
            done.append(i)

        tasks = [asyncio.create_task(piece(i)) for i in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return done

    assert asyncio.run(main()) == [0, 2, 3]
