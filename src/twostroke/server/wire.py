"""Messages between the HTTP process and the engine process, and their framing.

A frame is four bytes of length (big-endian) and that many bytes of msgpack. Messages are tagged structs, decoded into
declared types only, so no byte stream can make a process run code. Both directions have a size limit, which is checked before
the payload is read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from twostroke.core.errors import EngineError
from twostroke.scheduling.sampling_params import SamplingParams

MAX_FRAME_BYTES = 16 * 2**20
"""More than the tokens of any 2 MB request body, and than one step's tokens of a thousand requests with logprobs."""

_LENGTH = struct.Struct(">I")


class FrameError(EngineError):
    """The bytes on the socket are not a frame of a known message. The connection that sent them is closed."""


# HTTP process → engine.


class Add(msgspec.Struct, tag="add", forbid_unknown_fields=True):
    """A request, which ends after ``timeout_s``. A lower ``priority`` goes first, and requests of one ``client`` do not delay
    another's. ``lora`` names an adapter. ``whole``: the receiver looks at no token before the answer is complete, except for
    the time of the first."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0
    client: str = ""
    timeout_s: float | None = None
    whole: bool = False
    lora: str | None = None


class Abort(msgspec.Struct, tag="abort", forbid_unknown_fields=True):
    """Abort answer ``index`` to a request; None aborts all of them."""

    request_id: str
    index: int | None = None


class AskStats(msgspec.Struct, tag="stats", forbid_unknown_fields=True):
    query_id: int


class ChangeAdapter(msgspec.Struct, tag="adapter", forbid_unknown_fields=True):
    """Let requests name the adapter in ``directory``, or with None no longer."""

    query_id: int
    name: str
    directory: str | None


class WatchBlocks(msgspec.Struct, tag="watch", forbid_unknown_fields=True):
    """Tell this connection which prefixes the cache holds, now and at each change; with ``pages`` what is in them as well."""

    pages: bool = False


class ChangeWeights(msgspec.Struct, tag="weights", forbid_unknown_fields=True):
    """Compute with the weights in ``directory``. With ``carry_on`` requests under way do so too; without, they finish on the
    weights they began with."""

    query_id: int
    directory: str
    carry_on: bool = False


class Sleep(msgspec.Struct, tag="sleep", forbid_unknown_fields=True):
    """Give the memory of the KV cache back (level 1), of the weights too (2), or take it again (0)."""

    query_id: int
    level: int


class Shutdown(msgspec.Struct, tag="shutdown", forbid_unknown_fields=True):
    pass


Command = Add | Abort | AskStats | ChangeAdapter | ChangeWeights | Sleep | WatchBlocks | Shutdown


# Engine → HTTP process.


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probability (natural logarithm) of the token that was taken, and the most probable tokens, best first."""

    logprob: float
    top: list[tuple[int, float]]


