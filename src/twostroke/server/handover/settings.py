"""``HandoverSettings``: where an engine is asked for prompts, or whom it asks. Imports core alone."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from twostroke.core.errors import ConfigError
from twostroke.core.policy import HANDOVER_BYTES, HANDOVER_TOKENS
from twostroke.core.tables import build

_LEAST_KEY, _MOST_KEY = 16, 4096


@dataclass(frozen=True)
class HandoverSettings:
    """An engine that prefills for others listens at ``listen``; one that decodes asks ``peers``. ``key_file`` has the key that
    both prove to each other over TCP.

    A side that hears nothing for ``timeout_s`` gives the other up; each says something every ``beat_s``. So is an engine given
    up of which one turn of its loop takes ``step_timeout_s``. Pages wait ``lease_s``
    to be sent. Prompts of which fewer than ``least_tokens`` are not known are not handed over. Pages that have arrived and are
    not loaded yet take at most ``memory_bytes`` for each peer.
    """

    listen: str | None = None
    peers: tuple[str, ...] = ()
    key_file: str | None = None
    timeout_s: float = 5.0
    step_timeout_s: float = 120.0
    beat_s: float = 0.5
    lease_s: float = 10.0
    least_tokens: int = HANDOVER_TOKENS
    memory_bytes: int = HANDOVER_BYTES

    def key(self) -> bytes | None:
        return None if self.key_file is None else read_key(Path(self.key_file))

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def handover_settings(text: str) -> HandoverSettings:
    """What ``to_json`` wrote."""
    return build(HandoverSettings, json.loads(text), "handover settings")


def read_key(path: Path) -> bytes:
    """The key in ``path``, without blanks around it. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            key = file.read(_MOST_KEY + 1).strip()
    except OSError as error:
        raise ConfigError(f"--role-key-file {path} cannot be read: {error.strerror}.") from None
    if not _LEAST_KEY <= len(key) <= _MOST_KEY:
        raise ConfigError(
            f"--role-key-file {path} has a key of {len(key)} bytes; it must have {_LEAST_KEY} to {_MOST_KEY}. "
            "`openssl rand -hex 32` makes one."
        )
    return key


def address_of(text: str) -> str | tuple[str, int]:
    """The path of a Unix socket, or (host, port), of ``/a/path``, ``host:port`` or ``[::1]:port``. Raises ConfigError."""
    if text.startswith("/"):
        return text
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit() and 0 <= int(port) < 2**16):
        raise ConfigError(f"{text!r} is not an address of an engine. Write HOST:PORT, or the path of a socket, from / on.")
    return host, int(port)
