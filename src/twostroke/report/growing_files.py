"""Reads files that another thread or process is writing, as they grow."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from twostroke.core import documents
from twostroke.core.errors import CorruptFileError

MAX_BYTES_A_READ = 2**20
"""A megabyte of log takes about 25 ms to parse, during which the training process of the same interpreter cannot run Python."""

TAIL_BYTES = 256
"""Bytes at the end of what was read. If they have changed at the next reading, the file is a new one. (A step that is repeated
logs other times, so its line differs.)"""


class GrowingRecords:
    """The JSON objects of a file of lines, each returned once. If the file is truncated or replaced, all are returned again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.more = False
        self._restart(0)

    def _restart(self, inode: int) -> None:
        self._inode, self._offset, self._torn, self._tail = inode, 0, b"", b""

    def fresh(self) -> tuple[bool, list[dict[str, Any]]]:
        """(whether the file is a new one, so that earlier records do not count; the records since the last call).

        It reads at most ``MAX_BYTES_A_READ`` bytes, and ``more`` is True if the file has more. Lines other than JSON objects
        are left out."""
        is_new_file = False
        try:
            with self.path.open("rb") as stream:
                status = os.fstat(stream.fileno())
                stream.seek(self._offset - len(self._tail))
                if status.st_ino != self._inode or stream.read(len(self._tail)) != self._tail:
                    is_new_file = True
                    self._restart(status.st_ino)
                    stream.seek(0)
                data = stream.read(MAX_BYTES_A_READ)
        except OSError:
            return False, []
        self._offset += len(data)
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        self.more = self._offset < status.st_size
        whole, newline, self._torn = (self._torn + data).rpartition(b"\n")
        return is_new_file, _objects((whole + newline).splitlines())


class NewestRecords:
    """The last ``most`` JSON objects of a small file of lines, which is read again if its time or size has changed."""

    def __init__(self, path: Path, most: int) -> None:
        self.path, self._most = path, most
        self.mark = ""  # changes with the records
        self.records: list[dict[str, Any]] = []

    def refresh(self) -> None:
        mark = stamp(self.path)
        if mark == self.mark:
            return
        try:
            lines = self.path.read_bytes().splitlines()
        except OSError:
            lines = []
        self.mark, self.records = mark, _objects(lines[-self._most :])


def stamp(file: Path) -> str:
    """Modification time and size of a file as text; empty if it does not exist."""
    try:
        status = file.stat()
    except OSError:
        return ""
    return f"{status.st_mtime_ns}-{status.st_size}"


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object that a file holds; empty if it holds something else."""
    try:
        return documents.read_object(file)
    except CorruptFileError:
        return {}


def _objects(lines: list[bytes]) -> list[dict[str, Any]]:
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            found.append(record)
    return found
