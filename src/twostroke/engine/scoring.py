"""Log-probabilities of given tokens, computed as the engine serves: with the same plan, cache, kernels and chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from twostroke.core.errors import CapacityError, EngineError, InputError
from twostroke.core.policy import scored_rows
from twostroke.engine.core import EngineCore
from twostroke.engine.sampler import log_softmax_of
from twostroke.scheduling.request import Request
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.scheduling.step import ScheduledStep

TokenScores = tuple[npt.NDArray[np.floating[Any]], npt.NDArray[np.bool_]]
"""−ln p of each scored token, and whether it was the most probable one."""


@dataclass
class _Open:
    """A sequence that is being scored. Its row i, the i-th token, predicts ``targets[i]``. Rows from ``first_row`` on count."""

    index: int
    request: Request
    first_row: int
    targets: npt.NDArray[np.int64]
    nats: list[npt.NDArray[np.float64]] = field(default_factory=list)
    greedy: list[npt.NDArray[np.bool_]] = field(default_factory=list)

    @property
    def n_due(self) -> int:
        return len(self.request.tokens) - self.request.n_computed


@torch.inference_mode()
def token_scores(
    engine: EngineCore, sequences: Sequence[tuple[Sequence[int], int]], progress: Callable[[float], None] | None = None
) -> list[TokenScores]:
    """For each (ids, first) the scores of ``ids[first:]``, each token given all before it. ``first`` is at least 1.

    Sequences run together in steps of the engine's token budget, as prompts do. With the native runner the scores are, bit for
    bit, the log-probabilities that any engine with the same weights, formats and instruction set reports for these tokens
    (docs/determinism.md). Known prefixes are not looked up: every row is computed. The engine must be idle, and is idle again
    afterwards, even after an error. Raises InputError for ids outside the vocabulary, CapacityError for a sequence longer than
    ``max_model_len`` + 1, and EngineError if a logarithm is not finite. tests/engine/test_token_scores.py compares it with the
    decoder.
    """
    if engine.has_work:
        raise EngineError("scoring needs an idle engine, and this one has unfinished requests. Let them end first.")
    config, pool = engine.scheduler.config, engine.scheduler.pool
    for ids, first in sequences:
        _check(engine, ids, first)
    results: list[TokenScores] = [_empty()] * len(sequences)
    waiting = deque(i for i, (ids, first) in enumerate(sequences) if first < len(ids))
    n_total = n_left = sum(len(sequences[i][0]) - 1 for i in waiting)
    budget = scored_rows(engine.spec.vocab_size, config.token_budget)
    slots = list(range(config.max_running - 1, -1, -1))
    running: list[_Open] = []
    try:
        number = 0
        while running or waiting:
            left = budget - sum(o.n_due for o in running)
            grown: list[Request] = []
            while left > 0 and waiting and slots:
                ids, first = sequences[waiting[0]]
                pages = pool.allocate(-(-(len(ids) - 1) // config.page_tokens))
                if pages is None:  # a running sequence has to end first; the longest allowed one fits alone
                    break
                index = waiting.popleft()
                # The last token is only predicted, so it is not among the tokens that are computed.
                request = Request(f"score-{index}", [int(i) for i in ids[:-1]], SamplingParams(max_tokens=1))
                request.pages, request.slot = pages, slots.pop()
                running.append(_Open(index, request, first - 1, np.asarray(ids[1:], np.int64)))
                grown.append(request)
                left -= len(request.tokens)
            number += 1
            n_left -= _run(engine, running, grown, budget, number)
            for done in [o for o in running if o.n_due == 0]:
                results[done.index] = np.concatenate(done.nats), np.concatenate(done.greedy)
                running.remove(done)
                pool.release(done.request.pages)
                slots.append(done.request.slot)
            if progress is not None:
                progress(1 - n_left / n_total)
    finally:
        engine.release_logits()
        for unfinished in running:
            pool.release(unfinished.request.pages)
    return results


def _run(engine: EngineCore, running: Sequence[_Open], grown: list[Request], budget: int, number: int) -> int:
    """Compute one step, the oldest sequences first and the last one in part. Returns how many tokens were computed."""
    taken: list[_Open] = []
    counts: list[int] = []
    left = budget
    for o in running:
        if left <= 0:
            break
        counts.append(min(left, o.n_due))
        taken.append(o)
        left -= counts[-1]
    starts = [o.request.n_computed for o in taken]
    step = ScheduledStep(number, [o.request for o in taken], counts, starts, 0, grown, [])
    begins = np.cumsum([0, *counts[:-1]])
    wanted = [np.arange(max(o.first_row, s), s + n) for o, s, n in zip(taken, starts, counts, strict=True)]
    rows = np.concatenate([w - s + b for w, s, b in zip(wanted, starts, begins, strict=True)])
    targets = np.concatenate([o.targets[w] for o, w in zip(taken, wanted, strict=True)])
    nats, greedy = _scores(engine, step, rows, targets)
    at = 0
    for o, w, n in zip(taken, wanted, counts, strict=True):
        o.nats.append(nats[at : at + len(w)])
        o.greedy.append(greedy[at : at + len(w)])
        at += len(w)
        o.request.n_computed += n
    return sum(counts)


def _scores(
    engine: EngineCore, step: ScheduledStep, rows: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Compute ``step``, and score ``targets`` by its ``rows``."""
    logits, n = engine.compute(step, torch.from_numpy(rows)), len(rows)
    if n == 0:
        return _empty()
    largest, best = engine.best_of(n) or logits.max(dim=1)
    finite = bool(torch.isfinite(largest).all())  # ``log_softmax_of`` takes no NaN
    logprobs = log_softmax_of(logits, range(n), targets.tolist(), 0, engine.threads_for(step))[0] if finite else None
    if logprobs is None or not np.isfinite(logprobs).all():
        raise EngineError("the model's output was not finite. The weights may be damaged.")
    return -logprobs, best.numpy() == targets


def _empty() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    return np.empty(0), np.empty(0, np.bool_)


def check_ids(ids: Sequence[int], first: int, n_vocabulary: int) -> None:
    """Raises InputError unless ``ids[first:]`` can be scored by a model of ``n_vocabulary`` tokens."""
    if first < 1:
        raise InputError(f"first={first} must be at least 1, because nothing predicts a sequence's first token.")
    bad = [i for i in (min(ids, default=0), max(ids, default=0)) if not 0 <= i < n_vocabulary]
    if bad:
        raise InputError(f"token {bad[0]} is not in the model's vocabulary of {n_vocabulary}. Use the model's tokenizer.")


def _check(engine: EngineCore, ids: Sequence[int], first: int) -> None:
    longest = engine.max_model_len
    check_ids(ids, first, engine.spec.vocab_size)
    if len(ids) - 1 > longest:
        raise CapacityError(
            f"a sequence of {len(ids)} tokens has {len(ids) - 1} to compute and max_model_len={longest}. "
            "Cut it from the left, or raise max_model_len."
        )