class TokenDelta(msgspec.Struct, array_like=True):
    """New tokens of answer ``index`` to one request. Its last delta has the ``finish_reason``. ``prompt_logprobs`` come in
    deltas without tokens, before the first token of any answer. ``cached_tokens``: of the prompt, and ``started_s`` when it
    began to be computed (``time.monotonic``), in the first delta of answer 0 that has tokens. ``embedding``: a pooled prompt's
    vector, fp32 numbers, the lowest byte of each first. ``fingerprint``: of the weights that computed the answer from here on,
    where they are not those before; "+" between several."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    index: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0
    embedding: bytes | None = None
    fingerprint: str | None = None
    started_s: float | None = None


class Ready(msgspec.Struct, tag="ready", forbid_unknown_fields=True):
    """The model is loaded; sent once to every connection."""

    dtype: str
    max_model_len: int
    page_tokens: int
    weights_bytes: int
    kv_cache_bytes: int
    load_s: float
    loaded_packed: bool = False
    notes: list[str] = []
    fingerprint: str = ""


class Tokens(msgspec.Struct, tag="tokens"):
    """All new tokens of one engine step that belong to this connection."""

    deltas: list[TokenDelta]


class Failed(msgspec.Struct, tag="error", forbid_unknown_fields=True):
    """A request failed, or with ``request_id`` None the engine itself, which is about to exit. ``kind`` "input": the caller's
    fault."""

    request_id: str | None
    kind: Literal["input", "capacity", "engine"]
    message: str


class StatsReport(msgspec.Struct, tag="stats", forbid_unknown_fields=True):
    query_id: int
    values: dict[str, float]


class AdapterChanged(msgspec.Struct, tag="adapter", forbid_unknown_fields=True):
    """The answer to a ``ChangeAdapter``. With an ``error`` nothing has changed. ``key``: that of the loaded adapter ``name`` in
    this engine, from which the keys of its prefixes follow (``scheduling.prefix_tree``)."""

    query_id: int
    error: str | None = None
    name: str = ""
    key: bytes = b""


class Page(msgspec.Struct, array_like=True):
    """A full page that the cache has come to hold: its key, the key before it, its tokens, and if it begins a prefix the name
    of the adapter that computed it, "" for none."""

    key: bytes
    parent: bytes
    tokens: list[int]
    begins: str | None = None


class Blocks(msgspec.Struct, tag="blocks", forbid_unknown_fields=True):
    """Pages of prefixes that the cache has come to hold and has lost, by their keys (``scheduling.prefix_tree.chain_key``).
    ``pages``: of those stored, the full ones, if asked for."""

    stored: list[bytes]
    removed: list[bytes]
    pages: list[Page] = []


class WeightsChanged(msgspec.Struct, tag="weights", forbid_unknown_fields=True):
    """The answer to a ``ChangeWeights``. With an ``error`` nothing has changed. ``prepare_s`` passed beside the engine's steps,
    ``pause_s`` between two of them. ``finishing`` requests are still computed by the weights before. ``key``: of the weights,
    in the keys of their pages."""

    query_id: int
    error: str | None = None
    fingerprint: str = ""
    prepare_s: float = 0.0
    pause_s: float = 0.0
    finishing: int = 0
    key: bytes = b""


class Slept(msgspec.Struct, tag="slept", forbid_unknown_fields=True):
    """The answer to a ``Sleep``. With an ``error`` nothing has changed. ``freed_bytes`` of memory were given back."""

    query_id: int
    error: str | None = None
    freed_bytes: int = 0


class Heartbeat(msgspec.Struct, tag="heartbeat", forbid_unknown_fields=True):
    """A thread of its own sends one every second. ``busy_s``: for how long the engine's loop has been in its present turn."""

    loaded: bool
    busy_s: float


Event = Ready | Tokens | Failed | StatsReport | AdapterChanged | WeightsChanged | Slept | Blocks | Heartbeat

_ENCODER = msgspec.msgpack.Encoder()
_COMMANDS = msgspec.msgpack.Decoder(Command)
_EVENTS = msgspec.msgpack.Decoder(Event)


def encode(message: Command | Event) -> bytes:
    """One frame. Raises FrameError if the message is larger than a frame may be."""
    payload = _ENCODER.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"a {type(message).__name__} message of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}.")
    return _LENGTH.pack(len(payload)) + payload


def decode_command(payload: bytes) -> Command:
    return _decode(_COMMANDS, payload)


def decode_event(payload: bytes) -> Event:
    return _decode(_EVENTS, payload)


def _decode(decoder: msgspec.msgpack.Decoder[Any], payload: bytes) -> Any:
    try:
        return decoder.decode(payload)
    except Exception as error:  # msgspec's own errors, and whatever a field's own validation raises
        raise FrameError(f"a frame of {len(payload)} bytes holds no known message: {type(error).__name__}.") from None


class FrameReader:
    """Cuts a byte stream into payloads. Holds at most one incomplete frame and what was last fed."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Payloads that ``data`` completes. Raises FrameError at a length over the limit, after which the stream is lost."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer, start)
                if length > self._max_bytes:
                    raise FrameError(f"a frame announces {length} bytes; the limit is {self._max_bytes}.")
                end = start + _LENGTH.size + length
                if len(self._buffer) < end:
                    break
                payload = bytes(self._buffer[start + _LENGTH.size : end])
                start = end
                yield payload
        finally:
            del self._buffer[:start]
