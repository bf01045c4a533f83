"""Keys of clients: who they are, what each may ask for, and what each has used."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from twostroke.core.errors import ConfigError, did_you_mean
from twostroke.server.errors import ApiError

MAX_KEY_FILE_BYTES = 2**20
MINUTE_S = 60.0
MAX_LIMIT = 10**9
_OPTION = re.compile(r"\s+([a-z_]+)=(\S*)$")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHOWN_DIGITS = 8
"""Hexadecimal digits of a key's hash that stand for a key without a name."""


@dataclass(frozen=True)
class KeyLimits:
    """What one key may ask for; None is no limit. ``tokens_per_minute`` counts those of prompts when a request is admitted, and
    of answers when they end."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None


@dataclass(frozen=True)
class KeyLine:
    """A line of a key file."""

    key: str = field(repr=False)
    name: str | None = None
    limits: KeyLimits = KeyLimits()
    captures: bool = False
    """Whether the holder has consented to the capture of chats (``serve --capture``)."""


OPTIONS = ("name", "capture", *(each.name for each in fields(KeyLimits)))


def read_key_lines(path: Path) -> list[KeyLine]:
    """The keys of a key file: one a line, each followed by what it may ask for, as in ``KEY name=ann concurrent=4``. Blank
    lines and lines starting with # are skipped. Raises ConfigError, which names lines and never a key."""
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
    found = [_key_line(line, f"line {i} of {path}") for i, line in enumerate(lines, 1) if line and not line.startswith("#")]
    if not found:
        raise ConfigError(f"API key file {path} holds no key. Write one key a line.")
    for what, values in (("key", [one.key for one in found]), ("name", [one.name for one in found if one.name])):
        if len(set(values)) < len(values):
            raise ConfigError(f"API key file {path} has a {what} twice. Keep one line of each.")
    return found


def read_keys(path: Path) -> list[str]:
    """The keys alone."""
    return [line.key for line in read_key_lines(path)]


def _key_line(text: str, where: str) -> KeyLine:
    given: dict[str, str] = {}
    while match := _OPTION.search(text):
        option, value = match[1], match[2]
        if option not in OPTIONS:
            raise ConfigError(f"{where}: {option!r:.60} is not an option of a key. {did_you_mean(option[:64], OPTIONS)}")
        if option in given:
            raise ConfigError(f"{where}: {option} is given twice.")
        given[option] = value
        text = text[: match.start()]
    name = given.pop("name", None)
    if name is not None and not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: name={name!r:.80} must be 1 to 64 letters, digits, dots, dashes or underscores.")
    consent = given.pop("capture", "no")
    if consent not in ("yes", "no"):
        raise ConfigError(f"{where}: capture={consent!r:.40} must be yes or no.")
    limits = {}
    for option, value in given.items():
        if not re.fullmatch(r"[0-9]{1,10}", value) or not 1 <= int(value) <= MAX_LIMIT:
            raise ConfigError(f"{where}: {option}={value!r:.40} must be a whole number from 1 to {MAX_LIMIT}.")
        limits[option] = int(value)
    return KeyLine(text, name, KeyLimits(**limits), consent == "yes")


class Minute:
    """What was counted in the last minute, exactly."""

    def __init__(self) -> None:
        self._counted: deque[tuple[float, int]] = deque()
        self.total = 0

    def add(self, amount: int, now_s: float) -> None:
        if amount:
            self._counted.append((now_s, amount))
            self.total += amount

    def left(self, now_s: float) -> int:
        """What is counted still."""
        while self._counted and now_s - self._counted[0][0] >= MINUTE_S:
            self.total -= self._counted.popleft()[1]
        return self.total

    def until(self, most: int, now_s: float) -> float:
        """Seconds until no more than ``most`` is counted."""
        over, wait_s = self.left(now_s) - most, 0.0
        for at_s, amount in self._counted:
            if over <= 0:
                break
            over, wait_s = over - amount, at_s + MINUTE_S - now_s
        return wait_s


