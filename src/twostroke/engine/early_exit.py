"""Rows that leave before the last layer, unchecked, once the model is sure of their token (CALM: Schuster et al. 2022, arXiv
2207.07061).

After each exit layer the final norm and the head read the residual stream. A row whose two largest probabilities differ by the
threshold takes its token from there. Later rows attend to it in every layer, so the layers above write its keys and values of
the state in which it left, as if they had passed it on (CALM, section 3.2). All of that is plans of the model's own operations
over its one cache, run by the native library: a row that does not leave has the bits that it has without early exit, as long as
no row before it has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twostroke.core.fitted_exits import NEVER
from twostroke.engine.native_runner import NativeRunner
from twostroke.scheduling.request import Request
from twostroke.scheduling.step import ScheduledStep, SchedulerConfig

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


UNPLANNED = "early exit is predicted as if every token passed all layers: the planner does not know where tokens leave."


def confidence(logits: Float[Tensor, "n V"]) -> Float[Tensor, " n"]:
    """By how much the two largest probabilities of each row differ: CALM's measure of softmax responses."""
    two = logits.topk(2, dim=1).values
    shares = (two - logits.logsumexp(dim=1, keepdim=True)).exp_()
    return shares[:, 0] - shares[:, 1]


@dataclass
class _Part:
    """Layers from the exit before up to ``layers``, then norm and head. ``states`` hold its residual streams, those of all
    rows after each layer; ``write`` runs what the layers above write of those that leave. Both are None of the last part."""

    runner: NativeRunner
    layers: int
    step_bytes: int
    states: Tensor | None = None
    write: NativeRunner | None = None
    write_bytes: int = 0


