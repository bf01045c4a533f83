"""``TokenStream``: the tokens of one answer, from the engine to who reads them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from twostroke.core.errors import EngineError, TwostrokeError
from twostroke.server import wire

MAX_PENDING_BYTES = 2**20
HELD_BYTES = 2**16
"""Of a held answer, as much as is passed on at once: 8,000 tokens."""


class SlowReaderError(EngineError):
    """Output waits for a client that does not read it."""


class Aborts(Protocol):
    """What a stream needs of who computes it."""

    tags: bool

    def abort(self, stream: TokenStream) -> None: ...


class TokenStream:
    """Tokens of one answer, in order. ``wake`` is set when some have come. An answer of which more than ``MAX_PENDING_BYTES``
    wait to be taken is ended. The first answer's stream has the ``prompt_logprobs`` before any answer has a token, and with the
    first token how many tokens of the prompt were cached. A pooled prompt's has its ``embedding`` at the end.

    An answer of which nothing was taken may `begin_again` on another engine. If ``held``, nothing can be taken before the
    answer is complete or has ``HELD_BYTES``. ``first_s`` is when the first tokens came (``time.perf_counter``), ``asked`` what
    was asked for, until some are taken, ``asked_s`` when, ``started_s`` when the engine began it (``time.monotonic``)."""

    def __init__(
        self,
        client: Aborts,
        request_id: str,
        index: int,
        wake: asyncio.Event,
        asked: wire.Add | None = None,
        held: bool = False,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.finished = False
        self.asked = asked
        self.asked_s = time.monotonic()
        self.retried = False
        self.lora = None if asked is None else asked.lora
        self.first_s: float | None = None
        self.on_first: Callable[[float], None] | None = None
        self.prompt_logprobs: list[wire.TokenLogprobs] = []
        self.cached_tokens = 0
        self.started_s: float | None = None
        self.embedding: bytes | None = None
        self.computed_by: list[str | None] = [None]
        """Fingerprints of the weights that computed it; None: those that were served when it was asked for."""
        self._begun = False
        self._client = client
        self._pending: list[wire.TokenDelta] = []
        self._pending_bytes = 0
        self._error: TwostrokeError | None = None
        self._wake = wake
        self._held = held

    def push(self, delta: wire.TokenDelta) -> None:
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs += delta.prompt_logprobs  # sent once a request, so a slow reader cannot pile them up
            return
        if self.first_s is None:
            self.first_s = time.perf_counter()
            if self.on_first is not None:
                self.on_first(self.first_s)
        self.cached_tokens = self.cached_tokens or delta.cached_tokens
        self.started_s = self.started_s or delta.started_s
        self.embedding = self.embedding or delta.embedding
        if delta.fingerprint is not None:
            self._client.tags = True
            self.computed_by = [*(self.computed_by if self._begun else ()), *delta.fingerprint.split("+")]
        self._begun = True
        self._pending.append(delta)
        self._pending_bytes += 64 + 8 * len(delta.token_ids)
        if delta.logprobs is not None:
            self._pending_bytes += sum(64 + 24 * len(entry.top) for entry in delta.logprobs)
        if self._pending_bytes > MAX_PENDING_BYTES and not self.finished:
            self._pending, self._pending_bytes = [], 0
            self.fail(SlowReaderError("the client reads more slowly than the model writes; the request was ended."))
            self._client.abort(self)
        self._held = self._held and not self.finished and self._pending_bytes < HELD_BYTES
        if not self._held:
            self._wake.set()

    def fail(self, error: TwostrokeError) -> None:
        self._error = error
        self.finished, self._held = True, False
        self._wake.set()

    def take(self) -> list[wire.TokenDelta]:
        """All that has arrived since the last call. Once nothing waits, raises the error that ended the answer."""
        if not self._pending and self._error is not None:
            raise self._error
        if self._held or not self._pending:
            return []
        if self._error is not None:
            self._wake.set()  # the error came with these tokens, and is for the next call
        deltas, self._pending, self._pending_bytes, self.asked = self._pending, [], 0, None
        return deltas

    def begin_again(self, client: Aborts, request_id: str) -> None:
        """Forget what has arrived: ``client`` computes the whole answer under ``request_id``. Nothing of it was taken."""
        self.retried = True
        self._client, self.request_id = client, request_id
        self._pending, self._pending_bytes = [], 0
        self.prompt_logprobs.clear()
        self.cached_tokens, self.embedding, self.first_s, self.started_s = 0, None, None, None
        self.computed_by, self._begun = [None], False

    def close(self) -> None:
        """Take no more tokens. An unfinished answer is aborted in the engine."""
        if not self.finished:
            self.finished = True
            self._client.abort(self)
