"""Launchers of one run on several hosts, which find each other by torch's TCPStore, as torchrun's do."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from twostroke.cli.rank_processes import Ended, Placement
from twostroke.core.errors import ConfigError, InputError, Interrupted, TwostrokeError

FIND_S, FIND_AGAIN_S = 600.0, 60.0
"""Longest wait for the launchers of other hosts, at the beginning and after a rank was lost."""

SILENT_S = 10.0
"""A launcher that says nothing for longer counts as lost, with its host."""

ASK_S = 0.25
"""Between two questions to the store while ranks run."""

LEAVE_S = 5.0
"""Longest wait of host 0 for the others at the end."""

BETTER_REASON_S = 1.0
"""How long a host whose ranks lost others waits for the host that knows why."""


class Alone:
    """One host."""

    n = 1
    is_local = True

    @contextlib.contextmanager
    def joined(self, stops: Callable[[], int], settings: dict[str, Any]) -> Iterator[None]:
        yield

    def placed(self, attempt: int, n_local: int) -> Placement:
        return Placement(n_local, n_local, 0, 0, "127.0.0.1", free_port())

    def lost_elsewhere(self) -> str | None:
        return None

    def agreed(self, ended: Ended) -> Ended:
        return ended


@dataclass
class Hosts:
    """Host ``index`` of ``n``; that of index 0 has the store at ``address``:``port``. Each attempt has keys of its own, and
    the ranks of an attempt a store of their own at a new port, because gloo does not find its way among addresses of ranks that
    are gone."""

    address: str
    port: int
    n: int
    index: int
    _store: Any = None
    _stops: Callable[[], int] = lambda: 0
    _settings: dict[str, Any] = field(default_factory=dict)
    _attempt: int = 0
    _asked_at: float = 0.0
    _heard: dict[int, tuple[int, float]] = field(default_factory=dict)

    @classmethod
    def parse(cls, rendezvous: str | None, n: int | None, index: int | None) -> Hosts | Alone:
        """Hosts by the options; ``Alone`` without any. Raises InputError."""
        given = {"--rendezvous": rendezvous, "--hosts": n, "--host-index": index}
        missing = [name for name, value in given.items() if value is None]
        if len(missing) == 3:
            return Alone()
        if missing or rendezvous is None or n is None or index is None:
            raise InputError(f"{' and '.join(missing)} must be given too: several hosts need {', '.join(given)}.")
        address, _, port = rendezvous.rpartition(":")
        if not address or not port.isdigit() or not 0 < int(port) < 65536:
            raise InputError(f"--rendezvous {rendezvous} must be HOST:PORT of the host with --host-index 0.")
        if n < 2:
            raise InputError(f"--hosts {n} must be at least 2. One host needs --ranks alone.")
        if not 0 <= index < n:
            raise InputError(f"--host-index {index} must be from 0 to {n - 1}, one for each of the {n} hosts.")
        return cls(address.strip("[]"), int(port), n, index)

    @property
    def is_local(self) -> bool:
        return self.address in ("127.0.0.1", "localhost")

    @contextlib.contextmanager
    def joined(self, stops: Callable[[], int], settings: dict[str, Any]) -> Iterator[None]:
        """Connected to the store. ``settings`` must be the same on all hosts."""
        from datetime import timedelta

        from torch.distributed import TCPStore

        self._stops, self._settings = stops, settings
        is_first = self.index == 0
        if not is_first:
            self._wait(self._answers, FIND_S, f"no launcher answers at {self.address}:{self.port}")
        try:
            self._store = TCPStore(
                self.address, self.port, None, is_first, timeout=timedelta(seconds=30), wait_for_workers=False
            )
        except RuntimeError as error:
            what = "listen" if is_first else "connect"
            raise InputError(
                f"host {self.index} cannot {what} at --rendezvous {self.address}:{self.port}: {str(error).splitlines()[0]:.200}"
            ) from None
        try:
            yield
        finally:
            with contextlib.suppress(TwostrokeError):
                self._leave()
            self._store = None

    def _leave(self) -> None:
        """The store ends with the launcher of host 0, so that one leaves last."""
        self._set(f"left/{self.index}", "")
        deadline = time.monotonic() + LEAVE_S
        while self.index == 0 and time.monotonic() < deadline:
            if all(self._has(f"left/{host}") for host in range(self.n)):
                return
            time.sleep(ASK_S / 5)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self.address, self.port), timeout=1):
            return True
        return False

    def placed(self, attempt: int, n_local: int) -> Placement:
        """The place of this host's ranks in attempt ``attempt``. All hosts call it."""
        self._attempt, self._heard = attempt, {}
        own = {"ranks": n_local, "settings": self._settings}
        if self.index == 0:
            self._set("port", str(free_port()))
        self._set(f"host/{self.index}", json.dumps(own))
        for host in range(self.n):
            key = f"host/{host}"
            self._wait(lambda key=key: self._has(key), FIND_AGAIN_S if attempt else FIND_S, f"host {host} did not come")  # type: ignore[misc]
        hosts = [json.loads(self._get(f"host/{host}")) for host in range(self.n)]
        for host, theirs in enumerate(hosts):
            for name, value in theirs["settings"].items():
                if value != hosts[0]["settings"].get(name):
                    raise ConfigError(
                        f"{name} is {value} on host {host}, and on host 0 {hosts[0]['settings'].get(name)}. "
                        "Start all hosts alike."
                    )
        counts = [int(theirs["ranks"]) for theirs in hosts]
        first = sum(counts[: self.index])
        return Placement(sum(counts), n_local, first, self.index, self.address, int(self._get("port")))

    def lost_elsewhere(self) -> str | None:
        """How a rank of another host was lost; None if none was."""
        now = time.monotonic()
        if now - self._asked_at < ASK_S:
            return None
        self._asked_at = now
        if self._has("lost"):
            return self._get("lost")
        self._add(f"beat/{self.index}", 1)
        for host in range(self.n):
            if host != self.index and not self._has(f"done/{host}"):
                count = self._add(f"beat/{host}", 0)
                if count != self._heard.get(host, (-1, 0.0))[0]:
                    self._heard[host] = (count, now)
                elif now - self._heard[host][1] > SILENT_S:
                    return f"host {host} was silent for {SILENT_S:g} s"
        return None

    def agreed(self, ended: Ended) -> Ended:
        """How the ranks of all hosts ended; those of this one as ``ended``."""
        if ended.lost is None:
            self._set(f"done/{self.index}", str(ended.code))
            while ended.code == 0 and not all(self._has(f"done/{host}") for host in range(self.n)):
                lost = self.lost_elsewhere()
                if lost is not None:
                    return replace(ended, lost=lost)
                time.sleep(ASK_S / 5)
            return ended
        if not ended.is_cause:
            deadline = time.monotonic() + BETTER_REASON_S
            while not self._has("lost") and time.monotonic() < deadline:
                time.sleep(ASK_S / 5)
        if not self._has("lost"):
            self._set("lost", ended.lost)
        return replace(ended, lost=self._get("lost"))

    def _wait(self, done: Callable[[], bool], within_s: float, otherwise: str) -> None:
        deadline = time.monotonic() + within_s
        while not done():
            if self._stops():
                raise Interrupted(f"stopped while {otherwise}.")
            if time.monotonic() > deadline:
                raise TwostrokeError(f"{otherwise} within {within_s:g} s.")
            time.sleep(0.1)

    def _key(self, name: str) -> str:
        return f"{self._attempt}/{name}"

    def _set(self, name: str, value: str) -> None:
        with self._told():
            self._store.set(self._key(name), value)

    def _get(self, name: str) -> str:
        with self._told():
            return str(self._store.get(self._key(name)).decode())

    def _has(self, name: str) -> bool:
        with self._told():
            return bool(self._store.check([self._key(name)]))

    def _add(self, name: str, count: int) -> int:
        with self._told():
            return int(self._store.add(self._key(name), count))

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise TwostrokeError(
                f"host {self.index} lost the launcher of host 0 at {self.address}:{self.port}, and its ranks stopped. Continue "
                "with --resume."
            ) from error


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])