@dataclass
class Used:
    """What a key has used since the server started."""

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Account:
    """The limits and the use of one key, under its name, or under the beginning of its hash."""

    def __init__(self, line: KeyLine, clock: Callable[[], float] = time.monotonic) -> None:
        self.digest = hashlib.sha256(line.key.encode()).digest()
        self.owner = self.digest.hex()[:16]
        self.name = line.name or f"key-{self.owner[:_SHOWN_DIGITS]}"
        self.limits, self.captures, self.used, self.active = line.limits, line.captures, Used(), 0
        self._requests, self._tokens, self._clock = Minute(), Minute(), clock

    def require(self) -> None:
        """Raises ApiError 429 if the key may not send another request now."""
        limits, now_s = self.limits, self._clock()
        if limits.requests_per_minute is not None and self._requests.left(now_s) >= limits.requests_per_minute:
            wait_s = self._requests.until(limits.requests_per_minute - 1, now_s)
            raise self._refusal(f"requests_per_minute={limits.requests_per_minute}", wait_s)
        if limits.tokens_per_minute is not None and self._tokens.left(now_s) >= limits.tokens_per_minute:
            wait_s = self._tokens.until(limits.tokens_per_minute - 1, now_s)
            raise self._refusal(f"tokens_per_minute={limits.tokens_per_minute}", wait_s)
        if limits.concurrent is not None and self.active >= limits.concurrent:
            raise self._refusal(f"concurrent={limits.concurrent}", 1.0)

    def count_request(self) -> None:
        if self.limits.requests_per_minute is not None:
            self._requests.add(1, self._clock())

    def enter(self, n: int, param: str) -> None:
        """Take ``n`` of the places that the key may have. Raises ApiError 429, or 400 naming ``param`` if ``n`` never fit."""
        most = self.limits.concurrent
        if most is not None and n > most:
            raise ApiError(400, f"the request asks for {n} answers (prompts × n); this key may have {most} at once.", param)
        if most is not None and self.active + n > most:
            raise self._refusal(f"concurrent={most}", 1.0)
        self.active += n

    def leave(self, n: int) -> None:
        self.active -= n

    def charge_prompt(self, tokens: int, param: str) -> None:
        """Count a request's prompts. Raises ApiError 429, or 400 naming ``param`` if a minute never holds them."""
        most, now_s = self.limits.tokens_per_minute, self._clock()
        if most is None:
            return
        if tokens > most:
            raise ApiError(400, f"the {param} has {tokens} tokens; this key may use {most} a minute.", param)
        if self._tokens.left(now_s) + tokens > most:
            wait_s = self._tokens.until(most - tokens, now_s)
            raise self._refusal(f"tokens_per_minute={most}", wait_s)
        self._tokens.add(tokens, now_s)

    def charge_output(self, tokens: int) -> None:
        if self.limits.tokens_per_minute is not None:
            self._tokens.add(tokens, self._clock())

    def _refusal(self, limit: str, wait_s: float) -> ApiError:
        self.used.refused += 1
        wait_s = max(0.25, wait_s)
        headers = {"retry-after": str(max(1, -int(-wait_s // 1))), "retry-after-ms": str(round(1000 * wait_s))}
        return ApiError(429, f"this key's limit {limit} is reached. Try again later.", None, "rate_limit_exceeded", headers)


class ApiKeys:
    """The keys of a key file, held as SHA-256 digests: never in a log, and compared in constant time."""

    def __init__(self, keys: Sequence[str | KeyLine]) -> None:
        self.accounts = [Account(key if isinstance(key, KeyLine) else KeyLine(key)) for key in keys]
        by_name: dict[str, Account] = {}
        for account in self.accounts:
            if by_name.setdefault(account.name, account) is not account:
                raise ConfigError(f"two keys are called {account.name!r}. Give one of them another name=.")

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """Those of ``read_key_lines``. Raises ConfigError."""
        return cls(read_key_lines(path))

    @staticmethod
    def name(authorization: bytes | None) -> str:
        """A name for the holder of a key, from which the key cannot be found."""
        return hashlib.sha256((authorization or b"").partition(b" ")[2].strip()).hexdigest()[:16]

    def account(self, authorization: bytes | None) -> Account | None:
        """The account of ``Bearer <key>``; None if the key is not known. Every key is compared, so the time does not tell which
        one was near."""
        scheme, _, given = (authorization or b"").partition(b" ")
        digest = hashlib.sha256(given.strip()).digest()
        found = None
        for account in self.accounts:
            if hmac.compare_digest(digest, account.digest):
                found = account
        return found if scheme.lower() == b"bearer" else None

    def owned(self, owner: str) -> Account | None:
        """The account whose key ``name`` calls ``owner``."""
        return next((account for account in self.accounts if account.owner == owner), None)

    def captures(self, owner: str) -> bool:
        """Whether the holder whose key ``name`` calls ``owner`` has consented to the capture of chats."""
        account = self.owned(owner)
        return account is not None and account.captures

    def allow(self, authorization: bytes | None) -> bool:
        """Whether ``Bearer <key>`` names a known key."""
        return self.account(authorization) is not None
