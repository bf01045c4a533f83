"""Sends ``kv_events`` over ZeroMQ, as vLLM's publisher does: a PUB socket with messages of three frames (topic, number of the
batch in eight bytes, batch), and a ROUTER socket that answers a number with the batches from there on. Imports pyzmq when it is
asked for."""

from __future__ import annotations

import logging
import threading
from typing import Any

from twostroke.core.errors import ConfigError
from twostroke.server.kv_events import KVEvents

log = logging.getLogger("twostroke.server")

END = (-1).to_bytes(8, "big", signed=True)
"""The number behind the last batch that is replayed."""
MOST_WAITING = 10_000
"""Batches that wait for a reader, of which the next are dropped: it sees that their numbers are missing."""


class KVSockets:
    """Publishes ``events`` at ``endpoint`` under ``topic``, and at ``replay``, if given, those that are kept. An endpoint with
    ``*`` or ``::`` for its address, and a file, is bound; any other is connected to, as vLLM does. Raises ConfigError if pyzmq
    is not installed or an endpoint cannot be used."""

    def __init__(self, events: KVEvents, endpoint: str, replay: str | None, topic: str) -> None:
        try:
            import zmq
        except ImportError:
            raise ConfigError(
                f"--kv-events {endpoint} needs the package pyzmq, which is not installed: pip install 'twostroke[kv-events]'."
            ) from None
        self._zmq = zmq
        self._events = events
        self._topic = topic.encode()
        self._context = zmq.Context()
        self._publisher = self._socket(zmq.PUB, "--kv-events", endpoint)
        self._router = None if replay is None else self._socket(zmq.ROUTER, "--kv-events-replay", replay)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._replay, name="kv-replay", daemon=True)
        if self._router is not None:
            self._thread.start()
        events.outlets.append(self.send)

    def send(self, number: int, payload: bytes) -> None:
        """Waits for nobody: what a reader does not take in time is dropped for it."""
        self._publisher.send_multipart((self._topic, number.to_bytes(8, "big"), payload), self._zmq.NOBLOCK)

    def close(self) -> None:
        self._events.outlets.remove(self.send)
        self._stopping.set()
        if self._router is not None:
            self._thread.join()
        self._context.destroy(linger=200)  # milliseconds in which the last batches leave

    def _socket(self, kind: int, option: str, endpoint: str) -> Any:
        socket = self._context.socket(kind)
        socket.set_hwm(MOST_WAITING)
        try:
            if endpoint.startswith("ipc://") or "*" in endpoint or "::" in endpoint or kind == self._zmq.ROUTER:
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except self._zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"{option} {endpoint} cannot be used: {error.strerror}. Give an address as tcp://*:5557 or ipc:///run/file."
            ) from None
        return socket

    def _replay(self) -> None:
        assert self._router is not None
        while not self._stopping.is_set():
            if not self._router.poll(200):
                continue
            frames = self._router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                log.warning("a request for KV events that were missed was not understood.")
                continue
            reader = frames[0]
            for number, payload in self._events.kept(int.from_bytes(frames[2], "big")):
                self._router.send_multipart((reader, b"", number.to_bytes(8, "big"), payload))
            self._router.send_multipart((reader, b"", END, b""))
