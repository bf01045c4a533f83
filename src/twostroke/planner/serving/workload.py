"""What users ask of a server: when requests come, how long prompts and answers are, which prompts begin alike, which requests
are turns of one conversation.

In a closed loop each of so many users asks again when answered; in an open one requests come by chance at a rate, as a trace
says, or from clients who each have their own rate and lengths. The planner simulates it and ``bench`` sends it.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from twostroke.core.checks import check_amount, check_count, check_positive, check_whole
from twostroke.core.errors import ConfigError
from twostroke.core.policy import PAGE_TOKENS
from twostroke.planner.serving.drawn import Gaps, Lengths, gaps_of, lengths_of

TRACE_BLOCK_TOKENS = 512
"""Tokens that one of a trace's ``hash_ids`` stands for (Mooncake, github.com/kvcache-ai/Mooncake, FAST25-release/traces)."""

TURNAROUND_S = 1e-3
"""From the end of an answer to the arrival of the user's next question: a chunk and a request on a loopback or a rack's
network, parsed and tokenized. Assumed. What counts is that it is not 0: the next step has begun by then."""


class Arrival(NamedTuple):
    """One request: seconds since the start (of a closed loop 0: its user decides), tokens of prompt and of each answer.

    ``blocks`` are what the prompt begins with: equal numbers stand for equal tokens, ``Workload.block_tokens`` each, after
    equal ones before. ``answers`` are drawn to the one prompt. ``after`` is the index of the turn before in a conversation:
    the prompt then begins with that one's prompt and answer, and ``at_s`` counts from the end of that answer."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    answers: int = 1
    after: int | None = None


@dataclass(frozen=True)
class Turns:
    """How long conversations are, and how long a user reads and writes before the next turn. Raises ConfigError."""

    n: int = 1
    think_s: float = 0.0

    def __post_init__(self) -> None:
        check_whole("turns", self.n, most=10_000)
        check_amount("think_s", self.think_s)


@dataclass(frozen=True)
class Client:
    """One of several clients of a server, with a rate, gaps and lengths of its own, as ServeGen describes production traffic
    (arXiv 2505.09999). Its prompts begin with ``shared_prefix`` tokens that no other client's have. Raises ConfigError."""

    rate: float = 0.0  # requests/s; it must be given
    arrivals: str = "poisson"
    prompt_tokens: str = "64"
    output_tokens: str = "64"
    shared_prefix: int = 0
    turns: int = 1
    think_s: float = 0.0

    def __post_init__(self) -> None:
        check_positive("rate", self.rate)
        check_whole("shared_prefix", self.shared_prefix, 0)
        gaps_of(self.arrivals)
        lengths_of(self.prompt_tokens), lengths_of(self.output_tokens)
        Turns(self.turns, self.think_s)


