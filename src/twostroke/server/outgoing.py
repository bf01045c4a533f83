"""What an engine computed in the form in which it is sent: in messages that the reader decodes in a few ms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from twostroke.server import wire
from twostroke.server.engine_connection import Connection

_LOGPROBS_A_FRAME = 2**14
"""Log-probabilities, alternatives included, after which a message ends. The HTTP process decodes so many in a few ms."""
_HELD_ENTRIES = 512
"""Tokens, or log-probabilities, of a whole answer that are sent together: 8 kB, and half a frame for a thousand requests."""


@dataclass
class Owner:
    """The connection of a request, and its unfinished answers. ``held``: by answer the tokens that wait, if sent whole."""

    connection: Connection
    request_id: str
    open: set[int]
    whole: bool = False
    held: dict[int, wire.TokenDelta] = field(default_factory=dict)

    def due(self, delta: wire.TokenDelta) -> wire.TokenDelta | None:
        """What to send now that ``delta`` has come, or None. A whole answer's first token goes at once, because its time
        counts, and then ``_HELD_ENTRIES`` together: a message for every token of a hundred answers keeps the HTTP process
        busier than the answers do."""
        if not self.whole:
            return delta
        held = self.held.get(delta.index)
        if held is not None:
            held.token_ids += delta.token_ids
            held.fingerprint = "+".join(filter(None, (held.fingerprint, delta.fingerprint))) or None
            held.finish_reason = delta.finish_reason
            n_each = 1
            if delta.logprobs is not None:
                held.logprobs = held.logprobs or []
                held.logprobs += delta.logprobs
                n_each += max((len(entry.top) for entry in delta.logprobs), default=0)
            if held.finish_reason is None and len(held.token_ids) * n_each < _HELD_ENTRIES:
                return None
        self.held[delta.index] = wire.TokenDelta(self.request_id, [], index=delta.index)
        return held or delta


T = TypeVar("T", wire.TokenLogprobs, wire.TokenDelta)


def in_frames(items: Sequence[T]) -> Iterator[list[T]]:
    """``items`` in order, in parts that end as soon as they hold ``_LOGPROBS_A_FRAME``."""
    part: list[T] = []
    n = 0
    for item in items:
        part.append(item)
        n += _size(item)
        if n >= _LOGPROBS_A_FRAME:
            yield part
            part, n = [], 0
    if part:
        yield part


def _size(item: wire.TokenLogprobs | wire.TokenDelta) -> int:
    """Log-probabilities in ``item``, its tokens, and half the numbers of its vector. A delta counts as ten more, for what
    surrounds them."""
    if isinstance(item, wire.TokenLogprobs):
        return 1 + len(item.top)
    return (
        10
        + len(item.token_ids)
        + len(item.embedding or b"") // 8
        + sum(1 + len(entry.top) for entries in (item.logprobs, item.prompt_logprobs) for entry in entries or ())
    )


def wire_logprobs(entries: Sequence[Any] | None) -> list[wire.TokenLogprobs] | None:
    """The engine's log-probabilities in the form in which they are sent."""
    if entries is None:
        return None
    return [wire.TokenLogprobs(entry.logprob, entry.top) for entry in entries]
