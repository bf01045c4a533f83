"""Who is admitted next: lower priorities first, among those the client that was served least, in its own order of arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twostroke.scheduling.request import Request

Turn = tuple[int, int, int]

OUTPUT_WEIGHT = 2
"""A generated token counts as two tokens of a prompt (Sheng et al. 2024, "Fairness in Serving Large Language Models",
arXiv:2401.00588, section 5): it takes a step of its own, a prompt's tokens share one."""


class Account:
    """What one client was given: ``served`` = prompt tokens computed + ``OUTPUT_WEIGHT`` · tokens generated."""

    __slots__ = ("client", "n_open", "served")

    def __init__(self, client: str) -> None:
        self.client = client
        self.served = 0
        self.n_open = 0  # requests that are not finished


class Accounts:
    """Accounts of the clients that have requests; one that has none is forgotten, so that their number stays bounded.

    A client that comes (back) starts at the least of those that are there: it owes nothing, and idling earns no credit.
    """

    def __init__(self) -> None:
        self._of: dict[str, Account] = {}

    def open(self, client: str) -> Account:
        """The account of ``client``, with one request more."""
        account = self._of.get(client)
        if account is None:
            least = min((other.served for other in self._of.values()), default=0)
            account = self._of[client] = Account(client)
            account.served = least
        account.n_open += 1
        return account

    def close(self, account: Account) -> None:
        """One request of ``account`` has finished."""
        account.n_open -= 1
        if account.n_open == 0:
            del self._of[account.client]

    def __len__(self) -> int:
        return len(self._of)


class WaitingQueue:
    """Waiting requests by (priority, client), each queue in order of arrival.

    The queues stand in a heap by the turn of their first request. A turn only grows later while it waits, because what a client
    was served only grows, so it is looked up again when it comes to the top, and not for a thousand clients in every step.
    """

    def __init__(self) -> None:
        self._queues: dict[tuple[int, str], list[Request]] = {}
        self._turns: list[tuple[Turn, tuple[int, str]]] = []  # a heap
        self._turn_of: dict[tuple[int, str], Turn] = {}  # which entry of the heap is a queue's; others are out of date
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def add(self, request: Request) -> None:
        name = _queue_of(request)
        queue = self._queues.setdefault(name, [])
        insort(queue, request, key=_arrival)
        self._n += 1
        if queue[0] is request:  # a new queue, or a turn that became earlier
            self._enter(name, turn_of(request))

    def remove(self, request: Request) -> None:
        name = _queue_of(request)
        queue = self._queues[name]
        del queue[bisect_left(queue, request.arrival, key=_arrival)]
        self._n -= 1
        if not queue:
            del self._queues[name], self._turn_of[name]

    def first(self) -> Request | None:
        """The request to admit next. It alone is considered: passing it over for a smaller one would starve it."""
        while self._turns:
            turn, name = self._turns[0]
            if self._turn_of.get(name) != turn:
                heappop(self._turns)
                continue
            first = self._queues[name][0]
            now = turn_of(first)
            if now == turn:
                return first
            heappop(self._turns)
            self._enter(name, now)
        return None

    def _enter(self, name: tuple[int, str], turn: Turn) -> None:
        self._turn_of[name] = turn
        if len(self._turns) > 2 * len(self._queues) + 64:  # mostly of queues that have gone while the first one waits
            self._turns = [(known, queue) for queue, known in self._turn_of.items() if queue != name]
            heapify(self._turns)
        heappush(self._turns, (turn, name))


def _queue_of(request: Request) -> tuple[int, str]:
    return (request.priority, request.client)


def _arrival(request: Request) -> int:
    return request.arrival


def turn_of(request: Request) -> Turn:
    """Smaller goes first: priority, what the client was served, arrival."""
    assert request.account is not None
    return (request.priority, request.account.served, request.arrival)
