"""``Connection``: the engine's end of one socket."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

from twostroke.server import wire

RECEIVE_BYTES = 256 * 2**10


def listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    os.chmod(path, 0o600)
    listener.listen(8)
    return listener


class Connection:
    """One peer. Bytes come in through a frame reader and go out through a buffer to which two threads may append."""

    def __init__(self, peer: socket.socket, number: int) -> None:
        peer.setblocking(False)
        self.socket = peer
        self.number = number
        self.open = True
        self.requests: set[str] = set()
        self.watches = False
        self.watches_pages = False
        self.stalled_since: float | None = None
        self._reader = wire.FrameReader()
        self._unsent = bytearray()
        self._lock = threading.Lock()

    @property
    def unsent_bytes(self) -> int:
        return len(self._unsent)

    def receive(self) -> list[wire.Command]:
        """Commands that have arrived. An end of file clears ``open``. Raises wire.FrameError for other bytes."""
        try:
            data = self.socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.open = False
            return []
        return [wire.decode_command(payload) for payload in self._reader.feed(data)]

    def send(self, message: wire.Event) -> None:
        """Queue ``message`` and send what the socket takes now. A dead peer clears ``open``; it raises nothing."""
        frame = wire.encode(message)
        with self._lock:
            self._unsent += frame
            self._flush()

    def flush(self) -> None:
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        while self._unsent and self.open:
            try:
                sent = self.socket.send(self._unsent)
            except BlockingIOError:
                self.stalled_since = self.stalled_since or time.monotonic()
                return
            except OSError:
                self.open = False
                return
            del self._unsent[:sent]
            self.stalled_since = None

    def close(self) -> None:
        self.open = False
        with contextlib.suppress(OSError):
            self.socket.close()
