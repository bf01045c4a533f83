"""The waiting queue: lower ``priority`` first, then the client that was served least, then order of arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush

from twostroke.scheduling.request import Request

QueueRank = tuple[int, int, int]


class WaitingQueue:
    """Waiting requests in one queue for each (priority, client), in order of arrival.

    The queues stand in a heap by the rank of their first request. ``served`` only grows, so a rank in the heap can only be too
    low. It is renewed only when it reaches the top, because renewing the ranks of a thousand waiting clients would slow every
    step.
    """

    def __init__(self) -> None:
        self._queues: dict[tuple[int, str], list[Request]] = {}
        self._heap: list[tuple[QueueRank, tuple[int, str]]] = []
        self._rank_of: dict[tuple[int, str], QueueRank] = {}  # the heap's valid entry of each queue; any other is out of date
        self._n = 0

    def __len__(self) -> int:
        return self._n

    @property
    def n_queues(self) -> int:
        """Pairs of a priority and a client that wait."""
        return len(self._queues)

    def add(self, request: Request) -> None:
        name = _queue_of(request)
        queue = self._queues.setdefault(name, [])
        insort(queue, request, key=_arrival)
        self._n += 1
        if queue[0] is request:  # the queue is new, or its first request has changed
            self._enter(name, queue_rank(request))

    def remove(self, request: Request) -> None:
        name = _queue_of(request)
        queue = self._queues[name]
        del queue[bisect_left(queue, request.arrival, key=_arrival)]
        self._n -= 1
        if not queue:
            del self._queues[name], self._rank_of[name]

    def first(self) -> Request | None:
        """The request to admit next. If it does not fit, no other is admitted: smaller ones would overtake it for ever."""
        while self._heap:
            rank, name = self._heap[0]
            if self._rank_of.get(name) != rank:
                heappop(self._heap)
                continue
            first = self._queues[name][0]
            now = queue_rank(first)
            if now == rank:
                return first
            heappop(self._heap)
            self._enter(name, now)
        return None

    def behind(self, request: Request, most: int) -> list[Request]:
        """Up to ``most`` requests that come after ``request`` in its own queue, in their order."""
        queue = self._queues[_queue_of(request)]
        at = bisect_left(queue, request.arrival, key=_arrival) + 1
        return queue[at : at + most]

    def _enter(self, name: tuple[int, str], rank: QueueRank) -> None:
        self._rank_of[name] = rank
        if len(self._heap) > 2 * len(self._queues) + 64:  # more than half are out of date, and leave only at the top
            self._heap = [(known, queue) for queue, known in self._rank_of.items() if queue != name]
            heapify(self._heap)
        heappush(self._heap, (rank, name))


def _queue_of(request: Request) -> tuple[int, str]:
    return (request.priority, request.client)


def _arrival(request: Request) -> int:
    return request.arrival


def queue_rank(request: Request) -> QueueRank:
    """The request with the smallest (priority, service that its client received, order of arrival) goes first."""
    assert request.account is not None
    return (request.priority, request.account.served, request.arrival)
