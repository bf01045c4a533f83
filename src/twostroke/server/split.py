"""An A/B test: a share of the clients who ask for one model is answered by another, always the same clients."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Raw, Struct

from twostroke.server.callers import Caller

ARM_HEADER = b"x-twostroke-arm"
KNOWN_ANSWERS = 100_000
"""Newest answers that can be rated: some 20 MB."""
READ_BYTES = 64 * 2**20
"""Of the usage log, its end, in which a server that starts looks for them."""


class _Labels(Struct):
    """What a body may say of whose it is, whatever its type."""

    safety_identifier: Raw = Raw()
    user: Raw = Raw()
    prompt_cache_key: Raw = Raw()
    metadata: Raw = Raw()


class _Metadata(Struct):
    user_id: Raw = Raw()


def label_of(body: bytes) -> str | None:
    """The person or conversation that a request names, if it does: ``safety_identifier``, ``user``, Anthropic's
    ``metadata.user_id``, or ``prompt_cache_key``."""
    try:
        labels = msgspec.json.decode(body, type=_Labels)
    except (msgspec.DecodeError, RecursionError):
        return None
    of_metadata = Raw()
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        of_metadata = msgspec.json.decode(labels.metadata, type=_Metadata).user_id
    for raw in (labels.safety_identifier, labels.user, of_metadata, labels.prompt_cache_key):
        try:
            found = msgspec.json.decode(raw, type=str)
        except msgspec.DecodeError:
            continue
        if found:
            return found
    return None


class Split:
    """A ``share`` of the clients of model ``a`` is answered by model ``b``.

    A client is the person or conversation that the request names, under its key, or else the key, or else the address. It
    belongs to ``b`` if SHA-256 of both models' names and the client, as a number from 0 to 1, is below ``share``: so it stays
    in its arm across restarts, a larger share only moves clients to ``b``, and another test divides the same clients anew."""

    def __init__(self, a: str, b: str, share: float) -> None:
        self.a, self.b, self.share = a, b, share
        self.ratings = {(arm, kind): 0 for arm in (a, b) for kind in ("good", "bad")}  # since the start
        self._secret = secrets.token_hex(16)

    def arm_of(self, caller: Caller, body: bytes) -> tuple[str, str]:
        """The model that answers, and the name of the client in the usage log. That of an address is another after a restart,
        so that nobody can find the address from it."""
        label = label_of(body)
        whose = caller.name if caller.account is None else caller.account.name
        if label is not None:
            whose = f"{whose if caller.account is not None else ''}\0{label}"
        digest = self._digest(whose)
        arm = self.b if int.from_bytes(digest[:8], "big") < self.share * 2**64 else self.a
        is_address = caller.account is None and label is None
        return arm, self._digest(f"{self._secret}\0{whose}" if is_address else whose)[8:16].hex()

    def count(self, arm: str, rating: float) -> None:
        """A rating came. What is above 0 counts as good."""
        self.ratings[arm, "good" if rating > 0 else "bad"] += 1

    def _digest(self, whose: str) -> bytes:
        return hashlib.sha256(f"{self.a}\0{self.b}\0{whose}".encode(errors="surrogatepass")).digest()


class _Rateable(NamedTuple):
    key: str | None
    n_choices: int
    arm: str
    unit: str


class _Line(Struct):
    """What is read again of the usage log."""

    id: str
    key: str | None = None
    finish_reasons: dict[str, int] | None = None
    arm: str | None = None
    unit: str | None = None
    choice: int | None = None


class Rateable:
    """The answers of a test that may be rated by who asked for them: the holder of the same key, or without keys whoever knows
    the answer's id, which nobody can guess."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Rateable] = OrderedDict()

    def add(self, id: str, key: str | None, n_choices: int, arm: str, unit: str) -> None:
        self._known[bare(id)] = _Rateable(key, n_choices, arm, unit)
        if len(self._known) > KNOWN_ANSWERS:
            self._known.popitem(last=False)

    def find(self, id: str, key: str | None, choice: int) -> tuple[str, str] | None:
        """The arm of an answer and its client, if it may be rated under ``key``."""
        found = self._known.get(bare(id))
        return None if found is None or found.key != key or choice >= found.n_choices else (found.arm, found.unit)

    def read(self, log: Path) -> None:
        """Know those that the end of the usage log ``log`` holds."""
        try:
            with log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - READ_BYTES))
                lines = file.read(READ_BYTES).split(b"\n")
        except OSError:
            return
        for line in lines:
            try:
                found = msgspec.json.decode(line, type=_Line)
            except msgspec.DecodeError:
                continue  # torn by a kill, or by where reading began
            if found.arm is not None and found.finish_reasons is not None:
                self.add(found.id, found.key, sum(found.finish_reasons.values()), found.arm, found.unit or "")


def bare(id: str) -> str:
    """An answer's id without the word that its interface puts before it."""
    return id.replace("_", "-").rpartition("-")[2]
