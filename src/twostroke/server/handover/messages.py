"""What two engines say to each other: one asks for pages of prompts (it decodes), the other computes them (it prefills).

Both begin with a `Challenge`. The asking engine greets with `Hello` and then sends `Compute` and `Cancel`. The other answers
each `Compute` with a `Page` for each page and one `Ended`, after which it sends nothing more of it. Both send `Beat` while they
have nothing else to say. Messages are tagged structs of declared types, as in ``server.wire``: no bytes run code.
"""

from __future__ import annotations

from typing import Any

import msgspec

from twostroke.server.wire import FrameError

VERSION = 1


class Challenge(msgspec.Struct, tag="challenge", forbid_unknown_fields=True):
    """The first message of a connection, of both sides. All later ones are proved with a key of both nonces."""

    nonce: bytes


class Hello(msgspec.Struct, tag="hello", forbid_unknown_fields=True):
    """Records of pages have ``record_bytes``. ``n_slots`` > 0: a descriptor of shared memory of so many records follows, to
    which pages are written; else each page follows its message."""

    version: int
    record_bytes: int
    n_slots: int


class Welcome(msgspec.Struct, tag="welcome", forbid_unknown_fields=True):
    """The greeting has ended well. ``busy_s`` as in `Beat`."""

    busy_s: float = 0.0


class Refused(msgspec.Struct, tag="refused", forbid_unknown_fields=True):
    """The greeting has ended: why, in a sentence."""

    message: str


class Compute(msgspec.Struct, tag="compute", forbid_unknown_fields=True):
    """Compute ``tokens``, whole pages of a prompt, and hand over the pages from ``first`` on: the i-th of them to slot
    ``slots[i]``, summed with ``keys[i]``. ``identity``: of the keys and values that are wanted. ``client`` and ``priority`` as
    in a request. A page that could not be sent ``lease_s`` after it was there is given up, with what follows it."""

    job: int
    identity: bytes
    tokens: list[int]
    first: int
    slots: list[int]
    keys: list[bytes]
    client: str
    priority: int
    lease_s: float


class Cancel(msgspec.Struct, tag="cancel", forbid_unknown_fields=True):
    """Compute it no further. Its `Ended` follows all the same."""

    job: int


class Page(msgspec.Struct, tag="page", forbid_unknown_fields=True):
    """The ``index``-th page of a job lies in its slot, or follows. ``total`` and ``crc`` are its sums
    (``engine.tiers.records``)."""

    job: int
    index: int
    total: int
    crc: int


class Ended(msgspec.Struct, tag="ended", forbid_unknown_fields=True):
    """Nothing more comes of a job. ``why``: in a sentence, if pages are missing. ``sent_s`` passed with copying and sending its
    pages."""

    job: int
    why: str = ""
    sent_s: float = 0.0


class Beat(msgspec.Struct, tag="beat", forbid_unknown_fields=True):
    """A sign of life. ``busy_s``: for how long the engine's loop has been in its present turn."""

    busy_s: float = 0.0


Message = Challenge | Hello | Welcome | Refused | Compute | Cancel | Page | Ended | Beat

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _ENCODER.encode(message)


def decode(payload: bytes) -> Any:
    """Raises FrameError for bytes that are no message."""
    try:
        return _DECODER.decode(payload)
    except Exception as error:  # msgspec's own errors
        raise FrameError(f"a frame of {len(payload)} bytes holds no known message: {type(error).__name__}.") from None
