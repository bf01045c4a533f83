"""From logits to tokens: a batch at a time, each request's choice independent of who else is in the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twostroke.scheduling.request import Request

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

_MASK64 = 2**64 - 1
_HEAD = 512
"""Largest probabilities looked at first for top-p; the vocabulary is sorted only where they do not reach it."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithm of the chosen token's probability, and (token id, logarithm) of the most probable ones, best first."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Sampled:
    """Aligned with the rows that were given. ``failed`` are rows whose logits were not finite; their token means nothing."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    failed: list[int]


def uniform(seed: int, index: int) -> float:
    """The ``index``-th number in [0, 1) of the stream ``seed``: SplitMix64 (Steele, Lea & Flood 2014) as a counter.

    A counter and not a generator's state, so that a request that is preempted and recomputed, or sits elsewhere in the
    batch, draws the same numbers.
    """
    z = (_mix(seed & _MASK64) + (index + 1) * 0x9E3779B97F4A7C15) & _MASK64
    return (_mix(z) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def sample(
    logits: Float[Tensor, "n V"],
    requests: Sequence[Request],
    seeds: Sequence[int],
    known: tuple[Float[Tensor, " n"], Int[Tensor, " n"]] | None = None,
) -> Sampled:
    """One token a row by each request's ``SamplingParams``; the row's random number is the ``n_output``-th of its seed.

    ``known``: each row's largest logit (NaN where one is not finite) and its token, where whoever made the logits looked.
    """
    masked = _adjusted(logits, requests)
    # NaN and +inf come through max, so this is the check as well.
    best, greedy = known if known is not None and masked is logits else masked.max(dim=1)
    failed = [i for i, value in enumerate(best.tolist()) if not math.isfinite(value)]
    tokens = greedy.tolist()
    drawn = [i for i, r in enumerate(requests) if not r.params.greedy and i not in failed]
    if drawn:
        rows = masked if len(drawn) == len(requests) else masked[drawn]
        chosen = _draw(rows, [requests[i] for i in drawn], [seeds[i] for i in drawn])
        for i, token in zip(drawn, chosen, strict=True):
            tokens[i] = token
    logprobs: list[TokenLogprobs | None] = [None] * len(requests)
    wanted = [i for i, r in enumerate(requests) if r.params.logprobs is not None and i not in failed]
    if wanted:
        counts = [requests[i].params.logprobs or 0 for i in wanted]
        for i, entry in zip(wanted, logprobs_of(logits[wanted], [tokens[i] for i in wanted], counts), strict=True):
            logprobs[i] = entry
    return Sampled(tokens, logprobs, failed)


def _adjusted(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Logits with biases and penalties, and −∞ at the end tokens of requests that lack tokens of their ``min_tokens``; the same
    tensor where no request asks for any of it."""
    changed = [
        i
        for i, r in enumerate(requests)
        if (r.n_output < r.params.min_tokens and r.stop_ids) or r.params.logit_bias or r.params.has_penalties
    ]
    if not changed:
        return logits
    logits = logits.clone()
    for i in changed:
        _adjust(logits[i], requests[i])
    return logits


def _adjust(row: Float[Tensor, " V"], request: Request) -> None:
    """In place; the order is bias, penalties, held-off ends."""
    params, n_vocab = request.params, row.shape[0]
    for token, bias in params.logit_bias:
        if token < n_vocab:
            row[token] += bias
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(request.tokens).unique()
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and request.n_output:
        generated, counts = torch.tensor(request.output_ids).unique(return_counts=True)
        row[generated] -= params.presence_penalty + params.frequency_penalty * counts.to(row.dtype)
    if request.n_output < params.min_tokens:
        ends = [token for token in request.stop_ids if token < n_vocab]
        if len(ends) < n_vocab:  # a request that may end with every token cannot be held off
            row[ends] = float("-inf")


