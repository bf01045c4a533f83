"""What a scheduler is told, and what it decides: limits, and one step as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from twostroke.core.errors import ConfigError
from twostroke.scheduling.request import Request

SCORED_LOGITS_BYTES = 64 * 2**20
"""Of logits, fp32, that one step computes for ``prompt_logprobs`` at most: all of a step's 512 tokens would take 311 MB at a
vocabulary of 151,936."""

LEAST_SCORED_ROWS = 16


def scored_rows(vocab_size: int) -> int:
    """Tokens of prompts whose probabilities one step computes at most."""
    return max(LEAST_SCORED_ROWS, SCORED_LOGITS_BYTES // logits_bytes(vocab_size, 1))


def logits_bytes(vocab_size: int, n_rows: int) -> int:
    """What the logits of a step take, in fp32: a row of the vocabulary for each token that is sampled or scored."""
    return 4 * vocab_size * n_rows


@dataclass(frozen=True)
class SchedulerConfig:
    """At most ``token_budget`` tokens are computed in a step, for at most ``max_running`` requests; keys and values live in
    ``n_pages`` pages of ``page_tokens`` tokens. No request outgrows ``max_model_len`` tokens, prompt and output together.

    ``window``: no layer's query looks further back than so many tokens, its own included, so that pages before it are given
    back; None where a layer sees everything. ``separate_prefixes``: a request finds only what its own client has sent.
    ``scored_rows``: tokens a step of requests with ``prompt_logprobs``, each of which has logits; None: any number."""

    token_budget: int
    max_running: int
    page_tokens: int
    n_pages: int
    max_model_len: int
    window: int | None = None
    separate_prefixes: bool = False
    scored_rows: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window={self.window} must be at least 1, or None.")
        if self.scored_rows is not None and self.scored_rows < 1:
            raise ConfigError(f"scored_rows={self.scored_rows} must be at least 1, or None.")
        for name in ("token_budget", "max_running", "page_tokens", "n_pages", "max_model_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1.")
        if self.token_budget < self.max_running:
            raise ConfigError(
                f"token_budget={self.token_budget} must be at least max_running={self.max_running}, "
                "or decoding requests would wait for one another."
            )

    @property
    def most_scored_rows(self) -> int:
        """Tokens of prompts that a step scores at most."""
        return self.token_budget if self.scored_rows is None else min(self.token_budget, self.scored_rows)


@dataclass(frozen=True)
class ScheduledStep:
    """What to compute: of ``requests[i]`` the ``counts[i]`` tokens from position ``starts[i]`` on. The first ``n_decodes`` have
    exactly one token each. Where a request's tokens end with the step (``samples``), its last row yields a new token.

    A request's page table is ``request.pages``; ``grown`` are those whose table changed since the step before, other than by
    pages given back. ``copies`` are (page, page) pairs: what the first holds must be in the second before anything is computed.
    """

    number: int
    requests: list[Request]
    counts: list[int]
    starts: list[int]
    n_decodes: int
    grown: list[Request]
    preempted: list[str]
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return self.n_decodes + sum(self.counts[self.n_decodes :])

    def by_request(self) -> dict[str, int]:
        """``{request id: number of tokens}``."""
        return {request.id: n for request, n in zip(self.requests, self.counts, strict=True)}

    def samples(self, i: int) -> bool:
        """Whether the i-th request of the step yields a new token."""
        return self.starts[i] + self.counts[i] == len(self.requests[i].tokens)
