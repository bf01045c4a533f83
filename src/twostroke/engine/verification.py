"""Takes the tokens of a step with drafts: the same ones, drawn with the same numbers, as steps without drafts would."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from twostroke.engine.adjust import is_changed
from twostroke.engine.sampler import TokenLogprobs, sample
from twostroke.scheduling.request import Request
from twostroke.scheduling.step import ScheduledStep

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True)
class Taken:
    """For each request that samples: its new tokens (none if its logits were not finite), and their log-probabilities."""

    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs | None]]


def verify(
    logits: Float[Tensor, "rows V"],
    step: ScheduledStep,
    places: Sequence[int],
    seeds: Sequence[int],
    known: tuple[Float[Tensor, " rows"], Int[Tensor, " rows"]] | None,
    n_threads: int = 1,
) -> Taken:
    """Tokens of the requests at ``places`` of ``step``, whose ``sampled_rows`` are ``logits``.

    A row yields the token that the request would have drawn there without drafts: by its parameters, with its own number of its
    random stream, after penalties for the drafts before it. Where that is the draft, the draft was right and the next row
    counts too. A draft is a fixed token, so it is kept with the probability p(draft) and replaced by a token of
    p(· | not draft): this is the rejection sampling of Leviathan et al. (2023, arXiv:2211.17192) for a draft that is certain.
    Not only the distribution is kept, but every token.

    Rows are drawn one behind another, those of all requests together, so that penalties never see a token that is not taken.
    A row whose logits are not finite is left to the next step, unless it is the request's first.
    """
    requests = [step.requests[i] for i in places]
    if not step.drafts:
        if not requests:
            return Taken([], [])
        once = sample(logits, requests, seeds, known, n_threads)
        failed = set(once.failed)
        new = [[] if i in failed else [token] for i, token in enumerate(once.tokens)]
        return Taken(new, [[entry] for entry in once.logprobs])
    drafts = [step.drafts.get(i, []) for i in places]
    rows: list[int] = []
    n_rows = 0
    for draft in drafts:
        rows.append(n_rows)
        n_rows += 1 + len(draft)
    if known is not None and all(_takes_the_largest(request) for request in requests):
        return _right_as_far_as_largest(known, rows, drafts)
    before = [len(request.tokens) for request in requests]
    tokens: list[list[int]] = [[] for _ in places]
    logprobs: list[list[TokenLogprobs | None]] = [[] for _ in places]
    left = list(range(len(places)))
    try:
        while left:
            of = [requests[k] for k in left]
            at = [rows[k] + len(tokens[k]) for k in left]
            sampled = sample(logits, of, [seeds[k] for k in left], known, n_threads, at)
            failed = {left[j] for j in sampled.failed}
            right: list[int] = []
            for k, token, entry in zip(left, sampled.tokens, sampled.logprobs, strict=True):
                if k in failed:
                    continue
                n = len(tokens[k])
                tokens[k].append(token)
                logprobs[k].append(entry)
                if n < len(drafts[k]) and drafts[k][n] == token:
                    requests[k].tokens.append(token)  # only for the rows behind it: ``Scheduler.update`` appends what counts
                    right.append(k)
            left = right
    finally:
        for request, n in zip(requests, before, strict=True):
            del request.tokens[n:]
    return Taken(tokens, logprobs)


def _takes_the_largest(request: Request) -> bool:
    """Whether the request takes the largest of the model's own logits, now and at each later token, and no more is asked."""
    return request.params.greedy and request.params.logprobs is None and not is_changed(request)


def _right_as_far_as_largest(
    known: tuple[Float[Tensor, " rows"], Int[Tensor, " rows"]], rows: Sequence[int], drafts: Sequence[Sequence[int]]
) -> Taken:
    """The same for requests that ``_takes_the_largest`` is true of. Nothing is drawn, so all tokens are there at once: five
    take 4 µs, one by one they took 28."""
    values, largest = known[0].tolist(), known[1].tolist()
    tokens: list[list[int]] = []
    for first, draft in zip(rows, drafts, strict=True):
        new: list[int] = []
        for row, expected in enumerate([*draft, None], first):
            if not math.isfinite(values[row]):
                break
            new.append(largest[row])
            if largest[row] != expected:
                break
        tokens.append(new)
    return Taken(tokens, [[None] * len(new) for new in tokens])
