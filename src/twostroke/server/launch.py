"""Takes a server's port and starts its engine process, before anything slow is imported. Imports core alone."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError, EngineError, TwostrokeError
from twostroke.core.openmp import limit_spinning
from twostroke.core.topology import processors_of
from twostroke.server.handover.settings import HandoverSettings

_MAX_SOCKET_PATH = 107  # bytes of sockaddr_un.sun_path on Linux, less the closing zero


@dataclass(frozen=True)
class CaptureSettings:
    """The folder in which chats are kept, ``most_bytes`` of them, without what the regular expressions in the file ``redact``
    match and what the program ``command`` leaves out."""

    folder: Path
    most_bytes: int
    redact: Path | None = None
    command: str | None = None


@dataclass(frozen=True)
class KVEventSettings:
    """Where what the caches hold is published: at ``endpoint`` under ``topic`` and, again for those who missed some, at
    ``replay``; None: on the route below ``/admin`` alone, where it always is. The default topic names the server's address and
    model."""

    endpoint: str | None
    replay: str | None = None
    topic: str | None = None


@dataclass(frozen=True)
class PoolSettings:
    """Further models that are served beside the first: each with its engine's settings, its one name and its adapters; what the
    HTTP side adds is the first one's. Together they take ``most_bytes`` while they are loaded. A request waits for its model
    for ``wait_s``. ``split``: the model and the share of an A/B test with the first."""

    others: tuple[ServeSettings, ...]
    most_bytes: float
    wait_s: float
    split: tuple[str, float] | None = None


@dataclass(frozen=True)
class ServeSettings:
    """One server: a model, the engine's settings, and what the HTTP side adds. Clients call the model by one of ``names``."""

    directory: Path
    engine: EngineSettings
    names: tuple[str, ...]
    api_key_file: Path | None = None
    max_concurrent: int = 128
    grace_s: float = 30.0
    adapters: Mapping[str, str] = field(default_factory=dict)  # directories by name
    files_dir: Path | None = None  # of uploaded files and of batches; None: the server keeps neither
    replicas: int = 1
    admin: bool = False  # whether the routes below /admin are there
    capture: CaptureSettings | None = None
    log_requests: bool = False
    response_cache: Path | None = None  # directory of answers; None: none are kept
    response_cache_bytes: int = 2**30
    usage_log: Path | None = None  # a JSON line for each request; None: none is written
    max_queued_tokens: int | None = None  # of prompts that wait; None: not bounded
    kv_events: KVEventSettings | None = None  # None: nobody is told what the caches hold
    otlp_endpoint: str | None = None  # of the collector of traces; None: there are none
    handover: HandoverSettings | None = None  # with other servers' engines; None: each engine computes all of its requests
    prefill_at: tuple[str, ...] = ()  # sockets of engines of this server that compute prompts for the one that decodes
    pool: PoolSettings | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "engine", self.engine.behind_http())

    def relaunch(self, number: int, weights: str) -> EngineChild:
        """Start engine ``number`` with the weights in the directory ``weights``."""
        return replace(self, directory=Path(weights)).launches()[number]()

    def relaunch_prefill(self, number: int, weights: str) -> EngineChild:
        """The same of an engine that computes prompts."""
        return replace(self, directory=Path(weights)).prefill_launches()[number]()

    def launches(self) -> list[Callable[[], EngineChild]]:
        """For each engine a function that starts it, on its share of the processors if there are several engines. Each has its
        own part of the directory of cached prefixes, because a store has one owner."""
        if self.prefill_at:
            return self._launches_apart()[:1]
        if self.replicas == 1:
            return [lambda: launch_engine(self.engine_command())]
        found: list[Callable[[], EngineChild]] = []
        for i, share in enumerate(shares(self.replicas)):
            own = self._one_of(self.replicas, f"replica-{i}")
            found.append(partial(launch_engine, own.engine_command(), share))
        return found

    def prefill_launches(self) -> list[Callable[[], EngineChild]]:
        """For each engine that computes prompts for the one that decodes a function that starts it."""
        return self._launches_apart()[1:] if self.prefill_at else []

    def _launches_apart(self) -> list[Callable[[], EngineChild]]:
        n = 1 + len(self.prefill_at)
        decodes = replace(self._one_of(n, "decode"), handover=HandoverSettings(peers=self.prefill_at))
        found = [decodes]
        for i, path in enumerate(self.prefill_at):
            own = replace(self._one_of(n, f"prefill-{i}"), handover=HandoverSettings(listen=path))
            # What clients must not learn of each other they must not learn here either; an engine that does not keep its own
            # apart asks for all of them as for one.
            found.append(replace(own, engine=replace(own.engine, separate_prefixes=True)))
        return [partial(launch_engine, own.engine_command(), share) for own, share in zip(found, shares(n), strict=True)]

    def _one_of(self, n: int, part: str) -> ServeSettings:
        """The same for one of ``n`` engines, with its own ``part`` of the directory of cached prefixes."""
        kept = None if self.engine.kv_dir is None else str(Path(self.engine.kv_dir) / part)
        return replace(self, engine=replace(self.engine, replicas=n, kv_dir=kept))

    def engine_command(self) -> list[str]:
        """Command line of the engine process, to which `launch_engine` adds the socket and the parent."""
        # -P: never import a module that happens to lie in the working directory.
        words = [sys.executable, "-P", "-m", "twostroke.server.engine_process"]
        words += ["--model", str(self.directory), "--settings", self.engine.to_json()]
        return words if self.handover is None else [*words, "--handover", self.handover.to_json()]


