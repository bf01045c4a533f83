"""One request: its prompt and parameters, and how much of it has been computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Literal, Protocol

from twostroke.scheduling.accounts import Account
from twostroke.scheduling.beams import Beams
from twostroke.scheduling.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]
"""``stop``: an end token or stop string; ``length``: max_tokens was reached or the context is full; ``abort``: cancelled;
``timeout``: its deadline passed; ``error``: this request alone failed."""


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Adapter(Protocol):
    """What a request's keys and values depend on beside its tokens. No two adapters have the same ``key``."""

    @property
    def key(self) -> bytes: ...

    @property
    def name(self) -> str: ...


class Request:
    """``tokens`` is the prompt followed by what was generated; ``n_computed`` of them have their keys and values in ``pages``.

    A request has no phase. ``len(tokens) − n_computed`` tokens are still to be computed; with the last of them a new token is
    sampled. Lower ``priority`` is served earlier; requests of equal priority go by the service that their clients received, and
    those of one client in order of arrival. The request ends at ``deadline``, in seconds of the caller's clock, even if it is
    unfinished. ``fork_of`` is a request with the same prompt; its pages are shared once they are computed. ``adapter``, if any,
    changes what its tokens' keys and values are, so only requests of the same one share them. So do the ``weights`` that
    compute them, which the scheduler names. ``beams`` are the sequences of a request that searches, of which it is one itself.
    """

    __slots__ = (
        "account",
        "adapter",
        "adjusted",
        "adjuster",
        "arrival",
        "beams",
        "capacity",
        "client",
        "deadline",
        "drafter",
        "finish_reason",
        "fork_of",
        "forks",
        "id",
        "limit",
        "matcher",
        "min_length",
        "n_computed",
        "n_dropped",
        "n_passed",
        "n_preemptions",
        "n_prefix_hit",
        "n_prompt",
        "n_registered",
        "page_keys",
        "pages",
        "params",
        "priority",
        "restorable",
        "slot",
        "started_s",
        "status",
        "stop_ids",
        "tokens",
        "weights",
    )

    def __init__(
        self,
        id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        eos_token_ids: Iterable[int] = (),
        client: str = "",
        deadline: float | None = None,
        fork_of: Request | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        self.id = id
        self.params = params
        self.priority = priority
        self.client = client
        self.deadline = deadline
        self.fork_of = fork_of
        self.adapter = adapter
        self.forks: list[Request] = []  # not queued yet, because they wait for this request to compute their prompt
        self.account: Account | None = None  # its client's, given by the scheduler
        self.tokens: list[int] = list(prompt_ids)
        self.n_prompt = len(self.tokens)
        self.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))
        # Tokens at which it ends; the scheduler lowers it to max_model_len.
        self.limit = self.n_prompt + (params.max_tokens if params.pooling is None else 1)
        self.min_length = self.n_prompt + params.min_tokens
        # Whether logits are changed for each token.
        self.adjusted = bool(params.logit_bias) or params.has_penalties or params.constraint is not None
        self.adjuster: object = None  # the sampler's state of this request between steps
        self.matcher: object = None  # how far the output has come in the form that it must have
        self.drafter: object = None  # what drafts are made from, if any are made
        self.arrival = -1  # order of arrival, given by the scheduler
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.n_computed = 0
        self.pages: list[int] = []  # −1 for a page that lies before the window and was released
        self.n_dropped = 0  # leading pages that were released
        self.capacity = 0  # tokens that ``pages`` have room for
        self.slot = -1  # row of per-request tables in the engine while it runs
        self.page_keys: list[bytes] = []  # chained hash of each full page of ``tokens``, computed once
        self.n_registered = 0  # leading pages that have been offered to the prefix tree
        self.n_prefix_hit = 0  # tokens found in the prefix tree and below it at the first admission
        self.restorable = 0  # leading pages that are to be had by loading further ones; 0 if none is to be loaded
        self.n_preemptions = 0
        self.started_s = 0.0  # when it first ran (``time.monotonic``)
        self.n_passed = 0  # later requests that were admitted first
        self.weights = b""
        self.beams = Beams(self, params) if params.use_beam_search else None

    @property
    def n_output(self) -> int:
        return len(self.tokens) - self.n_prompt

    def __repr__(self) -> str:
        return (
            f"Request({self.id!r}, {self.status.value}, {self.n_computed}/{len(self.tokens)} computed, {len(self.pages)} pages)"
        )
