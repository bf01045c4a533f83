"""What the router knows of a server behind it, and which one a request goes to.

    predicted seconds to the first byte = pace · (work that waits there + BASE · streams that have begun + own work)
    work of a request = BASE + characters of its prompt that this server has not seen at the beginning of another

``pace`` is measured: seconds to a first byte ÷ the work that was there when the request was sent, its own included. A server
that has not been asked for a while is taken for ever more like the fastest, so that one that was slow once is tried again.

Nobody tells a router what servers' caches hold. It remembers which beginnings of prompts it has sent where, in blocks of
``BLOCK_CHARS`` characters whose hashes are chained, the newest ``MAX_BLOCKS`` for each server. Prompts of one key are not found
by another's, so what one waits says nothing of what another has asked.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

BASE = 256
"""Characters that a request counts as beside its prompt: its answer takes steps as well."""
BLOCK_CHARS = 256
MAX_BLOCKS = 50_000
"""10 MB for each server, and the beginnings of some 12 million characters."""
FIRST_PACE_S = 1e-4
"""Seconds a character before anything is measured: 2,500 tokens of four characters a second."""
FORGET_S = 30.0
"""Half of what is measured is forgotten after so long."""


def prompt_text(body: dict[str, Any]) -> str:
    """What of a request the server reads first, as one text: equal beginnings of prompts are equal beginnings of it."""
    parts = [str(body.get("model", ""))]
    parts += [_text(body[name]) for name in ("tools", "system", "instructions") if body.get(name)]
    for name in ("messages", "prompt", "input"):
        given = body.get(name)
        if isinstance(given, list):
            parts += [_text(each) for each in given]
        elif given is not None:
            parts.append(_text(given))
    return "\0".join(parts)


def _text(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps(given, sort_keys=True, ensure_ascii=False)


def block_keys(text: str, owner: str) -> list[bytes]:
    """A key for each whole block of ``text``, which stands for all before it as well. ``owner`` is whose prompt it is."""
    keys, key = [], owner.encode(errors="surrogatepass")
    for i in range(0, len(text) - BLOCK_CHARS + 1, BLOCK_CHARS):
        key = blake2b(key + text[i : i + BLOCK_CHARS].encode(errors="surrogatepass"), digest_size=16).digest()
        keys.append(key)
    return keys


class Sent:
    """A request while one endpoint has it. ``work`` is in characters."""

    def __init__(self, endpoint: Endpoint, keys: Sequence[bytes], work: int, predicted_s: float, now: float) -> None:
        self.endpoint = endpoint
        self.predicted_s = predicted_s
        self._keys, self._work, self._sent_s = keys, work, now
        self._ahead = endpoint.work + work
        self._begun = self._ended = False
        endpoint.waiting_work += work
        endpoint.in_flight += 1

    def begun(self, served: bool = True) -> None:
        """The first byte has come; if ``served``, of an answer and not of a refusal."""
        if self._begun:
            return
        self._begun = True
        endpoint = self.endpoint
        endpoint.waiting_work -= self._work
        endpoint.begun += 1
        if served:
            now = endpoint.clock()
            endpoint.measured(now - self._sent_s, self._ahead, self.predicted_s)
            endpoint.remember(self._keys)

    def ended(self) -> None:
        """Nothing more comes. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        self.endpoint.in_flight -= 1
        if self._begun:
            self.endpoint.begun -= 1
        else:
            self.endpoint.waiting_work -= self._work


class Endpoint:
    """One server behind the router. ``url`` has no slash at its end. ``models`` is None where it does not tell."""

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.url = url
        self.clock = clock
        self.up = False
        self.models: frozenset[str] | None = None
        self.waiting_work = self.in_flight = self.begun = 0
        self.requests = self.moved = self.failures = 0
        self.predicted_s = self.measured_s = 0.0
        self._pace_s: float | None = None
        self._measured_at = 0.0
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def sent(self, found: Ranked, keys: Sequence[bytes]) -> Sent:
        """A request goes there, of which ``ranked`` has found out ``found``."""
        self.requests += 1
        return Sent(self, keys, found.work, found.predicted_s, self.clock())

    @property
    def work(self) -> int:
        return self.waiting_work + BASE * self.begun

    def pace_s(self, best_s: float) -> float:
        """Seconds a character, where ``best_s`` is that of the fastest server."""
        if self._pace_s is None:
            return best_s
        return best_s + (self._pace_s - best_s) * 0.5 ** ((self.clock() - self._measured_at) / FORGET_S)

    @property
    def measured_pace_s(self) -> float | None:
        return self._pace_s

    def measured(self, seconds: float, work: int, predicted_s: float) -> None:
        """A first byte came ``seconds`` after its request, with ``work`` characters there."""
        pace_s = seconds / work
        self._pace_s = pace_s if self._pace_s is None else (3 * self._pace_s + pace_s) / 4
        self._measured_at = self.clock()
        self.predicted_s += predicted_s
        self.measured_s += seconds

    def remember(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > MAX_BLOCKS:
            self._blocks.popitem(last=False)

    def forget(self) -> None:
        """It was down: its cache is empty."""
        self._blocks.clear()

    def seen_chars(self, keys: Sequence[bytes]) -> int:
        n = 0
        while n < len(keys) and keys[n] in self._blocks:
            n += 1
        return n * BLOCK_CHARS


class Ranked(NamedTuple):
    """One of the servers that a request could go to. ``work`` is what the request would be there, in characters."""

    predicted_s: float
    in_flight: int
    requests: int
    place: int
    work: int


def ranked(endpoints: Sequence[Endpoint], n_chars: int, keys: Sequence[bytes]) -> list[Ranked]:
    """All of ``endpoints``, the one whose first byte is predicted to come first at the front; of equal ones the idlest."""
    paces = [each.measured_pace_s for each in endpoints]
    best_s = min((pace for pace in paces if pace is not None), default=FIRST_PACE_S)
    found = []
    for i, each in enumerate(endpoints):
        work = BASE + n_chars - each.seen_chars(keys)
        found.append(Ranked(each.pace_s(best_s) * (each.work + work), each.in_flight, each.requests, i, work))
    return sorted(found)


def choose(
    endpoints: Sequence[Endpoint], model: str, n_chars: int, keys: Sequence[bytes], without: Endpoint | None = None
) -> Sent | None:
    """Count a request for ``model`` with a prompt of ``n_chars`` to the server with the earliest first byte, among those that
    are up and serve the model (or, if none says so, among all that are up), other than ``without``. None if there is none."""
    able = [each for each in endpoints if each.up and each is not without]
    able = [each for each in able if each.models is None or model in each.models] or able
    if not able:
        return None
    best = ranked(able, n_chars, keys)[0]
    return able[best.place].sent(best, keys)
