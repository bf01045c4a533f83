"""The side that decodes: has prompts computed by engines that prefill, before its own engine gets the request.

A request waits here until its prompt's pages have come or are known not to come, and then goes to the engine, which loads what
has come (``engine.tiers.received``) and computes the rest. So every fault ends the same way: a peer that is gone, a page that
is damaged, a lease that has passed are pages that did not come.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from twostroke.engine.core import EngineCore
from twostroke.engine.tiers.images import Bytes
from twostroke.engine.tiers.received import Received, ReceivedPages
from twostroke.engine.tiers.records import PageRecords
from twostroke.server import wire
from twostroke.server.handover.channel import Channel, LostError, greet, reason_of
from twostroke.server.handover.messages import VERSION, Beat, Cancel, Compute, Ended, Hello, Page
from twostroke.server.handover.segment import Segment
from twostroke.server.handover.settings import HandoverSettings, address_of

log = logging.getLogger("twostroke.server")

BACKOFF_S = (0.1, 0.25, 0.5, 1.0)
"""Before a peer is connected to again."""


@dataclass
class HandoverCounts:
    """Of an engine that asks, since its start. ``s`` of a handover are what its pages took to be copied out and sent, checked,
    and copied in; ``wait_s`` is how long the request waited for all of that and for its prompt to be computed."""

    handover_requests: int = 0  # of which pages came
    handover_tokens: int = 0  # that came
    handover_bytes: int = 0
    handover_s: float = 0.0
    handover_wait_s: float = 0.0
    handover_incomplete: int = 0  # requests of which pages did not come
    handover_damaged: int = 0  # pages that were not what was said of them
    handover_peers: int = 0  # that can be asked now


class Handover:
    """The prompt of one request, which a peer computes. ``done`` when no more pages of it come."""

    def __init__(self, asked: Compute, give_up: Callable[[Handover], None]) -> None:
        self.asked = asked
        self.done: Future[None] = Future()
        self.began_s = time.monotonic()
        self.peer: _Peer | None = None
        self.segment: Segment | None = None
        self.slots: dict[int, int] = {}  # by index of its page: where it will be written; not those that came
        self.came: dict[int, Received] = {}
        self._give_up = give_up

    def cancel(self) -> None:
        """Nothing of it is wanted any more: its request has ended, or has got what it needs."""
        self._give_up(self)


@dataclass(eq=False)
class _Peer:
    """The engine at ``address``. ``channel`` is None while it cannot be asked."""

    address: str
    channel: Channel | None = None
    outbox: queue.SimpleQueue[Compute | Cancel | None] = field(default_factory=queue.SimpleQueue)
    segment: Segment | None = None
    jobs: dict[int, Handover] = field(default_factory=dict)
    waiting: deque[Handover] = field(default_factory=deque)  # for slots

    @property
    def tokens(self) -> int:
        """That it was asked for and has not handed over."""
        return sum(len(each.asked.tokens) for each in (*self.jobs.values(), *self.waiting))


class Borrower:
    """Asks ``settings.peers`` on behalf of ``core``. ``wake`` lets the engine's loop take a turn."""

    def __init__(self, core: EngineCore, settings: HandoverSettings, wake: Callable[[], None]) -> None:
        self._core, self._settings, self._wake = core, settings, wake
        self._pages: ReceivedPages = core.receive_pages()
        self._records = PageRecords(core.scheduler.config.page_tokens, core.pool.images().n_bytes)
        self._key = settings.key()
        self._separate = core.settings.separate_prefixes
        self._counts = HandoverCounts()
        self._lock = threading.RLock()
        self._n_asked = 0
        self._said: dict[str, str] = {}
        self._closed = threading.Event()
        self._peers = [_Peer(address) for address in settings.peers]
        for peer in self._peers:
            address_of(peer.address)  # raises ConfigError
            threading.Thread(target=self._attend, args=(peer,), name="handover", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            for peer in self._peers:
                if peer.channel is not None:
                    peer.channel.close()

    def counts(self) -> HandoverCounts:
        with self._lock:
            counts = HandoverCounts(**vars(self._counts))
            counts.handover_s += self._pages.load_s
            counts.handover_peers = sum(self._can_be_asked(peer) for peer in self._peers)
        return counts

    @property
    def n_slots_taken(self) -> int:
        return sum(peer.segment.n_slots - peer.segment.n_free for peer in self._peers if peer.segment is not None)

    # The engine's loop.

    def ask(self, command: wire.Add) -> Handover | None:
        """Have the prompt of ``command`` computed by the peer that has least to do. None if the engine should do it itself:
        most of it is cached, nobody can be asked, or its pages would not be found by their tokens alone."""
        params, core, size = command.params, self._core, self._records.page_tokens
        if command.lora is not None or params.prompt_logprobs is not None or params.pooling == "mean" or core.is_empty:
            return None
        prompt = command.prompt_ids
        n_pages = (len(prompt) - 1) // size
        if n_pages * size < self._settings.least_tokens or not set(map(type, prompt)) <= {int}:
            return None
        if min(prompt) < 0 or max(prompt) >= core.spec.vocab_size:  # the engine says so
            return None
        tree = core.scheduler.pool.tree
        keys = core.scheduler.page_lists.keys_of(prompt[: n_pages * size], command.client)[1:]
        first = next((i for i, key in enumerate(keys) if tree.held(key) is None), n_pages)
        if (n_pages - first) * size < self._settings.least_tokens:
            return None
        with self._lock:
            ready = [peer for peer in self._peers if self._can_be_asked(peer)]
            if not ready:
                return None
            peer = min(ready, key=lambda each: each.tokens)
            assert peer.segment is not None
            end = min(n_pages, first + peer.segment.n_slots)
            self._n_asked += 1
            client = client_of(command.client) if self._separate else ""
            asked = Compute(
                self._n_asked, core.identity, prompt[: end * size], first, [], keys[first:end], client, command.priority,
                self._settings.lease_s,
            )  # fmt: skip
            made = Handover(asked, self._give_up)
            made.peer = peer
            peer.waiting.append(made)
            self._send_waiting(peer)
        return made

    def _give_up(self, handover: Handover) -> None:
        with self._lock:
            peer = handover.peer
            if peer is not None and handover in peer.waiting:
                peer.waiting.remove(handover)
            elif peer is not None and handover.asked.job in peer.jobs and not handover.done.done():
                peer.outbox.put(Cancel(handover.asked.job))  # its slots are free once its end has come
            for index, page in handover.came.items():
                self._pages.drop(handover.asked.keys[index], page)
            handover.came.clear()
            _resolve(handover)

    # Threads of their own, one a peer that reads and one that writes.

    def _can_be_asked(self, peer: _Peer) -> bool:
        return peer.channel is not None

    def _attend(self, peer: _Peer) -> None:
        n_failed = 0
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                self._talk(peer)
            except LostError as error:
                self._say(peer, str(error))
            except OSError as error:
                self._say(peer, reason_of(error))
            self._lose(peer)
            n_failed = 0 if time.monotonic() - began > BACKOFF_S[-1] else n_failed + 1
            self._closed.wait(BACKOFF_S[min(n_failed, len(BACKOFF_S) - 1)])

    def _say(self, peer: _Peer, why: str) -> None:
        """Log it, unless it was the last that was logged of this peer."""
        if self._said.get(peer.address) != why and not self._closed.is_set():
            self._said[peer.address] = why
            log.warning(
                "%s computes no prompts for this engine, which computes them itself: %s.", peer.address, why.rstrip(".")
            )

    def _talk(self, peer: _Peer) -> None:
        """Connect, greet, and take what comes until the connection is lost."""
        where, settings = address_of(peer.address), self._settings
        near = isinstance(where, str)
        channel = Channel(_connected(where, settings.timeout_s), settings.timeout_s)
        # A new one for each connection: an engine that was stopped may still write to the one before.
        segment = Segment(max(1, settings.memory_bytes // self._records.n_bytes), self._records.n_bytes, near)
        try:
            n_shared = 0 if segment.fd is None else segment.n_slots
            welcome = greet(channel, Hello(VERSION, self._records.n_bytes, n_shared), self._key, segment.fd)
            self._check(welcome.busy_s)
            segment.close_fd()
            with self._lock:
                peer.channel, peer.segment = channel, segment
                peer.outbox = queue.SimpleQueue()
            arguments = channel, peer.outbox, settings.beat_s
            threading.Thread(target=_write, args=arguments, name="handover-out", daemon=True).start()
            log.info("%s computes prompts for this engine.", peer.address)
            self._said.pop(peer.address, None)
            into = partial(self._place, peer, None if n_shared else self._records.record())
            while not self._closed.is_set():
                match channel.receive(into):
                    case Page() as page:
                        self._came(peer, page)
                    case Ended() as ended:
                        self._ended(peer, ended)
                    case Beat(busy_s):
                        self._check(busy_s)
                    case other:
                        raise LostError(f"it sent a {type(other).__name__}")
        finally:
            segment.close_fd()
            channel.close()
            peer.outbox.put(None)

    def _check(self, busy_s: float) -> None:
        if busy_s > self._settings.step_timeout_s:
            raise LostError(f"one step of it has taken over {self._settings.step_timeout_s:g} s")

    def _place(self, peer: _Peer, scratch: Bytes | None, page: Page) -> Bytes | None:
        """Where the bytes go that follow ``page``; None if they lie in shared memory."""
        if scratch is None:
            return None
        with self._lock:
            handover = peer.jobs.get(page.job)
            slot = None if handover is None else handover.slots.get(page.index)
            return scratch if slot is None or peer.segment is None else peer.segment.record(slot)

    def _came(self, peer: _Peer, page: Page) -> None:
        with self._lock:
            handover = peer.jobs.get(page.job)
            slot = None if handover is None else handover.slots.get(page.index)
            segment = peer.segment
        if handover is None or slot is None or segment is None:
            return
        began, record = time.perf_counter(), segment.record(slot)
        key = handover.asked.keys[page.index]
        whole = self._records.sums(key, record) == (page.total, page.crc)
        with self._lock:
            self._counts.handover_s += time.perf_counter() - began
            if not whole:
                self._counts.handover_damaged += 1
                return  # its slot is free with the others at the end
            del handover.slots[page.index]
            received = Received(record, partial(self._give_back, peer, segment, slot))
            if handover.done.done() or not self._pages.put(key, received):  # cancelled, or another request's came first
                received.free()
                return
            handover.came[page.index] = received
            self._counts.handover_tokens += self._records.page_tokens
            self._counts.handover_bytes += self._records.n_bytes

    def _ended(self, peer: _Peer, ended: Ended) -> None:
        with self._lock:
            handover = peer.jobs.pop(ended.job, None)
            if handover is None:
                return
            self._counts.handover_s += ended.sent_s
            if ended.why and not handover.done.done():
                self._say(peer, ended.why)
            self._end(handover)
            self._send_waiting(peer)

    def _end(self, handover: Handover) -> None:
        """No more pages of it come, and those slots are free to which none came."""
        if not handover.done.done():
            self._counts.handover_requests += bool(handover.came)
            self._counts.handover_incomplete += bool(handover.slots) or not handover.asked.slots
            self._counts.handover_wait_s += time.monotonic() - handover.began_s
        if handover.segment is not None:
            for slot in handover.slots.values():
                handover.segment.give_back(slot)
        handover.slots.clear()
        _resolve(handover)
        self._wake()

    def _give_back(self, peer: _Peer, segment: Segment, slot: int) -> None:
        with self._lock:
            segment.give_back(slot)
            self._send_waiting(peer)

    def _send_waiting(self, peer: _Peer) -> None:
        """Ask for what waits for slots, in order, as far as there are some."""
        while peer.waiting and peer.segment is not None and peer.channel is not None:
            handover = peer.waiting[0]
            slots = peer.segment.take(len(handover.asked.keys))
            if slots is None:
                return
            peer.waiting.popleft()
            handover.asked.slots, handover.segment = slots, peer.segment
            handover.slots = dict(enumerate(slots))
            peer.jobs[handover.asked.job] = handover
            peer.outbox.put(handover.asked)

    def _lose(self, peer: _Peer) -> None:
        with self._lock:
            peer.channel = peer.segment = None
            lost = [*peer.jobs.values(), *peer.waiting]
            peer.jobs.clear()
            peer.waiting.clear()
            for handover in lost:
                self._end(handover)


def _connected(where: str | tuple[str, int], timeout_s: float) -> socket.socket:
    if not isinstance(where, str):
        return socket.create_connection(where, timeout_s)
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.settimeout(timeout_s)
        connected.connect(where)
    except OSError:
        connected.close()
        raise
    return connected


def _resolve(handover: Handover) -> None:
    if not handover.done.done():
        handover.done.set_result(None)


def _write(channel: Channel, outbox: queue.SimpleQueue[Compute | Cancel | None], beat_s: float) -> None:
    try:
        while True:
            try:
                message = outbox.get(timeout=beat_s)
            except queue.Empty:
                channel.send(Beat())
                continue
            if message is None:
                return
            channel.send(message)
    except LostError:
        channel.close()  # the thread that reads says why


def client_of(name: str) -> str:
    """What another engine is told of a client: enough to keep clients apart."""
    return hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=16).hexdigest()
