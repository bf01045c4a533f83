"""The side that prefills: computes prompts for engines that ask, and hands their pages over.

The engine's loop calls ``turn`` between its steps. There a page that is wanted and in the prefix tree is *pinned*: the pool
cannot give it away. A thread for each engine that asks copies pinned pages out and sends them; a page that it has copied is
pinned no more. What waits longer than its job's lease is given up, so an engine that takes nothing, or that has ended, holds no
page for longer.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from twostroke.core.errors import ConfigError, TwostrokeError
from twostroke.engine.core import EngineCore
from twostroke.engine.tiers.images import Bytes, PageImages
from twostroke.engine.tiers.records import PageRecords
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.server.handover.channel import Channel, LostError, be_greeted
from twostroke.server.handover.messages import Beat, Cancel, Compute, Ended, Page
from twostroke.server.handover.segment import mapped
from twostroke.server.handover.settings import HandoverSettings, address_of

log = logging.getLogger("twostroke.server")

MAX_PEERS = 32
"""Engines that ask at a time, those included that greet."""
MAX_JOBS = 1024
"""Unfinished prompts of one of them."""
MAX_LEASE_S = 60.0
_PROMPT = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


@dataclass
class LentCounts:
    """Of an engine that computes prompts for others, since its start."""

    lent_prompts: int = 0
    lent_pages: int = 0
    lent_bytes: int = 0
    lent_pinned: int = 0  # pages, now
    lent_peers: int = 0  # engines that ask, now


class _Pin:
    """Page ``page`` of the pool, which is pinned for job ``job``, the ``index``-th of its pages."""

    def __init__(self, job: _Job, index: int, page: int) -> None:
        self.job, self.index, self.page = job, index, page
        self.since = time.monotonic()
        self._lock = threading.Lock()
        self._taken = False

    def take(self) -> bool:
        """Whether the caller is the first: the thread that sends it, or the loop that gives it up."""
        with self._lock:
            taken, self._taken = self._taken, True
        return not taken


@dataclass(eq=False)
class _Job:
    asked: Compute
    peer: _Peer
    name: str
    own_keys: list[bytes]
    next: int = 0  # the first of its pages that has not been pinned
    pins: deque[_Pin] = field(default_factory=deque)  # those that may still wait
    running: bool = False  # whether the engine computes it
    ended: Ended | None = None  # what ends it, once that waits behind its pages


class _Peer:
    """An engine that asks. ``inbox`` has its messages, ``copied`` the pins whose pages are pinned no more."""

    def __init__(self, channel: Channel, slots: Bytes | None, lender: Lender) -> None:
        self.channel, self.slots, self._lender = channel, slots, lender
        self.inbox: deque[Compute | Cancel] = deque()
        self.outbox: queue.SimpleQueue[_Pin | Ended | None] = queue.SimpleQueue()
        self.copied: deque[_Pin] = deque()
        self.jobs: dict[int, _Job] = {}
        self.sent_s: dict[int, float] = {}
        self.lost = False

    def lose(self, why: object) -> None:
        if not self.lost:
            self.lost = True
            log.info("an engine that asks for prompts is gone: %s.", why)
            self.outbox.put(None)
            self.channel.close()
            self._lender.wake()

    def read(self) -> None:
        try:
            while not self.lost:
                message = self.channel.receive()
                if isinstance(message, Compute | Cancel):
                    if len(self.inbox) > 2 * MAX_JOBS:
                        raise LostError(f"it asks for more than {MAX_JOBS} prompts at a time")
                    self.inbox.append(message)
                    self._lender.wake()
                elif not isinstance(message, Beat):
                    raise LostError(f"it sent a {type(message).__name__}")
        except LostError as error:
            self.lose(error)

    def write(self, images: PageImages, records: PageRecords, beat_s: float) -> None:
        scratch = records.record()
        try:
            while not self.lost:
                try:
                    item = self.outbox.get(timeout=beat_s)
                except queue.Empty:
                    self.channel.send(Beat(self._lender.busy_s()))
                    continue
                if isinstance(item, Ended):
                    item.sent_s = self.sent_s.pop(item.job, 0.0)
                    self.channel.send(item)
                elif item is not None and item.take():
                    self._send_page(item, images, records, scratch)
        except LostError as error:
            self.lose(error)

    def _send_page(self, pin: _Pin, images: PageImages, records: PageRecords, scratch: Bytes) -> None:
        asked, size, began = pin.job.asked, records.page_tokens, time.perf_counter()
        record = scratch if self.slots is None else self.slots[asked.slots[pin.index]]
        place = asked.first + pin.index
        records.set_tokens(record, asked.tokens[place * size : (place + 1) * size])
        images.copy_out(pin.page, records.image(record))
        self.copied.append(pin)
        self._lender.wake()
        total, crc = records.sums(asked.keys[pin.index], record)
        self.channel.send(Page(asked.job, pin.index, total, crc), scratch if self.slots is None else None)
        self.sent_s[asked.job] = self.sent_s.get(asked.job, 0.0) + time.perf_counter() - began


class Lender:
    """Listens at ``settings.listen`` for engines that ask ``core``. ``wake`` lets the engine's loop take a turn, and ``busy_s``
    says for how long its present one has lasted. Raises ConfigError if the address cannot be used."""

    def __init__(
        self, core: EngineCore, settings: HandoverSettings, wake: Callable[[], None], busy_s: Callable[[], float]
    ) -> None:
        self.wake, self.busy_s = wake, busy_s
        self._core, self._settings = core, settings
        self._images = core.pool.images()
        self._records = PageRecords(core.scheduler.config.page_tokens, self._images.n_bytes)
        self._key = settings.key()
        self._peers: list[_Peer] = []
        self._lock = threading.Lock()
        self._greeting = 0
        self._jobs: dict[str, _Job] = {}  # by the name that the engine knows
        self._numbers = itertools.count()
        self._counts = LentCounts()
        assert settings.listen is not None
        self._listener = _listening(settings.listen, self._key)
        threading.Thread(target=self._accept, name="handover", daemon=True).start()

    @property
    def port(self) -> int:
        """Of the address at which it listens, where that has one."""
        name = self._listener.getsockname()
        return int(name[1]) if isinstance(name, tuple) else 0

    def counts(self) -> LentCounts:
        counts = LentCounts(**vars(self._counts))
        counts.lent_pinned = sum(len(job.pins) for job in self._jobs.values())
        counts.lent_peers = len(self._peers)
        return counts

    @property
    def is_idle(self) -> bool:
        """Whether no prompt is computed and no page pinned for another engine."""
        return not self._jobs

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for peer in self._peers:
                peer.lose("this engine is ending")

    # Threads of their own.

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                full = self._greeting + len(self._peers) >= MAX_PEERS
                self._greeting += not full
            if full:
                peer.close()
            else:
                threading.Thread(target=self._attend, args=(peer,), name="handover-in", daemon=True).start()

    def _attend(self, socket_: socket.socket) -> None:
        channel = Channel(socket_, self._settings.timeout_s)
        made: _Peer | None = None
        try:
            hello, fd = be_greeted(channel, self._key, self._records.n_bytes, self.busy_s())
            slots = None if fd is None else mapped(fd, hello.n_slots, self._records.n_bytes)
            made = _Peer(channel, slots, self)
        except (LostError, ValueError) as error:
            log.warning("an engine that asked for prompts was sent away: %s.", error)
            channel.close()
        finally:
            with self._lock:
                self._greeting -= 1
                if made is not None:
                    self._peers.append(made)
        if made is not None:
            arguments = self._images, self._records, self._settings.beat_s
            threading.Thread(target=made.write, args=arguments, name="handover-out", daemon=True).start()
            made.read()

    # The engine's loop.

    def turn(self, events: Iterable[Any] = ()) -> None:
        """Begin what is asked for, pin what has been computed, and let go what has been sent. ``events`` are a step's."""
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            while peer.inbox:
                self._take(peer, peer.inbox.popleft())
        ended = {event.request_id: event.finish_reason for event in events if event.finish_reason is not None}
        for job in self._jobs.values():
            if job.ended is None or job.pins:
                self._advance(job, ended.get(job.name))
        for peer in peers:
            if peer.lost:
                for job in peer.jobs.values():
                    self._give_up(job, "the engine that asked is gone")
            self._let_go(peer)
            if peer.lost and not peer.jobs:
                with self._lock:
                    self._peers.remove(peer)

    def _take(self, peer: _Peer, message: Compute | Cancel) -> None:
        if isinstance(message, Cancel):
            if message.job in peer.jobs:
                self._give_up(peer.jobs[message.job], "it was cancelled")
            return
        why = self._refusal(peer, message)
        if why:
            peer.outbox.put(Ended(message.job, why))
            return
        core, size = self._core, self._records.page_tokens
        own_keys = core.scheduler.page_lists.keys_of(message.tokens, message.client)[1:]
        job = _Job(message, peer, f"handover:{next(self._numbers)}", own_keys)
        peer.jobs[message.job] = self._jobs[job.name] = job
        self._counts.lent_prompts += 1
        n_held = next((i for i, key in enumerate(own_keys) if core.scheduler.pool.tree.held(key) is None), len(own_keys))
        if n_held * size < len(message.tokens):
            try:
                core.add_request(job.name, message.tokens, _PROMPT, message.priority, message.client)
                job.running = True
            except TwostrokeError as error:
                self._stop(job, str(error))

    def _refusal(self, peer: _Peer, asked: Compute) -> str:
        """Why it is not computed; empty if it is."""
        size, n_slots = self._records.page_tokens, None if peer.slots is None else len(peer.slots)
        n = len(asked.tokens) // size - asked.first
        if asked.identity != self._core.identity:
            return "this engine has other weights, or computes or holds keys and values in another way"
        whole = asked.tokens and len(asked.tokens) % size == 0 and asked.first >= 0 and n > 0
        if not whole or len(asked.slots) != n or len(asked.keys) != n or not 0 < asked.lease_s <= MAX_LEASE_S:
            return "it does not ask for whole pages, each with a slot and a key"
        if any(slot < 0 or (n_slots is not None and slot >= n_slots) for slot in asked.slots):
            return "it names slots that its memory does not have"
        if asked.job in peer.jobs or len(peer.jobs) >= MAX_JOBS:
            return f"its number is in use, or it asks for more than {MAX_JOBS} prompts at a time"
        return ""

    def _advance(self, job: _Job, ended: str | None) -> None:
        asked, tree, size = job.asked, self._core.scheduler.pool.tree, self._records.page_tokens
        if ended is not None:
            job.running = False
        while job.ended is None and ended != "error" and job.next < len(asked.slots):
            place = asked.first + job.next
            held = tree.held(job.own_keys[place])
            if held is None or held[1] != asked.tokens[place * size : (place + 1) * size]:
                break
            self._core.scheduler.pool.retain([held[0]])
            pin = _Pin(job, job.next, held[0])
            job.pins.append(pin)
            job.peer.outbox.put(pin)
            job.next += 1
            self._counts.lent_pages += 1
            self._counts.lent_bytes += self._records.n_bytes
        if job.next == len(asked.slots):
            self._stop(job, "")
        elif not job.running:
            self._stop(job, "its prompt could not be computed" if ended == "error" else "its pages left the cache")
        if job.pins and time.monotonic() - job.pins[0].since > asked.lease_s:
            self._give_up(job, f"its pages were not taken within {asked.lease_s:g} s")

    def _let_go(self, peer: _Peer) -> None:
        """Release the pages that have been copied, and forget jobs of which nothing is left."""
        while peer.copied:
            pin = peer.copied.popleft()
            pin.job.pins.remove(pin)
            self._core.scheduler.pool.release([pin.page])
        for job in [job for job in peer.jobs.values() if job.ended is not None and not job.pins]:
            del peer.jobs[job.asked.job], self._jobs[job.name]

    def _stop(self, job: _Job, why: str) -> None:
        """Compute ``job`` no further, and let its end follow the pages that wait to be sent."""
        if job.running:
            self._core.abort(job.name)
            job.running = False
        if job.ended is None:
            job.ended = Ended(job.asked.job, why[:300])
            job.peer.outbox.put(job.ended)

    def _give_up(self, job: _Job, why: str) -> None:
        """`_stop`, and do not send the pages that wait."""
        for pin in list(job.pins):
            if pin.take():
                job.pins.remove(pin)
                self._core.scheduler.pool.release([pin.page])
        if job.ended is not None:
            job.ended.why = job.ended.why or why  # it waits behind what is not sent
        self._stop(job, why)


def _listening(address: str, key: bytes | None) -> socket.socket:
    where = address_of(address)
    if isinstance(where, tuple) and key is None:
        raise ConfigError(f"engines that ask at {address} must prove who they are. Give --role-key-file.")
    listener: socket.socket | None = None
    try:
        if isinstance(where, str):
            listener = socket.socket(socket.AF_UNIX)
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISSOCK(os.lstat(where).st_mode):  # of an engine that has ended
                    os.unlink(where)
            listener.bind(where)
            os.chmod(where, 0o600)
        else:
            listener = socket.socket(socket.getaddrinfo(*where, type=socket.SOCK_STREAM)[0][0])
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
        listener.listen(8)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(f"engines cannot be listened to at {address}: {error.strerror or error}. Name another.") from None
    return listener
