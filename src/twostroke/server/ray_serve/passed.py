"""A request on its way from the ingress to a replica, and what the ingress knows of the replicas.

Ray's request router runs beside the ingress, in the same process. It is asked about a `Question`, which knows where its first
token is predicted to come first (``router.endpoint``); only its `Passed` half travels to the replica.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from twostroke.server.router.endpoint import Endpoint, Ranked, Sent, ranked


class Passed(NamedTuple):
    """A whole HTTP request. ``client`` is the address that sent it."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    client: str
    body: bytes = b""


class Head(NamedTuple):
    """What a replica answers first: a status, headers, and the body as far as it is there. ``more``: the rest follows."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    more: bool


class Fleet:
    """The replicas, by their names. Ray's router and the ingress may run in different threads."""

    def __init__(self) -> None:
        self._endpoints: dict[str, Endpoint] = {}
        self._lock = threading.Lock()

    @property
    def endpoints(self) -> list[Endpoint]:
        with self._lock:
            return [*self._endpoints.values()]

    def ranked(self, ready: Mapping[str, bool], question: Question) -> list[str]:
        """The names in ``ready``, which are all that run, in the order in which ``question`` should go there: those that said
        that they take requests, by their predicted first tokens; then the others; last where it has been."""
        with self._lock:
            for name in self._endpoints.keys() - ready.keys():
                del self._endpoints[name]
            for name, takes in ready.items():
                self._endpoints.setdefault(name, Endpoint(name)).up = takes
            every = [*self._endpoints.values()]
            found = ranked(every, question.n_chars, question.keys)
            question.found = {every[each.place].url: each for each in found}
        return sorted(question.found, key=lambda name: (name == question.been_at, not ready[name]))  # stable

    def routed(self, name: str, question: Question) -> None:
        """``question`` has gone to ``name``."""
        with self._lock:
            endpoint, found = self._endpoints.get(name), question.found.get(name)
            if endpoint is not None and found is not None:
                if question.sent is not None:
                    question.sent.ended()  # the replica that had it died before it took it up
                question.sent = endpoint.sent(found, question.keys)

    def begun(self, sent: Sent | None, served: bool) -> None:
        """The first piece of an answer has come; ``served``: it is not a refusal."""
        if sent is not None:
            with self._lock:
                sent.begun(served)

    def ended(self, sent: Sent | None, failed: bool = False) -> None:
        """Nothing more comes. ``failed``: the replica was lost."""
        if sent is not None:
            with self._lock:
                sent.ended()
                sent.endpoint.failures += failed

    def has_other(self, name: str | None) -> bool:
        """Whether another replica than ``name`` runs and takes requests."""
        return any(each.up and each.url != name for each in self.endpoints)


class Question:
    """``passed``, and which replica it is for. ``keys`` stand for the beginning of its prompt of ``n_chars`` characters, and
    ``been_at`` is the replica that did not answer it."""

    def __init__(
        self, fleet: Fleet, passed: Passed, n_chars: int = 0, keys: Sequence[bytes] = (), been_at: str | None = None
    ) -> None:
        self.passed, self.n_chars, self.keys, self.been_at = passed, n_chars, keys, been_at
        self.found: dict[str, Ranked] = {}
        self.sent: Sent | None = None
        self._fleet = fleet

    def __reduce__(self) -> tuple[Any, ...]:
        return Passed, tuple(self.passed)

    @property
    def at(self) -> str | None:
        """The replica that it was sent to."""
        return None if self.sent is None else self.sent.endpoint.url

    def ranked(self, ready: Mapping[str, bool]) -> list[str]:
        return self._fleet.ranked(ready, self)

    def routed(self, name: str) -> None:
        self._fleet.routed(name, self)
