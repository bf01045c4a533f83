"""What the engines' caches hold, as events that routers before several servers read: vLLM's, in form and meaning.

A batch is the msgpack array [seconds since 1970, [event, …], 0], and an event one of

    ["BlockStored", block hashes, parent's hash or null, token ids, block size, null, null, adapter's name or null]
    ["BlockRemoved", block hashes, null]
    ["AllBlocksCleared"]

A block is a full page, and its hash the last eight bytes of the page's key, big-endian. The blocks of one event follow each
other; the parent of the first is null where they begin a prompt. Of several engines a block is stored with the first that holds
it and removed with the last, because whoever reads this can choose the server but not the engine. Batches are numbered from 0
in the order in which they are made, and the last ones are kept for readers that have missed some.

Source: vLLM's ``vllm/distributed/kv_events.py``, whose newest form names the fields; readers take both forms.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from twostroke.server import wire

KEPT_BATCHES = 10_000
KEPT_BYTES = 64 * 2**20
"""Of the batches that are kept for readers that have missed some, encoded."""
BLOCKS_A_BATCH = 1024
"""Of what is told to a reader that has missed too much."""
_ENCODER = msgspec.msgpack.Encoder()


class BlockStored(msgspec.Struct, tag="BlockStored", array_like=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", array_like=True):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Event]
    data_parallel_rank: int = 0


@dataclass(slots=True)
class _Block:
    """``engines`` that hold it, a bit each. ``parent`` None: it begins a prompt."""

    engines: int
    parent: bytes | None
    tokens: array[int]
    lora: str


class KVEvents:
    """Follows the caches of some engines and makes batches of what changes. ``outlets`` get each batch's number and bytes."""

    def __init__(self) -> None:
        self.outlets: list[Callable[[int, bytes], None]] = []
        self.n_batches = 0
        self._blocks: dict[bytes, _Block] = {}
        self._page_tokens = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._news = asyncio.Event()

    def of_engine(self, number: int) -> EnginePages:
        return EnginePages(self, 1 << number)

    def stored(self, engine: int, pages: list[wire.Page]) -> list[Event]:
        """Events of blocks that no engine held before."""
        new: dict[bytes, _Block] = {}
        for page in pages:
            known = self._blocks.get(page.key)
            if known is not None:
                known.engines |= engine
                continue
            parent = None if page.begins is not None else page.parent
            before = new.get(page.parent) or self._blocks.get(page.parent)
            lora = page.begins if page.begins is not None else before.lora if before is not None else ""
            new[page.key] = _Block(engine, parent, array("I", page.tokens), lora)
        self._blocks |= new
        return list(self._chains(new))

    def removed(self, engine: int, keys: list[bytes]) -> list[Event]:
        """Events of blocks that no engine holds any more."""
        gone = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None or not block.engines & engine:
                continue
            block.engines &= ~engine
            if not block.engines:
                del self._blocks[key]
                gone.append(_hash(key))
        if gone and not self._blocks:
            return [AllBlocksCleared()]
        return [BlockRemoved(gone)] if gone else []

    def held_by(self, engine: int) -> list[bytes]:
        return [key for key, block in self._blocks.items() if block.engines & engine]

    def use_pages_of(self, n_tokens: int) -> None:
        self._page_tokens = n_tokens

    def publish(self, events: list[Event]) -> None:
        if not events:
            return
        number, payload = self.n_batches, _ENCODER.encode(Batch(time.time(), events))
        self.n_batches += 1
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        for outlet in self.outlets:
            outlet(number, payload)
        self._news.set()

    def kept(self, since: int) -> list[tuple[int, bytes]]:
        """The batches from number ``since`` on that are still kept. Any thread may ask."""
        return [each for each in self._kept.copy() if each[0] >= since]

    async def follow(self, since: int | None, wait_s: float) -> AsyncIterator[tuple[int, Batch] | None]:
        """Batches from number ``since`` on, with their numbers, as they come; None where ``wait_s`` pass without one. If some
        are not kept any more, or with ``since`` None, what is held comes before, under the number of the last batch that it
        contains."""
        at = -1 if since is None or since > self.n_batches else since
        decode = msgspec.msgpack.Decoder(Batch).decode
        while True:
            if at < self.n_batches - len(self._kept):
                at = self.n_batches
                for events in self._held():
                    yield at - 1, Batch(time.time(), events)
            elif at < self.n_batches:
                number, payload = self._kept[at - self.n_batches]
                at += 1
                yield number, decode(payload)
            else:
                self._news.clear()
                try:
                    async with asyncio.timeout(wait_s):
                        await self._news.wait()
                except TimeoutError:
                    yield None

    def _held(self) -> list[list[Event]]:
        """All that is held, told from the beginning, in parts."""
        chains = list(self._chains(self._blocks))
        parts: list[list[Event]] = [[AllBlocksCleared()]]
        n = 0
        for chain in chains:
            n += len(chain.block_hashes)
            if n > BLOCKS_A_BATCH:
                parts.append([])
                n = 0
            parts[-1].append(chain)
        return parts

    def _chains(self, blocks: dict[bytes, _Block]) -> Iterator[BlockStored]:
        """``blocks`` in runs that follow each other, each run behind the one that it continues."""
        behind: dict[bytes, list[bytes]] = {}
        waiting = []
        for key, block in blocks.items():
            if block.parent is not None and block.parent in blocks:
                behind.setdefault(block.parent, []).append(key)
            else:
                waiting.append(key)
        waiting.reverse()
        while waiting:
            key = waiting.pop()
            first, hashes, tokens = blocks[key], [_hash(key)], list(blocks[key].tokens)
            while len(after := behind.get(key, [])) == 1:
                key = after[0]
                hashes.append(_hash(key))
                tokens += blocks[key].tokens
            waiting += reversed(after)
            parent = None if first.parent is None else _hash(first.parent)
            yield BlockStored(hashes, parent, tokens, self._page_tokens, lora_name=first.lora or None)


class EnginePages:
    """The part of ``events`` that is one engine's. An engine that is started anew begins with nothing."""

    def __init__(self, events: KVEvents, engine: int) -> None:
        self._events = events
        self._engine = engine

    def begin(self, page_tokens: int) -> None:
        self._events.use_pages_of(page_tokens)

    def change(self, blocks: wire.Blocks) -> None:
        removed = self._events.removed(self._engine, blocks.removed)
        self._events.publish(removed + self._events.stored(self._engine, blocks.pages))

    def forget(self) -> None:
        self._events.publish(self._events.removed(self._engine, self._events.held_by(self._engine)))


def _hash(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")


def shown(batch: Batch) -> dict[str, Any]:
    """``batch`` with its fields' names, as JSON has it."""
    events = [{"type": type(event).__name__} | msgspec.structs.asdict(event) for event in batch.events]
    return {"ts": batch.ts, "events": events}
