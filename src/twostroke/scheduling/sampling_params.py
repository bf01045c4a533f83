"""``SamplingParams``: how the tokens of one request are chosen and when it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.core.errors import InputError

MAX_LOGPROBS = 20
"""Most alternatives a request may ask for at each token (OpenAI's bound): they cost a sort of the vocabulary and output."""

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024


@dataclass(frozen=True)
class SamplingParams:
    """Validated on construction; raises InputError naming field, value and rule.

    The model's logits are divided by ``temperature``; then ``top_k`` keeps the k most probable tokens (0: all), ``top_p`` the
    smallest set of them whose probabilities sum to at least p, and ``min_p`` those with at least min_p times the highest
    probability. Each filter sees what the one before it left. ``temperature=0`` takes the most probable token, unfiltered.

    ``seed`` fixes the request's own random stream: the i-th token of a request is drawn with the i-th number of that stream,
    whatever else is in the batch. Without one the engine draws a seed. ``logprobs=n`` reports the natural logarithm of the
    chosen token's probability and of the n most probable ones, under the model's own distribution (before temperature and
    filters).

    A request ends with ``"stop"`` at an end-of-sequence token of the model (unless ``ignore_eos``), at one of
    ``stop_token_ids``, or when its text contains one of ``stop`` (never before ``min_tokens`` tokens), and with ``"length"``
    after ``max_tokens``.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, 0, 2**31)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InputError("top_p=0 keeps no token. Use a value above 0, or temperature=0 for the most probable token.")
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        _integer("max_tokens", self.max_tokens, 1, 2**31)
        _integer("min_tokens", self.min_tokens, 0, 2**31)
        if self.min_tokens > self.max_tokens:
            raise InputError(f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}.")
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"ignore_eos={self.ignore_eos!r} must be true or false.")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _number(name: str, value: object, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not least <= value <= most:
        raise InputError(f"{name}={value!r} must be a number from {least:g} to {most:g}.")


def _integer(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InputError(f"{name}={value!r} must be a whole number from {least} to {most}.")


def _strings(value: str | Sequence[str] | None) -> tuple[str, ...]:
    strings = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if len(strings) > MAX_STOP_STRINGS:
        raise InputError(f"stop has {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed.")
    for text in strings:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARACTERS:
            raise InputError(f"stop={str(text)[:40]!r} must be text of 1 to {MAX_STOP_CHARACTERS} characters.")
    return strings


def _token_ids(value: Sequence[int] | None) -> tuple[int, ...]:
    ids = () if value is None else tuple(value)
    for token in ids:
        _integer("stop_token_ids", token, 0, 2**31)
    return ids
