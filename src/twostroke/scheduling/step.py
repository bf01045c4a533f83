"""Input and output of the scheduler as plain data: its limits, and one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from twostroke.core.checks import check_whole
from twostroke.core.errors import ConfigError
from twostroke.core.policy import logits_bytes
from twostroke.scheduling.request import Request

SCORED_LOGITS_BYTES = 64 * 2**20
"""Largest size of the fp32 logits that one step computes for ``prompt_logprobs``. All 512 tokens of a step would take 311 MB at
a vocabulary of 151,936."""

MIN_SCORED_ROWS = 16


def scored_rows(vocab_size: int) -> int:
    """Most prompt tokens whose probabilities one step computes."""
    return max(MIN_SCORED_ROWS, SCORED_LOGITS_BYTES // logits_bytes(vocab_size, 1))


@dataclass(frozen=True)
class SchedulerConfig:
    """A step computes at most ``token_budget`` tokens for at most ``max_running`` requests. Keys and values live in ``n_pages``
    pages of ``page_tokens`` tokens. Prompt and output of a request have at most ``max_model_len`` tokens together.

    ``window``: a query attends to this many tokens at most, its own included, in every layer, so that pages before them are
    released; None if a layer attends to all tokens. ``separate_prefixes``: a request finds only prefixes that its own client
    has sent. ``scored_rows``: most tokens that a step computes for requests with ``prompt_logprobs``, because each needs a row
    of logits; None for any number. ``prefix_cache``: full pages can be found again by later requests with the same tokens.
    ``parts_of_pages``: so can parts of pages; not where tokens are placeholders. ``cached_outputs``: so can pages that hold
    output; not where its keys and values are others than those of a prompt of the same tokens. ``draft_rows``: most drafted
    tokens that a step checks, because each needs a row of logits."""

    token_budget: int
    max_running: int
    page_tokens: int
    n_pages: int
    max_model_len: int
    window: int | None = None
    separate_prefixes: bool = False
    scored_rows: int | None = None
    prefix_cache: bool = True
    draft_rows: int = 0
    parts_of_pages: bool = True
    cached_outputs: bool = True

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window={self.window} must be at least 1, or None for no window.")
        if self.scored_rows is not None and self.scored_rows < 1:
            raise ConfigError(f"scored_rows={self.scored_rows} must be at least 1, or None for any number.")
        for name in ("token_budget", "max_running", "page_tokens", "n_pages", "max_model_len"):
            check_whole(name, getattr(self, name))
        if self.token_budget < self.max_running:
            raise ConfigError(
                f"token_budget={self.token_budget} must be at least max_running={self.max_running}, because every decoding "
                "request gets a token in every step. Raise token_budget or lower max_running."
            )

    @property
    def max_scored_rows(self) -> int:
        """Most prompt tokens that a step scores."""
        return self.token_budget if self.scored_rows is None else min(self.token_budget, self.scored_rows)


Propose = Callable[[Sequence[Request], int, int], Mapping[int, Sequence[int]]]
"""Drafts for a step: (decoding requests, tokens that the step computes without drafts, most drafted tokens) → place of a
request among them → tokens that may follow its last one."""


@dataclass(frozen=True)
class ScheduledStep:
    """The step computes ``counts[i]`` tokens of ``requests[i]`` from position ``starts[i]`` on. The first ``n_decodes``
    requests lack exactly one token each. If a request's tokens end with the step (``samples``), its last row yields a new
    token.

    ``drafts[i]`` are tokens that are guessed to follow those of the i-th request, which decodes. They are computed behind its
    last token, and each of these rows yields a token: the draft before it was right if the row before yielded the same.

    A request's page table is ``request.pages``. ``grown`` are the requests whose table changed since the previous step, other
    than by released pages. ``copies`` are (source page, target page) pairs to copy before the step is computed.
    """

    number: int
    requests: list[Request]
    counts: list[int]
    starts: list[int]
    n_decodes: int
    grown: list[Request]
    preempted: list[str]
    copies: list[tuple[int, int]] = field(default_factory=list)
    drafts: dict[int, list[int]] = field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        return sum(self.counts)

    @property
    def one_row_each(self) -> bool:
        """Whether each request has one row, from which a token is sampled unless it is pooled."""
        return self.n_decodes == len(self.requests) and not self.drafts

    def tokens_of(self, i: int) -> list[int]:
        """The tokens that the step computes of its i-th request."""
        start = self.starts[i]
        tokens = self.requests[i].tokens[start : start + self.counts[i]]
        return tokens + self.drafts[i] if i in self.drafts else tokens

    def sampled_rows(self) -> list[int]:
        """Rows of the step that yield a token, in their order: the last one of each request that samples, after drafts more."""
        rows: list[int] = []
        end = 0
        for i, count in enumerate(self.counts):
            end += count
            if i in self.drafts:
                rows += range(end - count, end)
            elif self.samples(i):
                rows.append(end - 1)
        return rows

    def by_request(self) -> dict[str, int]:
        """``{request id: number of tokens}``."""
        return {request.id: n for request, n in zip(self.requests, self.counts, strict=True)}

    def samples(self, i: int) -> bool:
        """Whether the i-th request of the step yields a new token."""
        return self.completes(i) and self.requests[i].params.pooling is None

    def completes(self, i: int) -> bool:
        """Whether all tokens of the i-th request are computed after the step."""
        return self.starts[i] + self.counts[i] >= len(self.requests[i].tokens)
