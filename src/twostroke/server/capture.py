"""Keeps served chats for training (``data.captured`` says in which form), with their ratings.

Nothing waits for it: a thread redacts and writes, and what comes faster than it writes is dropped and counted. A line is
written whole and synced within a second. What a kill leaves half written is cut off at the next start.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.core.errors import ConfigError
from twostroke.core.private_folder import PrivateFolder, private_folder
from twostroke.data.captured import CONVERSATIONS, RATINGS
from twostroke.server.generation import Generation, TextDelta
from twostroke.server.redaction import Redaction
from twostroke.server.responses import CalledFunction
from twostroke.server.tool_answers import read_message

log = logging.getLogger("twostroke.server")

DEFAULT_BYTES = 2**30
FILE_BYTES = 64 * 2**20
"""After which a file is followed by the next, unless an eighth of the whole is less."""
MAX_WAITING = 1000
KNOWN_IDS = 10_000
"""Newest answers that can be rated."""
SYNC_S = 1.0


@dataclass
class Counts:
    """Since the start. ``withheld``: the redaction left nothing of them."""

    written: int = 0
    dropped: int = 0
    withheld: int = 0
    rated: int = 0


def _called(function: CalledFunction) -> dict[str, Any]:
    """As a chat template gets it: the arguments as an object, where they are one."""
    arguments: Any = function.arguments
    with contextlib.suppress(ValueError, RecursionError):
        arguments = json.loads(arguments)
    return {"name": function.name, "arguments": arguments}


@dataclass(frozen=True)
class _Rating:
    id: str
    choice: int
    rating: float
    comment: str | None


class Capture:
    """The folder at ``path``, which takes at most ``most_bytes``: the oldest file makes room. Raises ConfigError if it cannot
    be used."""

    def __init__(self, path: Path, redaction: Redaction, most_bytes: int = DEFAULT_BYTES) -> None:
        self.path, self.counts = path, Counts()
        self._redaction, self._most_bytes = redaction, most_bytes
        self._file_bytes = max(1, min(FILE_BYTES, most_bytes // 8))
        self._owners: OrderedDict[str, tuple[str, int]] = OrderedDict()  # by id: who may rate, and how many answers there are
        self._jobs: queue.Queue[tuple[str, dict[str, Any]] | _Rating | None] = queue.Queue(MAX_WAITING)
        self._failed = False
        try:
            with private_folder(path, create=True) as folder:
                self._folder = PrivateFolder(os.dup(folder.descriptor))
            self._ratings = self._folder.update(RATINGS)
            try:
                fcntl.flock(self._ratings, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another server captures into {path}. Name another folder.") from None
            self._cut(self._ratings)
            self._number = max([1, *(int(match[1]) for match in map(CONVERSATIONS.fullmatch, self._names()) if match)])
            self._file = self._folder.update(self._name(self._number))
            for record in self._cut(self._file):
                self._know(str(record.get("id")), str(record.get("key")), int(record.get("choice", 0)) + 1)
        except OSError as error:
            raise ConfigError(f"{path} cannot be captured into: {error.strerror or error}. Name another folder.") from None
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
        self._thread.start()

    # On the event loop.

    def keep(self, generation: Generation, asked: Sequence[Mapping[str, Any]], tools: Any, deltas: Sequence[TextDelta]) -> None:
        """Keep the answers to the conversation ``asked``, each by itself. ``deltas`` are their texts."""
        by_choice: dict[int, list[TextDelta]] = {}
        for delta in deltas:
            by_choice.setdefault(delta.index, []).append(delta)
        self._know(generation.id, generation.client, len(by_choice))
        for index, mine in by_choice.items():
            message, finish = read_message(generation, mine)
            answer: dict[str, Any] = {"role": "assistant", "content": message.content or ""}
            if isinstance(message.tool_calls, list):
                answer["tool_calls"] = [
                    {"id": call.id, "type": "function", "function": _called(call.function)} for call in message.tool_calls
                ]
            if isinstance(message.reasoning_content, str):
                answer["reasoning_content"] = message.reasoning_content
            record = {
                "messages": [*asked, answer],
                **({"tools": tools} if tools else {}),
                "id": generation.id,
                "choice": index,
                "model": generation.model,
                "system_fingerprint": generation.fingerprint,
                "created": generation.created,
                "finish_reason": finish,
                "key": generation.client,
            }
            self._put((generation.id, record))

    def rate(self, id: str, owner: str, choice: int, rating: float, comment: str | None) -> bool:
        """Keep a rating of an answer to ``owner``. False if there is no such answer."""
        name = id.replace("_", "-").rpartition("-")[2]  # the interfaces put different words before it
        known = self._owners.get(name)
        if known is None or known[0] != owner or choice >= known[1]:
            return False
        self._put(_Rating(name, choice, rating, comment))
        return True

    def _know(self, id: str, owner: str, n: int) -> None:
        name = id.rpartition("-")[2]
        n = max(n, self._owners.pop(name, ("", 0))[1])
        self._owners[name] = owner, n
        if len(self._owners) > KNOWN_IDS:
            self._owners.popitem(last=False)

    def _put(self, job: tuple[str, dict[str, Any]] | _Rating) -> None:
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self.counts.dropped += 1

    def close(self) -> None:
        """Write what waits, and let another server have the folder."""
        self._jobs.put(None)
        self._thread.join()

    # In the thread.

    def _run(self) -> None:
        dirty, synced_s = False, time.monotonic()
        job: tuple[str, dict[str, Any]] | _Rating | None = ("", {})
        while job is not None:
            with contextlib.suppress(queue.Empty):
                job = self._jobs.get(timeout=SYNC_S)
                if job is not None:
                    self._write(job)
                    dirty = True
            if dirty and (job is None or time.monotonic() - synced_s >= SYNC_S):
                for descriptor in (self._file, self._ratings):
                    with contextlib.suppress(OSError):
                        os.fsync(descriptor)
                dirty, synced_s = False, time.monotonic()
        self._redaction.close()
        for descriptor in (self._file, self._ratings, self._folder.descriptor):
            os.close(descriptor)

    def _write(self, job: tuple[str, dict[str, Any]] | _Rating) -> None:
        try:
            if isinstance(job, _Rating):
                comment = None if job.comment is None else self._redaction.text(job.comment)
                line = {"id": f"chatcmpl-{job.id}", "choice": job.choice, "rating": job.rating, "comment": comment}
                if os.fstat(self._ratings).st_size > self._file_bytes:
                    raise OSError(errno.EFBIG, "the file of ratings is full")
                self._append(self._ratings, line | {"at": int(time.time())})
                self.counts.rated += 1
                return
            kept = self._redaction.record(job[1])
            if kept is None:
                self.counts.withheld += 1
                return
            if self._append(self._file, kept) > self._file_bytes:
                self._turn_over()
            self.counts.written += 1
            self._failed = False
        except Exception as error:  # neither its message nor values are logged, because they may hold a conversation
            self.counts.dropped += 1
            if not self._failed:
                why = error.strerror if isinstance(error, OSError) else type(error).__name__
                log.error("conversations are not captured: %s.", why)
            self._failed = True

    @staticmethod
    def _append(descriptor: int, record: Mapping[str, Any]) -> int:
        """Returns the file's size with the line, which is written whole or not at all. Raises OSError."""
        before, line = os.lseek(descriptor, 0, os.SEEK_END), json.dumps(record).encode() + b"\n"
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except BaseException:
            os.ftruncate(descriptor, before)
            raise
        return before + len(line)

    def _turn_over(self) -> None:
        """Begin the next file, and remove the oldest ones beyond the limit."""
        os.fsync(self._file)
        following = self._folder.update(self._name(self._number + 1))
        os.close(self._file)
        self._file, self._number = following, self._number + 1
        files = sorted((name, status.st_size) for name, status in self._folder.files(CONVERSATIONS))
        total = sum(size for _, size in files) + self._file_bytes  # with the file that was begun
        for name, size in files[:-1]:
            if total > self._most_bytes:
                self._folder.remove(name)
                total -= size

    def _names(self) -> list[str]:
        return os.listdir(self._folder.descriptor)

    @staticmethod
    def _name(number: int) -> str:
        return f"conversations-{number:06}.jsonl"

    @staticmethod
    def _cut(descriptor: int) -> list[dict[str, Any]]:
        """The records of a file, which is cut behind the last whole one. Raises OSError."""
        found: list[dict[str, Any]] = []
        end = 0
        with os.fdopen(os.dup(descriptor), "rb") as stream:
            stream.seek(0)
            for line in stream:
                record: Any = None
                with contextlib.suppress(ValueError, RecursionError):
                    record = json.loads(line)
                if not isinstance(record, dict) or not line.endswith(b"\n"):
                    break
                found.append(record)
                end += len(line)
        os.ftruncate(descriptor, end)
        return found
