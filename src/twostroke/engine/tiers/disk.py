"""The disk tier: pages of finished requests in a file of a directory, from which later requests and later starts load them.

A page is written by a thread of its own while it still lies in the pool, and loaded when a request is admitted, if that is
predicted to take less time than computing its tokens. Nothing depends on the file: what is damaged, missing or late is
computed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import queue
import re
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from twostroke.core.errors import ConfigError, CorruptFileError
from twostroke.core.private_folder import private_folder
from twostroke.core.units import format_bytes
from twostroke.engine.tiers.images import Bytes, PageImages
from twostroke.engine.tiers.load_times import Load, LoadTimes, PromptTimes
from twostroke.engine.tiers.page_file import Entry, PageFile, PageRead
from twostroke.scheduling.prefix_tree import PrefixTree
from twostroke.scheduling.request import Request
from twostroke.scheduling.step import ScheduledStep

log = logging.getLogger("twostroke.engine")

_MOST_WAITING = 256
"""Finished requests whose pages wait to be written. Those of further ones are not kept."""

_SLICE_S = 0.01
"""Seconds of loading in a step in which other requests decode; the rest follows in the next steps."""

_CHECKED_EVERY = 8
"""Pages after which loading stops if the disk has become too slow for the rest."""

_LEAST_GAIN = 1.25
"""Loading must promise to take so many times less than computing. Below it the errors of both predictions decide."""

_SAMPLED = 8
"""Pages that are read to know how long loading takes: at the start, and again after ``_RENEWED`` refusals."""

_RENEWED = 8
"""Admissions for which loading was not worth it until the writing thread reads some of the last one's pages. A disk that was
slow is then loaded from again, and no request has to try it."""

_NICE = 19
"""Of the writing thread. At the engine's own priority it would make the engine's threads wait for each other at barriers."""

_CLOSE_S = 30.0
"""Longest time to write what waits when the engine is closed."""


@dataclass
class DiskCounts:
    """Since the start, but for ``pages``, which are in the file now."""

    pages: int = 0
    hit_tokens: int = 0
    load_s: float = 0.0
    written: int = 0  # pages
    dropped: int = 0  # requests whose pages were not written, because too many waited
    damaged: int = 0  # pages that were not what their entry says
    refused: int = 0  # admissions for which computing was predicted to be faster


class PageStore:
    """The index of a page file: key → slot, the least recently used first. Two threads may use it; one alone writes pages."""

    def __init__(self, file: PageFile, most_bytes: int) -> None:
        self.file = file
        self.n_most = file.slots_within(most_bytes)
        self._lock = threading.Lock()
        self._slots: OrderedDict[bytes, tuple[int, Entry]] = OrderedDict()
        self._free: list[int] = []
        entries = file.entries(self.n_most)
        file.cut(self.n_most)
        self._n_slots = len(entries)
        for slot, entry in sorted(enumerate(entries), key=lambda item: 0 if item[1] is None else item[1].used):
            older = (slot, entry) if entry is None else self._slots.pop(entry.key, None)
            if older is not None:
                self._free.append(older[0])
            if entry is not None:
                self._slots[entry.key] = slot, entry
        self._clock = max((entry.used for entry in entries if entry is not None), default=0)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def oldest(self, n: int) -> list[bytes]:
        """Up to ``n`` keys, those that were used the longest time ago, in the order of the file."""
        with self._lock:
            return sorted(list(self._slots)[:n], key=lambda key: self._slots[key][0])

    def read(self, key: bytes, record: Bytes) -> PageRead | None:
        """Fill ``record`` with what is held of ``key``. Returns None if nothing is. A page that is not whole is forgotten."""
        found = self._slots.get(key)
        if found is None:
            return None
        read = self.file.read(*found, record)
        if not read.whole:
            if self._slots.get(key) is not found:  # its slot was taken for another page meanwhile
                return None
            self.forget([key])
        return read

    def in_memory(self, keys: Sequence[bytes]) -> bool:
        """Whether reading ``keys`` waits for no disk, as far as the system tells."""
        found = [self._slots.get(key) for key in keys]
        return all(slot is not None and self.file.in_memory(slot[0]) for slot in found)

    def leave_memory(self, keys: Sequence[bytes]) -> None:
        """Ask the system's page cache to forget what is held of ``keys``."""
        for key in keys:
            found = self._slots.get(key)
            if found is not None:
                with contextlib.suppress(OSError):
                    self.file.leave_memory(found[0])

    def forget(self, keys: Sequence[bytes]) -> None:
        """Let nothing be held of ``keys``."""
        for key in keys:
            with self._lock:
                found = self._slots.pop(key, None)
                if found is not None:
                    self._free.append(found[0])
            if found is not None:
                with contextlib.suppress(OSError):
                    self.file.write_entry(found[0], None)

    def write(self, key: bytes, record: Bytes, beside: Sequence[bytes]) -> bool:
        """Hold ``record`` for ``key``, in the place of the page used the longest time ago if there is no other. Returns False,
        and holds nothing, if that page is one of ``beside``. Raises OSError."""
        with self._lock:
            if self._free:
                slot = self._free.pop()
            elif self._n_slots < self.n_most:
                slot = self._n_slots
                self._n_slots += 1
            elif not self._slots or next(iter(self._slots)) in beside:
                return False
            else:
                slot, _ = self._slots.popitem(last=False)[1]
            self._clock += 1
            used = self._clock
        try:
            entry = self.file.write(slot, key, used, record)
        except OSError as error:
            with self._lock:
                self._free.append(slot)
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    self.n_most = min(self.n_most, slot)  # places that the disk has given already are used on
                    self._free = [known for known in self._free if known < slot]
                    self._n_slots = min(self._n_slots, slot)
            raise
        with self._lock:
            self._slots[key] = slot, entry
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        """The prefix ``keys`` was used now, its start last: the end of a prefix then makes room before its start, without which
        it cannot be found. Raises OSError."""
        for key in reversed(keys):
            with self._lock:
                found = self._slots.get(key)
                if found is None:
                    continue
                self._clock += 1
                slot, entry = found
                entry = Entry(key, self._clock, entry.total, entry.crc)
                self._slots[key] = slot, entry
                self._slots.move_to_end(key)
            self.file.write_entry(slot, entry)