class EarlyExits:
    """Computes the steps of ``whole`` with exits after ``layers``. Rows of prompts pass every layer, and so do those of each
    answer's first token; ``threshold`` may be changed between steps. ``depths`` counts the rows that have left after each of
    ``layers``, those that passed all of them last."""

    def __init__(self, whole: NativeRunner, config: SchedulerConfig, layers: Sequence[int], threshold: float) -> None:
        self.whole, self.layers, self.threshold = whole, tuple(layers), threshold
        plan, width = whole.plan, whole.plan.spec.d_model
        self._parts: list[_Part] = []
        self.depths = [0] * (len(self.layers) + 1)
        self.read_share = 1.0
        """Of the weights that a whole step reads: what a row of the last step read on average, if all might leave."""
        before: Tensor | None = None
        begin = 0
        for end in (*self.layers, plan.spec.n_layers):
            part = plan.first(end) if before is None else plan.between(begin, end, before)
            runner = NativeRunner(part, whole.pool, config, whole)
            made = _Part(runner, end, part.step_bytes)
            if end < plan.spec.n_layers:
                made.states = before = torch.empty(((end + 1) * config.max_running, width))
                writes = plan.cache_writes(end, before)
                made.write, made.write_bytes = NativeRunner(writes, whole.pool, config, whole), writes.step_bytes
            self._parts.append(made)
            begin = end
        rows = config.max_running + config.draft_rows
        self._best, self._best_tokens = torch.empty(rows), torch.empty(rows, dtype=torch.int64)

    def run(self, step: ScheduledStep, rows: Tensor | None = None, n_threads: int = 1, n_hidden: int = 0) -> Tensor:
        """What ``NativeRunner.run`` returns. A row has the same logits whatever else is in the step."""
        leaving = [i for i, request in enumerate(step.requests[: step.n_decodes]) if _may_leave(request)]
        self.read_share = 1.0
        if not leaving:
            logits = self.whole.run(step, rows, n_threads, n_hidden=n_hidden)
            n = len(logits)
            self._need(n)
            for own, of_whole in zip((self._best, self._best_tokens), self.whole.best_of(n), strict=True):
                own[:n] = of_whole
            return logits
        apart = set(leaving)
        others = [i for i in range(len(step.requests)) if i not in apart]
        for request in step.grown:  # all parts read the one table
            self.whole.table[request.slot, : len(request.pages)] = request.pages
        if not others:
            logits = torch.empty((len(leaving), self.whole.plan.spec.vocab_size))
            self.read_share = self._leave(_part(step, leaving), n_threads, logits, range(len(leaving)))
            return logits
        return self._mixed(step, rows, n_threads, n_hidden, leaving, others)

    def _mixed(
        self, step: ScheduledStep, rows: Tensor | None, n_threads: int, n_hidden: int, leaving: list[int], others: list[int]
    ) -> Tensor:
        """Rows that may leave first, then all others through the whole plan; logits in the order that was asked for."""
        ends = torch.tensor(step.counts).cumsum(0)
        wanted = torch.tensor(step.sampled_rows()) if rows is None else rows
        owners = torch.searchsorted(ends, wanted, right=True)
        n = len(wanted) - n_hidden
        logits = torch.empty((n, self.whole.plan.spec.vocab_size))
        self._need(n)
        is_leaving = torch.zeros(len(step.requests), dtype=torch.bool)
        is_leaving[leaving] = True
        of_leaving = is_leaving[owners]
        self._leave(_part(step, leaving), n_threads, logits, of_leaving.nonzero()[:, 0].tolist())
        counts = torch.tensor(step.counts)
        rest = _part(step, others)
        first = torch.zeros(len(step.requests), dtype=torch.int64)
        first[others] = torch.tensor([0, *rest.counts[:-1]]).cumsum(0)
        of_rest = (~of_leaving).nonzero()[:, 0]
        rest_rows = (wanted - (ends - counts)[owners] + first[owners])[of_rest]
        found = self.whole.run(rest, rest_rows, n_threads, n_hidden=n_hidden)
        places = of_rest[: len(found)]
        logits[places] = found
        best, tokens = self.whole.best_of(len(found))
        self._best[places], self._best_tokens[places] = best, tokens
        return logits

    def best_of(self, n: int) -> tuple[Tensor, Tensor]:
        """See ``NativeRunner.best_of``."""
        return self._best[:n], self._best_tokens[:n]

    def histogram(self) -> dict[int, int]:
        """Rows by the number of layers that they passed, the whole model's last."""
        return dict(zip((*self.layers, self.whole.plan.spec.n_layers), self.depths, strict=True))

    def read_shares(self) -> list[float]:
        """Of the weights that a step of the whole plan reads: what a row reads that leaves after each of ``layers``, what it
        writes to the layers above included; and what one reads that passes all of them."""
        found, read = [], 0
        for part in self._parts:
            read += part.step_bytes
            found.append((read + part.write_bytes) / self.whole.plan.step_bytes)
        return found

    def _need(self, n: int) -> None:
        if len(self._best) < n:
            self._best, self._best_tokens = torch.empty(n), torch.empty(n, dtype=torch.int64)

    def _leave(self, step: ScheduledStep, n_threads: int, logits: Tensor, places: Sequence[int]) -> float:
        """Compute one row of each of the step's requests and put its logits to its place. Returns a row's ``read_share``."""
        to, left = torch.tensor(places), list(range(len(places)))
        self._need(int(to.max()) + 1)
        tokens: list[int] | None = None
        read = 0
        for i, part in enumerate(self._parts):
            trace = None if part.states is None else part.states[: (part.layers + 1) * len(left)]
            if trace is not None:
                trace = trace.view(part.layers + 1, len(left), -1)
            own = _part(step, left)
            found = part.runner.run(own, n_threads=n_threads, all_rows=trace is not None, trace=trace, tokens=tokens)
            best, best_tokens = part.runner.best_of(len(left))
            read += part.step_bytes * len(left)
            goes = self._goes(part, found)
            at = to[left][goes]
            logits[at], self._best[at], self._best_tokens[at] = found[goes], best[goes], best_tokens[goes]
            self.depths[i] += len(at)
            rows = [part.layers * len(left) + j for j in range(len(left))]
            if part.write is not None and len(at):
                gone = goes.nonzero()[:, 0].tolist()
                part.write.run(_part(own, gone), n_threads=n_threads, tokens=[rows[j] for j in gone])
                read += part.write_bytes * len(gone)
            stays = (~goes).nonzero()[:, 0].tolist()
            if not stays:
                break
            left, tokens = [left[j] for j in stays], [rows[j] for j in stays]
        return read / (len(places) * self.whole.plan.step_bytes)

    def _goes(self, part: _Part, logits: Tensor) -> Bool[Tensor, " n"]:
        if part.states is None:
            return torch.ones(len(logits), dtype=torch.bool)
        if self.threshold >= NEVER:
            return torch.zeros(len(logits), dtype=torch.bool)
        return confidence(logits) >= self.threshold  # false of what is not finite, which the last layer tells


def _may_leave(request: Request) -> bool:
    return request.n_output > 0 and request.params.pooling is None


def _part(step: ScheduledStep, places: Sequence[int]) -> ScheduledStep:
    """The step of these of its requests alone, whose tables are known."""
    n_decodes = sum(i < step.n_decodes for i in places)
    counts, starts = [step.counts[i] for i in places], [step.starts[i] for i in places]
    return ScheduledStep(step.number, [step.requests[i] for i in places], counts, starts, n_decodes, [], [])
