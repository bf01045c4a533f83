"""``prompt_logprobs``: how probable the model found a prompt, collected over the steps that compute it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from twostroke.engine.sampler import TokenLogprobs, logprobs_of
from twostroke.scheduling.scheduler import ScheduledStep

if TYPE_CHECKING:
    from jaxtyping import Float


class PromptScores:
    """Of each request that asks for them, the log-probabilities of its prompt's tokens from the second on."""

    def __init__(self) -> None:
        self._of: dict[str, list[TokenLogprobs]] = {}

    def wanted(self, step: ScheduledStep) -> list[tuple[int, int, int]]:
        """(index in the step, first position, number) of rows that predict a token of a prompt and were not scored yet.

        A request that was preempted is computed again, not scored again."""
        found = []
        for i in range(step.n_decodes, len(step.requests)):
            request = step.requests[i]
            if request.params.prompt_logprobs is not None:
                first = max(step.starts[i], len(self._of.get(request.id, ())))
                end = min(step.starts[i] + step.counts[i], request.n_prompt - 1)
                if first < end:
                    found.append((i, first, end - first))
        return found

    def add(
        self,
        step: ScheduledStep,
        wanted: Sequence[tuple[int, int, int]],
        logits: Float[Tensor, "n V"],
        largest: Float[Tensor, " n"],
        n_threads: int = 1,
    ) -> set[str]:
        """Score the rows of ``wanted``, one after another in ``logits``. Returns the ids of requests that cannot be scored.

        ``largest``: of each row the largest logit, NaN or ±∞ where one is not finite. Probabilities do not exist then, and what
        finds the most probable tokens must not be asked."""
        at, failed = 0, set()
        finite = torch.isfinite(largest).numpy()
        for i, first, n in wanted:
            request = step.requests[i]
            if not finite[at : at + n].all():
                failed.add(request.id)
                at += n
                continue
            targets = request.tokens[first + 1 : first + n + 1]
            counts = [request.params.prompt_logprobs or 0] * n
            entries = logprobs_of(logits, range(at, at + n), targets, counts, n_threads)
            self._of.setdefault(request.id, []).extend(entries)
            at += n
        return failed

    def take(self, request_id: str) -> list[TokenLogprobs] | None:
        """All of a request's, which are forgotten; None where it asked for none."""
        return self._of.pop(request_id, None)


def rows_of(step: ScheduledStep, sampled: Sequence[int], wanted: Sequence[tuple[int, int, int]]) -> Tensor:
    """Rows of the step's tokens whose logits are needed: the last of each request in ``sampled``, then those of ``wanted``."""
    ends = np.cumsum(step.counts)
    rows = [ends[list(sampled)] - 1]
    for i, first, n in wanted:
        begin = ends[i] - step.counts[i] + first - step.starts[i]
        rows.append(np.arange(begin, begin + n))
    return torch.from_numpy(np.concatenate(rows).astype(np.int64))
