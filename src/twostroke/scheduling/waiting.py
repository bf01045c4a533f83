"""Who is admitted next: lower priorities first, among those the client that was served least, in its own order of arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twostroke.scheduling.request import Request

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
    """Waiting requests by (priority, client), each queue in order of arrival. The first is found by a look at each."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, str], list[Request]] = {}
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def add(self, request: Request) -> None:
        insort(self._queues.setdefault(_queue_of(request), []), request, key=_arrival)
        self._n += 1

    def remove(self, request: Request) -> None:
        name = _queue_of(request)
        queue = self._queues[name]
        del queue[bisect_left(queue, request.arrival, key=_arrival)]
        self._n -= 1
        if not queue:
            del self._queues[name]

    def first(self) -> Request | None:
        """The request to admit next. It alone is considered: passing it over for a smaller one would starve it."""
        if not self._queues:
            return None
        return min((queue[0] for queue in self._queues.values()), key=_turn)


def _queue_of(request: Request) -> tuple[int, str]:
    return (request.priority, request.client)


def _arrival(request: Request) -> int:
    return request.arrival


def _turn(request: Request) -> tuple[int, int, int]:
    assert request.account is not None
    return (request.priority, request.account.served, request.arrival)
