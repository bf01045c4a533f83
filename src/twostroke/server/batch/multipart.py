"""Reads ``multipart/form-data`` (RFC 7578) piece by piece, so that a file of 200 MB takes no more memory than a piece of it."""

from __future__ import annotations

import email.message
import email.parser
import email.policy
from collections.abc import Iterator
from typing import Literal, NamedTuple

from twostroke.server.errors import ApiError, bad_request

MOST_PARTS = 16
MAX_HEAD_BYTES = 8 * 2**10
MAX_BOUNDARY = 70
"""RFC 2046, 5.1.1."""


class Head(NamedTuple):
    """Begins a part: the field's name, and the file's if it is a file."""

    name: str
    filename: str | None


END = None
"""Ends a part."""


class FormReader:
    """``feed`` it the body's pieces. Of each part it gives a ``Head``, bytes, and ``END``. Raises ApiError 400 for what is no
    form, and 415 for another content type."""

    def __init__(self, content_type: str) -> None:
        header = email.message.Message()
        header["content-type"] = content_type
        boundary = header.get_param("boundary")
        if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
            kind = content_type.partition(";")[0].strip()
            raise ApiError(
                415, f"content-type {kind[:40]!r} is not supported; send multipart/form-data.", code="unsupported_media_type"
            )
        if not 0 < len(boundary) <= MAX_BOUNDARY or not boundary.isascii():
            raise _malformed(f"its boundary must have 1 to {MAX_BOUNDARY} ASCII characters")
        self._delimiter = f"\r\n--{boundary}".encode()
        self._buffer = bytearray(b"\r\n")  # as if a line ended before the first boundary
        self._state: Literal["data", "boundary", "head", "end"] = "data"
        self._in_part = False
        self._n_parts = 0

    @property
    def complete(self) -> bool:
        """Whether the last boundary has come."""
        return self._state == "end"

    def feed(self, data: bytes) -> Iterator[Head | bytes | None]:
        self._buffer += data
        while True:
            if self._state == "data":
                at = self._buffer.find(self._delimiter)
                n_ready = at if at >= 0 else max(0, len(self._buffer) - len(self._delimiter) + 1)
                if self._in_part and n_ready:
                    yield bytes(self._buffer[:n_ready])
                if at < 0:
                    del self._buffer[:n_ready]
                    return
                if self._in_part:
                    yield END
                del self._buffer[: at + len(self._delimiter)]
                self._state = "boundary"
            elif self._state == "boundary":
                if len(self._buffer) < 2:
                    return
                mark = bytes(self._buffer[:2])
                if mark not in (b"\r\n", b"--"):
                    raise _malformed("a boundary is followed by something else than a line's end")
                del self._buffer[:2]
                self._state = "head" if mark == b"\r\n" else "end"
            elif self._state == "head":
                at = self._buffer.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
                if at < 0:
                    if len(self._buffer) >= MAX_HEAD_BYTES:
                        raise _malformed(f"a part's headers have over {MAX_HEAD_BYTES} bytes")
                    return
                head = self._head(bytes(self._buffer[:at]))
                del self._buffer[: at + 4]
                self._state, self._in_part = "data", True
                yield head
            else:
                self._buffer.clear()  # what follows the last boundary means nothing
                return

    def _head(self, text: bytes) -> Head:
        self._n_parts += 1
        if self._n_parts > MOST_PARTS:
            raise _malformed(f"it has over {MOST_PARTS} parts")
        headers = email.parser.BytesHeaderParser(policy=email.policy.compat32).parsebytes(text + b"\r\n\r\n")
        name = headers.get_param("name", header="content-disposition")
        if headers.get_content_disposition() != "form-data" or not isinstance(name, str):
            raise _malformed("a part has no name")
        return Head(name, headers.get_filename())


def _malformed(why: str) -> ApiError:
    return bad_request(f"the request body is not a valid form: {why}.", code="invalid_form")
