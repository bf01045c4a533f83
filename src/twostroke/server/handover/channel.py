"""A connection between two engines: frames of bounded length, with a code that proves each if they share a key.

A frame is four bytes of length (big-endian), that many bytes of a message, behind a `Page` its record unless that lies in
shared memory, and with a key 32 bytes of HMAC-SHA256 over the frame's number and all of that. The code's key is made of the
shared one, both sides' nonces and the direction, so that a frame cannot be forged, changed, repeated, left out or sent back.
Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, NoReturn

from twostroke.engine.tiers.images import Bytes
from twostroke.server.handover.messages import VERSION, Challenge, Hello, Page, Refused, Welcome, decode, encode
from twostroke.server.wire import MAX_FRAME_BYTES, FrameError

GREETING_S = 5.0
"""Time of a whole greeting. Until it has ended well a stranger may be at the other end."""
LEAST_BYTES_PER_S = 1e6
"""A message that has begun must come at least as fast: else one whose length was damaged would wait for what never comes."""
_GREETING_BYTES = 1024
_ANSWER_BYTES = 4096
_NONCE_BYTES = 32
_CODE_BYTES = 32
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")


class LostError(Exception):
    """The connection is of no use any more; its text says why."""


class Channel:
    """``peer`` with frames. One thread may send while another receives. Both raise LostError where the peer ends, is silent for
    ``timeout_s`` or sends what it must not."""

    def __init__(self, peer: socket.socket, timeout_s: float) -> None:
        peer.settimeout(min(timeout_s, GREETING_S))
        if peer.family != socket.AF_UNIX:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = peer
        self.max_bytes = _GREETING_BYTES
        self.deadline: float | None = time.monotonic() + GREETING_S
        self._timeout_s = timeout_s
        self._sends: hmac.HMAC | None = None
        self._receives: hmac.HMAC | None = None
        self._n_sent = self._n_received = 0

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that receives
        self.socket.close()

    def prove(self, key: bytes | None, nonces: bytes, asks: bool) -> None:
        """From here on every frame has a code, if there is a ``key``."""
        if key is not None:
            names = (b"asks", b"computes") if asks else (b"computes", b"asks")
            made = [hmac.digest(key, b"twostroke handover " + name + nonces, "sha256") for name in names]
            self._sends, self._receives = (hmac.new(each, digestmod="sha256") for each in made)

    def greeted(self, most_bytes: int) -> None:
        """A holder of the key is at the other end, whose messages have at most ``most_bytes``."""
        self.max_bytes, self.deadline = most_bytes, None
        self.socket.settimeout(self._timeout_s)

    def send(self, message: Any, record: Bytes | None = None) -> None:
        payload = encode(message)
        parts = [_LENGTH.pack(len(payload)) + payload, b"" if record is None else record.data]
        if self._sends is not None:
            code = self._sends.copy()
            code.update(_NUMBER.pack(self._n_sent))
            for part in parts:
                code.update(part)
            parts.append(code.digest())
        self._n_sent += 1
        try:
            for part in parts:
                view = memoryview(part).cast("B")
                while view:  # not sendall, whose timeout is for all of it
                    view = view[self.socket.send(view) :]
        except OSError as error:
            raise LostError(reason_of(error)) from None

    def receive(self, into: Callable[[Page], Bytes | None] = lambda page: None) -> Any:
        """The next message. The record that follows a `Page` is written to ``into(page)``, and proved, before it returns."""
        head = bytearray(_LENGTH.size)
        self._fill(head)
        (length,) = _LENGTH.unpack(head)
        if length > self.max_bytes:
            raise LostError(f"a frame announces {length} bytes, and the limit is {self.max_bytes}")
        payload = bytearray(length)
        until = time.monotonic() + self._timeout_s + length / LEAST_BYTES_PER_S
        self._fill(payload, until)
        try:
            message = decode(bytes(payload))
        except FrameError as error:
            raise LostError(str(error).rstrip(".")) from None
        record = into(message) if isinstance(message, Page) else None
        if record is not None:
            until += len(record) / LEAST_BYTES_PER_S
            self._fill(record.data, until)
        if self._receives is not None:
            code = self._receives.copy()
            for part in (_NUMBER.pack(self._n_received), head, payload, b"" if record is None else record.data):
                code.update(part)
            found = bytearray(_CODE_BYTES)
            self._fill(found, until)
            if not hmac.compare_digest(found, code.digest()) and not (self.deadline and isinstance(message, Refused)):
                raise LostError("a frame does not prove that it comes from a holder of the key of --role-key-file")
        self._n_received += 1
        return message

    def _fill(self, buffer: bytearray | memoryview, until: float = math.inf) -> None:
        view, until = memoryview(buffer).cast("B"), min(until, math.inf if self.deadline is None else self.deadline)
        try:
            while view:
                if time.monotonic() > until:
                    raise TimeoutError
                n = self.socket.recv_into(view)
                if n == 0:
                    raise LostError("it closed the connection")
                view = view[n:]
        except OSError as error:
            raise LostError(reason_of(error)) from None


def greet(channel: Channel, hello: Hello, key: bytes | None, fd: int | None) -> Welcome:
    """Begin as the engine that asks; ``fd`` is of its shared memory. Raises LostError with what the other says, if it
    refuses."""
    _exchange(channel, key, asks=True)
    channel.send(hello)
    if fd is not None:
        try:
            socket.send_fds(channel.socket, [b"\0"], [fd])
        except OSError as error:
            raise LostError(reason_of(error)) from None
    answer = channel.receive()
    if isinstance(answer, Refused):
        raise LostError(f"it refuses: {answer.message[:300]}")
    if not isinstance(answer, Welcome):
        raise LostError("it did not answer the greeting")
    channel.greeted(_ANSWER_BYTES)
    return answer


def be_greeted(channel: Channel, key: bytes | None, record_bytes: int, busy_s: float = 0.0) -> tuple[Hello, int | None]:
    """Begin as the engine that computes, whose loop has been in its turn for ``busy_s``. Returns what the other says of itself,
    and the descriptor of its shared memory. Raises LostError for one that does not fit, which is told why."""
    _exchange(channel, key, asks=False)
    try:
        hello = channel.receive()
    except LostError as error:
        _refuse(channel, str(error))
    if not isinstance(hello, Hello) or hello.version != VERSION:
        _refuse(channel, f"it speaks another version than {VERSION}")
    if hello.record_bytes != record_bytes:
        sizes = f"its pages take {hello.record_bytes} bytes, and pages here {record_bytes}"
        _refuse(channel, f"{sizes}: it has another model or cache")
    fd = None
    if hello.n_slots:
        try:
            _, descriptors, _, _ = socket.recv_fds(channel.socket, 1, 1)
        except OSError as error:
            raise LostError(reason_of(error)) from None
        if not descriptors:
            _refuse(channel, "its shared memory did not come with the greeting")
        fd = descriptors[0]
    channel.send(Welcome(busy_s))
    channel.greeted(MAX_FRAME_BYTES)
    return hello, fd


def _exchange(channel: Channel, key: bytes | None, asks: bool) -> None:
    own = secrets.token_bytes(_NONCE_BYTES)
    channel.send(Challenge(own))
    other = channel.receive()
    if not isinstance(other, Challenge) or len(other.nonce) != _NONCE_BYTES:
        raise LostError("it does not begin as another engine does")
    channel.prove(key, own + other.nonce if asks else other.nonce + own, asks)


def _refuse(channel: Channel, why: str) -> NoReturn:
    with contextlib.suppress(LostError):
        channel.send(Refused(f"{why}."))
    raise LostError(why)


def reason_of(error: OSError) -> str:
    return "it was silent for too long" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
