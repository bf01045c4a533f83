"""Drafts of a smaller model with the same vocabulary, which computes a few tokens ahead of the one that is served."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from twostroke.engine.sampler import sample
from twostroke.engine.speculation.ahead import DraftsAhead
from twostroke.engine.speculation.lengths import StepTimes
from twostroke.scheduling.request import Request
from twostroke.scheduling.scheduler import Scheduler
from twostroke.scheduling.step import ScheduledStep


class DraftEngine(Protocol):
    """What of an ``EngineCore`` drafting needs: an idle one, whose pages and slots are taken by hand."""

    scheduler: Scheduler

    def compute(self, step: ScheduledStep, rows: Tensor | None = None) -> Tensor: ...

    def best_of(self, n: int) -> tuple[Tensor, Tensor] | None: ...


class _Mirror:
    """A served request in the draft model's cache. ``request.tokens`` are the served tokens and the drafts behind them."""

    __slots__ = ("n_served", "request", "seed")

    def __init__(self, served: Request, slot: int, seed: int) -> None:
        self.request = Request(served.id, served.tokens[: served.n_prompt], served.params)
        self.request.slot, self.seed = slot, seed
        self.request.stop_ids = served.stop_ids
        self.n_served = served.n_prompt


class ModelDrafter(DraftsAhead):
    """Drafts by ``draft``. It draws with the served request's parameters and the very random numbers that the served model will
    use at each place, so that equal distributions give equal tokens.

    ``seed_of`` gives a request's random stream."""

    def __init__(self, draft: DraftEngine, times: StepTimes, draft_times: StepTimes, seed_of: Callable[[Request], int]) -> None:
        super().__init__(times, draft_times)
        self._draft, self._seed_of = draft, seed_of
        config = draft.scheduler.config
        self._slots = list(range(config.max_running - 1, -1, -1))
        self._mirrors: dict[str, _Mirror] = {}
        self._n_steps = 0
        self._grown: list[Request] = []  # whose pages the draft model's runner has yet to be told of

    def ended(self, request: Request) -> None:
        """Give back what the draft model keeps of ``request``."""
        mirror = self._mirrors.pop(request.id, None)
        if mirror is not None:
            self._draft.scheduler.pool.release(mirror.request.pages)
            self._slots.append(mirror.request.slot)
            self._grown = [own for own in self._grown if own is not mirror.request]

    def _compare(self, served: Request) -> None:
        """Count which drafts were right, and keep the keys and values of those."""
        mirror = self._mirrors.get(served.id)
        if mirror is None:
            return
        own, tokens = mirror.request, served.tokens
        n = mirror.n_served
        for place in range(len(own.tokens) - n):
            if n >= len(tokens):
                break
            right = own.tokens[n] == tokens[n]
            self._shares.count(place, right)
            if not right:
                own.adjuster = None  # it has counted this draft
                break
            n += 1
        own.n_computed = min(own.n_computed, n)
        own.tokens[n:] = tokens[n:]
        mirror.n_served = len(tokens)

    def _draft_tokens(self, decoding: Sequence[Request], n: int) -> dict[int, list[int]]:
        """``n`` tokens behind each request that the draft model has caught up with, a step of all for each."""
        config = self._draft.scheduler.config
        ready: list[tuple[int, _Mirror]] = []
        behind: list[tuple[_Mirror, int]] = []
        budget = config.token_budget
        for i, served in enumerate(decoding):
            mirror = self._mirror_of(served)
            n_tokens = len(served.tokens) + n
            if (
                mirror is None
                or budget == 0
                or n_tokens > config.max_model_len
                or not self._make_room(mirror.request, n_tokens)
            ):
                continue
            due = len(mirror.request.tokens) - mirror.request.n_computed
            count = min(due, budget)
            budget -= count
            behind.append((mirror, count))
            if count == due:
                ready.append((i, mirror))
        if not behind:
            return {}
        self._step([mirror for mirror, _ in behind], [count for _, count in behind], [mirror for _, mirror in ready])
        for _ in range(n - 1 if ready else 0):
            mirrors = [mirror for _, mirror in ready]
            self._step(mirrors, [1] * len(mirrors), mirrors)
        return {i: mirror.request.tokens[mirror.n_served :] for i, mirror in ready}

    def _step(self, mirrors: Sequence[_Mirror], counts: list[int], ready: Sequence[_Mirror]) -> None:
        """Compute ``counts`` tokens of each, and append the token that each of ``ready`` draws."""
        began = time.perf_counter()
        self._n_steps += 1
        requests = [mirror.request for mirror in mirrors]
        starts = [request.n_computed for request in requests]
        n_decodes = len(requests) if all(count == 1 for count in counts) else 0
        step = ScheduledStep(self._n_steps, requests, counts, starts, n_decodes, self._grown, [])
        logits = self._draft.compute(step)
        self._grown = []
        for request, count in zip(requests, counts, strict=True):
            request.n_computed += count
        if not ready:
            return
        own = [mirror.request for mirror in ready]
        drawn = sample(logits, own, [mirror.seed for mirror in ready], self._draft.best_of(len(logits)))
        for request, token in zip(own, drawn.tokens, strict=True):
            request.tokens.append(token)
        if n_decodes:
            self.draft_times.saw(len(requests), time.perf_counter() - began)

    def _mirror_of(self, served: Request) -> _Mirror | None:
        """The request's mirror, made at its first draft; None while no slot is free."""
        mirror = self._mirrors.get(served.id)
        if mirror is None and self._slots:
            mirror = self._mirrors[served.id] = _Mirror(served, self._slots.pop(), self._seed_of(served))
            mirror.request.tokens += served.tokens[served.n_prompt :]
            mirror.n_served = len(served.tokens)
        return mirror

    def _make_room(self, own: Request, n_tokens: int) -> bool:
        """Pages for ``n_tokens``; False, and none taken, if too few are free."""
        page_tokens = self._draft.scheduler.config.page_tokens
        short = -(-n_tokens // page_tokens) - len(own.pages)
        if short > 0:
            pages = self._draft.scheduler.pool.allocate(short, after=own.pages[-1] if own.pages else -1)
            if pages is None:
                return False
            own.pages += pages
            self._grown.append(own)
        return True
