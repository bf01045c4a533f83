"""The scheduler decides which tokens of which requests are computed in the next step.

It has no phases. A step is ``{request: number of tokens}``, and each request's computed count catches up with its token count.
Chunked prefill, prefix hits and resumption after preemption all follow from that one rule, as in vLLM's V1 scheduler.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush

from twostroke.core.errors import CapacityError, InputError
from twostroke.core.policy import BEHIND_TOKENS, BESIDE_TOKENS, QUIET_STEPS
from twostroke.scheduling.accounts import OUTPUT_WEIGHT, Accounts
from twostroke.scheduling.admission import Adapters, Admission, slots_of
from twostroke.scheduling.beams import Beams, BeamSearch
from twostroke.scheduling.lower_tier import LowerTier
from twostroke.scheduling.pace import Pace, Room
from twostroke.scheduling.page_lists import PageLists
from twostroke.scheduling.pages import PagePool
from twostroke.scheduling.request import FinishReason, Request, Status
from twostroke.scheduling.step import Propose, ScheduledStep, SchedulerConfig
from twostroke.scheduling.waiting import WaitingQueue, queue_rank


class Scheduler:
    """The scheduler decides by three rules.

    1. Every decoding request gets its token first, so that no prefill can starve it; only one of a lower priority than a prompt
       in the step waits for it.
    2. The rest of the token budget goes to prompts, in chunks; beside decoding requests no more of it than ``pace`` has room
       for, so that their next tokens are not late. Prompts under way and waiting prompts share one order, by
       ``queue_rank``. So a prompt of 100,000 tokens shares each step with another client's short one; in order of arrival the
       short one would wait about 200 steps of 512 tokens. Prompts that were put behind others (a priority above 0) get at most
       ``BEHIND_TOKENS`` of a step, ``BESIDE_TOKENS`` if a request of a lower value decodes in it or one of priority 0 was in
       one of the last ``QUIET_STEPS`` steps, and none beside a prompt of a lower value.
    3. A waiting request is admitted only if pages for all its known tokens are free and each running request could still take
       one page more. It holds those pages from then on, so that only decoding can run out of pages. Of one client's next few
       the one goes first of whose prompt most is cached, and passes nobody who was passed ``MOST_PASSED`` times.

    Two events preempt a running request: decoding runs out of pages, or a request of higher priority waits and could run in its
    place. The victim is the running request of the lowest priority that arrived last. Its pages are freed, and it waits to be
    recomputed from its tokens, which gives the same keys and values. Requests of equal priority never preempt each other for
    admission, and the first can always run, so there is always progress.

    A decoding request may have drafts: tokens that are guessed to follow its last one. Those that turn out to be right count as
    computed, and the pages that only others needed are freed again. Drafts take what prompts leave of the token budget, and
    pages only where admission would still find enough; they never preempt a request.

    A fork (a further answer to one prompt) shares the whole pages of its original and gets a copy of the page that both will
    write to. Of its prompt only the last token is computed again.

    The sequences of a beam search (``beams.Beams``) decode together, and ``go_on`` makes those that were chosen follow. They
    share whole pages; one that is about to write to a page that others hold too gets a copy of it. If one is preempted, all
    are. Then what they have in common is computed once, they share its pages again, and decode once each has caught up.

    What a request runs with (pages, a slot, room for its adapter) is given and taken back by ``admission``. Pages that the
    prefix tree has lost may be in a lower tier: an admitted request loads them before its first chunk, in slices if other
    requests decode.
    """

    look_ahead = 8
    """Waiting requests behind the first, of the same client, that are asked how much of their prompt is cached."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool | None = None,
        adapters: Adapters | None = None,
        lower: LowerTier | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.config = config
        self.pace = pace
        self.pool = pool or PagePool(config.n_pages)
        self.page_lists = PageLists(config, self.pool)
        self.admission = Admission(config, self.page_lists, adapters, lower, self._tokens_to_hold)
        self.requests: dict[str, Request] = {}  # unfinished ones
        self._waiting = WaitingQueue()
        self._n_held = 0  # forks that wait for their original to compute the prompt; they are not in ``_waiting``
        self._accounts = Accounts()
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap; finished requests stay in it until their deadline
        self.searching: list[Beams] = []  # of the running requests that search
        self._prefilling: list[Request] = []  # admitted, prompt not yet computed; in order of admission
        self._decoding: list[Request] = []  # exactly one token is due
        self._in_flight: ScheduledStep | None = None
        self._unreported_growth: list[Request] = []  # ``grown`` of an abandoned step, reported with the next one
        self._n_arrived = 0
        self._n_steps = 0
        self._until_quiet = 0  # number of the step from which on no request of priority 0 was seen lately
        self.n_preemptions = 0
        self.n_drafted = 0  # tokens that steps checked
        self.n_drafts_right = 0

    @property
    def n_waiting(self) -> int:
        return len(self._waiting) + self._n_held

    @property
    def n_running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def decoding(self) -> Sequence[Request]:
        """Requests that lack exactly one token, in the order of their rows in a step."""
        return self._decoding

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add(self, request: Request) -> None:
        """Queue ``request``. Raises InputError for an empty prompt, an id in use or more beams than may run, and
        CapacityError if it could never fit."""
        c = self.config
        if request.id in self.requests:
            raise InputError(f"request id {request.id!r} is already in use. Give each unfinished request its own id.")
        if request.n_prompt == 0:
            raise InputError("the prompt has no tokens. Give at least one.")
        if request.n_prompt >= c.max_model_len:
            raise CapacityError(
                f"the prompt has {request.n_prompt} tokens and max_model_len={c.max_model_len} must hold at least one more. "
                "Shorten the prompt or raise max_model_len."
            )
        request.limit = min(request.limit, c.max_model_len)
        n_pages = self.admission.most_pages(request)
        if request.beams is not None:
            if request.beams.width > c.max_running:
                raise InputError(
                    f"a search of {request.beams.width} beams needs as many running requests, and max_running={c.max_running}. "
                    "Lower best_of or n, or raise max_running.",
                    field="n",
                )
            request.beams.limit(request.limit - request.n_prompt)
        if n_pages > c.n_pages:
            raise CapacityError(
                f"prompt and output of {request.limit} tokens need {n_pages} KV-cache pages, and the cache has {c.n_pages}. "
                "Lower max_tokens, shorten the prompt or raise kv_cache_bytes."
            )
        request.arrival = self._n_arrived
        self._n_arrived += 1
        original = request.fork_of
        request.weights = self.page_lists.weights if original is None else original.weights
        self.requests[request.id] = request
        request.account = self._accounts.open(request.client)
        if original is not None:
            request.page_keys = original.page_keys[: request.n_prompt // c.page_tokens]
        self.page_lists.hash_full_pages(request)  # here and not at admission, because running requests wait for schedule()
        if request.deadline is not None:
            # The heap keeps finished requests alive. Rebuild it once they are more than half of it.
            if len(self._deadlines) > 2 * len(self.requests) + 64:
                self._deadlines = [entry for entry in self._deadlines if entry[2].status is not Status.FINISHED]
                heapify(self._deadlines)
            heappush(self._deadlines, (request.deadline, request.arrival, request))
        if original is not None and original.status is not Status.FINISHED and original.n_computed < original.n_prompt:
            original.forks.append(request)
            self._n_held += 1
        else:
            self._waiting.add(request)

    def abort(self, request_id: str) -> Request | None:
        """Cancel a request. Its pages are free when this returns, or after ``update`` if the current step computes it.

        Returns None if the id is unknown or the request has finished."""
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

    def change_weights(self, weights: bytes, carry_on: bool) -> None:
        """From now on new requests are computed by ``weights``, and so are those that wait and have computed nothing. With
        ``carry_on`` the others are too: running ones are preempted, and their tokens are computed again. Without, they keep
        their weights until they end. Answers to one prompt are computed by the same weights.

        No step may be under way.
        """
        if self._in_flight is not None:
            raise RuntimeError("change_weights() was called before update() of the step under way")
        n_preemptions = self.n_preemptions  # which counts those for lack of pages
        for request in [*self._decoding, *self._prefilling] if carry_on else ():
            if request.status is Status.RUNNING:  # else it was preempted with another sequence of its search
                self._preempt(request)
        self.n_preemptions = n_preemptions
        self.page_lists.weights = weights
        self.admission.unblock()
        for request in self.requests.values():
            first = request if request.fork_of is None else request.fork_of
            if carry_on or (first.status is Status.WAITING and first.n_preemptions == 0):
                request.weights = weights
                request.page_keys = []  # hashed again at admission
                for beam in () if request.beams is None else request.beams.members:
                    beam.weights = weights
            else:
                request.restorable = 0  # the lower tier is the new weights' from now on

    def schedule(self, propose: Propose | None = None) -> ScheduledStep:
        """Decide the next step and allocate its pages. Call ``update`` or ``abandon`` before the next ``schedule``. ``propose``
        is asked for drafts once the rest of the step is decided.

        It takes 12 to 35 µs with 256 running requests (tests/scheduling/test_fairness.py holds it below 100 µs)."""
        if self._in_flight is not None:
            raise RuntimeError("schedule() was called before update() of the step under way")
        grown, self._unreported_growth = self._unreported_growth, []
        preempted: list[str] = []
        self.admission.copied = []
        for request in [r for r in self._decoding if r.n_computed >= r.capacity]:
            if request.status is Status.RUNNING:  # an earlier request of this loop may have preempted it
                self._allocate_one_page(request, grown, preempted)
        parted = self._part_pages(grown, preempted) if self.searching else []  # and pages for those that catch up
        admitting = not preempted  # pages just ran out, and a newly admitted request would cause the next preemption
        if admitting and self._waiting:
            self._preempt_for_priority(preempted)
        budget = self._prompt_budget(len(self._decoding))
        scored = budget if self.config.scored_rows is None else self.config.scored_rows
        copies: list[tuple[int, int]] = []
        under_way = sorted(self._prefilling, key=queue_rank) if len(self._prefilling) > 1 else self._prefilling.copy()
        if self.searching:
            under_way = [r for r in under_way if self._due(r) > 0]
        admission = self.admission
        first = self._waiting.first() if admitting and admission.slots else None
        ahead = min((r.priority for r in (*under_way[:1], *(() if first is None else (first,)))), default=None)
        requests = self._decoding.copy() if ahead is None else self._not_behind(ahead)
        n_decodes = len(requests)
        counts = [1] * n_decodes
        lately = self._n_steps < self._until_quiet
        room: Room | None = None
        under_way.reverse()  # pop() takes the last, in constant time
        while budget > 0:
            first = self._waiting.first() if admitting and admission.slots else None
            if first is not None and under_way and queue_rank(under_way[-1]) < queue_rank(first):
                first = None
            if first is None and not under_way:
                break
            request = first or under_way[-1]
            if request.priority > 0:
                beside = lately or any(r.priority < request.priority for r in requests[:n_decodes])
                budget = min(budget, (BESIDE_TOKENS if beside else BEHIND_TOKENS) - sum(counts[n_decodes:]))
                urgent = len(requests) > n_decodes and requests[n_decodes].priority < request.priority
                if urgent or budget <= 0:
                    break
            if first is None:
                under_way.pop()
            elif (admitted := self._admit(first, copies)) is not None:
                grown.append(admitted)
                request = admitted
            else:
                admitting = False
                continue
            if request.restorable and admission.lower is not None and not admission.restore(request, n_decodes > 0):
                continue  # it loads further pages in the next step
            n = self._chunk(self._due(request), budget)
            if n and n_decodes and self.pace is not None:
                room = room or self.pace.beside(requests[:n_decodes], self._others(request))
                fits = room.take(request.n_computed, n)
                if fits < n:
                    budget = n = fits  # nothing goes behind it, neither prompts nor drafts
            if n == 0:
                break  # it keeps its pages and its place
            if request.params.prompt_logprobs is not None:
                n = min(n, scored)
                scored -= n
                if n == 0:
                    continue  # it keeps its pages, and the rest of the budget goes to other requests
            requests.append(request)
            counts.append(n)
            budget -= n
        if n_decodes < len(self._decoding) and not any(r.priority == ahead for r in requests[n_decodes:]):
            requests[:n_decodes], counts[:n_decodes] = self._decoding, [1] * len(self._decoding)
            n_decodes = len(self._decoding)  # nobody found a place before them
        grown = [r for r in grown if r.status is Status.RUNNING]  # some may have been preempted since
        copies += [(source, target) for source, target, holder in parted if target in holder.pages]
        self._n_steps += 1
        if any(r.priority <= 0 for r in requests):
            self._until_quiet = self._n_steps + QUIET_STEPS
        step = ScheduledStep(
            self._n_steps, requests, counts, [r.n_computed for r in requests], n_decodes, grown, preempted, copies
        )
        self._in_flight = step
        n_drafts = min(budget, self.config.draft_rows)
        if propose is not None and n_decodes and n_drafts > 0:
            try:
                self._draft(propose, step, n_drafts)
            except BaseException:  # Ctrl-C too, since a model may compute the drafts
                self.abandon(step)
                raise
        return step

    def _admit(self, first: Request, copies: list[tuple[int, int]]) -> Request | None:
        """Let ``first`` or one behind it run. Returns which, or None if there is no room."""
        admitted = self.admission.admit(first, self._waiting, self.look_ahead, self.n_running, copies)
        if admitted is not None:
            self._waiting.remove(admitted)
            self._prefilling.append(admitted)
            if admitted.beams is not None:
                self.searching.append(admitted.beams)
        return admitted

    def _others(self, one: Request) -> int:
        """Requests beside ``one`` that wait for their first token, without those put behind it."""
        first = self._waiting.first()
        n_waiting = 0 if first is None or first.priority > one.priority else self.n_waiting
        return n_waiting + sum([r.priority <= one.priority for r in self._prefilling]) - 1

    def _not_behind(self, ahead: int) -> list[Request]:
        """The decoding requests that a prompt of priority ``ahead`` does not go before. Sequences of a search stay together."""
        return [r for r in self._decoding if r.priority <= ahead or r.beams is not None]

    def _draft(self, propose: Propose, step: ScheduledStep, room: int) -> None:
        """Add to ``step`` what is proposed for its decoding requests, cut to what can be right and to the pages there are."""
        for i, tokens in propose(step.requests[: step.n_decodes], step.n_tokens, room).items():
            request = step.requests[i]
            # The row behind the last draft yields one token more, and what ends a request is not computed.
            n = min(len(tokens), room, request.limit - len(request.tokens) - 1)
            draft = list(tokens[: max(0, n)])
            ends = [at for at, token in enumerate(draft) if token in request.stop_ids]
            del draft[ends[0] if ends else len(draft) :]
            del draft[self.reserve(request, len(draft)) :]
            if draft:
                step.drafts[i] = draft
                step.counts[i] += len(draft)
                room -= len(draft)

    def reserve(self, request: Request, n: int) -> int:
        """Take pages for ``n`` drafts of a request that decodes in the step that is being decided. Returns for how many there
        is room: one page is left for each running request."""
        assert self._in_flight is not None
        short = request.n_computed + 1 + n - request.capacity
        if short <= 0:
            return n
        n_pages = self.page_lists.pages_for(short)
        if n_pages + self.n_running > self.pool.n_free:
            return n - short
        pages = self.pool.allocate(n_pages, after=request.pages[-1])
        if pages is None:
            return n - short
        request.pages += pages
        request.capacity += n_pages * self.config.page_tokens
        self._in_flight.grown.append(request)
        return n

    def update(
        self, step: ScheduledStep, sampled: Sequence[int | Sequence[int] | None], failed: Collection[str] = ()
    ) -> list[Request]:
        """Record that ``step`` was computed. Returns the requests that finished.

        ``sampled`` has one entry for each of ``step.requests``: its new token, or None if the step did not reach the end of the
        request's tokens or the request searches (``go_on``). Of a request with drafts it has the drafts that were right and the
        token behind them. Ids in ``failed`` end with ``"error"`` (searches by ``fail``), and the prefix tree never offers the
        pages that they computed.
        """
        if step is not self._in_flight:
            raise RuntimeError("update() must follow schedule() with the step it returned")
        if len(sampled) != len(step.requests):
            raise ValueError(f"{len(sampled)} samples for {len(step.requests)} requests")
        self._in_flight = None
        self.admission.release_sources()
        finished: list[Request] = []
        page_tokens, window, drafts = self.config.page_tokens, self.config.window, step.drafts
        running, ended = Status.RUNNING, False
        for i, (request, token) in enumerate(zip(step.requests, sampled, strict=True)):
            if request.status is not running:  # aborted or timed out during the step; the engine was writing to its pages
                ended = True
                self.admission.release(request)
                continue
            if failed and request.id in failed:
                self.pool.discard_content(request.pages)
                if self.admission.lower is not None and self.admission.in_lower(request):
                    self.admission.lower.forget(request.page_keys)
                if request.beams is None:  # else ``fail`` ends all of its sequences
                    self._finish(request, "error")
                    finished.append(request)
                    ended = True
                continue
            n_rows = step.counts[i]
            if drafts and i in drafts:
                assert isinstance(token, Sequence)
                n_rows, token = self._take_drafts(request, token, drafts[i])
            assert token is None or isinstance(token, int)
            n_computed = request.n_computed = request.n_computed + n_rows
            if n_computed // page_tokens > request.n_registered:
                self.page_lists.register(request)
                if window is not None:
                    self.page_lists.free_before_window(request, window)
            account = request.account
            assert account is not None
            # The first ``n_decodes`` requests decode.
            account.served += n_rows if i >= step.n_decodes else n_rows * OUTPUT_WEIGHT
            if request.forks and n_computed >= request.n_prompt:
                self._queue_forks(request)
            if token is None:
                if n_computed == len(request.tokens):
                    if request.beams is not None:  # its sequences go on in ``go_on``
                        if request.beams.folded:
                            self._unfold(request.beams)
                        continue
                    raise ValueError(f"the step computed the last token of request {request.id!r}, and its sample is None")
                continue
            tokens = request.tokens
            tokens.append(token)
            length = len(tokens)
            if length >= request.limit or token in request.stop_ids:
                reason = _finish_reason(request, token)
                if reason is not None:
                    self._finish(request, reason)
                    finished.append(request)
                    ended = True
                    continue
        for i in drafts:
            if step.requests[i].status is running:
                self._roll_back(step.requests[i])
        if step.n_decodes < len(step.requests) or self.searching:
            self._move_to_decoding()
        if ended:
            self._decoding = [r for r in self._decoding if r.status is running]
            self._prefilling = [r for r in self._prefilling if r.status is running]
            for request in finished:
                self.requests.pop(request.id, None)
        return finished

    def _take_drafts(self, request: Request, sampled: Sequence[int], draft: Sequence[int]) -> tuple[int, int]:
        """Append the drafts that were right. Returns how many of the request's rows count, and its new token."""
        *right, token = sampled
        if right != list(draft[: len(right)]):
            raise ValueError(f"request {request.id!r} drafted {list(draft)}, and {right} are said to be right")
        request.tokens += right
        self.n_drafted += len(draft)
        self.n_drafts_right += len(right)
        return len(sampled), token

    def _roll_back(self, request: Request) -> None:
        """Free the pages that only wrong drafts needed. What stands in the others is overwritten by the right tokens."""
        n_held = self.page_lists.pages_for(request.n_computed)
        if len(request.pages) > n_held:
            self.pool.release(request.pages[n_held:])
            del request.pages[n_held:]
            request.capacity = n_held * self.config.page_tokens

    def abandon(self, step: ScheduledStep) -> None:
        """Record that ``step`` was not computed to its end (an error, Ctrl-C).

        Its tokens are scheduled again, and the next step reports its ``grown`` again. Keys and values that it wrote are
        overwritten with the same ones."""
        if step is not self._in_flight:
            raise RuntimeError("abandon() must follow schedule() with the step it returned")
        self._in_flight = None
        # Its copy may be missing, and another request may change that page before the next step.
        for copied in self.admission.copied:
            copied.n_computed = copied.n_registered * self.config.page_tokens
            if copied.status is Status.RUNNING:
                self._preempt(copied)
        self.admission.release_sources()
        self._unreported_growth = [r for r in step.grown if r.status is Status.RUNNING]
        for request in step.requests:
            if request.status is Status.FINISHED:
                self.admission.release(request)
        self._decoding = [r for r in self._decoding if r.status is Status.RUNNING]
        self._prefilling = [r for r in self._prefilling if r.status is Status.RUNNING]
        self._move_to_decoding()  # a prompt that lacks a single token, for instance a fork's

    def _move_to_decoding(self) -> None:
        """Move requests that lack exactly one token to ``_decoding``, which goes first in every step whatever its rank."""
        for beams in self.searching:
            if beams.catching_up and beams.caught_up:
                beams.catching_up = False
        self._decoding += [r for r in self._prefilling if len(r.tokens) - r.n_computed == 1 and not _catches_up(r)]
        self._prefilling = [r for r in self._prefilling if len(r.tokens) - r.n_computed > 1 or _catches_up(r)]

    # -- what other engines decide otherwise (planner.serving.policies)

    def _prompt_budget(self, n_decodes: int) -> int:
        """Tokens of prompts that a step may compute beside ``n_decodes`` decoding requests."""
        return self.config.token_budget - n_decodes

    def _chunk(self, n_left: int, budget: int) -> int:
        """Tokens that a step computes of a prompt that has ``n_left``; 0 ends the step."""
        return min(budget, n_left)

    @staticmethod
    def _tokens_to_hold(request: Request) -> int:
        """Tokens whose pages a request gets at admission."""
        return len(request.tokens)

    def _allocate_one_page(self, request: Request, grown: list[Request], preempted: list[str]) -> None:
        """Give ``request`` one page more, or preempt it."""
        page = self._one_page(request, request.pages[-1] if request.pages else -1, preempted)
        if page is not None:
            request.pages.append(page)
            request.capacity += self.config.page_tokens
            grown.append(request)

    def _one_page(self, request: Request, after: int, preempted: list[str]) -> int | None:
        """A page for ``request``. Until one is free, preempt the last request by rank; None if that was ``request``."""
        while True:
            pages = self.pool.allocate(1, after=after)
            if pages is not None:
                return pages[0]
            victim = max((*self._decoding, *self._prefilling), key=_preemption_rank)
            self._preempt(victim)
            preempted.append(victim.id)
            if request.status is not Status.RUNNING:
                return None

    # -- beam search

    def go_on(self, root: Request, search: BeamSearch) -> None:
        """Go on with the sequences that ``search`` chose after the step of the last ``update``, or end ``root`` if it is done.

        The best continuation of a sequence stays in its request. Others take over a request whose sequence ended, and the page
        list of the one that they continue. No page is allocated, so this cannot fail."""
        beams = root.beams
        assert beams is not None
        beams.search = search
        if search.done:
            del self.requests[root.id]
            self._end_beams(beams, "stop" if search.ended and search.ended[0][1].stopped else "length")
            return
        old = beams.live
        places = beams.heirs(search)
        kept = set(places)
        for i, request in enumerate(old):
            if i not in kept:
                self.page_lists.drop(request)
                # The root is taken first, so that it is seldom idle.
                beams.idle.insert(len(beams.idle) if request is root else 0, request)
        live = []
        for beam, place in zip(search.live, places, strict=True):
            if place >= 0:
                live.append(old[place])
                continue
            request = beams.idle.pop() if beams.idle else self._another(beams)
            self._inherit(request, old[beam.place])
            live.append(request)
        for request, beam in zip(live, search.live, strict=True):
            request.tokens.append(beam.token)
        beams.live = live
        self._decoding = [r for r in self._decoding if r.beams is not beams] + live

    def fail(self, root: Request) -> None:
        """End all sequences of ``root`` with ``"error"``, because one of them failed in the step of the last ``update``."""
        assert root.beams is not None
        del self.requests[root.id]
        self._end_beams(root.beams, "error")

    def _another(self, beams: Beams) -> Request:
        """One more sequence of the search, with no tokens yet."""
        root = beams.root
        name = f"{root.id}\x1f{len(beams.slots)}"
        made = Request(name, (), root.params.of_fork(1), root.priority, (), root.client, None, root, root.adapter)
        made.beams, made.account, made.arrival, made.status = beams, root.account, root.arrival, Status.RUNNING
        made.weights = root.weights
        made.n_prompt, made.limit, made.min_length, made.stop_ids = root.n_prompt, root.limit, root.min_length, root.stop_ids
        made.slot = beams.slots.pop()
        return made

    def _inherit(self, request: Request, parent: Request) -> None:
        """Give ``request`` the tokens of ``parent`` and a share of its pages."""
        self.pool.retain(page for page in parent.pages if page >= 0)
        request.tokens, request.pages, request.page_keys = parent.tokens.copy(), parent.pages.copy(), parent.page_keys.copy()
        request.n_computed, request.n_registered = parent.n_computed, parent.n_registered
        request.n_dropped, request.capacity = parent.n_dropped, parent.capacity
        request.adjuster = None
        self._unreported_growth.append(request)  # the engine's table has another sequence's pages

    def _part_pages(self, grown: list[Request], preempted: list[str]) -> list[tuple[int, int, Request]]:
        """Give each sequence a page of its own to write to. Returns (page, its copy, holder of the copy)."""
        parted = []
        for beams in self.searching.copy():
            for request in beams.live if len(beams.live) > 1 else ():
                while beams.catching_up and request.capacity < len(request.tokens) and request.status is Status.RUNNING:
                    self._allocate_one_page(request, grown, preempted)
                at = request.n_computed // self.config.page_tokens
                if request.status is not Status.RUNNING:
                    break  # the search was preempted
                source = request.pages[at] if at < len(request.pages) else -1
                if source < 0 or self.pool.references[source] == 1:
                    continue
                page = self._one_page(request, request.pages[at - 1] if at else -1, preempted)
                if page is not None:
                    request.pages[at] = page
                    self.pool.release((source,))
                    parted.append((source, page, request))
                    self.admission.copied.append(request)
                    grown.append(request)
        return parted

    def _fold(self, beams: Beams) -> None:
        """Preempt all sequences of a search: its root waits for them."""
        self._retire(beams, Status.WAITING)
        beams.fold()
        root = beams.root
        del root.page_keys[root.n_prompt // self.config.page_tokens :]
        root.n_computed = 0
        root.adjuster = None

    def _unfold(self, beams: Beams) -> None:
        """Let the sequences of a search that was preempted share what their root has computed, and catch up."""
        root = beams.root
        others = [self._another(beams) for _ in beams.search.live[1:]]
        for request in others:
            self._inherit(request, root)
        beams.unfold(others)
        self._decoding = [r for r in self._decoding if r is not root]
        self._prefilling = [r for r in self._prefilling if r is not root] + beams.live

    def _due(self, request: Request) -> int:
        """Tokens that may be computed now: a sequence that catches up leaves its last one to a step with the others."""
        return len(request.tokens) - request.n_computed - _catches_up(request)

    def _end_beams(self, beams: Beams, reason: FinishReason) -> None:
        root = beams.root
        root.finish_reason = reason
        assert root.account is not None
        self._accounts.close(root.account)
        self._retire(beams, Status.FINISHED)

    def _retire(self, beams: Beams, status: Status) -> None:
        """Take the sequences out of the steps. What the current step computes is released after it, by ``update``."""
        computed = () if self._in_flight is None else self._in_flight.requests
        for request in beams.members:
            request.status = status
            if request not in computed:
                self.admission.release(request)
        self.admission.slots += beams.slots
        beams.slots = []
        self.searching.remove(beams)
        self._decoding = [r for r in self._decoding if r.beams is not beams]
        self._prefilling = [r for r in self._prefilling if r.beams is not beams]

    def _preempt_for_priority(self, preempted: list[str]) -> None:
        """Preempt the fewest running requests of lower priority that let the first waiting request run.

        If even all of them would not free enough, none is preempted: their work would be lost for nothing."""
        first = self._waiting.first()
        assert first is not None
        lower = [r for r in (*self._decoding, *self._prefilling) if r.priority > first.priority]
        if not lower:
            return
        lower.sort(key=_preemption_rank)
        # Prefix hits are not subtracted from ``n_needed``: matching them would hash and compare a long prompt in every step. At
        # worst one request more is preempted than necessary.
        n_free, n_needed, n_running = self.pool.n_free, self.admission.pages_to_start(first), self.n_running
        n_slots = len(self.admission.slots) - slots_of(first)
        for n_victims in range(len(lower) + 1):
            if n_free >= n_needed + n_running - n_victims and n_slots + n_victims >= 0:  # the condition of ``Admission``
                break
            if n_victims < len(lower):
                n_free += len(self.pool.unshared(lower[-1 - n_victims].pages))
        else:
            return
        for victim in reversed(lower[len(lower) - n_victims :]):
            if victim.status is Status.RUNNING:  # else it was preempted with another sequence of its search
                self._preempt(victim)
                preempted.append(victim.id)

    def _preempt(self, request: Request) -> None:
        if request.beams is not None:
            request = request.beams.root
            assert request.beams is not None
            self._fold(request.beams)
        else:
            (self._decoding if request in self._decoding else self._prefilling).remove(request)
            self.admission.release(request)
            request.status = Status.WAITING
            request.n_computed = 0
        request.restorable = 0
        request.n_preemptions += 1
        self.n_preemptions += 1
        self._waiting.add(request)
        self._queue_forks(request)

    def _queue_forks(self, request: Request) -> None:
        """Put the forks of ``request`` into the waiting queue: it has computed their prompt, or was preempted or ended
        before."""
        for fork in request.forks:
            self._waiting.add(fork)
        self._n_held -= len(request.forks)
        request.forks = []

    def _finish(self, request: Request, reason: FinishReason) -> None:
        was_waiting = request.status is Status.WAITING
        if request.beams is not None and not was_waiting:
            self._end_beams(request.beams, reason)
            return
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
            self.admission.release(request)  # else ``update`` does, because the step still writes to the request's pages
            if reason in ("abort", "timeout"):
                (self._decoding if request in self._decoding else self._prefilling).remove(request)


def _catches_up(request: Request) -> bool:
    return request.beams is not None and request.beams.catching_up


def _preemption_rank(request: Request) -> tuple[int, int]:
    """The largest is preempted first: the lowest priority, and of that the last arrival. So the first arrival of the highest
    priority is preempted only if it runs alone."""
    return (request.priority, request.arrival)


def _finish_reason(request: Request, token: int) -> FinishReason | None:
    length = len(request.tokens)
    if token in request.stop_ids and length > request.min_length:
        return "stop"
    return "length" if length >= request.limit else None