@dataclass(frozen=True)
class EngineChild:
    """A running engine process, and the private directory that holds its socket."""

    process: subprocess.Popen[bytes]
    directory: Path

    @property
    def socket_path(self) -> Path:
        return self.directory / "engine.sock"

    def kill(self) -> None:
        """End it at once, stopped or not, and remove its socket."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.hide_socket()

    def hide_socket(self) -> None:
        """Remove the socket's directory. Open connections live on, no other can be made, and a server that is killed leaves no
        files."""
        shutil.rmtree(self.directory, ignore_errors=True)


def launch_engine(command: Sequence[str], processors: Collection[int] = ()) -> EngineChild:
    """Start ``command`` with ``--socket`` and ``--parent-pid``, on ``processors`` if any are named; returns at once, long
    before the model is loaded."""
    directory = Path(tempfile.mkdtemp(prefix="twostroke-"))  # mode 0700: only this user reaches the socket
    path = directory / "engine.sock"
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        directory.rmdir()
        raise EngineError(f"socket path {path} is over {_MAX_SOCKET_PATH} bytes. Set TMPDIR to a shorter directory.")
    environment = dict(os.environ)
    limit_spinning(environment)
    asked = environment.get("OMP_NUM_THREADS", "")
    if processors and asked.isdigit() and int(asked) > len(processors):
        environment["OMP_NUM_THREADS"] = str(len(processors))
    words = [*command, "--socket", str(path), "--parent-pid", str(os.getpid())]
    try:
        # Its output joins our stderr: stdout belongs to the command's own result.
        # A session of its own: Ctrl-C in a terminal is for the HTTP process, which still finishes what is in flight.
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True, env=environment)
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise EngineError(f"the engine process could not be started: {error.strerror}.") from None
    if processors:
        with contextlib.suppress(OSError):  # it has ended, which its supervisor will notice; its threads inherit this
            os.sched_setaffinity(process.pid, processors)
    return EngineChild(process, directory)


def shares(n: int) -> list[tuple[int, ...]]:
    """The processors that this process may use in ``n`` equal shares, neighbours together: threads of a core, cores of a
    node. Empty ones if there are fewer than ``n``, or if the system does not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return [()] * n
    found = sorted(processors_of(os.sched_getaffinity(0)), key=lambda each: (each.node, each.core, each.number))
    ordered = [each.number for each in found]
    if len(ordered) < n:
        return [()] * n
    return [tuple(ordered[i * len(ordered) // n : (i + 1) * len(ordered) // n]) for i in range(n)]


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to ``host:port`` (port 0: any free one), not yet listening. Raises TwostrokeError with a sentence."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError:
        raise ConfigError(
            f"host={host!r} is not an address of this machine. Use 127.0.0.1, or 0.0.0.0 to let others in."
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise TwostrokeError(
            f"port {port} on {host} cannot be used: {reason}. Give another --port, or 0 for a free one."
        ) from None
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_own_name(host: str) -> bool:
    """Whether a request's Host header is an address or localhost. A DNS name may be under others' control."""
    name = host.removeprefix("[").partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower() in ("", "localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def process_age_s() -> float:
    """Seconds since this process was created, imports included. From the kernel, or else the processor time of this process."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as file:
            started_ticks = int(file.read().rpartition(")")[2].split()[19])  # field 22: starttime, in ticks since boot
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.process_time()
