"""``SamplingParams`` say how the tokens of one request are chosen and when it ends."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from twostroke.core.errors import InputError
from twostroke.core.sampling_kinds import DRAWN, FILTERED, LOGPROBS, PENALTIES, SAMPLING_KINDS
from twostroke.scheduling.constraint import Constraint

MAX_LOGPROBS = 20
"""Most alternatives that a request may ask for at each token (OpenAI's bound). They cost a sort of the vocabulary and
output."""

MAX_BIASED_TOKENS = 1024
MAX_N = 128
MAX_LENGTH_PENALTY = 10.0
MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 1024
MAX_STOP_CHARACTERS = 1024

Pooling = Literal["mean", "last"]

FORK_STRIDE = 0x9E3779B97F4A7C15
"""Distance between the seeds of the answers to one prompt. It is large (2⁶⁴ over the golden ratio), so that they do not meet
the small seeds that other requests give."""


@dataclass(frozen=True)
class SamplingParams:
    """The fields are checked on construction, which raises InputError with the field, its value and the rule.

    Logits are changed in this order. ``logit_bias`` adds to the logits of single tokens. ``repetition_penalty`` divides the
    positive logits of tokens of prompt and output by r and multiplies the negative ones (Keskar et al. 2019, arXiv:1909.05858).
    ``presence_penalty`` is subtracted once from the logit of each token of the output, ``frequency_penalty`` once for each of
    its occurrences there (OpenAI's API).

    Then the logits are divided by ``temperature``. Of the tokens ``top_k`` keeps the k most probable (0: all), ``top_p`` the
    smallest set whose probabilities sum to at least p, and ``min_p`` those with at least min_p times the highest probability.
    Each filter sees only what the one before it kept. ``temperature=0`` takes the most probable token and skips the filters.

    ``seed`` fixes the request's own random stream: its i-th token is drawn with the i-th number of that stream, whatever else
    is in the batch. Without one the engine draws a seed. ``logprobs=n`` reports the natural logarithm of the probability of the
    chosen token and of the n most probable ones, before bias, penalties, temperature and filters. ``prompt_logprobs=n`` reports
    the same for each token of the prompt from the ``prompt_logprobs_start``-th on, counted from 0; nothing predicts the first.
    Tokens before are found in the prefix cache.

    ``include_stop_str_in_output`` leaves the stop string, or the token, that ended the text in it. ``skip_special_tokens``
    leaves special tokens out of the text.

    ``n`` is the number of answers to the prompt, which is computed once. The i-th uses the i-th random stream of ``seed``.

    ``use_beam_search`` finds the ``n`` best of ``best_of`` (default: ``n``) sequences that are searched together, by the rules
    of transformers' ``num_beams``. It draws nothing, so ``temperature`` must be 0. A sequence ranks by its sum of
    log-probabilities, after biases and penalties, ÷ length ** ``length_penalty``; ``early_stopping`` (True, False, "never")
    says when the search ends (``BeamSearch``).

    ``pooling`` asks for one vector in the place of an answer: the mean of the prompt's hidden states after the final norm
    ("mean") or that of its last token ("last"), of Euclidean length 1. No token is sampled.

    ``constraint`` is a form that the answer must have: after biases and penalties, tokens that cannot continue it become
    impossible. The end-of-sequence token is possible where the form is complete. An answer of ``max_tokens`` may be cut off
    before. It goes neither with a beam search nor with what puts off the end (``ignore_eos``, ``min_tokens``).

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
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 1
    n: int = 1
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    use_beam_search: bool = False
    best_of: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    pooling: Pooling | None = None
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "stop", _strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, 0, 2**31)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InputError(
                "top_p=0 keeps no token. Use a value above 0, or temperature=0 for the most probable token.", field="top_p"
            )
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        _integer("max_tokens", self.max_tokens, 1, 2**31)
        _integer("min_tokens", self.min_tokens, 0, 2**31)
        self._check_length()
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "use_beam_search"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name}={getattr(self, name)!r} must be true or false.", field=name)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _integer("prompt_logprobs_start", self.prompt_logprobs_start, 1, 2**31)
        _integer("n", self.n, 1, MAX_N)
        self._check_beams()
        self._check_pooling()
        self._check_constraint()

    def _check_pooling(self) -> None:
        if self.pooling not in (None, "mean", "last"):
            raise InputError(f"pooling={str(self.pooling)[:40]!r} must be 'mean' or 'last'.", field="pooling")
        if self.pooling is not None and (self.n > 1 or self.use_beam_search or self.prompt_logprobs is not None):
            raise InputError(
                "pooling gives one vector and goes with neither n, beam search nor prompt_logprobs.", field="pooling"
            )

    def _check_constraint(self) -> None:
        if self.constraint is None:
            return
        if not isinstance(self.constraint, Constraint):
            raise InputError(f"constraint={self.constraint!r:.40} must be a Constraint.", field="constraint")
        for name in ("use_beam_search", "ignore_eos", "min_tokens"):
            if getattr(self, name):
                raise InputError(f"{name} does not go with an answer of a given form. Leave one of them out.", field=name)

    def _check_beams(self) -> None:
        if self.best_of is not None:
            _integer("best_of", self.best_of, 1, MAX_N)
        _number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise InputError(f"early_stopping={self.early_stopping!r} must be true, false or 'never'.", field="early_stopping")
        if not self.use_beam_search:
            if self.best_of not in (None, self.n):
                raise InputError(
                    f"best_of={self.best_of} must equal n={self.n}, which gives every answer, unless with use_beam_search. "
                    "Ask for n answers with logprobs and choose.",
                    field="best_of",
                )
            return
        if self.beam_width < self.n:
            raise InputError(f"best_of={self.best_of} must be at least n={self.n}.", field="best_of")
        if not self.greedy:
            raise InputError(
                f"temperature={self.temperature} draws tokens, and a beam search does not. Use temperature=0.",
                field="temperature",
            )

    @property
    def beam_width(self) -> int:
        """Sequences that grow together: the answers, or the beams that are searched for them."""
        return self.n if self.best_of is None else self.best_of

    def _check_length(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise InputError(f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}.", field="min_tokens")

    def of_length(self, max_tokens: int) -> SamplingParams:
        """The same for answers of ``max_tokens``, from 1; only that is validated. Raises InputError."""
        made = copy(self)
        object.__setattr__(made, "max_tokens", max_tokens)
        made._check_length()
        return made

    def of_fork(self, i: int) -> SamplingParams:
        """Parameters of the ``i``-th further answer of ``n``: another random stream, one answer, and no ``prompt_logprobs``,
        which the first answer reports."""
        made = copy(self)  # without checking it again, which takes a third of a second for 128 forks with 1,000 biases each
        seed = None if self.seed is None else (self.seed + i * FORK_STRIDE) % 2**63
        for name, value in (("n", 1), ("seed", seed), ("prompt_logprobs", None)):
            object.__setattr__(made, name, value)
        return made

    @cached_property
    def bias_arrays(self) -> tuple[array[int], array[float]]:
        """Tokens ("q") and biases ("f") of ``logit_bias``, converted once because they are added to every row."""
        return array("q", (token for token, _ in self.logit_bias)), array("f", (bias for _, bias in self.logit_bias))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those of ``SAMPLING_KINDS`` that a plan prices."""
        filtered = self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0
        asked = {
            DRAWN: not self.greedy and not filtered,
            FILTERED: not self.greedy and filtered,
            PENALTIES: self.has_penalties,
            LOGPROBS: self.logprobs is not None or self.use_beam_search,
        }
        return tuple(kind for kind in SAMPLING_KINDS if asked[kind])

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _number(name: str, value: object, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not least <= value <= most:
        raise InputError(f"{name}={value!r} must be a number from {least:g} to {most:g}.", field=name)


def _integer(name: str, value: object, least: int, most: int, of: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InputError(f"{name}{of}={value!r} must be a whole number from {least} to {most}.", field=name)


def _strings(value: str | Sequence[str] | None) -> tuple[str, ...]:
    strings = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if len(strings) > MAX_STOP_STRINGS:
        raise InputError(f"stop has {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed.", field="stop")
    for text in strings:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARACTERS:
            raise InputError(f"stop={str(text)[:40]!r} must be text of 1 to {MAX_STOP_CHARACTERS} characters.", field="stop")
    return strings


def _biases(value: Mapping[int, float] | Sequence[tuple[int, float]] | None) -> tuple[tuple[int, float], ...]:
    pairs = () if value is None else tuple(value.items()) if isinstance(value, Mapping) else tuple(value)
    if len(pairs) > MAX_BIASED_TOKENS:
        raise InputError(f"logit_bias names {len(pairs)} tokens; at most {MAX_BIASED_TOKENS} are allowed.", field="logit_bias")
    for token, bias in pairs:
        _integer("logit_bias", token, 0, 2**31, of="'s token")
        _number("logit_bias", bias, -100.0, 100.0)
    if len({token for token, _ in pairs}) < len(pairs):
        raise InputError("logit_bias names a token twice. Give each token one bias.", field="logit_bias")
    return tuple((token, float(bias)) for token, bias in pairs)


def _token_ids(value: Sequence[int] | None) -> tuple[int, ...]:
    ids = () if value is None else tuple(value)
    if len(ids) > MAX_STOP_TOKENS:
        raise InputError(
            f"stop_token_ids holds {len(ids)} tokens; at most {MAX_STOP_TOKENS} are allowed.", field="stop_token_ids"
        )
    for token in ids:
        _integer("stop_token_ids", token, 0, 2**31)
    return ids
