"""Keeps whole answers on disk, for requests that would get the same answer again. Nothing depends on the files: what is
missing, damaged or another key's is computed."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from twostroke.core.errors import ConfigError
from twostroke.core.private_folder import PrivateFolder, private_folder
from twostroke.core.version import __version__
from twostroke.server import protocol
from twostroke.server.turns import Turns

log = logging.getLogger("twostroke.server")

MAX_ANSWER_BYTES = 4 * 2**20
"""Of a larger answer nothing is kept."""
MAX_WAITING = 64
"""Answers that wait to be written; further ones are not kept."""
_MAGIC = b"twostroke answer 1\n"
_NAME = re.compile(r"[0-9a-f]{64}")
_PARTIAL = re.compile(r"[0-9a-f]{64}\.partial")
_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json")
_OF_THE_DAY = re.compile(r"(?<!\{)%-?[aAbBdejmuwyY]")
_OF_A_CLOCK = re.compile(r"(?<!\{)%-?[cfgGHIklMnpPrRsSTXzZ]")


class Kept(Struct, array_like=True):
    """An answer: its whole body, or the pieces of its stream."""

    key: bytes
    streamed: bool
    parts: list[bytes]


@dataclass
class Counts:
    """Since the start."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    damaged: int = 0


_DECODER = msgspec.msgpack.Decoder(Kept)


class ResponseCache:
    """Answers by key, one a file, ``most_bytes`` together; the least recently used go first, over restarts too. One thread of
    its own reads and writes. ``text_digest`` names what makes text of a conversation and tokens of text; ``clock_in_template``
    is "day" or "clock" for a chat template that reads one."""

    def __init__(self, folder: PrivateFolder, most_bytes: int, text_digest: bytes = b"", clock_in_template: str = "") -> None:
        self.counts = Counts()
        self._folder = folder
        self._most = most_bytes
        self._text = text_digest
        self._clock = clock_in_template
        self._thread = Turns("response-cache")
        self._writing: set[asyncio.Task[None]] = set()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        for name, _ in folder.files(_PARTIAL):
            folder.remove(name)
        for name, status in folder.files(_NAME):
            self._sizes[name] = status.st_size
        self.n_bytes = sum(self._sizes.values())
        self._make_room(0)

    def __len__(self) -> int:
        return len(self._sizes)

    def key(
        self, tenant: str, fingerprint: str, longest: int, route: str, asked: Struct, chat: protocol.CommonRequest
    ) -> str | None:
        """Of a request's answer; None if the answer could be another the next time: it is drawn without a seed, or its template
        reads the clock. ``tenant`` is the client whose answers are its own."""
        fixed = chat.temperature == 0 or chat.seed is not None or chat.use_beam_search
        if not fixed or (self._clock == "clock" and isinstance(chat, protocol.ChatRequest)):
            return None
        day = time.strftime("%Y-%m-%d") if self._clock else ""
        digest = hashlib.sha256()
        fields = msgspec.json.encode(asked, order="deterministic")
        names = (__version__, tenant, fingerprint, str(longest), route, day)
        for part in (*(name.encode() for name in names), self._text, fields):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.hexdigest()

    async def get(self, key: str, client: str, streamed: bool) -> list[bytes] | None:
        """The parts of the answer that is kept under ``key``."""
        found = None
        if key in self._sizes:
            found = await self._thread.run(client, lambda: self._read(key, streamed))
        self.counts.hits += found is not None
        self.counts.misses += found is None
        return found

    def put(self, key: str, client: str, streamed: bool, parts: Sequence[bytes]) -> None:
        """Keep an answer. It is written after this call."""
        if len(self._writing) < MAX_WAITING and sum(map(len, parts)) <= MAX_ANSWER_BYTES:
            kept = Kept(bytes.fromhex(key), streamed, list(parts))
            task = asyncio.ensure_future(self._thread.run(client, lambda: self._write(key, kept)))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def written(self) -> None:
        """Return when all that was put is on its way to the disk."""
        await asyncio.gather(*self._writing, return_exceptions=True)

    def _read(self, key: str, streamed: bool) -> list[bytes] | None:
        try:
            with self._folder.read(key) as file:
                data = file.read(2 * MAX_ANSWER_BYTES)
                with contextlib.suppress(OSError):
                    os.utime(file.fileno())  # the next start reads the order of use off the files
        except OSError:
            data = b""
        found = _checked(data, key, streamed)
        if found is None:
            self.counts.damaged += 1
            self._forget(key)
            return None
        if key in self._sizes:
            self._sizes.move_to_end(key)
        return found.parts

    def _write(self, key: str, kept: Kept) -> None:
        rest = msgspec.msgpack.encode(kept)
        data = _MAGIC + hashlib.sha256(rest).digest() + rest
        if key in self._sizes or len(data) > self._most:
            return
        self._make_room(len(data))
        partial = f"{key}.partial"
        try:
            with contextlib.suppress(FileNotFoundError):
                self._folder.remove(partial)  # of a write that failed
            with self._folder.create(partial) as file:
                file.write(data)
            self._folder.rename(partial, key)
        except OSError as error:
            log.warning("an answer could not be kept: %s", error.strerror or error)
            with contextlib.suppress(OSError):
                self._folder.remove(partial)
            return
        self._sizes[key] = len(data)
        self.n_bytes += len(data)
        self.counts.stored += 1

    def _make_room(self, n_bytes: int) -> None:
        while self._sizes and self.n_bytes + n_bytes > self._most:
            self.counts.evicted += 1
            self._forget(next(iter(self._sizes)))

    def _forget(self, key: str) -> None:
        self.n_bytes -= self._sizes.pop(key, 0)
        with contextlib.suppress(OSError):
            self._folder.remove(key)


