"""``Admission``: what a waiting request needs to run, given and taken back. That is pages, a slot, and room for its adapter."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Protocol

from twostroke.scheduling.lower_tier import LowerTier
from twostroke.scheduling.page_lists import PageLists
from twostroke.scheduling.request import Request, Status
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.scheduling.step import SchedulerConfig
from twostroke.scheduling.waiting import WaitingQueue

LEAST_BEGUN = 0.25
"""Share of a page that a prompt must have in common with one for that page to be copied: fewer tokens are computed as fast."""

MOST_PASSED = 8
"""Times that a waiting request lets a later one of its client go first."""


class Adapters(Protocol):
    """Who holds adapters in memory for requests that run. ``claim`` returns False if there is no room beside the others."""

    def claim(self, request: Request) -> bool: ...

    def release(self, request: Request) -> None: ...


class Admission:
    """``tokens_to_hold`` says for how many tokens a request gets pages. ``slots`` are the free ones.

    A request with an adapter also needs room for that in memory, which ``adapters`` gives it while it runs.

    A prompt that parts from a known one within a page takes over what comes before, in a copy of that page. The page is held
    until the step is over, so that nobody else writes to it before it is copied.

    Pages that the prefix tree has lost may be in the tier ``lower``. Those of adapters are not in it, because their keys mean
    nothing to another engine.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        page_lists: PageLists,
        adapters: Adapters | None,
        lower: LowerTier | None,
        tokens_to_hold: Callable[[Request], int],
    ) -> None:
        self.config = config
        self.page_lists, self.pool = page_lists, page_lists.pool
        self.adapters = adapters
        self.lower = lower
        self.slots = list(range(config.max_running - 1, -1, -1))
        self.copied: list[Request] = []  # those that need a page copied in the current step
        self.sources: list[int] = []  # cached pages that are copied in the current step, and must not be given away before
        self.n_prompt_tokens = 0  # of all admitted requests; a preempted request counts once
        self.n_prefix_hit_tokens = 0  # those of them that the prefix tree held or the original of a fork had computed
        self._tokens_to_hold = tokens_to_hold
        # The request that found too few pages, and ``pool.n_released`` at that time: until pages come back it finds too few
        # again.
        self._blocked: tuple[Request, int] | None = None

    def unblock(self) -> None:
        """Let each request look for pages again."""
        self._blocked = None

    def most_pages(self, request: Request) -> int:
        """Pages that ``request`` takes at its longest. The sequences of a search share the prompt's whole pages."""
        n_pages = self.page_lists.pages_for(request.limit - 1)  # the last token is never fed back
        if request.beams is None:
            return n_pages
        n_shared = request.n_prompt // self.config.page_tokens
        return n_shared + request.beams.width * (n_pages - n_shared)

    def pages_to_start(self, request: Request) -> int:
        """Free pages that admission asks for beside those that the prefix tree has: a search parts soon after its prompt."""
        n_pages = self.page_lists.pages_for(self._tokens_to_hold(request))
        if request.beams is None:
            return n_pages
        return max(n_pages, min(n_pages + request.beams.width - 1, self.most_pages(request)))

    def release_sources(self) -> None:
        """The step is over, and its pages were copied."""
        if self.sources:  # else a blocked request would look for pages again
            self.pool.release(self.sources)
            self.sources = []

    def admit(
        self, first: Request, waiting: WaitingQueue, look_ahead: int, n_running: int, copies: list[tuple[int, int]]
    ) -> Request | None:
        """Admit ``first``, the first waiting request, or one of those behind it whose prompt is better known: the pages of
        ``first`` may take the place of what that one would find. Returns which, or None if there is no room."""
        if self._fork(first, n_running, copies):
            return first
        behind = waiting.behind(first, look_ahead) if self._looks_ahead(first) else []
        at, most = 0, len(self._hits(first)) if behind else 0
        for n, request in enumerate(behind, 1):
            if request.fork_of is None and (n_hits := len(self._hits(request))) > most:
                at, most = n, n_hits
        if at and self._take_pages(behind[at - 1], n_running, copies):
            for passed in (first, *behind[: at - 1]):
                passed.n_passed += 1
            return behind[at - 1]
        return first if self._take_pages(first, n_running, copies) else None

    def _looks_ahead(self, first: Request) -> bool:
        """Whether another waiting request may be admitted in place of ``first``."""
        if first.fork_of is not None or first.n_preemptions or first.n_passed >= MOST_PASSED:
            return False
        return self.config.prefix_cache and not self.is_blocked(first)

    def is_blocked(self, request: Request) -> bool:
        """No page has come back since ``request`` found too few, and matching a long prompt costs time in every step."""
        return self._blocked == (request, self.pool.n_released)

    def _unread(self, request: Request) -> int:
        """Tokens of which a cached page may save the work, and one more: the last token must be computed, because its logits
        are sampled from. A request for the scores of its prompt computes each token that predicts one, and one for
        the mean of its hidden states computes all."""
        n_known = len(request.tokens)
        return min(n_known, request.params.prompt_logprobs_start) if _reads_prompt(request.params) else n_known

    def _hits(self, request: Request) -> list[int]:
        """The whole cached pages that ``request`` would share."""
        page_tokens = self.config.page_tokens
        most = (self._unread(request) - 1) // page_tokens
        return self.pool.tree.match(request.page_keys, request.tokens, page_tokens, most)

    def _take_pages(self, request: Request, n_running: int, copies: list[tuple[int, int]]) -> bool:
        """Give a waiting request its pages, cached prefix first. Returns False, and changes nothing, if too few are free."""
        c, pool = self.config, self.pool
        if self.is_blocked(request):
            return False
        if len(self.slots) < slots_of(request):
            return False
        n_known = len(request.tokens)
        n_needed = self.page_lists.pages_for(self._tokens_to_hold(request))
        self.page_lists.hash_full_pages(request)
        hits = self._hits(request)  # only whole pages are shared, and one that begins alike is copied
        max_hits = (self._unread(request) - 1) // c.page_tokens
        n_hits_free = sum(map(pool.is_free, hits))  # cached pages count as free until they are retained
        # One page for the next token of each running request, so that admission does not cause a preemption at once.
        margin = n_running
        if self.pages_to_start(request) - len(hits) + n_hits_free + margin > pool.n_free:
            self._blocked = (request, pool.n_released)
            return False
        if not self._claim_adapter(request):
            return False
        pool.retain(hits)
        n_lower = 0
        if self.lower is not None and self.in_lower(request) and len(hits) < max_hits:
            n_lower = self.lower.worth(request, len(hits), max_hits)
        source, n_begun = -1, 0
        if n_lower == 0 and c.prefix_cache and c.parts_of_pages and not _reads_prompt(request.params):
            before = request.page_keys[len(hits) - 1] if hits else self.page_lists.root_of(request)
            start = len(hits) * c.page_tokens
            source, n_begun = pool.tree.begun(before, request.tokens[start : min(start + c.page_tokens, n_known - 1)])
            if n_begun < c.page_tokens * LEAST_BEGUN or (pool.is_free(source) and n_needed - len(hits) + margin >= pool.n_free):
                n_begun = 0  # too few for a copy, or there is no room beside the page that would be copied
        if n_begun:
            pool.retain([source])
            self.sources.append(source)
        fresh = pool.allocate(n_needed - len(hits), after=hits[-1] if hits else -1)
        assert fresh is not None  # counted above
        if n_begun:
            copies.append((source, fresh[0]))
            self.copied.append(request)
        self._start(request, hits + fresh, len(hits), len(hits) * c.page_tokens + n_begun)
        request.restorable = len(hits) + n_lower if n_lower else 0
        return True

    def restore(self, request: Request, bounded: bool) -> bool:
        """Load pages of ``request`` from the lower tier. Returns whether no more of them is to be loaded."""
        assert self.lower is not None
        page_tokens = self.config.page_tokens
        first, end = request.n_computed // page_tokens, request.restorable
        n = self.lower.load(request, first, end, bounded)
        request.n_computed = (first + n) * page_tokens
        self.page_lists.register(request)
        if request.n_preemptions == 0:
            request.n_prefix_hit = request.n_computed
            self.n_prefix_hit_tokens += n * page_tokens
        if n == 0 or not bounded or first + n == end:
            request.restorable = 0
        return request.restorable == 0

    def _fork(self, request: Request, n_running: int, copies: list[tuple[int, int]]) -> bool:
        """Start ``request`` from the pages of its original. Returns False, and changes nothing, if that is not possible.

        The fork takes over all tokens of the prompt but the last, which it computes again to sample from its logits.
        """
        original, c = request.fork_of, self.config
        if original is None or original.status is not Status.RUNNING or original.n_computed < request.n_prompt:
            return False
        if request.n_output:  # it was preempted after it had started, and now has tokens that the original has not computed
            return False
        n_computed = request.n_prompt - 1
        if c.window is not None and original.n_dropped > self.page_lists.first_visible(n_computed, c.window):
            return False  # the original has already released pages that the fork's window still covers
        n_shared = n_computed // c.page_tokens
        shared = original.pages[:n_shared]
        n_fresh = self.page_lists.pages_for(request.n_prompt) - n_shared
        if n_fresh + n_running > self.pool.n_free or not self._claim_adapter(request):
            return False
        self.pool.retain(page for page in shared if page >= 0)
        fresh = self.pool.allocate(n_fresh, after=shared[-1] if shared else -1)
        assert fresh is not None  # counted above
        if n_computed % c.page_tokens:
            # All copies of a step are read before any is written: a page that this step only begins is copied from its source.
            source = original.pages[n_shared]
            copies.append((next((from_ for from_, to in copies if to == source), source), fresh[0]))
            self.copied.append(request)
        self.page_lists.hash_full_pages(request)
        request.n_dropped = original.n_dropped
        self._start(request, shared + fresh, n_shared, n_computed)
        return True

    def _claim_adapter(self, request: Request) -> bool:
        return request.adapter is None or self.adapters is None or self.adapters.claim(request)

    def _start(self, request: Request, pages: list[int], n_registered: int, n_computed: int) -> None:
        request.pages = pages
        request.capacity = len(pages) * self.config.page_tokens
        request.n_computed = n_computed
        request.n_registered = n_registered
        request.slot = self.slots.pop()
        request.status = Status.RUNNING
        if request.beams is not None:
            request.beams.slots = [self.slots.pop() for _ in range(request.beams.width - 1)]
        if request.n_preemptions == 0:
            request.started_s = monotonic()
            request.n_prefix_hit = n_computed
            self.n_prompt_tokens += request.n_prompt
            self.n_prefix_hit_tokens += n_computed

    def release(self, request: Request) -> None:
        """Take back all that ``request`` runs with."""
        if self.lower is not None and self.in_lower(request) and request.n_registered:
            self.lower.keep(request.page_keys[: request.n_registered])
        if request.beams is None:  # else another sequence of the search may go on writing to its last page
            self.page_lists.register_end(request)
        self.page_lists.drop(request)
        self.slots.append(request.slot)
        claimed = request.beams is None or request is request.beams.root  # an adapter is claimed once for a search
        if request.adapter is not None and self.adapters is not None and claimed:
            self.adapters.release(request)
        request.slot = -1

    def in_lower(self, request: Request) -> bool:
        """Whether the lower tier may hold pages of ``request``: not those of adapters, nor of weights that were replaced."""
        return request.adapter is None and request.weights == self.page_lists.weights


def _reads_prompt(params: SamplingParams) -> bool:
    """Whether more is wanted of the prompt than what follows it."""
    return params.prompt_logprobs is not None or params.pooling == "mean"


def slots_of(request: Request) -> int:
    """Slots that ``request`` takes: a search has one for each sequence."""
    return 1 if request.beams is None else request.beams.width
