"""Decides how many requests are worked on at once, and how many bytes they may hold."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable

from twostroke.server.errors import ApiError

MIN_RETRY_AFTER_S = 0.25
MAX_RETRY_AFTER_S = 30.0
MAX_STRETCH = 16.0
"""Most by which returns are slowed. Callers who got their answer and call again take most of the places that come free. Returns
at a sixteenth of that pace then keep the places full, and at most a fifth as many requests are refused as answered."""
INCOMING_BYTES = OUTGOING_BYTES = 64 * 2**20
"""Limits of all bodies that are arriving, and of all whole answers that are not read yet."""


class Admission:
    """Admits at most ``limit`` answers, queued and running together. The next request is refused at once, with a time at which
    to return.

    These times form a virtual queue. Each is later than the last one given by the time in which a place comes free (mean
    seconds of an answer ÷ ``limit``). The step is stretched while callers are still refused, and shortened again while places
    stay free. So callers return as fast as places come free and never together, and a crowd of a thousand does not spend the
    server's time on refusals (0.12 ms each, a tenth of a short answer). If some stay away, new callers take their places; an
    overload has enough of them.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.active = 0
        self.arriving = 0
        """Requests that the gate has let through and that have not entered: they wait for their turn of the event loop."""
        self._clock = clock
        self._recent_s: deque[float] = deque(maxlen=32)
        self._last_return_s = 0.0
        self._stretch = 1.0
        self._since_s = self._changed_s = clock()
        self._refused = self._entered = 0
        self._held_s = 0.0  # places × seconds since ``_since_s``

    @property
    def full(self) -> bool:
        return self.active + self.arriving >= self.limit

    def enter(self, n: int, param: str = "prompt") -> None:
        """Take ``n`` places. Raises ApiError 429 with ``Retry-After``, or 400 naming ``param``, if ``n`` can never fit."""
        if n > self.limit:
            raise ApiError(
                400,
                f"the request asks for {n} answers (prompts × n); at most {self.limit} are worked on at once.",
                param,
            )
        if self.active + n > self.limit:
            raise self.refusal()
        self._count_held()
        self.active += n
        self._entered += n
        self._adapt()

    def refusal(self) -> ApiError:
        """A 429 with the time to return, in whole seconds and in milliseconds, which OpenAI's SDK reads first."""
        wait_s = self._wait_s()
        self._refused += 1
        self._adapt()
        whole = max(1, int(wait_s + random.random()))  # at random, so that clients that read only this do not return together
        return ApiError(
            429,
            f"{self.active} requests are queued or running; at most {self.limit} may be. Try again later.",
            code="too_many_requests",
            headers={"retry-after": str(whole), "retry-after-ms": str(round(1000 * wait_s))},
        )

    def too_late(self, message: str, code: str, over_s: float, may_retry: bool = True) -> ApiError:
        """A 429 for a request whose wait would be ``over_s`` too long: by then, about, the queue is short enough."""
        wait_s = min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, over_s)) * random.uniform(1.0, 1.25)
        headers = {"retry-after": str(max(1, round(wait_s))), "retry-after-ms": str(round(1000 * wait_s))}
        return ApiError(429, message, code=code, headers=headers if may_retry else headers | {"x-should-retry": "false"})

    def leave(self, n: int, took_s: float | None = None) -> None:
        self._count_held()
        self.active -= n
        if took_s is not None:
            self._recent_s.append(took_s)

    def _count_held(self) -> None:
        now = self._clock()
        self._held_s += self.active * (now - self._changed_s)
        self._changed_s = now

    def _adapt(self) -> None:
        """Adjust the stretch once in the mean time of an answer: up if over a tenth as many were refused as admitted, down if
        over a tenth of the places stood free."""
        span_s = self._clock() - self._since_s
        if span_s < max(MIN_RETRY_AFTER_S, self._mean_s()):
            return
        self._count_held()
        if self._refused > 0.1 * self._entered:
            self._stretch = min(MAX_STRETCH, self._stretch * 1.5)
        elif self._held_s < 0.9 * self.limit * span_s:
            self._stretch = max(1.0, self._stretch / 1.5)
        self._since_s = self._changed_s
        self._refused = self._entered = 0
        self._held_s = 0.0

    def _mean_s(self) -> float:
        return sum(self._recent_s) / len(self._recent_s) if self._recent_s else 1.0

    def _wait_s(self) -> float:
        """Seconds until the next caller is to return: at least half the mean time of an answer, when some have ended."""
        now, mean_s = self._clock(), self._mean_s()
        earliest_s = now + max(MIN_RETRY_AFTER_S, mean_s / 2)
        self._last_return_s = max(earliest_s, self._last_return_s + self._stretch * mean_s / self.limit)
        if self._last_return_s - now <= MAX_RETRY_AFTER_S:
            return self._last_return_s - now
        self._last_return_s = now + MAX_RETRY_AFTER_S
        return MAX_RETRY_AFTER_S * random.uniform(0.5, 1.0)


class ByteBudget:
    """Bounds the bytes that all connections hold together. Above ``limit`` the connection that has not moved for longest is
    cut, then the next, until the rest fit. So what others leave unread never cuts a connection that moves. One connection
    alone may exceed the limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._held: dict[Held, None] = {}  # the one that moved least recently first

    def hold(self, cut: Callable[[], None]) -> Held:
        """A share of 0 bytes; ``cut`` ends its connection. Must be released."""
        return Held(self, cut)

    def _move(self, held: Held, n_bytes: int) -> None:
        if held.ended:
            return
        self._held.pop(held, None)
        self._held[held] = None
        held.n_bytes += n_bytes
        self.total += n_bytes
        while self.total > self.limit and len(self._held) > 1:
            stillest = next(iter(self._held))
            self._end(stillest)
            stillest.cut()

    def _end(self, held: Held) -> None:
        self._held.pop(held, None)
        self.total -= held.n_bytes
        held.n_bytes, held.ended = 0, True


class Held:
    """One connection's share of a `ByteBudget`."""

    def __init__(self, budget: ByteBudget, cut: Callable[[], None]) -> None:
        self.n_bytes = 0
        self.ended = False
        self.cut = cut
        self._budget = budget

    def grow(self, n_bytes: int) -> None:
        self._budget._move(self, n_bytes)

    def shrink(self, n_bytes: int) -> None:
        self._budget._move(self, -n_bytes)

    def release(self) -> None:
        if not self.ended:
            self._budget._end(self)