@dataclass(frozen=True)
class Workload:
    """Requests in order. ``users``: of a closed loop, who ask again ``turnaround_s`` after the last token; None for an open
    one. ``cap``: most conversations that an open loop's client has under way. The first ``warmup`` and the last ``cooldown``
    requests are served and left out of what is reported. Raises ConfigError."""

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
        """Most conversations under way."""
        return self.users or self.cap or len(self.arrivals)

    @property
    def followers(self) -> dict[int, int]:
        """The next turn of each request that has one."""
        return {arrival.after: index for index, arrival in enumerate(self.arrivals) if arrival.after is not None}

    @property
    def longest(self) -> int:
        """Most tokens of one prompt and its answer."""
        return max(arrival.prompt_tokens + arrival.output_tokens for arrival in self.arrivals)

    @property
    def new_share(self) -> float:
        """The share of all tokens that no earlier request has: 1 without shared blocks and conversations."""
        seen: set[int] = set()
        tokens = known = 0
        for arrival in self.arrivals:
            tokens += arrival.prompt_tokens + arrival.output_tokens
            if arrival.after is not None:
                before = self.arrivals[arrival.after]
                known += before.prompt_tokens + before.output_tokens
                continue
            known += min(arrival.prompt_tokens, self.block_tokens * sum(block in seen for block in arrival.blocks))
            seen.update(arrival.blocks)
        return 1 - known / tokens

    @classmethod
    def closed(
        cls, users: int, n_requests: int, prompt: int | Lengths, output: int | Lengths, *, warmup: int = 0, cooldown: int = 0,
        answers: int = 1, shared_prefix: int = 0, turns: Turns = Turns(), turnaround_s: float = TURNAROUND_S, seed: int = 0,
    ) -> Workload:  # fmt: skip
        """``users`` who each ask again when answered, ``n_requests`` in all. Every prompt begins with the same
        ``shared_prefix`` tokens."""
        rng, prompts, outputs = random.Random(seed), lengths_of(prompt), lengths_of(output)
        blocks = (0,) if shared_prefix else ()

        def drawn() -> Iterator[_Conversation]:
            while True:
                yield _conversation(rng, 0.0, prompts, outputs, shared_prefix, blocks, answers, turns)

        arrivals = _laid_out(drawn(), n_requests)
        return cls(arrivals, users, None, warmup, cooldown, shared_prefix or TRACE_BLOCK_TOKENS, turnaround_s)

    @classmethod
    def open(
        cls, rate_per_s: float, n_requests: int, prompt: int | Lengths, output: int | Lengths, *, gaps: str | Gaps = "poisson",
        cap: int | None = None, warmup: int = 0, cooldown: int = 0, answers: int = 1, shared_prefix: int = 0,
        turns: Turns = Turns(), seed: int = 0,
    ) -> Workload:  # fmt: skip
        """Conversations begin ``rate_per_s`` times a second, on average. A rate of inf begins all at once."""
        if not rate_per_s > 0:
            raise ConfigError(f"rate={rate_per_s:g} must be above 0 requests/s, or inf.")
        blocks = (0,) if shared_prefix else ()
        rng, prompts, outputs = random.Random(seed), lengths_of(prompt), lengths_of(output)
        starts = _starts(rng, rate_per_s, gaps_of(gaps))
        drawn = (_conversation(rng, at, prompts, outputs, shared_prefix, blocks, answers, turns) for at in starts)
        return cls(_laid_out(drawn, n_requests), None, cap, warmup, cooldown, shared_prefix or TRACE_BLOCK_TOKENS)

    @classmethod
    def of_clients(cls, clients: Sequence[Client], n_requests: int, cap: int | None = None, seed: int = 0) -> Workload:
        """The first ``n_requests`` of what several clients ask, each by itself. Of a shared prefix whole pages are shared."""
        if not clients:
            raise ConfigError("there is no client. Name at least one.")

        def asked(number: int, client: Client) -> Iterator[_Conversation]:
            rng = random.Random(f"{seed} {number}")
            shared = client.shared_prefix // PAGE_TOKENS
            blocks = tuple(number * MOST_SHARED_BLOCKS + i for i in range(shared))
            prompts, outputs = lengths_of(client.prompt_tokens), lengths_of(client.output_tokens)
            gaps, turns = gaps_of(client.arrivals), Turns(client.turns, client.think_s)
            starts = _starts(rng, client.rate, gaps)
            next(starts)  # clients do not begin together: the first gap is drawn, too
            for at in starts:
                yield _conversation(rng, at, prompts, outputs, shared * PAGE_TOKENS, blocks, 1, turns)

        merged = heapq.merge(*itertools.starmap(asked, enumerate(clients)), key=lambda turns: turns[0].at_s)
        return cls(_laid_out(merged, n_requests), None, cap, block_tokens=PAGE_TOKENS)

    @classmethod
    def of_trace(
        cls, rows: Iterable[Mapping[str, Any]], speed: float = 1.0, warmup: int = 0, scale: float = 1.0, cap: int | None = None
    ) -> Workload:
        """Rows of Mooncake's JSON lines: ``timestamp`` in ms, ``input_length``, ``output_length``, ``hash_ids`` of blocks of
        512 tokens. They come ``speed`` times as fast as recorded, and have ``scale`` times as many tokens, blocks included."""
        check_positive("speed", speed)
        check_positive("scale", scale)

        def tokens(length: int) -> int:
            return max(1, round(length * scale))

        arrivals = [
            Arrival(
                row["timestamp"] / 1e3 / speed,
                tokens(row["input_length"]),
                tokens(row["output_length"]),
                tuple(row.get("hash_ids", ())),
            )
            for row in rows
        ]
        in_order = tuple(sorted(arrivals, key=lambda arrival: arrival.at_s))
        return cls(in_order, None, cap, warmup, block_tokens=tokens(TRACE_BLOCK_TOKENS))


MOST_SHARED_BLOCKS = 2**32
"""Blocks are numbered by client: more than any prefix has."""

_Conversation = list[Arrival]
"""The turns of one; ``after`` is set when it is laid out."""


def _starts(rng: random.Random, rate_per_s: float, gaps: Gaps) -> Iterator[float]:
    """When conversations begin, in seconds: the first at once."""
    at = 0.0
    while True:
        yield at
        if rate_per_s != math.inf:
            at += gaps.draw(rng) / rate_per_s


def _conversation(
    rng: random.Random, at_s: float, prompts: Lengths, outputs: Lengths, shared: int, blocks: tuple[int, ...], answers: int,
    turns: Turns,
) -> _Conversation:  # fmt: skip
    """Each turn's prompt is all before it and as many tokens more as are drawn. A prompt is not shorter than what it shares."""
    found: _Conversation = []
    for _ in range(turns.n):
        new, n_output = prompts.draw(rng), outputs.draw(rng)
        if not found:
            found.append(Arrival(at_s, max(new, shared + 1 if shared else 1), n_output, blocks, answers))
            continue
        before = found[-1]
        n_prompt = before.prompt_tokens + before.output_tokens + new
        found.append(Arrival(turns.think_s, n_prompt, n_output, blocks, answers))
    return found


def _laid_out(conversations: Iterator[_Conversation], n_requests: int) -> tuple[Arrival, ...]:
    """The first ``n_requests`` turns; the last conversation may be cut short."""
    check_count("requests", n_requests)
    arrivals: list[Arrival] = []
    for turns in conversations:
        for number, turn in enumerate(turns[: n_requests - len(arrivals)]):
            arrivals.append(turn._replace(after=len(arrivals) - 1) if number else turn)
        if len(arrivals) == n_requests:
            return tuple(arrivals)
    raise ConfigError(f"there are {len(arrivals)} requests, fewer than {n_requests}.")
