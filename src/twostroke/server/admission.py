"""Who may send requests, and how many at once."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections import deque
from pathlib import Path

from twostroke.core.errors import ConfigError
from twostroke.server.errors import ApiError

MAX_KEY_FILE_BYTES = 2**20
MAX_RETRY_AFTER_S = 30


class ApiKeys:
    """The keys of a key file, held as SHA-256 digests: never in a log, and compared in constant time."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """One key a line; blank lines and lines starting with # are skipped. Raises ConfigError."""
        try:
            with path.open("rb") as file:
                data = file.read(MAX_KEY_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"API key file {path} cannot be read: {error.strerror}.") from None
        if len(data) > MAX_KEY_FILE_BYTES:
            raise ConfigError(f"API key file {path} is over {MAX_KEY_FILE_BYTES} bytes. It holds one key a line.")
        try:
            lines = [line.strip() for line in data.decode().splitlines()]
        except UnicodeDecodeError:
            raise ConfigError(f"API key file {path} is not UTF-8 text.") from None
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ConfigError(f"API key file {path} holds no key. Write one key a line.")
        return cls(keys)

    @staticmethod
    def name(authorization: bytes | None) -> str:
        """A name for the holder of a key that says nothing of the key."""
        return hashlib.sha256((authorization or b"").partition(b" ")[2].strip()).hexdigest()[:16]

    def allow(self, authorization: bytes | None) -> bool:
        """Whether ``Bearer <key>`` names a known key. Every key is compared, so the time does not tell which one was near."""
        scheme, _, given = (authorization or b"").partition(b" ")
        digest = hashlib.sha256(given.strip()).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found and scheme.lower() == b"bearer"


class Admission:
    """At most ``limit`` answers queued and running together; the next is turned away at once, with a time to come back."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.active = 0
        self._recent_s: deque[float] = deque(maxlen=32)

    def enter(self, n: int, param: str = "prompt") -> None:
        """Take ``n`` places. Raises ApiError 429 with ``Retry-After``, or 400 naming ``param``, where ``n`` could never fit."""
        if n > self.limit:
            raise ApiError(
                400,
                f"the request asks for {n} answers (prompts × n); at most {self.limit} are worked on at once.",
                param,
            )
        if self.active + n > self.limit:
            raise ApiError(
                429,
                f"{self.active} requests are queued or running; at most {self.limit} may be. Try again later.",
                code="too_many_requests",
                headers={"retry-after": str(self.retry_after_s())},
            )
        self.active += n

    def leave(self, n: int, took_s: float | None = None) -> None:
        self.active -= n
        if took_s is not None:
            self._recent_s.append(took_s)

    def retry_after_s(self) -> int:
        """Half the mean time a recent request took, in whole seconds from 1 to 30: by then a good part of today's have left."""
        mean = sum(self._recent_s) / len(self._recent_s) if self._recent_s else 0.0
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(mean / 2)))
