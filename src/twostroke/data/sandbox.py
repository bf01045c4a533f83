"""Processes for work whose time and memory cannot be known before: both ends of their frames, and their limits.

``python -m`` a module that calls ``serve`` is one end: it reads frames from the socket that is its standard input. A process
limits its address space, and an alarm ends it, inside any code. ``Sandbox`` is the other end. Neither imports torch.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from twostroke.core.errors import TwostrokeError

MEMORY_BYTES = 256 * 2**20
"""Memory for the work, beside the interpreter's. A template of Qwen3's size and 2 MB of messages take 20 MB."""
MAX_SENTENCE = 300
_START_S = 30.0
"""Time beyond a process's own limits before it counts as stuck. It covers the start of an interpreter on a busy machine."""

_HEADER = struct.Struct("!cI")
"""Header of an answer: its kind, and the number of bytes of UTF-8 that follow (lone surrogates included)."""
TEXT, REFUSED, OUT_OF_MEMORY = b"t", b"r", b"m"
_LENGTH = struct.Struct("!I")


class Sandbox:
    """One process of ``module``, and the socket to it. ``ready``: it has answered, so it is there and has begun."""

    def __init__(self, module: str) -> None:
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        # -P keeps modules of the current directory from replacing those of this package. With a session of its own, Ctrl-C in a
        # terminal reaches the calling process alone.
        command = [sys.executable, "-P", "-m", module]
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    env=dict(os.environ) | {"PYTHONPATH": path},
                )
            except OSError as error:
                self._socket.close()
                raise TwostrokeError(f"the process {module} could not be started: {error.strerror}.") from None
        self._popen = process
        self.ready = False
        self.end = weakref.finalize(self, _kill, process, self._socket)

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self.end.alive

    def ask(self, frame: bytes, limit_s: float) -> tuple[bytes, str]:
        """The kind of the answer and its text. A process that takes too long or too much, ends, or refuses its first frame is
        ended, which is a refusal too."""
        try:
            kind, text = self._ask(frame, limit_s)
        except TimeoutError:
            kind, text = REFUSED, f"it takes over {limit_s:g} s"
        except OSError:
            kind, text = REFUSED, "its process ended"
        except BaseException:  # Ctrl-C in the middle of an answer: the next call must not read the rest of it
            self.end()
            raise
        else:
            if kind == TEXT or (kind == REFUSED and self.ready):
                self.ready = True
                return kind, text
            text = text or f"it takes over {MEMORY_BYTES // 2**20} MiB of memory"
        self.end()
        return kind, text

    def _ask(self, frame: bytes, limit_s: float) -> tuple[bytes, str]:
        # The process keeps the limit by an alarm of its own. This deadline is for a process that is stopped (SIGSTOP).
        deadline = time.monotonic() + limit_s + (0.0 if self.ready else _START_S)
        try:
            self._socket.settimeout(deadline - time.monotonic())
            self._socket.sendall(_LENGTH.pack(len(frame)) + frame)
            kind, length = _HEADER.unpack(self._read(_HEADER.size, deadline))
            return kind, self._read(length, deadline).decode("utf-8", "surrogatepass")
        except ConnectionError:
            if self._popen.wait(_START_S) == -signal.SIGALRM:
                raise TimeoutError from None
            raise

    def _read(self, n_bytes: int, deadline: float) -> bytearray:
        found = bytearray(n_bytes)
        at = memoryview(found)
        while at:
            self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            n = self._socket.recv_into(at)
            if n == 0:
                raise ConnectionError
            at = at[n:]
        return found


def _kill(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()


Work = tuple[Callable[[], str], float]
"""What makes the text of an answer, and its limit in seconds."""


def serve(first: Callable[[bytes], Work], others: Callable[[bytes], Work]) -> None:
    """Answer the frames on standard input until the other end is gone: the first by ``first``, and once that has a text all
    others by ``others``. What the calling module has imported does not count as memory."""
    connection = socket.socket(fileno=0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    _limit_memory()
    with connection, connection.makefile("rb") as frames:
        kind, made = TEXT, first
        # The stream also ends when the calling process is killed.
        while kind == TEXT or made is others:
            head = frames.read(_LENGTH.size)
            if len(head) < _LENGTH.size:
                return
            kind, text = _answer(*made(frames.read(*_LENGTH.unpack(head))))
            raw = text.encode("utf-8", "surrogatepass")
            connection.sendall(_HEADER.pack(kind, len(raw)) + raw)
            made = others if kind == TEXT else made


def _answer(work: Callable[[], str], limit_s: float) -> tuple[bytes, str]:
    # The signal's default action ends the process inside any code, even if the calling process has ended.
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return TEXT, work()
    except MemoryError:
        return OUT_OF_MEMORY, ""
    except Exception as error:  # a template can raise any exception
        message = str(getattr(error, "message", None) or error or type(error).__name__).rstrip(".")
        return REFUSED, message if len(message) <= MAX_SENTENCE else f"{message[:MAX_SENTENCE]}…"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _limit_memory() -> None:
    """Limit the address space to ``MEMORY_BYTES`` above what the interpreter has mapped by now. On some systems locale files
    alone are 200 MB of that."""
    try:
        mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        mapped = 0
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = mapped + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