def _read_through(store: PageStore, images: PageImages, keys: Sequence[bytes], record: Bytes) -> Load:
    """What loading ``keys`` takes, once the system was asked to forget them. Nothing goes into the pool: a copy out of it
    stands for the one into it."""
    load = Load()
    store.leave_memory(keys)
    for key in keys:
        began = time.perf_counter()
        read = store.read(key, record)
        if read is not None:
            store.file.records.tokens(record)
            images.copy_out(0, store.file.records.image(record))
            load.add(time.perf_counter() - began, read.waited_s)
    return load


class _Writer:
    """Writes pages behind the steps. ``jobs`` are its calls of ``write`` and ``renew``; None ends the thread."""

    def __init__(self, store: PageStore, tree: PrefixTree, images: PageImages) -> None:
        self.jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(_MOST_WAITING)
        self.n_written = 0
        self.seconds: float | None = None  # that the last page took
        self._store, self._tree, self._images = store, tree, images
        self._record = store.file.records.record()
        self._is_over = self._is_full = False

    def run(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (job := self.jobs.get()) is not None:
            try:
                job()
            finally:
                self.jobs.task_done()

    def renew(self, keys: Sequence[bytes], times: LoadTimes) -> None:
        """Tell ``times`` what loading ``keys`` takes now."""
        times.renew(_read_through(self._store, self._images, keys, self._record))

    def write(self, keys: Sequence[bytes]) -> None:
        """Keep the prefix ``keys`` of a request that has ended."""
        if self._is_over:
            return
        try:
            if os.fstat(self._store.file.descriptor).st_nlink == 0:
                raise FileNotFoundError("the file was removed")
            self._write(keys)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if full and not self._is_full:
                log.warning("the disk of --kv-dir is full: its %d pages make room for one another.", self._store.n_most)
            elif not full:
                log.warning("no further pages are kept in --kv-dir: %s.", error)
            self._is_over, self._is_full = not full, full

    def _write(self, keys: Sequence[bytes]) -> None:
        store, file, record = self._store, self._store.file, self._record
        n_kept = 0
        try:
            for key in keys:
                if key not in store:
                    began = time.perf_counter()
                    held = self._tree.held(key)
                    if held is None:
                        break  # what follows a missing page cannot be found
                    page, tokens = held
                    file.records.set_tokens(record, tokens)
                    self._images.copy_out(page, file.records.image(record))
                    # A page leaves the tree before it is written again, so what stands in it since has been copied whole.
                    again = self._tree.held(key)
                    if again is None or again[1] is not tokens:
                        break
                    if not store.write(key, record, keys[:n_kept]):
                        break  # the prefix is longer than the file
                    self.n_written += 1
                    self.seconds = time.perf_counter() - began
                n_kept += 1
        finally:
            store.touch(keys[:n_kept])


class DiskTier:
    """See ``scheduling.lower_tier``. ``times`` are seconds of a step with a prompt by its rows, ``token_budget`` the most."""

    def __init__(
        self, store: PageStore, tree: PrefixTree, images: PageImages, page_tokens: int, token_budget: int, times: PromptTimes
    ) -> None:
        self._store, self._images, self._page_tokens, self._token_budget = store, images, page_tokens, token_budget
        self.times = times
        self._counts = DiskCounts()
        self._record = store.file.records.record()
        self.loads = self._sampled()
        self._under_way: dict[str, Load] = {}  # of requests whose loads go on in the next step
        self._loaded_s = 0.0  # in the present step
        self._writer = _Writer(store, tree, images)
        thread = threading.Thread(target=self._writer.run, name="kv-pages", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _end, self._writer.jobs, thread, store.file)

    def close(self) -> None:
        """Write what waits to be written, and let another process have the file."""
        self._end()

    def wait_written(self) -> None:
        """Return when no finished request's pages wait to be written any more (for measurements and tests)."""
        self._writer.jobs.join()

    def counts(self) -> DiskCounts:
        counts = self._counts
        counts.pages, counts.written = len(self._store), self._writer.n_written
        return DiskCounts(**vars(counts))

    def _sampled(self) -> LoadTimes:
        """How long loading takes, as a few pages say. They are read twice, because the first time also is that of memory that
        was never touched."""
        store, times = self._store, LoadTimes(self._store.file.records.n_bytes)
        sample = store.oldest(_SAMPLED)
        _read_through(store, self._images, sample, self._record)
        times.saw(_read_through(store, self._images, sample, self._record))
        return times

    def worth(self, request: Request, first: int, end: int) -> int:
        """How many of pages ``first`` to ``end`` of ``request`` are held, up to the first that is not; 0 if computing their
        tokens is predicted to be as fast as loading."""
        store, loads, n = self._store, self.loads, 0
        while first + n < end and request.page_keys[first + n] in store:
            n += 1
        if n == 0:
            return 0
        if loads.work_s is None:
            loads.work_s = self._writer.seconds  # reading takes about as long as writing did
        self._under_way.pop(request.id, None)
        keys = request.page_keys[first : first + n]
        n_left = len(request.tokens) - first * self._page_tokens
        if self._pays(n, n_left, loads.seconds(n, store.in_memory((keys[0], keys[-1])))):
            return n
        self._counts.refused += 1
        if self._counts.refused % _RENEWED == 0:
            with contextlib.suppress(queue.Full):
                self._writer.jobs.put_nowait(partial(self._writer.renew, keys[:_SAMPLED], loads))
        return 0

    def _pays(self, n_pages: int, n_left: int, load_s: float) -> bool:
        """Whether ``n_pages`` that take ``load_s`` save time where ``n_left`` tokens of the request are to be computed."""
        saved = self._compute_s(n_left) - self._compute_s(n_left - n_pages * self._page_tokens)
        return saved > _LEAST_GAIN * load_s

    def _compute_s(self, n_tokens: int) -> float:
        steps, rest = divmod(n_tokens, self._token_budget)
        return steps * self.times.seconds(self._token_budget) + (self.times.seconds(rest) if rest else 0.0)

    def load(self, request: Request, first: int, end: int, bounded: bool) -> int:
        """Fill pages ``first`` to ``end`` of ``request``. Returns how many were, from the first on: fewer where one is damaged
        or the disk has become too slow, and, if ``bounded``, after ``_SLICE_S``."""
        store, tokens, size = self._store, request.tokens, self._page_tokens
        records, load = store.file.records, self._under_way.pop(request.id, None) or Load()
        began = at = time.perf_counter()
        n, goes_on = 0, False
        while first + n < end:
            place = first + n
            if n and bounded and at - began > _SLICE_S:
                goes_on = True
                break
            if load.n and load.n % _CHECKED_EVERY == 0:
                rest = end - place
                if not self._pays(rest, len(tokens) - place * size, load.rest_s(rest)):
                    break
            read = store.read(request.page_keys[place], self._record)
            if read is not None and not read.whole:
                self._counts.damaged += 1
            if read is None or not read.whole or records.tokens(self._record) != tokens[place * size : (place + 1) * size]:
                break
            self._images.copy_in(request.pages[place], records.image(self._record))
            n += 1
            before, at = at, time.perf_counter()
            load.add(at - before, read.waited_s)
        if goes_on:
            if len(self._under_way) > _MOST_WAITING:  # of requests that were aborted
                self._under_way.clear()
            self._under_way[request.id] = load
        else:
            self.loads.saw(load)
        passed = time.perf_counter() - began
        self._counts.hit_tokens += n * size
        self._counts.load_s += passed
        self._loaded_s += passed
        return n

    def keep(self, keys: Sequence[bytes]) -> None:
        """Pages of the prefix ``keys`` are no longer used by their request."""
        try:
            self._writer.jobs.put_nowait(partial(self._writer.write, keys))
        except queue.Full:
            self._counts.dropped += 1

    def forget(self, keys: Sequence[bytes]) -> None:
        """Pages of ``keys`` were computed by a request that failed."""
        self._store.forget(keys)

    def saw(self, step: ScheduledStep, seconds: float) -> None:
        """``step`` took ``seconds``, its loads included. Steps that compute no prompt say little of computing prompts."""
        loaded, self._loaded_s = self._loaded_s, 0.0
        if step.n_decodes < len(step.requests) and seconds > loaded:
            self.times.saw(step.n_tokens, seconds - loaded)


def _end(jobs: queue.Queue[Callable[[], None] | None], thread: threading.Thread, file: PageFile) -> None:
    with contextlib.suppress(queue.Full):
        jobs.put(None, timeout=_CLOSE_S)
    thread.join(_CLOSE_S)
    if not thread.is_alive():
        file.close()


def open_store(directory: Path, most_bytes: int, identity: bytes, page_tokens: int, images: PageImages) -> PageStore | None:
    """The pages of this identity in ``directory``, which is made where it is missing. None, with a sentence in the log, if they
    cannot be used: another process has them, or the file is another model's.

    Raises ConfigError if the directory cannot be used, or if ``most_bytes`` is less than a page takes.
    """
    name = f"{identity.hex()[:32]}.kv"
    try:
        with private_folder(directory, create=True) as folder:
            files = folder.files(re.compile(r"[0-9a-f]{32}\.kv"))
            n_others = sum(status.st_blocks * 512 for other, status in files if other != name)
            descriptor = folder.update(name)
    except OSError as error:
        reason = error.strerror or str(error).rstrip(".")
        raise ConfigError(f"kv_dir={str(directory)!r} cannot be used: {reason}. Name another directory.") from None
    file = PageFile(descriptor, identity, page_tokens, images.n_bytes)
    try:
        store = _open(file, directory / name, most_bytes)
    except OSError as error:
        log.warning("%s cannot be used: %s. No pages are kept.", directory / name, error.strerror or error)
        store = None
    except BaseException:
        file.close()
        raise
    if store is None:
        file.close()
    elif n_others:
        log.warning("%s also holds %s of other models' pages, which are not used.", directory, format_bytes(n_others))
    return store


def _open(file: PageFile, path: Path, most_bytes: int) -> PageStore | None:
    if file.slots_within(most_bytes) < 1:
        raise ConfigError(f"kv_dir_bytes={most_bytes} is less than a file of one page of the cache takes. Raise it.")
    try:
        fcntl.flock(file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.warning("another process keeps its pages in %s, so this one keeps none. Name another --kv-dir.", path)
        return None
    try:
        if not file.is_blank:
            file.check()
        else:
            file.begin()
    except ConfigError as error:
        log.warning("%s is not used: %s. Remove it, or name another --kv-dir.", path, error)
        return None
    except CorruptFileError as error:
        log.warning("%s begins anew: %s.", path, error)
        file.begin()
    return PageStore(file, most_bytes)
