"""A file of pages of the KV cache: slots of one size, in groups of 64 behind a table of what they hold.

A header names the identity of what was computed (``engine.tiers.identity``) and the size of a page. A slot has a record
(``engine.tiers.records``). Its entry in the table has the page's key, when it was last used, and a CRC-32 and a sum of the
record, so that nothing has to be written in a certain order or flushed: an entry that does not fit its record, after a crash or
a flipped bit, is a page that is not there.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
import zlib
from dataclasses import dataclass
from typing import NamedTuple

from twostroke.core.errors import ConfigError, CorruptFileError
from twostroke.engine.tiers.images import Bytes
from twostroke.engine.tiers.records import PageRecords

_MAGIC = b"twostroke kv 1\0\0"
_HEADER = struct.Struct("<16sQQ32s")  # magic; tokens and bytes of a page; identity; behind it a digest of these
_BLOCK = 4096  # of the header, of a group's table, and what a slot is a multiple of
_GROUP = 64
_ENTRY = struct.Struct("<16sQQI")  # key; last used; sum and CRC-32 of the record; behind it a CRC-32 of these
_ENTRY_BYTES = _BLOCK // _GROUP
_MOST_USED = 2**62  # no engine counts so far, and behind it there is room to count on
_AT_ONCE: int = getattr(os, "RWF_NOWAIT", 0)  # Linux tells what its page cache has


@dataclass(frozen=True)
class Entry:
    """What a slot holds. ``used`` grows from one use of any page to the next."""

    key: bytes
    used: int
    total: int
    crc: int

    def pack(self) -> bytes:
        packed = _ENTRY.pack(self.key, self.used, self.total, self.crc)
        return (packed + zlib.crc32(packed).to_bytes(4, "little")).ljust(_ENTRY_BYTES, b"\0")


class PageRead(NamedTuple):
    """``whole``: the record is what its entry says. ``waited_s``: seconds until the disk gave what memory lacked; where the
    system does not tell, those of the whole read."""

    whole: bool
    waited_s: float


class PageFile:
    """The open file ``descriptor``, of pages of ``page_tokens`` tokens and ``image_bytes`` bytes; ``close`` closes it.

    Methods may be called from several threads and raise OSError. One slot must not be written by two at once.
    """

    def __init__(self, descriptor: int, identity: bytes, page_tokens: int, image_bytes: int) -> None:
        self.descriptor = descriptor
        self.records = PageRecords(page_tokens, image_bytes)
        self._stride = _BLOCK * -(-self.records.n_bytes // _BLOCK)
        header = _HEADER.pack(_MAGIC, page_tokens, image_bytes, identity)
        self._header = header + hashlib.blake2b(header, digest_size=32).digest()

    def close(self) -> None:
        os.close(self.descriptor)

    @property
    def is_blank(self) -> bool:
        return os.fstat(self.descriptor).st_size == 0

    def begin(self) -> None:
        """Make it a file without pages."""
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, self._header, 0)

    def check(self) -> None:
        """Raises CorruptFileError if the header is damaged, and ConfigError if the pages are another model's or of another
        form."""
        found = os.pread(self.descriptor, len(self._header), 0)
        if not found.startswith(_MAGIC):
            raise CorruptFileError("it does not begin as a file of pages does")
        body = found[: _HEADER.size]
        if hashlib.blake2b(body, digest_size=32).digest() != found[_HEADER.size :]:
            raise CorruptFileError("its header is damaged")
        if found != self._header:
            raise ConfigError("it holds pages of another model, or computed or held in another way")

    def slots_within(self, n_bytes: int) -> int:
        """Slots of a file of at most ``n_bytes``."""
        groups, rest = divmod(n_bytes - _BLOCK, self._group_bytes)
        return max(0, groups * _GROUP + max(0, rest - _BLOCK) // self._stride)

    @property
    def _group_bytes(self) -> int:
        return _BLOCK + _GROUP * self._stride

    def _entry_at(self, slot: int) -> int:
        return _BLOCK + slot // _GROUP * self._group_bytes + slot % _GROUP * _ENTRY_BYTES

    def _record_at(self, slot: int) -> int:
        return 2 * _BLOCK + slot // _GROUP * self._group_bytes + slot % _GROUP * self._stride

    def entries(self, n_slots: int) -> list[Entry | None]:
        """Of each slot that the file has, at most ``n_slots``, its entry; None where that is damaged or was never written."""
        found: list[Entry | None] = []
        end = os.fstat(self.descriptor).st_size
        while len(found) < n_slots and self._record_at(len(found)) < end:
            table = os.pread(self.descriptor, _BLOCK, self._entry_at(len(found)))
            for at in range(0, _BLOCK, _ENTRY_BYTES):
                if len(found) >= n_slots or self._record_at(len(found)) >= end:
                    break
                entry = None
                packed = table[at : at + _ENTRY.size]
                if zlib.crc32(packed).to_bytes(4, "little") == table[at + _ENTRY.size : at + _ENTRY.size + 4]:
                    entry = Entry(*_ENTRY.unpack(packed))
                found.append(entry if entry is None or entry.used < _MOST_USED else None)
        return found

    def cut(self, n_slots: int) -> None:
        """Remove the slots from the ``n_slots``-th on."""
        end = self._record_at(n_slots - 1) + self._stride
        if os.fstat(self.descriptor).st_size > end:
            os.ftruncate(self.descriptor, end)

    def write(self, slot: int, key: bytes, used: int, record: Bytes) -> Entry:
        """Write ``record`` to ``slot``, and return the entry that it has from then on."""
        entry = Entry(key, used, *self.records.sums(key, record))
        _write_all(self.descriptor, record, self._record_at(slot))
        self.write_entry(slot, entry)
        return entry

    def write_entry(self, slot: int, entry: Entry | None) -> None:
        """Change what is said of ``slot``; None: it holds nothing."""
        os.pwrite(self.descriptor, b"\0" * _ENTRY_BYTES if entry is None else entry.pack(), self._entry_at(slot))

    def read(self, slot: int, entry: Entry, record: Bytes) -> PageRead:
        """Fill ``record`` from ``slot``. It is not whole if it is not what ``entry`` says, as after a crash or damage."""
        at, waited_s = self._record_at(slot), 0.0
        n = self._read_at_once(record.data, at)
        if n < len(record):
            began = time.perf_counter()
            try:
                n += os.preadv(self.descriptor, [record.data[n:]], at + n)
            except OSError:
                n = 0
            waited_s = time.perf_counter() - began
        whole = n == len(record) and self.records.sums(entry.key, record) == (entry.total, entry.crc)
        return PageRead(whole, waited_s)

    def in_memory(self, slot: int) -> bool:
        """Whether the system's page cache has the end of ``slot``, as far as it tells."""
        return self._read_at_once(memoryview(bytearray(1)), self._record_at(slot) + self.records.n_bytes - 1) == 1

    def leave_memory(self, slot: int) -> None:
        """Ask the system's page cache to forget ``slot``. What is not on the disk yet stays, and is on its way there."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, self._record_at(slot), self._stride, os.POSIX_FADV_DONTNEED)

    def _read_at_once(self, buffer: memoryview, at: int) -> int:
        """Fill ``buffer`` with what the page cache has from ``at`` on, and return how many bytes that is."""
        try:
            return os.preadv(self.descriptor, [buffer], at, _AT_ONCE) if _AT_ONCE else 0
        except OSError:  # it has nothing, or the file system does not tell
            return 0


def _write_all(descriptor: int, data: Bytes, at: int) -> None:
    written = 0
    while written < len(data):  # a nearly full disk takes a part first
        written += os.pwrite(descriptor, data[written:].data, at + written)
