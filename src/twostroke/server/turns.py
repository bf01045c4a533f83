"""Shares out threads and turns of the event loop, so that one client's work does not delay all others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

EACH_TURN = 8
"""Answers begun or ended in one turn of the event loop, some 0.3 ms each. The answers of one step of the engine end together:
without this limit 128 of them delayed a refusal, or `/health`, by 100 ms."""


class LoopTurns:
    """Lets ``n`` tasks go on in one turn of the event loop, in the order in which they came. Between turns the loop serves
    sockets."""

    def __init__(self, n: int = EACH_TURN) -> None:
        self._n = self._left = n
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Return at once if this turn has room, else in a later turn."""
        if self._left == self._n:
            asyncio.get_running_loop().call_soon(self._next_turn)
        if self._left:
            self._left -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _next_turn(self) -> None:
        self._left = self._n
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.cancelled():
                turn.set_result(None)
                self._left -= 1
        if self._left < self._n:
            asyncio.get_running_loop().call_soon(self._next_turn)


class Turns:
    """Runs work in ``n`` threads. Of what waits, each client's oldest piece is done before any client's next.

    So a client with a hundred long pieces delays another by the time of one."""

    def __init__(self, name: str, n: int = 1) -> None:
        self._executor = ThreadPoolExecutor(n, name)
        self._free = n
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def n_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """Run ``work()`` in a thread when it is ``client``'s turn, and return its result."""
        if self._free:
            self._free -= 1
        else:
            await self._turn(client)
        loop = asyncio.get_running_loop()
        try:
            running = loop.run_in_executor(self._executor, work)
        except BaseException:
            self._leave()
            raise
        # The turn ends when the thread is free, not when the task that waits for it is cancelled.
        running.add_done_callback(self._end)
        return await asyncio.shield(running)

    def _end(self, running: asyncio.Future[T]) -> None:
        self._leave()
        if not running.cancelled():
            running.exception()  # retrieved, or asyncio reports it if the task that waited was cancelled

    async def _turn(self, client: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()
            raise

    def _leave(self) -> None:
        while self._waiting:
            client = next(iter(self._waiting))
            theirs = self._waiting.pop(client)
            turn = theirs.popleft()
            if theirs:
                self._waiting[client] = theirs  # behind all others
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._free += 1
