"""The lines of a batch in OpenAI's format: requests, checked before anything is computed, and their answers."""

from __future__ import annotations

import contextlib
import hashlib
import os
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta, Raw, Struct

from twostroke.core.errors import InputError
from twostroke.server.answers import ENCODER
from twostroke.server.gate import MAX_BODY_BYTES

Url = Literal["/v1/chat/completions", "/v1/completions", "/v1/score"]
URLS: tuple[str, ...] = get_args(Url)
MAX_LINE_BYTES = MAX_BODY_BYTES + 2**12
"""A body as large as the server takes, and what surrounds it."""
MAX_CUSTOM_ID = 512
MOST_FAULTS = 20
"""Faults of an input after which it is not read further."""


class Request(Struct, forbid_unknown_fields=True):
    """One line of an input. ``body`` is the JSON that would be posted to ``url``."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=MAX_CUSTOM_ID)]
    method: str
    url: str
    body: Raw


class _Model(Struct):
    model: Any = None


class Fault(NamedTuple):
    """Why a line cannot be computed. ``line`` counts from 1."""

    line: int
    code: str
    message: str
    param: str | None = None


_REQUEST = msgspec.json.Decoder(Request)
_MODEL = msgspec.json.Decoder(_Model)


@dataclass
class BatchInput:
    """The requests of a file, by their place in it. The file is read again line by line, so only ids are held in memory.
    ``sha256`` is the whole file's."""

    descriptor: int
    ids: list[str] = field(default_factory=list)
    sha256: str = ""
    _places: array[int] = field(default_factory=lambda: array("Q"))  # offset and length of each line

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, custom_id: str, offset: int, length: int) -> None:
        self.ids.append(custom_id)
        self._places.extend((offset, length))

    def without(self, done: Collection[str]) -> list[int]:
        """Places of the requests whose ids are not ``done``."""
        return [i for i, custom_id in enumerate(self.ids) if custom_id not in done]

    def request(self, i: int) -> Request:
        """The ``i``-th request. Raises InputError if the file has changed since it was checked."""
        offset, length = self._places[2 * i : 2 * i + 2]
        found: Request | None = None
        with contextlib.suppress(msgspec.DecodeError):
            found = _REQUEST.decode(os.pread(self.descriptor, length, offset))
        if found is None or found.custom_id != self.ids[i]:
            raise InputError(f"the input changed while it was read: request {self.ids[i]!r:.80} is not in its place any more.")
        return found


def read_input(
    stream: BinaryIO, most_lines: int, names: Collection[str] | None, url: str | None = None
) -> tuple[BatchInput, list[Fault]]:
    """The requests of ``stream``, a regular file, and what is wrong with them: at most ``MOST_FAULTS`` faults. Lines without
    anything but white space are skipped.

    ``names`` are the models that may be asked for; None: any. With ``url`` all requests must be for it. Raises OSError.
    """
    found, seen = BatchInput(stream.fileno()), set[str]()
    faults: list[Fault] = []
    digest = hashlib.sha256()
    for number, offset, text in _lines(stream, digest):
        if not text.strip():
            continue
        fault: Fault | Request = _checked(number, text, names, url)
        if isinstance(fault, Request) and fault.custom_id in seen:
            fault = Fault(
                number, "duplicate_custom_id", f"custom_id {fault.custom_id!r:.80} is an earlier line's.", "custom_id"
            )
        elif isinstance(fault, Request) and len(found) == most_lines:
            fault = Fault(number, "too_many_requests", f"a batch holds at most {most_lines} requests. Split the file.")
            return found, [*faults, fault]
        if isinstance(fault, Request):
            seen.add(fault.custom_id)
            found.add(fault.custom_id, offset, len(text))
            continue
        faults.append(fault)
        if len(faults) == MOST_FAULTS:
            return found, faults
    if not found and not faults:
        faults.append(Fault(1, "empty_file", "the file holds no request."))
    found.sha256 = digest.hexdigest()
    return found, faults


def _lines(stream: BinaryIO, digest: Any) -> Iterator[tuple[int, int, bytes]]:
    """(number, offset, text) of each line. Of one that is too long only its beginning is given, which is no JSON."""
    stream.seek(0)
    offset = number = 0
    while text := stream.readline(MAX_LINE_BYTES):
        digest.update(text)
        number += 1
        n_bytes, last = len(text), text
        while not last.endswith(b"\n") and (last := stream.readline(MAX_LINE_BYTES)):
            digest.update(last)
            n_bytes += len(last)
        yield number, offset, text
        offset += n_bytes


def _checked(number: int, text: bytes, names: Collection[str] | None, url: str | None) -> Request | Fault:
    if len(text) == MAX_LINE_BYTES:
        return Fault(number, "request_too_large", f"a line has at most {MAX_LINE_BYTES} bytes.")
    try:
        request = _REQUEST.decode(text)
        model = _MODEL.decode(request.body).model if memoryview(request.body)[:1] == b"{" else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # Of a long sentence the beginning: it repeats the name of an unknown field.
        return Fault(number, "invalid_json_line", f"it is not a request: {str(error).replace('`', '')[:200]}.")
    if request.method != "POST":
        return Fault(number, "invalid_method", f"method {request.method!r:.40} is not supported; POST is.", "method")
    if request.url not in URLS:
        return Fault(number, "invalid_url", f"url {request.url!r:.80} is not supported. Use {', '.join(URLS)}.", "url")
    if url is not None and request.url != url:
        return Fault(number, "mismatched_url", f"url {request.url!r} is not the batch's endpoint {url}.", "url")
    if memoryview(request.body)[:1] != b"{":
        return Fault(number, "invalid_body", "body must be a JSON object.", "body")
    if names is not None and isinstance(model, str) and model not in names:
        served = ", ".join(names)
        return Fault(number, "model_not_found", f"model {model!r:.80} is not served. Served: {served:.200}.", "body.model")
    return request


def told(faults: Sequence[Fault], where: object) -> str:
    """The first of ``faults`` in a sentence, with its line, and how many others there are."""
    more = len(faults) - 1
    others = f" {more}{' or more' if len(faults) == MOST_FAULTS else ''} other lines are wrong too." if more else ""
    return f"{where}, line {faults[0].line}: {faults[0].message}{others}"


class Marks(NamedTuple):
    """What tells an answer from others. It follows from the job and the ``custom_id``, so a second computation gives the same
    bytes. ``seed`` is for a request that gives none; it follows from the ``custom_id`` alone."""

    custom_id: str
    hexadecimal: str
    seed: int

    @classmethod
    def of(cls, job: str, custom_id: str) -> Marks:
        digest = hashlib.sha256(f"{job}\0{custom_id}".encode()).hexdigest()[:32]
        seed = int.from_bytes(hashlib.sha256(custom_id.encode()).digest()[:8]) >> 1
        return cls(custom_id, digest, seed)

    @property
    def line_id(self) -> str:
        return f"batch_req_{self.hexadecimal}"

    def answered(self, status: int, body: Sequence[bytes]) -> bytes:
        """The line of an answer, whole, with its end. ``body`` is JSON, in parts."""
        head = ENCODER.encode({"id": self.line_id, "custom_id": self.custom_id})[:-1]
        response = f',"response":{{"status_code":{status},"request_id":"req-{self.hexadecimal}","body":'
        return b"".join((head, response.encode(), *body, b'},"error":null}\n'))

    def unanswered(self, code: str, message: str) -> bytes:
        """The line of a request that was not computed."""
        line = {"id": self.line_id, "custom_id": self.custom_id, "response": None, "error": {"code": code, "message": message}}
        return ENCODER.encode(line) + b"\n"