def _checked(data: bytes, key: str, streamed: bool) -> Kept | None:
    """The answer that ``data`` holds; None unless it is whole and ``key``'s."""
    head = len(_MAGIC) + 32
    if not data.startswith(_MAGIC) or hashlib.sha256(data[head:]).digest() != data[len(_MAGIC) : head]:
        return None
    try:
        found = _DECODER.decode(data[head:])
    except msgspec.MsgspecError:
        return None
    return found if found.key.hex() == key and found.streamed == streamed and found.parts else None


_USAGE = b'"usage":{'
_SHAPES = ({"prompt_tokens", "completion_tokens", "total_tokens"}, {"input_tokens", "output_tokens"})


def marked(part: bytes) -> bytes:
    """``part`` of an answer with a usage that says that nothing was computed. A text in it cannot hold the marker that is
    searched for, because quotes are escaped there; a schema that a client sent and that is repeated may, in another shape."""
    pieces = part.split(_USAGE)
    for i, piece in enumerate(pieces[1:], 1):
        usage, end = _object(b"{" + piece)
        made = msgspec.json.encode(_cached(usage)) if any(shape <= usage.keys() for shape in _SHAPES) else None
        pieces[i] = _USAGE + piece if made is None else _USAGE[:-1] + made + piece[end - 1 :]
    return b"".join(pieces)


def _object(raw: bytes) -> tuple[dict[str, Any], int]:
    """The JSON object with which ``raw`` begins, and its length; an empty one if it goes on in what was cut off."""
    text = raw.decode()
    try:
        found, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return {}, 0
    return found, len(text[:end].encode())


def _cached(usage: dict[str, Any]) -> dict[str, Any]:
    if "cache_read_input_tokens" in usage:  # Anthropic's, in which input tokens are those that were not cached
        n_input = usage["input_tokens"] + usage["cache_read_input_tokens"]
        usage |= {"input_tokens": 0, "cache_read_input_tokens": n_input}
    elif "input_tokens" in usage:
        usage["input_tokens_details"] = {**usage["input_tokens_details"], "cached_tokens": usage["input_tokens"]}
    else:
        usage["prompt_tokens_details"] = {"cached_tokens": usage["prompt_tokens"]}
    return usage | {"from_response_cache": True}


@contextlib.contextmanager
def opened_cache(path: Path | None, most_bytes: int, model: Path, template: str | None) -> Iterator[ResponseCache | None]:
    """The cache in the directory ``path``, which is made where it is missing, of answers of the model directory ``model`` with
    its chat template; None without a path. Raises ConfigError for a directory that is another user's, that others may write, or
    that another server uses."""
    if path is None:
        yield None
        return
    digest = hashlib.sha256((template or "").encode())
    for name in _TEXT_FILES:
        with contextlib.suppress(OSError):
            digest.update(name.encode() + hashlib.sha256((model / name).read_bytes()).digest())
    clock = ""
    if template is not None and "strftime_now" in template:
        clock = "clock" if _OF_A_CLOCK.search(template) or not _OF_THE_DAY.search(template) else "day"
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(private_folder(path, create=True))
            fcntl.flock(folder.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            cache = ResponseCache(folder, most_bytes, digest.digest(), clock)
        except BlockingIOError:
            raise ConfigError(f"--response-cache {path} is another server's. Give each server its own.") from None
        except OSError as error:
            raise ConfigError(f"--response-cache {path} cannot be used: {error.strerror or error}. Name another.") from None
        yield cache
