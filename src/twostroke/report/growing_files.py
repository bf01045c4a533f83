"""Files that another thread or process is writing, read as they grow."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from twostroke.core import documents
from twostroke.core.errors import CorruptFileError

MOST_BYTES_A_READ = 2**20
"""A megabyte of log takes about 25 ms to take in, which is what a request may keep a training process from its own Python."""

TAIL_BYTES = 256
"""Of what was read; not found there at the next reading, the file is another. (A step that is done again has other times.)"""


class GrowingRecords:
    """The JSON objects of a file of lines, each handed out once; all again where the file was cut or written anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.more = False
        self._begin_anew(0)

    def _begin_anew(self, inode: int) -> None:
        self._inode, self._offset, self._torn, self._tail = inode, 0, b"", b""

    def fresh(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether what was handed out before counts no more, and the records since, of at most ``MOST_BYTES_A_READ`` bytes:
        ``more`` says that there are others. Lines that are no objects are left out."""
        anew = False
        try:
            with self.path.open("rb") as stream:
                status = os.fstat(stream.fileno())
                stream.seek(self._offset - len(self._tail))
                if status.st_ino != self._inode or stream.read(len(self._tail)) != self._tail:
                    anew = True
                    self._begin_anew(status.st_ino)
                    stream.seek(0)
                data = stream.read(MOST_BYTES_A_READ)
        except OSError:
            return False, []
        self._offset += len(data)
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        self.more = self._offset < status.st_size
        whole, newline, self._torn = (self._torn + data).rpartition(b"\n")
        return anew, _objects((whole + newline).splitlines())


class NewestRecords:
    """The last ``most`` JSON objects of a small file of lines; read again where its time or size has changed."""

    def __init__(self, path: Path, most: int) -> None:
        self.path, self._most = path, most
        self.mark = ""  # another where the records are others
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
    """Time and size of a file; empty where there is none."""
    try:
        status = file.stat()
    except OSError:
        return ""
    return f"{status.st_mtime_ns}-{status.st_size}"


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object that a file holds; empty where it holds something else."""
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
