"""What users ask of a server: when requests come, how long prompts and answers are, which prompts begin alike.

In a closed loop each of so many users asks again when answered; in an open one requests come by chance at a rate, or as a trace
says.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from twostroke.core.checks import check_amount, check_count, check_positive, check_whole
from twostroke.core.errors import ConfigError

TRACE_BLOCK_TOKENS = 512
"""Tokens that one of a trace's ``hash_ids`` stands for (Mooncake, github.com/kvcache-ai/Mooncake, FAST25-release/traces)."""

TURNAROUND_S = 1e-3
"""From the end of an answer to the arrival of the user's next question: a chunk and a request on a loopback or a rack's
network, parsed and tokenized. Assumed. What counts is that it is not 0: the next step has begun by then."""


class Lengths(Protocol):
    """How many tokens prompts or answers have."""

    def draw(self, rng: random.Random) -> int: ...


@dataclass(frozen=True)
class Uniform:
    """Every length from ``least`` to ``most`` equally often. Raises ConfigError."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"lengths {self.least}:{self.most} must be two numbers of at least 1 token, the smaller first.")

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.least, self.most)


@dataclass(frozen=True)
class Lognormal:
    """exp(N(ln ``median``, ``sigma``²)), rounded, from 1 to ``most``: many short ones, a few long ones. Raises ConfigError."""

    median: float
    sigma: float
    most: int = 2**20

    def __post_init__(self) -> None:
        check_positive("median", self.median)
        check_amount("sigma", self.sigma)
        check_count("most", self.most)

    def draw(self, rng: random.Random) -> int:
        return max(1, min(self.most, round(rng.lognormvariate(math.log(self.median), self.sigma))))


def lengths_of(tokens: int | Lengths) -> Lengths:
    """A number stands for lengths that are all alike."""
    return Uniform(tokens, tokens) if isinstance(tokens, int) else tokens


class Arrival(NamedTuple):
    """One request: seconds since the start (of a closed loop 0: its user decides), tokens of prompt and of each answer.

    ``blocks`` are what the prompt begins with: equal numbers stand for equal tokens, ``Workload.block_tokens`` each, after
    equal ones before. ``answers`` are drawn to the one prompt."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    answers: int = 1


@dataclass(frozen=True)
class Workload:
    """Requests in order. ``users``: of a closed loop, who ask again ``turnaround_s`` after the last token; None for an open
    one. ``cap``: most requests that an open loop's client has in flight. The first ``warmup`` and the last ``cooldown`` of them
    are served and left out of what is reported. Raises ConfigError."""

    arrivals: tuple[Arrival, ...]
    users: int | None = None
    cap: int | None = None
    warmup: int = 0
    cooldown: int = 0
    block_tokens: int = TRACE_BLOCK_TOKENS
    turnaround_s: float = TURNAROUND_S

    def __post_init__(self) -> None:
        for name in ("users", "cap"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name))
        check_whole("warmup", self.warmup, 0)
        check_whole("cooldown", self.cooldown, 0)
        check_amount("turnaround_s", self.turnaround_s)
        if self.warmup + self.cooldown >= len(self.arrivals):
            raise ConfigError(
                f"warmup={self.warmup} and cooldown={self.cooldown} leave nothing of {len(self.arrivals)} requests. Use less."
            )

    def reports(self, index: int) -> bool:
        """Whether the request is one of those that are reported."""
        return self.warmup <= index < len(self.arrivals) - self.cooldown

    @property
    def places(self) -> int:
        """Most requests in flight."""
        return self.users or self.cap or len(self.arrivals)

    @classmethod
    def closed(
        cls, users: int, n_requests: int, prompt: int | Lengths, output: int | Lengths, *, warmup: int = 0, cooldown: int = 0,
        answers: int = 1, shared_prefix: int = 0, turnaround_s: float = TURNAROUND_S, seed: int = 0,
    ) -> Workload:  # fmt: skip
        """``users`` who each ask again when answered, ``n_requests`` in all. Every prompt begins with the same
        ``shared_prefix`` tokens."""
        rng, prompts, outputs = random.Random(seed), lengths_of(prompt), lengths_of(output)
        blocks = (0,) if shared_prefix else ()
        drawn = tuple(Arrival(0.0, prompts.draw(rng), outputs.draw(rng), blocks, answers) for _ in range(n_requests))
        return cls(drawn, users, None, warmup, cooldown, shared_prefix or TRACE_BLOCK_TOKENS, turnaround_s)

    @classmethod
    def open(
        cls, rate_per_s: float, n_requests: int, prompt: int | Lengths, output: int | Lengths, *, burstiness: float = 1.0,
        cap: int | None = None, warmup: int = 0, cooldown: int = 0, answers: int = 1, shared_prefix: int = 0, seed: int = 0,
    ) -> Workload:  # fmt: skip
        """Gaps ~ Gamma(shape = ``burstiness``, scale = 1/(rate · burstiness)): 1 is Poisson, less comes in bursts. A rate of
        inf sends all at once."""
        if not rate_per_s > 0 or not 0 < burstiness < math.inf:
            raise ConfigError(f"rate={rate_per_s:g} and burstiness={burstiness:g} must be above 0.")
        rng, prompts, outputs = random.Random(seed), lengths_of(prompt), lengths_of(output)
        blocks = (0,) if shared_prefix else ()
        at, drawn = 0.0, []
        for i in range(n_requests):
            if i and rate_per_s != math.inf:
                at += rng.gammavariate(burstiness, 1 / (rate_per_s * burstiness))
            drawn.append(Arrival(at, prompts.draw(rng), outputs.draw(rng), blocks, answers))
        return cls(tuple(drawn), None, cap, warmup, cooldown, shared_prefix or TRACE_BLOCK_TOKENS)

    @classmethod
    def of_trace(cls, rows: Iterable[Mapping[str, Any]], speed: float = 1.0, warmup: int = 0) -> Workload:
        """Rows of Mooncake's JSON lines: ``timestamp`` in ms, ``input_length``, ``output_length``, ``hash_ids`` of blocks of
        512 tokens. They come ``speed`` times as fast as recorded."""
        check_positive("speed", speed)
        arrivals = [
            Arrival(row["timestamp"] / 1e3 / speed, row["input_length"], row["output_length"], tuple(row.get("hash_ids", ())))
            for row in rows
        ]
        return cls(tuple(sorted(arrivals, key=lambda arrival: arrival.at_s)), warmup=warmup)
