"""What hostile and careless clients do, over plain sockets to 127.0.0.1."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit


def connect(url: str, receive_buffer: int | None = None) -> socket.socket:
    """``receive_buffer`` in bytes: how much of an answer the kernel takes off the server's hands."""
    parts = urlsplit(url)
    peer = socket.socket()
    if receive_buffer is not None:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    peer.settimeout(20)
    peer.connect((parts.hostname, parts.port))
    return peer


def post(body: dict[str, Any], route: str = "/v1/completions", headers: str = "", length: int | None = None) -> bytes:
    """A whole request; ``length``: what it announces instead of its body's."""
    payload = json.dumps(body).encode()
    announced = len(payload) if length is None else length
    head = f"POST {route} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{headers}"
    return f"{head}content-length: {announced}\r\n\r\n".encode() + payload


@contextlib.contextmanager
def silent_connections(url: str, n: int, say: bytes = b"") -> Iterator[list[socket.socket]]:
    """``n`` connections that say ``say`` and then nothing."""
    peers: list[socket.socket] = []
    try:
        for _ in range(n):
            peers.append(connect(url))
            with contextlib.suppress(OSError):  # the server may have had enough of it
                peers[-1].sendall(say)
        yield peers
    finally:
        for peer in peers:
            peer.close()


def is_closed(peer: socket.socket, within_s: float) -> bool:
    """Whether the other side ends the connection, whatever it says before."""
    deadline = time.monotonic() + within_s
    try:
        while (left := deadline - time.monotonic()) > 0:
            peer.settimeout(left)
            if not peer.recv(65536):
                return True
    except TimeoutError:
        return False
    except OSError:
        return True
    return False


def answer_of(peer: socket.socket, to_the_end: bool = False, within_s: float = 60.0) -> bytes:
    """One answer, by the length that it announces, or ``to_the_end`` of the connection. No silence is taken for an end: a
    machine that others use is silent for seconds in the middle of an answer."""
    data = b""
    peer.settimeout(within_s)
    with contextlib.suppress(ConnectionError):
        while (to_the_end or not _is_whole(data)) and (piece := peer.recv(65536)):
            data += piece
    return data


def _is_whole(data: bytes) -> bool:
    head, _, body = data.partition(b"\r\n\r\n")
    announced = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    return announced is not None and len(body) >= int(announced[1])


def status_of(answer: bytes) -> int:
    """Of a raw answer; 0 without one."""
    words = answer.split(b" ", 2)
    return int(words[1]) if answer.startswith(b"HTTP/1.1 ") else 0


def health_s(url: str) -> float:
    """Seconds in which a new connection gets its answer from ``/health``."""
    began = time.perf_counter()
    with connect(url) as peer:
        peer.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert status_of(peer.recv(4096)) == 200
    return time.perf_counter() - began
