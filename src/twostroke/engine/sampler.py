"""Chooses tokens from logits, a batch at a time. A request's choice does not depend on the others in its batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.engine import native_sampling
from twostroke.engine.adjust import Adjusted, is_changed
from twostroke.kernels.native_library import library
from twostroke.scheduling.request import Request
from twostroke.scheduling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

_MASK64 = 2**64 - 1
_HEAD = 512
"""Top-p looks at so many of the largest probabilities first, and sorts the vocabulary only if they do not reach it."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithm of the chosen token's probability, and (token id, logarithm) of the most probable ones, best first."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Sampled:
    """A token and its log-probabilities for each row that was given. ``failed`` lists the rows whose logits were not finite:
    their token means nothing."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    failed: list[int]


def uniform(seed: int, index: int) -> float:
    """The ``index``-th number in [0, 1) of the stream ``seed``: SplitMix64 (Steele, Lea & Flood 2014) as a counter.

    It counts instead of keeping a generator's state, so a request draws the same numbers after it was preempted and recomputed,
    and wherever it stands in the batch.
    """
    z = (_mix(seed & _MASK64) + (index + 1) * 0x9E3779B97F4A7C15) & _MASK64
    return (_mix(z) >> 11) * 2.0**-53  # the 53 bits that a double holds exactly, so never 1.0


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def sample(
    logits: Float[Tensor, "n V"],
    requests: Sequence[Request],
    seeds: Sequence[int],
    known: tuple[Float[Tensor, " n"], Int[Tensor, " n"]] | None = None,
    n_threads: int = 1,
    rows: Sequence[int] | None = None,
) -> Sampled:
    """One token a row by each request's ``SamplingParams``; the row's random number is the ``n_output``-th of its seed.

    ``known`` is given by a runner that looked: each row's largest logit (NaN if the row is not finite) and its token. The
    logits are then the runner's own and written anew in each step, so changed rows are put back only for requests that want
    log-probabilities. ``n_threads`` is for the native library. ``rows`` are those of ``logits`` that belong to ``requests``,
    the first ones if it is None.
    """
    at = range(len(requests)) if rows is None else rows
    # NaN and +inf come through max, so this one pass also finds the rows that are not finite.
    best, greedy = logits.max(dim=1) if known is None else known
    values, tokens = best.tolist(), greedy.tolist()
    if rows is not None:
        values, tokens = [values[row] for row in rows], [tokens[row] for row in rows]
    failed = {i for i, value in enumerate(values) if not math.isfinite(value)}
    changed = [i for i, request in enumerate(requests) if i not in failed and is_changed(request)]
    adjusted: Adjusted | None = None
    # Log-probabilities are those of the model itself, before biases and penalties.
    kept = known is None or any(requests[i].params.logprobs is not None for i in changed)
    if changed:
        logits = logits.contiguous()
        adjusted = Adjusted(logits, [at[i] for i in changed], [requests[i] for i in changed], n_threads, kept)
        for i, token, value in zip(changed, adjusted.tokens, adjusted.best, strict=True):
            tokens[i] = token  # a greedy request takes it; a drawn token replaces it below
            if not math.isfinite(value):
                failed.add(i)
    drawn = [i for i, r in enumerate(requests) if not r.params.greedy and i not in failed]
    if drawn:
        places = [at[i] for i in drawn]
        chosen = draw_tokens(logits, places, [requests[i] for i in drawn], [seeds[i] for i in drawn], n_threads)
        for i, token in zip(drawn, chosen, strict=True):
            tokens[i] = token
    if adjusted is not None and kept:
        adjusted.restore()
    logprobs: list[TokenLogprobs | None] = [None] * len(requests)
    wanted = [i for i, r in enumerate(requests) if r.params.logprobs is not None and i not in failed]
    if wanted:
        counts = [requests[i].params.logprobs or 0 for i in wanted]
        entries = logprobs_of(logits, [at[i] for i in wanted], [tokens[i] for i in wanted], counts, n_threads)
        for i, entry in zip(wanted, entries, strict=True):
            logprobs[i] = entry
    return Sampled(tokens, logprobs, sorted(failed))


def draw_tokens(
    logits: Float[Tensor, "n V"], rows: Sequence[int], requests: Sequence[Request], seeds: Sequence[int], n_threads: int = 1
) -> list[int]:
    """A token for each of ``requests``, drawn from its row of ``logits`` with the next number of its seed."""
    numbers = [uniform(seed, request.n_output) for seed, request in zip(seeds, requests, strict=True)]
    params = [request.params for request in requests]
    if library() is None:
        return plain_draw(logits[list(rows)], params, numbers)
    draws = np.empty(len(rows), native_sampling.DRAW)
    draws["row"], draws["number"] = rows, numbers
    draws["temperature"], draws["min_p"] = [q.temperature for q in params], [q.min_p for q in params]
    draws["top_p"], draws["top_k"] = [q.top_p for q in params], [min(q.top_k, 2**31 - 1) for q in params]
    return native_sampling.draw(logits, draws, n_threads)


def plain_draw(logits: Float[Tensor, "n V"], params: Sequence[SamplingParams], numbers: Sequence[float]) -> list[int]:
    """The same with torch, over whole rows: the reference of the native one (tests/engine/test_native_sampling.py)."""
    # The largest logit is subtracted before dividing, so that a tiny temperature cannot overflow.
    logits = logits - logits.amax(dim=1, keepdim=True)
    logits /= torch.tensor([max(q.temperature, 1e-30) for q in params])[:, None]
    kept = _kept(logits, [q.top_k for q in params], [q.top_p for q in params], [q.min_p for q in params])
    probabilities = torch.softmax(logits, dim=1)
    if kept is not None:
        probabilities = probabilities * kept
    # Inverts the distribution function over the tokens in the order of their ids, so equal probabilities need no sorting.
    cumulative = probabilities.cumsum(dim=1, dtype=torch.float64)
    total = cumulative[:, -1:]
    draws = torch.tensor(numbers, dtype=torch.float64)[:, None]
    # Rounding may make draws · total equal to total, behind the last token.
    target = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
    chosen: list[int] = torch.searchsorted(cumulative, target, right=True).flatten().tolist()
    return chosen


def _kept(
    logits: Float[Tensor, "n V"], top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float]
) -> Bool[Tensor, "n V"] | None:
    """Which tokens the filters keep; None for all. Each filter is a threshold, so tokens equal to the last one kept stay."""
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
    before = share.cumsum(dim=1) - share  # sum of everything more probable
    n_kept = (before < top_p * total).sum(dim=1, keepdim=True).clamp_(min=1)
    return values.gather(1, n_kept - 1)


def logprobs_of(
    logits: Float[Tensor, "n V"], rows: Sequence[int], tokens: Sequence[int], counts: Sequence[int], n_threads: int = 1
) -> list[TokenLogprobs]:
    """Log softmax of the raw logits, the model's own distribution: for each of ``rows`` its token's and the most probable."""
    own, values, ids = log_softmax_of(logits, rows, tokens, max(counts), n_threads)
    return [
        TokenLogprobs(logprob, list(zip(row_ids[:n], row_best[:n], strict=True)))
        for logprob, row_ids, row_best, n in zip(own.tolist(), ids.tolist(), values.tolist(), counts, strict=True)
    ]


def log_softmax_of(
    logits: Float[Tensor, "n V"], rows: Sequence[int], tokens: Sequence[int], k: int, n_threads: int = 1
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Of each of ``rows``: ln p of its one of ``tokens`` (n,), of its ``k`` most probable tokens (n, k), and these (n, k).

    Answers, scored prompts and evaluation all take it, so they have the same bits of the same row.
    """
    chosen = logits[list(rows), list(tokens)].double().numpy()
    if library() is None:
        normalisers, values, ids = plain_top(logits, rows, k)
    else:
        normalisers, values, ids = native_sampling.top(logits, rows, k, n_threads)
    return chosen - normalisers, values - normalisers[:, None], ids


def plain_top(
    logits: Float[Tensor, "n V"], rows: Sequence[int], k: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """``native_sampling.top`` with torch: its reference."""
    given = logits[list(rows)]
    values, ids = given.topk(min(k, given.shape[1]), dim=1)
    return given.double().logsumexp(dim=1).numpy(), values.numpy(), ids.numpy()
