"""A random walk over the scheduler, beside a cache that remembers what was written where."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from twostroke.core.errors import CapacityError
from twostroke.scheduling.beams import Beams
from twostroke.scheduling.pace import Pace, StepCosts
from twostroke.scheduling.request import Request, Status
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.scheduling.scheduler import Scheduler
from twostroke.scheduling.step import ScheduledStep, SchedulerConfig

TOKENS = st.integers(0, 2)  # a small alphabet, so that prefixes are shared often

BASES = ([0] * 30, [1, 1, 0, 0] * 8, [0, 1, 1, 0, 1] * 6)
PROMPTS = st.one_of(
    st.lists(TOKENS, min_size=1, max_size=30),
    st.builds(lambda base, n, tail: base[:n] + tail, st.sampled_from(BASES), st.integers(6, 30), st.lists(TOKENS, max_size=3)),
)


COSTS = StepCosts((1, 8, 64), (1.0, 1.2, 2.0), (1.0, 1.5, 5.0), 1e-3, 1e-3)

Content = tuple[int | bytes, ...] | None
"""Weights, and a prefix."""


class Below:
    """A tier that writes late, and loses, refuses and interrupts loads at random. ``held`` are copies of pages of the cache."""

    def __init__(self, machine: SchedulerMachine) -> None:
        self.machine, self.random = machine, random.Random(1)
        self.held: dict[bytes, list[Content]] = {}
        self.jobs: list[Sequence[bytes]] = []

    def worth(self, request: Request, first: int, end: int) -> int:
        n = 0
        while first + n < end and request.page_keys[first + n] in self.held:
            n += 1
        return n if self.random.random() < 0.9 else 0

    def load(self, request: Request, first: int, end: int, bounded: bool) -> int:
        assert request.status is Status.RUNNING
        n_before = self.random.choice((0, 1, 2)) if self.random.random() < 0.2 else 99  # pages before a damaged one
        # Of those that were worth loading some may be lost by now.
        n_held = sum(1 for _ in itertools.takewhile(self.held.__contains__, request.page_keys[first:end]))
        n = min(n_held, n_before, self.random.choice((1, 2)) if bounded else 99)
        for place in range(first, first + n):
            page = request.pages[place]
            assert self.machine.scheduler.pool.references[page] == 1, "a shared page is about to be written"
            self.machine.cache[page] = list(self.held[request.page_keys[place]])
        SchedulerMachine.n_restored += n
        return n

    def keep(self, keys: Sequence[bytes]) -> None:
        self.jobs.append(keys)

    def forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.held.pop(key, None)

    def write(self) -> None:
        jobs, self.jobs = self.jobs, []
        for key in (key for keys in jobs for key in keys):
            found = self.machine.scheduler.pool.tree.held(key)
            if found is not None:
                page, tokens = found
                content = self.machine.cache[page]
                assert [prefix and prefix[-1] for prefix in content] == tokens, "a page in the tree is not whole"
                self.held[key] = list(content)
        if self.held and self.random.random() < 0.2:
            del self.held[self.random.choice(list(self.held))]


class SchedulerMachine(RuleBasedStateMachine):
    """``cache[page][offset]`` is what computed the keys and values that stand there, and the whole prefix whose they are. If
    every request always finds its own prefixes at its positions, no page was lost to it, shared wrongly, or overwritten."""

    n_transitions = 0  # of all walks: rules that ran, each checked by the invariant
    n_right = n_wrong = n_rolled_back = 0  # drafts, and pages that only wrong ones needed
    n_restored = n_begun = 0  # pages from the tier below, and requests that took over a part of a page
    n_mixed = 0  # changes of weights after which requests of several were under way
    n_forked = n_folded = 0  # sequences of a search that took over another's pages, and searches that were preempted

    @initialize(
        page_tokens=st.sampled_from((1, 2, 3, 4)),
        n_pages=st.integers(8, 24),
        max_running=st.sampled_from((1, 2, 3, 4, 5, 6)),
        spare=st.sampled_from((0, 1, 4, 12, 40)),
        max_model_len=st.integers(4, 60),
        window=st.sampled_from((None, None, 1, 3, 8, 17)),
        separate=st.booleans(),
        scored_rows=st.sampled_from((None, 1, 3)),
        draft_rows=st.sampled_from((0, 2, 9)),
        below=st.sampled_from((False, True, True)),
        ratio=st.sampled_from((None, 1.1, 3.0)),
    )
    def start(
        self,
        page_tokens: int,
        n_pages: int,
        max_running: int,
        spare: int,
        max_model_len: int,
        window: int | None,
        separate: bool,
        scored_rows: int | None,
        draft_rows: int,
        below: bool,
        ratio: float | None,
    ) -> None:
        limits = (max_running + spare, max_running, page_tokens, n_pages, max_model_len)
        self.config = SchedulerConfig(*limits, window, separate, scored_rows, draft_rows=draft_rows)
        self.now = 0.0
        self.below = Below(self) if below else None
        self.belows = {b"": self.below}  # by weights
        pace = None if ratio is None else Pace(COSTS, ratio, page_tokens)
        self.scheduler = Scheduler(self.config, lower=self.below, pace=pace)
        self.cache: list[list[Content]] = [[None] * page_tokens for _ in range(n_pages)]
        self.step: ScheduledStep | None = None
        self.tables: dict[int, list[int]] = {}  # by slot, as an engine keeps them that reads only ``grown``
        self.n_added = 0

    @precondition(lambda self: len(self.scheduler.requests) < 8)
    @rule(
        prompt=PROMPTS,
        max_tokens=st.sampled_from((1, 5, 12, 20, 30)),
        priority=st.integers(0, 1),
        client=st.sampled_from("abc"),
        patience=st.sampled_from((None, None, 3.0, 20.0)),
        n_forks=st.sampled_from((0, 0, 1, 3)),
        scored=st.sampled_from((None, None, 0)),
        width=st.sampled_from((0, 0, 0, 2, 3)),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int,
        client: str,
        patience: float | None,
        n_forks: int,
        scored: int | None,
        width: int,
    ) -> None:
        deadline = None if patience is None else self.now + patience
        if 0 < width <= self.config.max_running:
            searching = {"use_beam_search": True, "best_of": width, "early_stopping": "never"}
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, **searching)
            request = Request(f"r{self.n_added}", prompt, params, priority, (2,), client, deadline)
            self._add(request, prompt, max_tokens, width)
            return
        original: Request | None = None
        for _ in range(1 + n_forks):
            params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=scored if original is None else None)
            request = Request(f"r{self.n_added}", prompt, params, priority, (2,), client, deadline, original)
            original = original or request
            self._add(request, prompt, max_tokens)

    def _add(self, request: Request, prompt: list[int], max_tokens: int, width: int = 1) -> None:
        self.n_added += 1
        try:
            self.scheduler.add(request)
        except CapacityError:
            needed = -(-(min(len(prompt) + max_tokens, self.config.max_model_len) - 1) // self.config.page_tokens)
            n_shared = len(prompt) // self.config.page_tokens  # by the sequences of a search
            needed += (width - 1) * (needed - n_shared)
            assert needed > self.config.n_pages or len(prompt) >= self.config.max_model_len

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
        assert self.scheduler.abort(name) is not None

    @rule(seconds=st.sampled_from((1.0, 5.0)))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        for request in self.scheduler.expire(self.now):
            assert request.finish_reason == "timeout"
            assert request.deadline is not None
            assert request.deadline <= self.now
        late = [r for r in self.scheduler.requests.values() if r.deadline is not None and r.deadline <= self.now]
        assert not late

    @precondition(lambda self: self.step is None)
    @rule(n=st.integers(1, 6), seed=st.integers(0, 999))
    def run_steps(self, n: int, seed: int) -> None:
        for i in range(n):
            self._schedule(random.Random(seed - i))
            self._update(random.Random(seed + i))

    @precondition(lambda self: self.step is None)
    @rule(seed=st.integers(0, 999))
    def begin_step(self, seed: int) -> None:
        """Left under way, so that requests are added and aborted meanwhile."""
        self._schedule(random.Random(seed))

    @precondition(lambda self: self.step is not None)
    @rule(seed=st.integers(0, 999))
    def end_step(self, seed: int) -> None:
        self._update(random.Random(seed))

    @precondition(lambda self: self.step is None)
    @rule(weights=st.sampled_from((b"", b"one", b"two")), carry_on=st.booleans())
    def change_weights(self, weights: bytes, carry_on: bool) -> None:
        begun = {r.id: r.weights for r in self.scheduler.requests.values() if r.status is Status.RUNNING or r.n_preemptions}
        self.scheduler.change_weights(weights, carry_on)
        if self.below is not None:
            self.below = self.scheduler.admission.lower = self.belows.setdefault(weights, Below(self))
        for request in self.scheduler.requests.values():
            if carry_on:
                assert request.weights == weights
                assert request.status is Status.WAITING
            elif request.id in begun:
                assert request.weights == begun[request.id]
            if request.fork_of is not None and request.fork_of.status is not Status.FINISHED:
                assert request.weights == request.fork_of.weights
        SchedulerMachine.n_mixed += len({request.weights for request in self.scheduler.requests.values()}) > 1

    @precondition(lambda self: self.below is not None and self.below.held and len(self.scheduler.requests) < 8)
    @rule(data=st.data(), tail=st.lists(TOKENS, min_size=1, max_size=3), max_tokens=st.sampled_from((1, 5)))
    def go_on_after_a_loss(self, data: st.DataObject, tail: list[int], max_tokens: int) -> None:
        """The pool forgets what it knows, as a new engine does, and prompts come whose beginnings the tier may hold."""
        assert self.below is not None
        self.below.write()
        self.scheduler.pool.discard_content(range(self.config.n_pages))
        held = list(self.below.held.values())  # it may have lost all by writing
        for content in data.draw(st.lists(st.sampled_from(held), min_size=1, max_size=3)) if held else ():
            prompt = [*(content[-1] or (b"",))[1:], *tail]
            self._add(Request(f"r{self.n_added}", prompt, SamplingParams(max_tokens=max_tokens)), prompt, max_tokens)

    @precondition(lambda self: self.step is not None)
    @rule()
    def abandon_step(self) -> None:
        step, self.step = self.step, None
        assert step is not None
        for request in step.grown:
            self.tables.pop(request.slot, None)
        self.scheduler.abandon(step)

    def _schedule(self, random: random.Random) -> None:
        scheduler, page_tokens = self.scheduler, self.config.page_tokens
        if self.below is not None and random.random() < 0.5:
            self.below.write()

        def propose(decoding: Sequence[Request], n_tokens: int, room: int) -> Mapping[int, Sequence[int]]:
            assert n_tokens + room <= self.config.token_budget
            places = [i for i, request in enumerate(decoding) if request.beams is None and random.random() < 0.6]
            return {i: random.choices((0, 1, 2), (20, 19, 1), k=random.choice((1, 2, 6))) for i in places}

        running = {r for r in scheduler.requests.values() if r.status is Status.RUNNING and r.beams is None}
        due = {r.id for r in running if len(r.tokens) - r.n_computed == 1}
        together = [beams for beams in scheduler.searching if len(beams.live) > 1 and not beams.catching_up]
        n_preemptions = scheduler.n_preemptions
        step = self.step = scheduler.schedule(propose)
        assert sum(step.counts) == step.n_tokens <= self.config.token_budget
        assert len(set(step.by_request())) == len(step.requests) <= self.config.max_running
        assert sum(map(len, step.drafts.values())) <= self.config.draft_rows
        ahead = min((r.priority for r in step.requests[step.n_decodes :]), default=math.inf)
        behind = {r.id for r in running if r.priority > ahead}
        assert due <= set(step.by_request()) | set(step.preempted) | behind  # no decode is starved
        for beams in together:  # a search's sequences decode in the same steps, or are preempted at once
            assert beams.folded or {r.id for r in beams.live} <= set(step.by_request())
        SchedulerMachine.n_folded += (scheduler.n_preemptions > n_preemptions) and any(beams.folded for beams in together)
        assert step.requests or not scheduler.requests  # always progress
        slots = [r.slot for r in self._holders() if r.status is Status.RUNNING]
        slots += [slot for beams in scheduler.searching for slot in beams.slots]
        assert len(set(slots)) == len(slots)
        assert all(0 <= slot < self.config.max_running for slot in slots)
        self.tables |= {r.slot: list(r.pages) for r in step.grown}
        for request in step.requests:
            known = self.tables[request.slot]
            assert len(known) >= len(request.pages)  # pages of wrong drafts are given back, and stay in the table
            assert all(page in (-1, told) for page, told in zip(request.pages, known, strict=False))
        prompts = list(zip(step.requests, step.counts, strict=True))[step.n_decodes :]
        n_scored = sum(n for request, n in prompts if request.params.prompt_logprobs is not None)
        assert self.config.scored_rows is None or n_scored <= self.config.scored_rows
        SchedulerMachine.n_begun += len(scheduler.admission.sources)
        read = [list(self.cache[source]) for source, _ in step.copies]  # all are read before any is written
        for (source, target), content in zip(step.copies, read, strict=True):
            assert scheduler.pool.references[source] or source in {told for _, told in step.copies}
            assert scheduler.pool.references[target] == 1
            self.cache[target] = content
        self.texts = [request.tokens + step.drafts.get(i, []) for i, request in enumerate(step.requests)]
        for i, (request, start, n) in enumerate(zip(step.requests, step.starts, step.counts, strict=True)):
            assert n >= 1
            assert start + n <= len(self.texts[i]) <= self.config.max_model_len
            assert step.tokens_of(i) == self.texts[i][start : start + n]
            assert i not in step.drafts or (i < step.n_decodes and len(self.texts[i]) < request.limit)
            assert all(scheduler.pool.references[page] for page in request.pages if page >= 0)
            for position in range(start, start + n):
                page = request.pages[position // page_tokens]
                assert scheduler.pool.references[page] == 1, "a shared page is about to be written"
                self.cache[page][position % page_tokens] = (request.weights, *self.texts[i][: position + 1])
        for text, request, start, n in zip(self.texts, step.requests, step.starts, step.counts, strict=True):
            window = self.config.window
            for position in range(0 if window is None else max(0, start - window + 1), start + n):
                found = self.cache[request.pages[position // page_tokens]][position % page_tokens]
                assert found == (request.weights, *text[: position + 1]), "a request reads another's keys and values"

    def _update(self, random: random.Random) -> None:
        step, self.step = self.step, None
        assert step is not None
        sampled: list[int | list[int] | None] = [
            random.choices((0, 1, 2), (20, 19, 1))[0] if step.samples(i) and request.beams is None else None
            for i, request in enumerate(step.requests)
        ]
        searches = self._searches_of(step)
        for i, draft in step.drafts.items():
            tokens = [sampled[i]]
            while len(tokens) <= len(draft) and tokens[-1] == draft[len(tokens) - 1]:
                tokens.append(random.choices((0, 1, 2), (20, 19, 1))[0])
            sampled[i] = tokens
        before = [(len(request.tokens), list(request.pages)) for request in step.requests]
        alive = [request.status is Status.RUNNING for request in step.requests]
        failed = {r.id for i, r in enumerate(step.requests) if step.samples(i) and random.random() < 0.01}
        for request in self.scheduler.update(step, sampled, failed):
            assert request.finish_reason in ("stop", "length", "error")
            assert request.id not in self.scheduler.requests
            assert not request.pages
        for root, beams in searches.items():
            if failed & {request.id for request in beams.live}:
                self.scheduler.fail(root)
            else:
                self._go_on(root, random)
        for i, draft in step.drafts.items():
            request, (n_tokens, pages) = step.requests[i], before[i]
            if alive[i] and request.id not in failed:
                assert request.tokens[n_tokens:] == sampled[i]
            if request.status is Status.RUNNING:
                assert request.n_computed == len(request.tokens) - 1
                assert len(request.pages) == -(-request.n_computed // self.config.page_tokens)
                assert len(request.pages) <= len(pages)
                SchedulerMachine.n_rolled_back += len(pages) - len(request.pages)
                SchedulerMachine.n_right += len(request.tokens) - n_tokens - 1
                SchedulerMachine.n_wrong += len(draft) - (len(request.tokens) - n_tokens - 1)

    def _searches_of(self, step: ScheduledStep) -> dict[Request, Beams]:
        """By root, the searches whose sequences ``step`` computes to their last tokens."""
        sampled = [request.beams for i, request in enumerate(step.requests) if step.samples(i)]
        return {b.root: b for b in sampled if b is not None and b in self.scheduler.searching and not b.folded}

    def _go_on(self, root: Request, random: random.Random) -> None:
        beams = root.beams
        assert beams is not None
        drawn = [[(token, math.log(1e-9 + random.random())) for token in range(6)] for _ in beams.live]
        rows = [sorted(row, key=lambda pair: -pair[1]) for row in drawn]
        search = beams.search.advance(rows, lambda beam: beam.token == 2 and random.random() < 0.1)
        SchedulerMachine.n_forked += len(search.live) - len({beam.place for beam in search.live})
        self.scheduler.go_on(root, search)
        if not search.done:
            assert [r.tokens[root.n_prompt :] for r in beams.live] == [[b.token for b in beam.path()] for beam in search.live]

    def _holders(self) -> set[Request]:
        """Everything that may hold pages: requests, those of the step under way, and the sequences of searches."""
        members = {request for beams in self.scheduler.searching for request in beams.members}
        return members | set(self.scheduler.requests.values()) | set(self.step.requests if self.step else ())

    @invariant()
    def references_are_exactly_what_requests_hold(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        SchedulerMachine.n_transitions += 1
        pool = self.scheduler.pool
        holders = dict(enumerate([0] * pool.n_pages))
        for request in self._holders():
            for page in request.pages:
                if page >= 0:
                    holders[page] += 1
        for source in self.scheduler.admission.sources:
            holders[source] += 1
        assert [holders[i] for i in range(pool.n_pages)] == pool.references
        assert pool.n_used == sum(n > 0 for n in pool.references)
        assert pool.n_used + pool.n_free == pool.n_pages

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        if self.step is not None:
            self._update(random.Random(0))
        for _ in range(3000):  # whatever the walk left behind ends by itself
            if not self.scheduler.has_work:
                break
            step = self.scheduler.schedule()
            searches = self._searches_of(step)
            plain = [request.beams is None and step.samples(i) for i, request in enumerate(step.requests)]
            self.scheduler.update(step, [0 if samples else None for samples in plain])
            for root in searches:
                self._go_on(root, random.Random(0))
        assert not self.scheduler.has_work
        assert self.scheduler.pool.n_used == 0
        assert self.scheduler.n_running == self.scheduler.n_waiting == len(self.scheduler.searching) == 0
        assert len(self.scheduler.admission.slots) == self.config.max_running
        assert len(self.scheduler._accounts) == 0


def test_no_copy_of_a_step_reads_what_another_writes() -> None:
    """All are read before any is written. Weights are replaced when an original has sampled and its fork waits: it is computed
    again from a part of its own page, and the fork begins with the same."""
    scheduler = Scheduler(SchedulerConfig(2, 2, 3, 8, 16))
    original = Request("a", [0, 0], SamplingParams(max_tokens=5))
    scheduler.add(original)
    scheduler.add(Request("b", [0, 0], SamplingParams(max_tokens=5), fork_of=original))
    scheduler.update(scheduler.schedule(), [0])
    scheduler.change_weights(b"", carry_on=True)
    copies = scheduler.schedule().copies
    assert len(copies) == 2
    assert not {source for source, _ in copies} & {target for _, target in copies}


def _run(max_examples: int, step_count: int) -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=step_count,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_no_page_is_lost_or_shared_wrongly() -> None:
    # How often each thing happens depends on what else is imported, because Hypothesis also draws the numbers that stand in our
    # modules: what is rare may come only with longer walks.
    for step_count in (30, 40, 50, 60, 80, 100, 120):
        _run(max_examples=150, step_count=step_count)
        drafts = SchedulerMachine.n_right, SchedulerMachine.n_wrong, SchedulerMachine.n_rolled_back
        found = SchedulerMachine.n_restored, SchedulerMachine.n_begun, SchedulerMachine.n_mixed
        least = min(*drafts, *found, SchedulerMachine.n_forked, SchedulerMachine.n_folded)
        if least > 0:
            break
    assert least > 0


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_no_page_is_lost_or_shared_wrongly_in_many_walks() -> None:
    before = SchedulerMachine.n_transitions
    _run(max_examples=13_000, step_count=100)  # 80 transitions a walk: some are cut short, where they drew too much
    assert SchedulerMachine.n_transitions - before >= 1_000_000
