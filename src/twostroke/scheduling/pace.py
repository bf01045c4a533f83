"""How much of prompts a step holds in which requests decode: so much that it takes at most a multiple of the step without, and
more where many wait for their first token."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.core.errors import ConfigError
from twostroke.scheduling.request import Request
from twostroke.scheduling.step import ScheduledStep

_OF_SPEED, _OF_PROMPTS = 0.1, 0.02
"""Shares of a surprise that the machine's speed and the prediction's error of steps with prompts take. Speed comes and goes
with other programs and cancels in a ratio; the error stays."""

_MOST_SURPRISE = 1.0
"""Nats that one step may surprise by: a step that the system interrupted says nothing of the next."""


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step by ``rows`` (increasing), linear between them: ``decode_s`` if each is of a request that decodes,
    ``prompts_s`` if some are of prompts. Beside them ``key_s`` for each key that a decoding request reads, and ``pair_s`` for
    each pair of a token of a prompt and a key that it sees."""

    rows: tuple[int, ...]
    decode_s: tuple[float, ...]
    prompts_s: tuple[float, ...]
    key_s: float
    pair_s: float

    def decode(self, n: int, keys: float) -> float:
        """A step in which ``n`` requests decode that read so many ``keys`` in all."""
        return self._between(self.decode_s, n) + keys * self.key_s

    def with_prompts(self, rows: int, keys: float, pairs: float) -> float:
        """A step of ``rows``, of decoding requests and of prompts."""
        return self._between(self.prompts_s, rows) + keys * self.key_s + pairs * self.pair_s

    def _between(self, seconds: tuple[float, ...], n: int) -> float:
        rows = self.rows
        i = bisect_left(rows, n)
        if i == 0:
            return seconds[0]
        if i == len(rows):
            return seconds[-1] * n / rows[-1]
        lower = seconds[i - 1]
        return lower + (seconds[i] - lower) * (n - rows[i - 1]) / (rows[i] - rows[i - 1])


class Pace:
    """Bounds prompts beside ``n`` decoding requests: a step takes at most ``ratio``·(1 + others ÷ n) times what it takes
    without them, where ``others`` wait for their first token beside the one whose prompt is computed. If only those who decode
    counted, the steps of a few would be short and everybody else would wait behind them, until nearly all wait (decision 134).
    At least a page's tokens are computed of a prompt all the same, so that none waits for good.

    ``costs`` are corrected by steps that were measured (``saw``). Only the ratio of the two kinds of steps matters, so the
    speed of the machine, which other programs change, is told apart from what is wrong with steps that hold prompts. Raises
    ConfigError for a ratio that is not above 1."""

    def __init__(self, costs: StepCosts, ratio: float, page_tokens: int) -> None:
        if not ratio > 1:
            raise ConfigError(f"max_step_ratio={ratio:g} must be above 1: a step with prompts takes longer than one without.")
        self.costs, self.ratio, self.page_tokens = costs, ratio, page_tokens
        self._speed, self._n_seen = 0.0, 0
        self._error, self._n_errors = 0.0, 0

    def beside(self, decoding: Sequence[Request], others: int) -> Room:
        """The room of a step in which these requests decode while ``others`` wait beside one whose prompt is computed."""
        return Room(self, len(decoding), sum([r.n_computed for r in decoding]), others)

    def tokens_beside(self, n: int, context: float, others: int = 0, start: int = 0) -> int:
        """Tokens of one long prompt, behind ``start`` of it, in a step in which ``n`` requests decode behind ``context`` tokens
        each."""
        return Room(self, n, n * context, others).take(start, self.costs.rows[-1])

    def limit_s(self, n: int, keys: float, others: int) -> float:
        """What a step with prompts may take, in seconds as ``costs`` has them of such steps."""
        return self.ratio * (1 + others / n) * self.costs.decode(n, keys) * math.exp(-self._error)

    def saw(self, step: ScheduledStep, seconds: float) -> None:
        """``step`` took ``seconds``."""
        n = step.n_decodes
        if n == 0 or step.drafts or seconds <= 0:
            return
        keys = sum(step.starts[:n])
        if n == len(step.requests):
            found = math.log(seconds / self.costs.decode(n, keys)) - self._speed
        else:
            pairs = sum([count * (start + count / 2) for start, count in zip(step.starts[n:], step.counts[n:], strict=True)])
            predicted = self.costs.with_prompts(step.n_tokens, keys, pairs)
            found = math.log(seconds / predicted) - self._speed - self._error
        found = max(-_MOST_SURPRISE, min(_MOST_SURPRISE, found))
        self._n_seen += 1
        of_speed = max(_OF_SPEED, 1 / self._n_seen)
        self._speed += of_speed * found
        if n < len(step.requests):
            self._n_errors += 1
            self._error += max(_OF_PROMPTS, 1 / (self._n_errors + 1)) * (1 - of_speed) * found


class Room:
    """What prompts may still take of one step."""

    def __init__(self, pace: Pace, n_decodes: int, keys: float, others: int = 0) -> None:
        self._pace, self._rows, self._keys, self._pairs = pace, n_decodes, keys, 0.0
        self._limit_s = pace.limit_s(n_decodes, keys, others)
        self._empty = True

    def take(self, start: int, most: int) -> int:
        """Tokens that are computed of a prompt whose ``start`` first ones are known: ``most`` or, where those do not fit, whole
        pages. 0: the step is full."""
        page_tokens = self._pace.page_tokens
        n = most
        if not self._fits(start, n):
            low, high = 0, -(-most // page_tokens)  # pages: ``low`` fit, ``high`` do not
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self._fits(start, middle * page_tokens) else (low, middle)
            n = low * page_tokens
            if n == 0 and self._empty:
                n = min(most, page_tokens)
        self._rows += n
        self._pairs += n * (start + n / 2)
        self._empty = False
        return n

    def _fits(self, start: int, n: int) -> bool:
        pairs = self._pairs + n * (start + n / 2)
        return self._pace.costs.with_prompts(self._rows + n, self._keys, pairs) <= self._limit_s
