"""``prompt_logprobs``: how probable the model finds the tokens of a prompt. Each step returns its part, and nothing is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from twostroke.engine.sampler import TokenLogprobs, logprobs_of
from twostroke.scheduling.step import ScheduledStep

if TYPE_CHECKING:
    from jaxtyping import Float


class PromptScores:
    """Log-probabilities of a prompt's tokens, from ``prompt_logprobs_start`` on, for each request that asks for them.

    A token with 20 alternatives takes 2 kB in Python. Kept until the prompts are complete, those of 128 requests would take
    7 GB.
    """

    def __init__(self) -> None:
        self._n_scored: dict[str, int] = {}
        self._new: list[tuple[str, list[TokenLogprobs]]] = []

    def wanted(self, step: ScheduledStep) -> list[tuple[int, int, int]]:
        """(index in the step, first position, number) of the rows that predict a prompt's token and have not been scored.

        A preempted request is computed again, but not scored again.
        """
        found = []
        for i in range(step.n_decodes, len(step.requests)):  # a decoding request has its prompt behind it
            request = step.requests[i]
            if request.params.prompt_logprobs is not None:
                least = self._n_scored.get(request.id, request.params.prompt_logprobs_start - 1)
                first = max(step.starts[i], least)
                # The prompt's last row predicts the answer's first token, which is sampled and not scored.
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
        """Score the rows of ``wanted``, which follow one another in ``logits``. Returns ids of requests that cannot be scored.

        ``largest`` is each row's largest logit, NaN or ±∞ if the row is not finite. Such a row has no probabilities, and
        ``native_sampling.top`` refuses it.
        """
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
            self._n_scored[request.id] = first + n
            self._new.append((request.id, entries))
            at += n
        return failed

    def take(self) -> list[tuple[str, list[TokenLogprobs]]]:
        """The scores since the last call: pairs of a request's id and the scores of its prompt's next tokens."""
        new, self._new = self._new, []
        return new

    def forget(self, request_id: str) -> None:
        """Drop what is known of a request that has ended."""
        self._n_scored.pop(request_id, None)


def rows_of(step: ScheduledStep, wanted: Sequence[tuple[int, int, int]]) -> Tensor:
    """Rows of the step whose logits are needed: those that yield a token, then those of ``wanted``."""
    ends = np.cumsum(step.counts)
    rows = [np.array(step.sampled_rows())]
    for i, first, n in wanted:
        begin = ends[i] - step.counts[i] + first - step.starts[i]
        rows.append(np.arange(begin, begin + n))
    return torch.from_numpy(np.concatenate(rows).astype(np.int64))
