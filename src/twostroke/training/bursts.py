"""The most bytes that a rank sends in a few milliseconds, as its connections' own counters tell, and how fast they may send.

A link that others share, and the switches on its way, feel bursts, not means. Linux counts for each TCP connection what the
other end has acknowledged, and holds a connection to a rate if it is asked to (SO_MAX_PACING_RATE, which TCP keeps to by itself
since Linux 4.13). Both need no rights. Elsewhere, and of NCCL on GPUs, nothing is known, and no rate is held.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from twostroke.core.policy import BURST_WINDOWS_MS
from twostroke.training.measurement import PEAKS

EVERY_S = 0.002
"""Between two looks at the counters. A look takes 10 µs a connection."""

QUIET_S = 0.1
"""Counters that have stood still for so long are left alone until something is sent again, so that the thread which reads them
sleeps beside a rank that hangs: a rank of which any thread runs is not taken for one."""

MOST_SAMPLES = 2**16
"""That are kept, 10 MB: the newest two minutes of sending in a step, or beside one, where nobody asks for peaks."""

_ACKED = struct.Struct("=Q")
_ACKED_AT, _INFO_BYTES = 120, 128
"""Of ``tcpi_bytes_acked`` in ``struct tcp_info`` of linux/tcp.h, which is there since Linux 4.1."""

_SO_MAX_PACING_RATE = 47

Samples = Sequence[tuple[float, float]]
"""When, by ``time.monotonic``, and the bytes that were sent until then."""


class Bursts:
    """Connections to other ranks, and a thread that reads their counters while they send."""

    def __init__(self) -> None:
        self._connections: list[socket.socket] = []
        self._samples: deque[tuple[float, float]] = deque(maxlen=MOST_SAMPLES)
        self._sends, self._ends, self._lock = threading.Event(), False, threading.Lock()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def connecting(self, rate_bytes_per_s: float = 0.0) -> Iterator[None]:
        """Inside, connections to other ranks are made, which together send at most at the rate that is given."""
        before = _connections()
        yield
        made = [descriptor for inode, descriptor in _connections().items() if inode not in before]
        for descriptor in made:
            connection = socket.socket(fileno=os.dup(descriptor))
            self._connections.append(connection)
            if rate_bytes_per_s:
                each = struct.pack("=Q", max(1, round(rate_bytes_per_s / len(made))))
                connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, each)

    def begin(self) -> None:
        """Something is about to be sent."""
        if self._connections:
            self._sends.set()
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._read, name="bursts", daemon=True)
                    self._thread.start()

    def close(self) -> None:
        """Forget the connections: the other ends learn that they are gone only when nobody here has them open."""
        self._ends = True
        self._sends.set()
        if self._thread is not None:
            self._thread.join()
        for connection in self._connections:
            connection.close()
        self._connections, self._thread, self._ends = [], None, False
        self._samples.clear()
        self._sends.clear()

    def peaks(self) -> dict[str, int]:
        """Since the last call, the most bytes that were sent in each of ``BURST_WINDOWS_MS``, by their names in the log. Empty
        where it is not known."""
        if not self._connections:
            return {}
        self._look()
        with self._lock:
            samples = list(self._samples)
            self._samples.clear()
            self._samples.append(samples[-1])
        return {name: round(most_sent(samples, ms / 1e3)) for name, ms in zip(PEAKS, BURST_WINDOWS_MS, strict=True)}

    def _look(self) -> float:
        """The bytes that were sent until now, which become a sample."""
        with self._lock:
            told = (c.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES) for c in self._connections)
            sent = float(sum(_ACKED.unpack_from(info, _ACKED_AT)[0] for info in told))
            self._samples.append((time.monotonic(), sent))
        return sent

    def _read(self) -> None:
        while True:
            self._sends.wait()
            last, moved_at = -1.0, time.monotonic()
            while time.monotonic() - moved_at < QUIET_S:
                if self._ends:
                    return
                sent = self._look()
                if sent != last or self._sends.is_set():
                    last, moved_at = sent, time.monotonic()
                    self._sends.clear()
                time.sleep(EVERY_S)


BURSTS = Bursts()
"""Those of this process, which is one rank."""


def most_sent(samples: Samples, window_s: float) -> float:
    """The most bytes between a sample and ``window_s`` later."""
    if len(samples) < 2:
        return 0.0
    times, sent = np.array(samples).T
    return float((np.interp(times + window_s, times, sent) - sent).max())


def _connections() -> dict[str, int]:
    """Descriptors of this process's TCP connections but those to the store, by what the kernel calls them; on Linux."""
    found: dict[str, int] = {}
    if sys.platform != "linux":
        return found
    store = int(os.environ.get("MASTER_PORT", "0"))
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inode = str(Path("/proc/self/fd", name).readlink())
            if not inode.startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
            with connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                    continue
                if store not in (connection.getpeername()[1], connection.getsockname()[1]):
                    found[inode] = int(name)
    return found