def _draw(logits: Float[Tensor, "n V"], requests: Sequence[Request], seeds: Sequence[int]) -> list[int]:
    params = [r.params for r in requests]
    # The largest is taken off before dividing, so that a tiny temperature cannot overflow.
    logits = logits - logits.amax(dim=1, keepdim=True)
    logits /= torch.tensor([max(q.temperature, 1e-30) for q in params])[:, None]
    kept = _kept(logits, [q.top_k for q in params], [q.top_p for q in params], [q.min_p for q in params])
    probabilities = torch.softmax(logits, dim=1)
    if kept is not None:
        probabilities = probabilities * kept
    # Inverse of the distribution function over the tokens in their own order: ties cannot change who is chosen.
    cumulative = probabilities.cumsum(dim=1, dtype=torch.float64)
    total = cumulative[:, -1:]
    draws = torch.tensor([uniform(s, r.n_output) for s, r in zip(seeds, requests, strict=True)], dtype=torch.float64)[:, None]
    target = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
    chosen: list[int] = torch.searchsorted(cumulative, target, right=True).flatten().tolist()
    return chosen


def _kept(
    logits: Float[Tensor, "n V"], top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float]
) -> Bool[Tensor, "n V"] | None:
    """Which tokens the filters leave, None for all. Each is a threshold, so tokens that tie with the last one kept stay."""
    n_vocab = logits.shape[1]
    limits = [k if 0 < k < n_vocab else 0 for k in top_k]
    floor = torch.full((len(limits), 1), float("-inf"))
    by_k = [i for i, k in enumerate(limits) if k]
    if by_k:
        values = logits[by_k].topk(max(limits), dim=1).values
        floor[by_k] = values.gather(1, torch.tensor([[limits[i] - 1] for i in by_k]))
    by_p = [i for i, p in enumerate(top_p) if p < 1.0]
    if by_p:
        rows = logits[by_p].masked_fill(logits[by_p] < floor[by_p], float("-inf"))
        floor[by_p] = torch.maximum(floor[by_p], _nucleus_floor(rows, torch.tensor([[top_p[i]] for i in by_p])))
    if any(min_p):
        # p ≥ min_p·max p, and the largest logit is 0
        floor = torch.maximum(floor, torch.tensor(min_p)[:, None].log())
    return logits >= floor if by_k or by_p or any(min_p) else None


def _nucleus_floor(logits: Float[Tensor, "n V"], top_p: Float[Tensor, "n 1"]) -> Float[Tensor, "n 1"]:
    """The smallest logit of the smallest set whose probabilities sum to at least ``top_p``."""
    weights = logits.exp()
    total = weights.sum(dim=1, keepdim=True, dtype=torch.float64)
    n_head = min(_HEAD, logits.shape[1])
    values = logits.topk(n_head, dim=1).values
    reached = values.exp().sum(dim=1, keepdim=True, dtype=torch.float64) >= top_p * total
    if not bool(reached.all()):
        values = logits.sort(dim=1, descending=True).values
    share = values.exp().double()
    before = share.cumsum(dim=1) - share  # of everything more probable
    n_kept = (before < top_p * total).sum(dim=1, keepdim=True).clamp_(min=1)
    return values.gather(1, n_kept - 1)


def logprobs_of(logits: Float[Tensor, "n V"], tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Of the model's own distribution: log softmax of the raw logits."""
    logprobs = torch.log_softmax(logits, dim=1)
    chosen: list[float] = logprobs.gather(1, torch.tensor(tokens)[:, None]).flatten().tolist()
    n_top = min(max(counts), logits.shape[1])
    values: Tensor
    ids: Int[Tensor, "n top"]
    values, ids = logprobs.topk(n_top, dim=1) if n_top else (logprobs[:, :0], logprobs[:, :0].long())
    return [
        TokenLogprobs(own, list(zip(row_ids[:n], row_values[:n], strict=True)))
        for own, row_ids, row_values, n in zip(chosen, ids.tolist(), values.tolist(), counts, strict=True)
    ]
