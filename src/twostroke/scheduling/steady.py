"""``SteadyScheduler``: a scheduler whose requests may take many steps at once, where a step only gives each its next token.
Simulated loads are mostly such steps."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.scheduling.accounts import OUTPUT_WEIGHT
from twostroke.scheduling.request import Request, Status
from twostroke.scheduling.scheduler import Scheduler


class SteadyScheduler(Scheduler):
    """Steps that ``steady_steps`` counts may be taken by ``advance``, all others by ``schedule`` and ``update``."""

    def steady_steps(self) -> int:
        """How many of the next steps are known to give each decoding request a token and to do nothing else, so that
        ``advance`` may take them at once: until a request reaches its limit or pages run out. 0 if a prompt is under way, if a
        waiting request might be admitted, or if tokens may end a request early."""
        decoding = self._decoding
        if not decoding or self._prefilling or self._in_flight is not None or not self._waits_for_an_end():
            return 0
        if any(r.stop_ids for r in decoding):
            return 0
        n_steps = min(r.limit - len(r.tokens) for r in decoding)
        if self.config.window is not None:  # with a page that fills, one before the window may be released
            n_steps = min(n_steps, *(self.config.page_tokens - r.n_computed % self.config.page_tokens for r in decoding))
        while n_steps and self._pages_of_steps(n_steps) > self.pool.n_free:
            n_steps //= 2
        return n_steps

    def _waits_for_an_end(self) -> bool:
        """Whether no waiting request can be admitted before a running one has ended: none waits, or no slot is free, or the
        first was found to lack pages. Among several clients another may become the first."""
        if not self._waiting:
            return True
        if self.config.window is not None or self._waiting.n_queues > 1:  # a window frees pages while requests decode
            return False
        first = self._waiting.first()
        assert first is not None
        if any(r.priority > first.priority for r in self._decoding):
            return False
        if not self.admission.slots:
            return True
        # A fork asks for fewer pages as soon as its original has computed the prompt.
        return first.fork_of is None and self.admission.is_blocked(first)

    def _pages_of_steps(self, n_steps: int) -> int:
        """Pages that the decoding requests need beside their own for so many tokens more of each."""
        short = (r.n_computed + n_steps - r.capacity for r in self._decoding)
        return sum(self.page_lists.pages_for(n) for n in short if n > 0)

    def advance(self, n_steps: int, tokens: Sequence[int]) -> list[Request]:
        """Take ``n_steps`` ≤ ``steady_steps()`` steps at once, each of which samples the i-th of ``tokens`` for the i-th of
        ``decoding``. Returns the requests that finished, all of them in the last step.

        It leaves what as many rounds of ``schedule`` and ``update`` would (tests/scheduling/test_advance.py)."""
        ended = []
        page_tokens, window = self.config.page_tokens, self.config.window
        for request, token in zip(self._decoding, tokens, strict=True):
            request.n_computed += n_steps
            request.tokens += [token] * n_steps
        if self.config.prefix_cache:
            self._fill_in_turn(n_steps)
        else:
            for request in self._decoding:
                self._grow(request, self.page_lists.pages_for(max(0, request.n_computed - request.capacity)))
        for request in self._decoding:
            if request.n_computed // page_tokens > request.n_registered:
                self.page_lists.register(request)
                if window is not None:
                    self.page_lists.free_before_window(request, window)
            assert request.account is not None
            request.account.served += n_steps * OUTPUT_WEIGHT
            if len(request.tokens) >= request.limit:  # its pages become free before the next request's, as in ``update``
                self._finish(request, "length")
                ended.append(request)
        self._n_steps += n_steps
        if ended:
            for request in ended:
                del self.requests[request.id]
            self._decoding = [r for r in self._decoding if r.status is Status.RUNNING]
        return ended

    def _fill_in_turn(self, n_steps: int) -> None:
        """Allocate the pages of ``n_steps`` steps, and offer what all but the last have filled to the prefix tree, in the order
        of the steps: which of two pages with the same content is found again depends on which was full first, and on whether
        one that was free had been taken by then."""
        page_tokens = self.config.page_tokens
        turns: list[tuple[int, bool, int, int]] = []  # the step, whether at its end, whose, and how many pages are full then
        for i, request in enumerate(self._decoding):
            before, full = request.n_computed - n_steps, (request.n_computed - 1) // page_tokens
            grown = range(request.capacity, request.n_computed, page_tokens)
            turns += ((n_tokens - before + 1, False, i, 0) for n_tokens in grown)
            turns += ((n * page_tokens - before, True, i, n) for n in range(request.n_registered + 1, full + 1))
        for _, is_full, i, n in sorted(turns):
            if is_full:
                self.page_lists.register(self._decoding[i], n)
            else:
                self._grow(self._decoding[i], 1)

    def _grow(self, request: Request, n_pages: int) -> None:
        """Allocate ``n_pages`` that ``steady_steps`` counted."""
        if n_pages:
            pages = self.pool.allocate(n_pages, after=request.pages[-1])
            assert pages is not None
            request.pages += pages
            request.capacity += n_pages * self.config.page_tokens
