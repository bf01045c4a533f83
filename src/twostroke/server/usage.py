"""Writes what each request used: a JSON line a request that the engine worked on, and one a rating in an A/B test, appended to
a file by a thread."""

from __future__ import annotations

import logging
import os
import queue
import threading
from pathlib import Path

import msgspec
from msgspec import UNSET, Struct, UnsetType

from twostroke.core.errors import ConfigError

log = logging.getLogger("twostroke.server")

MOST_WAITING = 10_000
"""Lines that wait for the disk. Of more, the newest are lost, and counted."""
CLOSE_S = 5.0
"""Longest time that the end of a server waits for its last lines."""


class UsageLine(Struct):
    """One request. ``time``: its end, in seconds since 1970. ``key``: the name of the key, never the key. ``outcome``:
    "complete", or "cut short" by the client, a timeout or an error. Seconds count from its headers. In an A/B test, ``arm`` is
    the model that answered, and ``unit`` the client's name in the test, ``share`` that of clients who are to be in the second
    arm."""

    time: float
    id: str
    key: str | None
    model: str
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish_reasons: dict[str, int]
    ttft_s: float | None
    e2e_s: float
    arm: str | UnsetType = UNSET
    unit: str | UnsetType = UNSET
    share: float | UnsetType = UNSET


class RatingLine(Struct):
    """A rating of choice ``choice`` of the answer ``id`` in an A/B test, from -1 to 1. The last of an answer counts."""

    time: float
    id: str
    key: str | None
    choice: int
    rating: float
    arm: str
    unit: str


class UsageLog:
    """The file at ``path``, which is made if it is not there, readable by its owner alone. Raises ConfigError if it cannot be
    written. A line that a kill left torn is closed, so that lines after it are whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            size = os.fstat(self._file).st_size
            self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        except OSError as error:
            raise ConfigError(f"usage log {path} cannot be written: {error.strerror}.") from None
        self.lost = 0
        self._said = False
        self._lines: queue.Queue[bytes | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._write_all, name="usage", daemon=True)
        self._thread.start()

    def add(self, line: UsageLine | RatingLine) -> None:
        """Never waits for the disk."""
        try:
            self._lines.put_nowait(msgspec.json.encode(line) + b"\n")
        except queue.Full:
            self.lost += 1

    def close(self) -> None:
        """Write what waits."""
        try:
            self._lines.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._write(b"\n" + line if self._torn else line)
                self._said = False
            except OSError as error:
                self.lost += 1
                if not self._said:
                    self._said = True
                    log.error("usage log %s cannot be written, and lines are lost: %s.", self.path, error.strerror)
        os.close(self._file)

    def _write(self, line: bytes) -> None:
        while line:
            n = os.write(self._file, line)
            self._torn = n < len(line)
            line = line[n:]
