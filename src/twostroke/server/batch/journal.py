"""The file to which a batch's answers are appended, and what is found in it after a crash.

A line is written whole. A process that is killed leaves at most one torn line, its last; a power cut may damage what was not
synced. Both are cut off when the file is opened again, and those requests are computed again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import BinaryIO

import msgspec
from msgspec import Raw, Struct

from twostroke.server.batch.lines import Marks


class _Written(Struct, forbid_unknown_fields=True):
    id: str
    custom_id: str
    response: Raw
    error: Raw


_WRITTEN = msgspec.json.Decoder(_Written)


class Journal:
    """The lines of ``descriptor``, a file opened to read and write, which its errors call ``name``. ``done`` are the ids of the
    requests that it holds answers to. Raises OSError."""

    def __init__(self, descriptor: int, name: str, known: Collection[str], marks: Callable[[str], Marks]) -> None:
        """``known`` are the ids that may stand in it, ``marks`` those of an id. Cuts off what is not a whole line of theirs."""
        self.descriptor, self.name = descriptor, name
        self._synced = 0
        with os.fdopen(os.dup(descriptor), "rb") as stream:
            self.done, self.size = answered_in(stream, known, marks)
        if os.fstat(descriptor).st_size > self.size:
            self._cut()

    def append(self, custom_id: str, line: bytes) -> None:
        """Write ``line`` whole, or not at all where that raises OSError."""
        left, at = memoryview(line), self.size
        try:
            while left:
                n_bytes = os.pwrite(self.descriptor, left, at)
                left, at = left[n_bytes:], at + n_bytes
        except OSError as error:
            self._cut()
            error.filename = self.name
            raise
        self.size = at
        self.done.add(custom_id)

    def sync(self) -> None:
        """After it, all lines survive a power cut."""
        size = self.size
        if size > self._synced:
            os.fdatasync(self.descriptor)
            self._synced = size

    def _cut(self) -> None:
        os.ftruncate(self.descriptor, self.size)


def answered_in(stream: BinaryIO, known: Collection[str], marks: Callable[[str], Marks]) -> tuple[set[str], int]:
    """The ids that ``stream`` holds answers to, and the bytes of these lines: those before the first that is torn, damaged, of
    another job or of an id that came before. Raises OSError."""
    done, size = set[str](), 0
    stream.seek(0)
    for line in stream:
        found = _decoded(line)
        if found is None or found.custom_id not in known or found.custom_id in done:
            break
        if found.id != marks(found.custom_id).line_id:
            break
        done.add(found.custom_id)
        size += len(line)
    return done, size


def _decoded(line: bytes) -> _Written | None:
    try:
        return _WRITTEN.decode(line) if line.endswith(b"\n") else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
