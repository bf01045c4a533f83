"""The scheduler: which tokens of which requests are computed in the next step.

It has no phases. A step is ``{request: number of tokens}``, and each request's computed count catches up with its token count;
chunked prefill, prefix hits and resumption after preemption all follow from that one rule (as in vLLM's V1 scheduler).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush

from twostroke.core.errors import CapacityError, InputError
from twostroke.scheduling.pages import PagePool
from twostroke.scheduling.prefix_tree import ROOT, chain_key, root_of
from twostroke.scheduling.request import FinishReason, Request, Status
from twostroke.scheduling.step import ScheduledStep, SchedulerConfig
from twostroke.scheduling.waiting import OUTPUT_WEIGHT, Accounts, WaitingQueue, turn_of

__all__ = ["ScheduledStep", "Scheduler", "SchedulerConfig"]


class Scheduler:
    """Decides by three rules. Every decoding request gets its token first, so that no prefill can starve it. What is left of
    the token budget goes to prompts in chunks, those under way and those that wait alike in their turns (``scheduling.waiting``
    has them): a long prompt of one client shares the budget with another's. A waiting request is admitted only when pages for
    all its known tokens are free and each running request could still take one more; it then holds those pages, so that only
    decoding can run out.

    When decoding runs out of pages, the request of the lowest priority that arrived last is preempted: its pages are freed and
    it waits to be recomputed from its tokens, which gives the same keys and values. So it is where a request of higher priority
    waits and could run in the place of lower ones. Among equals nobody makes way, and the first always has its way, so there is
    always progress.

    A fork shares its original's whole pages and gets a copy of the one that both will write in, so nothing is computed again.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = PagePool(config.n_pages)
        self.requests: dict[str, Request] = {}  # all that are not finished
        self._waiting = WaitingQueue()
        self._n_held = 0  # forks whose original computes the prompt
        self._accounts = Accounts()
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap; finished requests leave when their time comes
        self._copied: list[Request] = []  # forks admitted in the step under way by copying a page
        self._prefilling: list[Request] = []  # admitted, prompt not yet computed; in order of admission
        self._decoding: list[Request] = []  # exactly one token is due
        self._slots = list(range(config.max_running - 1, -1, -1))
        self._in_flight: ScheduledStep | None = None
        self._grown_untold: list[Request] = []  # of an abandoned step
        self._blocked: tuple[Request, int] | None = None  # who found too few pages, and ``pool.n_released`` then
        self._n_arrived = 0
        self._n_steps = 0
        self.n_preemptions = 0
        self.n_prompt_tokens = 0  # of all admitted requests, at first admission
        self.n_prefix_hit_tokens = 0  # of those, found in the prefix tree

    @property
    def n_waiting(self) -> int:
        return len(self._waiting) + self._n_held

    @property
    def n_running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add(self, request: Request) -> None:
        """Queue ``request``. Raises InputError for an empty prompt or an id in use, CapacityError where it could never fit."""
        c = self.config
        if request.id in self.requests:
            raise InputError(f"request id {request.id!r} is already in use.")
        if request.n_prompt == 0:
            raise InputError("the prompt has no tokens. Give at least one.")
        if request.n_prompt >= c.max_model_len:
            raise CapacityError(
                f"the prompt has {request.n_prompt} tokens and max_model_len={c.max_model_len} must hold at least one more. "
                "Shorten the prompt or raise max_model_len."
            )
        request.limit = min(request.limit, c.max_model_len)
        n_pages = self._pages_for(request.limit - 1)  # the last token is never fed back
        if n_pages > c.n_pages:
            raise CapacityError(
                f"prompt and output of {request.limit} tokens need {n_pages} KV-cache pages and there are {c.n_pages}. "
                "Lower max_tokens, shorten the prompt or raise kv_cache_bytes."
            )
        request.arrival = self._n_arrived
        self._n_arrived += 1
        self.requests[request.id] = request
        request.account = self._accounts.open(request.client)
        original = request.fork_of
        if original is not None:
            request.page_keys = original.page_keys[: request.n_prompt // c.page_tokens]
        self._extend_keys(request)  # here and not when it is admitted: a long prompt is no part of a step's decision
        if request.deadline is not None:
            if len(self._deadlines) > 2 * len(self.requests) + 64:  # mostly of finished requests, which they keep alive
                self._deadlines = [entry for entry in self._deadlines if entry[2].status is not Status.FINISHED]
                heapify(self._deadlines)
            heappush(self._deadlines, (request.deadline, request.arrival, request))
        if original is not None and original.status is not Status.FINISHED and original.n_computed < original.n_prompt:
            original.forks.append(request)
            self._n_held += 1
        else:
            self._waiting.add(request)

    def abort(self, request_id: str) -> Request | None:
        """Cancel a request. Its pages are free when this returns, or after ``update`` where a step with it is under way.

        Returns None where the id is not known (any more)."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        self._finish(request, "abort")
        return request

    def expire(self, now: float) -> list[Request]:
        """End every request whose deadline has passed, as ``abort`` does, with ``"timeout"``; returns them."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heappop(self._deadlines)[2]
            if request.status is not Status.FINISHED:
                del self.requests[request.id]
                self._finish(request, "timeout")
                expired.append(request)
        return expired

    def schedule(self) -> ScheduledStep:
        """Decide the next step and take the pages it needs. ``update`` or ``abandon`` must follow before the next."""
        if self._in_flight is not None:
            raise RuntimeError("schedule() was called before update() of the step under way")
        grown, self._grown_untold = self._grown_untold, []
        preempted: list[str] = []
        for request in [r for r in self._decoding if r.n_computed >= r.capacity]:
            if request.status is Status.RUNNING:  # it may have been preempted for one before it
                self._grow(request, grown, preempted)
        admitting = not preempted  # pages just ran out: admitting would preempt again
        if admitting and self._waiting:
            self._make_way(preempted)
        requests = self._decoding.copy()
        n_decodes = len(requests)
        counts = [1] * n_decodes
        budget = self.config.token_budget - n_decodes
        scored = budget if self.config.scored_rows is None else self.config.scored_rows
        copies: list[tuple[int, int]] = []
        self._copied = []
        under_way = sorted(self._prefilling, key=turn_of) if len(self._prefilling) > 1 else self._prefilling.copy()
        under_way.reverse()
        while budget > 0:
            first = self._waiting.first() if admitting and self._slots else None
            if first is not None and (not under_way or turn_of(first) < turn_of(under_way[-1])):
                if not (self._fork(first, copies) or self._admit(first)):
                    admitting = False
                    continue
                self._waiting.remove(first)
                grown.append(first)
                request = first
            elif under_way:
                request = under_way.pop()
            else:
                break
            n = min(budget, len(request.tokens) - request.n_computed)
            if request.params.prompt_logprobs is not None:
                n = min(n, scored)
                scored -= n
                if n == 0:
                    continue  # it keeps its pages, and others may use what is left of the budget
            requests.append(request)
            counts.append(n)
            budget -= n
        grown = [r for r in grown if r.status is Status.RUNNING]
        self._n_steps += 1
        step = ScheduledStep(
            self._n_steps, requests, counts, [r.n_computed for r in requests], n_decodes, grown, preempted, copies
        )
        self._in_flight = step
        return step

    def update(self, step: ScheduledStep, sampled: Sequence[int | None], failed: Collection[str] = ()) -> list[Request]:
        """Record that ``step`` was computed and what was sampled (aligned with ``step.requests``, None where nothing is).

        ``failed`` ids end with ``"error"`` and nothing they computed is offered to others. Returns the requests that finished.
        """
        if step is not self._in_flight:
            raise RuntimeError("update() must follow schedule() with the step it returned")
        if len(sampled) != len(step.requests):
            raise ValueError(f"{len(sampled)} samples for {len(step.requests)} requests")
        self._in_flight = None
        finished: list[Request] = []
        page_tokens, window = self.config.page_tokens, self.config.window
        running, ended = Status.RUNNING, False
        for i, (request, token) in enumerate(zip(step.requests, sampled, strict=True)):
            if request.status is not running:  # aborted while the step was under way
                ended = True
                self._release(request)
                continue
            if failed and request.id in failed:
                self.pool.discard_content(request.pages)
                self._finish(request, "error")
                finished.append(request)
                ended = True
                continue
            n_computed = request.n_computed = request.n_computed + step.counts[i]
            if n_computed // page_tokens > request.n_registered:
                self._register(request)
                if window is not None:
                    self._drop_passed(request, window)
            account = request.account
            assert account is not None
            account.served += step.counts[i] if i >= step.n_decodes else OUTPUT_WEIGHT
            if request.forks and n_computed >= request.n_prompt:
                self._queue_forks(request)
            if token is None:
                if n_computed == len(request.tokens):
                    raise ValueError(f"request {request.id!r} ended its tokens in this step and has no sample")
                continue
            tokens = request.tokens
            tokens.append(token)
            length = len(tokens)
            if length >= request.limit or token in request.stop_ids:
                reason = _reason(request, token)
                if reason is not None:
                    self._finish(request, reason)
                    finished.append(request)
                    ended = True
                    continue
        if step.n_decodes < len(step.requests):
            self._promote()
        if ended:
            self._decoding = [r for r in self._decoding if r.status is running]
            self._prefilling = [r for r in self._prefilling if r.status is running]
            for request in finished:
                self.requests.pop(request.id, None)
        return finished

    def abandon(self, step: ScheduledStep) -> None:
        """``step`` was not computed to its end (an error, Ctrl-C): its tokens stay due, and its ``grown`` are told once more.

        Keys and values that it wrote will be written again, the same."""
        if step is not self._in_flight:
            raise RuntimeError("abandon() must follow schedule() with the step it returned")
        self._in_flight = None
        for fork in self._copied:  # its page may not have been copied, and what it should hold may change before the next step
            if fork.status is Status.RUNNING:
                self._preempt(fork)
        self._grown_untold = [r for r in step.grown if r.status is Status.RUNNING]
        for request in step.requests:
            if request.status is Status.FINISHED:
                self._release(request)
        self._decoding = [r for r in self._decoding if r.status is Status.RUNNING]
        self._prefilling = [r for r in self._prefilling if r.status is Status.RUNNING]
        self._promote()  # one that was admitted for a single token

    def _promote(self) -> None:
        """Whoever lacks exactly one token decodes: it goes first in every step, whatever its turn."""
        self._decoding += [r for r in self._prefilling if len(r.tokens) - r.n_computed == 1]
        self._prefilling = [r for r in self._prefilling if len(r.tokens) - r.n_computed > 1]

    def _pages_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.config.page_tokens)

    def _grow(self, request: Request, grown: list[Request], preempted: list[str]) -> None:
        """One more page for ``request``, preempting the last arrived ones until there is one; it may be preempted itself."""
        while True:
            last = request.pages[-1] if request.pages else -1
            pages = self.pool.take(1, after=last)
            if pages is not None:
                request.pages += pages
                request.capacity += self.config.page_tokens
                grown.append(request)
                return
            victim = max((*self._decoding, *self._prefilling), key=_rank)
            self._preempt(victim)
            preempted.append(victim.id)
            if victim is request:
                return

    def _make_way(self, preempted: list[str]) -> None:
        """Preempt running requests of lower priority, the lowest and last first, where the first that waits could then run."""
        first = self._waiting.first()
        assert first is not None
        lower = [r for r in (*self._decoding, *self._prefilling) if r.priority > first.priority]
        if not lower:
            return
        lower.sort(key=_rank)
        # Prefix hits are not counted on: at worst somebody makes way who need not have.
        n_free, n_needed, n_slots = self.pool.n_free, self._pages_for(len(first.tokens)), len(self._slots)
        n_running = self.n_running
        for n_victims in range(len(lower) + 1):
            if n_free >= n_needed + n_running - n_victims and n_slots + n_victims > 0:
                break
            if n_victims < len(lower):
                n_free += len(self.pool.sole(lower[-1 - n_victims].pages))
        else:
            return
        for victim in reversed(lower[len(lower) - n_victims :]):
            self._preempt(victim)
            preempted.append(victim.id)

    def _preempt(self, request: Request) -> None:
        (self._decoding if request in self._decoding else self._prefilling).remove(request)
        self._release(request)
        request.status = Status.WAITING
        request.n_computed = 0
        request.n_preemptions += 1
        self.n_preemptions += 1
        self._waiting.add(request)
        self._queue_forks(request)

    def _admit(self, request: Request) -> bool:
        """Give the first waiting request its pages, known prefix first; False (and nothing changed) where too few are free."""
        c, pool = self.config, self.pool
        if self._blocked == (request, pool.n_released):
            return False  # no page has come back since it was looked at: a long prompt is not matched again in every step
        n_known = len(request.tokens)
        n_needed = self._pages_for(n_known)
        self._extend_keys(request)
        # At least one token must be computed to have logits, hence the cap at length − 1; and only whole pages are shared.
        most_hits = 0 if request.params.prompt_logprobs is not None else (n_known - 1) // c.page_tokens
        hits = pool.tree.match(request.page_keys, request.tokens, c.page_tokens, most_hits)
        n_hits_free = sum(map(pool.is_free, hits))
        margin = self.n_running
        if n_needed - len(hits) + n_hits_free + margin > pool.n_free:
            self._blocked = (request, pool.n_released)
            return False
        pool.retain(hits)
        fresh = pool.take(n_needed - len(hits), after=hits[-1] if hits else -1)
        assert fresh is not None  # counted above
        self._start(request, hits + fresh, len(hits), len(hits) * c.page_tokens)
        return True

    def _fork(self, request: Request, copies: list[tuple[int, int]]) -> bool:
        """Start ``request`` from what its original has computed; False (and nothing changed) where that cannot be.

        All but the prompt's last token is taken over: that one is computed again, because its logits are what is sampled from.
        """
        original, c = request.fork_of, self.config
        if original is None or original.status is not Status.RUNNING or original.n_computed < request.n_prompt:
            return False
        if request.n_output:  # preempted since: it has tokens of its own
            return False
        n_computed = request.n_prompt - 1
        if c.window is not None and original.n_dropped > self._first_seen(n_computed, c.window):
            return False  # it has gone on so far that pages are given back which the fork still sees
        n_shared = n_computed // c.page_tokens
        shared = original.pages[:n_shared]
        n_fresh = self._pages_for(request.n_prompt) - n_shared
        if n_fresh + self.n_running > self.pool.n_free:
            return False
        self.pool.retain(page for page in shared if page >= 0)
        fresh = self.pool.take(n_fresh, after=shared[-1] if shared else -1)
        assert fresh is not None  # counted above
        if n_computed % c.page_tokens:
            copies.append((original.pages[n_shared], fresh[0]))
            self._copied.append(request)
        self._extend_keys(request)
        request.n_dropped = original.n_dropped
        self._start(request, shared + fresh, n_shared, n_computed)
        return True

    def _start(self, request: Request, pages: list[int], n_registered: int, n_computed: int) -> None:
        request.pages = pages
        request.capacity = len(pages) * self.config.page_tokens
        request.n_computed = request.n_prefix_hit = n_computed
        request.n_registered = n_registered
        request.slot = self._slots.pop()
        request.status = Status.RUNNING
        if request.n_preemptions == 0:
            self.n_prompt_tokens += request.n_prompt
            self.n_prefix_hit_tokens += n_computed
        self._prefilling.append(request)

    def _queue_forks(self, request: Request) -> None:
        """``request`` has computed its prompt, or will not before others: its forks wait like everyone else."""
        for fork in request.forks:
            self._waiting.add(fork)
        self._n_held -= len(request.forks)
        request.forks = []

    def _first_seen(self, position: int, window: int) -> int:
        """The first page that the query at ``position`` sees."""
        return max(0, position - window + 1) // self.config.page_tokens

    def _drop_passed(self, request: Request, window: int) -> None:
        """Give back the pages that no later query can see: the next one, at ``n_computed``, sees the last ``window`` tokens."""
        first_seen = self._first_seen(request.n_computed, window)
        if first_seen > request.n_dropped:
            self.pool.release(request.pages[request.n_dropped : first_seen])
            request.pages[request.n_dropped : first_seen] = [-1] * (first_seen - request.n_dropped)
            request.n_dropped = first_seen

    def _extend_keys(self, request: Request) -> None:
        """Hash the full pages that were not hashed yet; a request that waits through many attempts is hashed once."""
        page_tokens, keys, tokens = self.config.page_tokens, request.page_keys, request.tokens
        if len(tokens) // page_tokens == len(keys):
            return
        parent = keys[-1] if keys else root_of(request.client) if self.config.separate_prefixes else ROOT
        for i in range(len(keys), len(tokens) // page_tokens):
            parent = chain_key(parent, tokens[i * page_tokens : (i + 1) * page_tokens])
            keys.append(parent)

    def _register(self, request: Request) -> None:
        """Offer the pages that this step filled to the prefix tree."""
        page_tokens = self.config.page_tokens
        self._extend_keys(request)
        for i in range(request.n_registered, request.n_computed // page_tokens):
            tokens = request.tokens[i * page_tokens : (i + 1) * page_tokens]
            self.pool.tree.insert(request.page_keys[i], tokens, request.pages[i])
        request.n_registered = request.n_computed // page_tokens

    def _finish(self, request: Request, reason: FinishReason) -> None:
        was_waiting = request.status is Status.WAITING
        request.status = Status.FINISHED
        request.finish_reason = reason
        assert request.account is not None
        self._accounts.close(request.account)
        self._queue_forks(request)
        if was_waiting:
            original = request.fork_of
            if original is not None and request in original.forks:
                original.forks.remove(request)
                self._n_held -= 1
            else:
                self._waiting.remove(request)
        elif self._in_flight is None or request not in self._in_flight.requests:
            self._release(request)
            if reason in ("abort", "timeout"):
                (self._decoding if request in self._decoding else self._prefilling).remove(request)

    def _release(self, request: Request) -> None:
        self.pool.release(request.pages[request.n_dropped :])
        self._slots.append(request.slot)
        request.pages = []
        request.n_dropped = 0
        request.capacity = 0
        request.n_registered = 0
        request.slot = -1


def _rank(request: Request) -> tuple[int, int]:
    return (request.priority, request.arrival)


def _reason(request: Request, token: int) -> FinishReason | None:
    length = len(request.tokens)
    if token in request.stop_ids and length > request.min_length:
        return "stop"
    return "length" if length >= request.limit else None
