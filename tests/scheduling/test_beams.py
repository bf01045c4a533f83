from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.core.errors import CapacityError, InputError
from twostroke.scheduling.beams import Beam, BeamSearch
from twostroke.scheduling.request import Request, Status
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.scheduling.scheduler import Scheduler
from twostroke.scheduling.step import ScheduledStep, SchedulerConfig

END = 0


def logprobs_after(tokens: tuple[int, ...], n_vocab: int, seed: int) -> list[float]:
    drawn = random.Random(f"{seed} {tokens}")
    weights = [drawn.random() ** 3 for _ in range(n_vocab)]
    return [math.log(weight / sum(weights)) for weight in weights]


def tokens_of(beam: Beam) -> tuple[int, ...]:
    return tuple(each.token for each in beam.path())


def searched(search: BeamSearch, n_vocab: int, seed: int) -> BeamSearch:
    while not search.done:
        rows = []
        for beam in search.live:
            after = logprobs_after(tokens_of(beam), n_vocab, seed)
            rows.append(sorted(enumerate(after), key=lambda pair: -pair[1]))
        search = search.advance(rows, lambda beam: beam.token == END)
    return search


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("penalty", [0.0, 1.0, -0.5, 2.0])
def test_beams_as_many_as_sequences_find_the_best_of_all(seed: int, penalty: float) -> None:
    n_vocab, longest = 4, 4
    every: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, longest + 1):
        for tokens in itertools.product(range(n_vocab), repeat=length):
            whole = END not in tokens[:-1] and (tokens[-1] == END or length == longest)
            if whole:
                score = sum(logprobs_after(tokens[:i], n_vocab, seed)[token] for i, token in enumerate(tokens))
                every.append((score / length**penalty, tokens))
    every.sort(reverse=True)
    search = searched(BeamSearch(len(every), penalty, "never", longest), n_vocab, seed)
    assert [tokens_of(beam) for _, beam in search.answers()] == [tokens for _, tokens in every]
    assert [rank for rank, _ in search.answers()] == pytest.approx([rank for rank, _ in every])


@pytest.mark.parametrize("seed", range(20))
def test_one_beam_takes_the_most_probable_token_each_time(seed: int) -> None:
    tokens: tuple[int, ...] = ()
    while len(tokens) < 9 and END not in tokens:
        after = logprobs_after(tokens, 6, seed)
        tokens += (after.index(max(after)),)
    ((_, beam),) = searched(BeamSearch(1, 1.0, True, 9), 6, seed).answers()
    assert tokens_of(beam) == tokens


@given(
    width=st.integers(1, 6), penalty=st.sampled_from((-1.0, 0.0, 1.0, 3.0)),
    early=st.sampled_from((True, False, "never")), longest=st.integers(1, 8), seed=st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=150, deadline=None, derandomize=True)
def test_what_a_search_keeps_is_in_order_and_its_own(width: int, penalty: float, early: Any, longest: int, seed: int) -> None:
    search = searched(BeamSearch(width, penalty, early, longest), 8, seed)
    ranks = [rank for rank, _ in search.ended]
    assert ranks == sorted(ranks, reverse=True)
    assert len({tokens_of(beam) for _, beam in search.ended}) == len(ranks) == width
    for rank, beam in search.ended:
        tokens = tokens_of(beam)
        score = sum(logprobs_after(tokens[:i], 8, seed)[token] for i, token in enumerate(tokens))
        assert beam.score == pytest.approx(score)
        assert rank == beam.score / len(tokens) ** penalty
        assert END not in tokens[:-1]
        assert beam.stopped == (tokens[-1] == END)
        assert beam.stopped or len(tokens) == longest


def test_a_search_under_way_answers_with_what_it_has() -> None:
    search = BeamSearch(2, 1.0, False, 5)
    assert search.answers() == []
    search = search.advance([[(END, -0.1), (3, -0.5), (4, -2.0)]], lambda beam: beam.token == END)
    assert [tokens_of(beam) for _, beam in search.answers()] == [(END,), (3,)]


class Walk:
    """A random walk of searches beside plain requests, beside a cache that remembers what was written where: every sequence
    always finds its own prefixes, whatever is forked, finished, preempted and aborted."""

    seen: ClassVar[Counter[str]] = Counter()  # over all walks

    def __init__(self, seed: int) -> None:
        self.random = drawn = random.Random(seed)
        page_tokens, n_pages, max_running = drawn.choice((1, 2, 3, 4)), drawn.randint(14, 30), drawn.choice((4, 8, 12))
        window = drawn.choice((None, None, 3, 8))
        self.config = SchedulerConfig(max_running + drawn.choice((0, 5, 40)), max_running, page_tokens, n_pages, 40, window)
        self.scheduler = Scheduler(self.config)
        self.cache: list[list[tuple[int, ...] | None]] = [[None] * page_tokens for _ in range(n_pages)]
        self.tables: dict[int, list[int]] = {}
        self.step: ScheduledStep | None = None
        self.n_added = 0

    def go(self, n: int) -> None:
        for _ in range(n):
            self._turn(self.random.random())
            self._check_references()
        self._finish()

    def _turn(self, at: float) -> None:
        if at < 0.25 and len(self.scheduler.requests) < 8:
            self._add()
        elif at < 0.27 and self.scheduler.requests:
            assert self.scheduler.abort(self.random.choice(sorted(self.scheduler.requests))) is not None
        elif at < 0.275:
            self.scheduler.expire(10.0)
        elif self.step is None:
            self._schedule()
        elif at < 0.3:
            step, self.step = self.step, None
            for request in step.grown:
                self.tables.pop(request.slot, None)
            self.scheduler.abandon(step)
        else:
            self._update()

    def _add(self) -> None:
        drawn, width = self.random, self.random.choice((0, 1, 2, 3, 4))
        n_prompt, max_tokens = drawn.randint(1, 14), drawn.choice((1, 9, 16, 24))
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, use_beam_search=width > 0, best_of=max(1, width), early_stopping="never"
        )
        prompt, deadline = ([1, 2, 1, 1] * 4)[:n_prompt], drawn.choice((None, None, None, 5.0))
        request = Request(f"r{self.n_added}", prompt, params, drawn.randint(0, 1), (END,), drawn.choice("ab"), deadline)
        self.n_added += 1
        try:
            self.scheduler.add(request)
        except CapacityError:
            n_shared = n_prompt // self.config.page_tokens
            n_own = -(-(min(n_prompt + max_tokens, 40) - 1) // self.config.page_tokens) - n_shared
            assert n_shared + max(1, width) * n_own > self.config.n_pages

    def _schedule(self) -> None:
        scheduler, page_tokens = self.scheduler, self.config.page_tokens
        before = scheduler.n_preemptions
        step = self.step = scheduler.schedule()
        Walk.seen["preemptions"] += scheduler.n_preemptions - before
        Walk.seen["copies"] += len(step.copies)
        Walk.seen["catching up"] += sum(beams.catching_up for beams in scheduler.searching)
        assert step.requests or not scheduler.requests
        assert len({r.slot for r in step.requests}) == len(step.requests) <= self.config.max_running
        self.tables |= {r.slot: list(r.pages) for r in step.grown}
        assert len({target for _, target in step.copies}) == len(step.copies)
        read = [list(self.cache[source]) for source, _ in step.copies]  # all are read before any is written
        for (_, target), content in zip(step.copies, read, strict=True):
            self.cache[target] = content
        for i, request in enumerate(step.requests):
            start, end = step.starts[i], step.starts[i] + step.counts[i]
            for page, told in zip(request.pages, self.tables[request.slot], strict=False):
                assert page in (-1, told)
            for position in range(start, end):
                page = request.pages[position // page_tokens]
                assert scheduler.pool.references[page] == 1, "a shared page is about to be written"
                self.cache[page][position % page_tokens] = tuple(request.tokens[: position + 1])
        for i, request in enumerate(step.requests):
            start, end = step.starts[i], step.starts[i] + step.counts[i]
            window = self.config.window
            for position in range(0 if window is None else max(0, start - window + 1), end):
                found = self.cache[request.pages[position // page_tokens]][position % page_tokens]
                assert found == tuple(request.tokens[: position + 1]), "a sequence reads another's keys and values"
        for beams in scheduler.searching:
            if not beams.catching_up:
                assert len({len(r.tokens) - r.n_computed for r in beams.live}) == 1  # they decode together
            assert len(beams.members) + len(beams.slots) == beams.width

    def _update(self) -> None:
        random, step, self.step = self.random, self.step, None
        assert step is not None
        samples = [i for i in range(len(step.requests)) if step.samples(i)]
        tokens = [random.choice((END, 1, 2, 1, 2, 1, 2)) if i in samples else None for i in range(len(step.requests))]
        roots = {}
        for i in samples:
            beams = step.requests[i].beams
            if beams is not None:
                tokens[i] = None
                if beams in self.scheduler.searching and not beams.folded:
                    assert len(beams.live) == len(beams.search.live)
                    roots[beams.root] = beams
        failed = {r.id for r in step.requests if random.random() < 0.01}
        lost = {r.beams.root for r in step.requests if r.beams in self.scheduler.searching and r.id in failed and r.beams}
        self.scheduler.update(step, tokens, failed)
        for root in lost:
            self.scheduler.fail(root)
        for root, beams in roots.items():
            if root not in lost:
                rows = []
                for _ in beams.live:
                    row = [(token, math.log(random.random() + 1e-9)) for token in range(6)]
                    rows.append(sorted(row, key=lambda pair: -pair[1]))
                search = beams.search.advance(rows, lambda beam: beam.token == END and random.random() < 0.1)
                Walk.seen["forks"] += len(search.live) - len({beam.place for beam in search.live})
                self.scheduler.go_on(root, search)
                Walk.seen["ends"] += search.done
                for beam, request in zip(search.live, beams.live, strict=False):
                    if not search.done:
                        assert request.tokens[root.n_prompt :] == [each.token for each in beam.path()]

    def _check_references(self) -> None:
        pool = self.scheduler.pool
        held = [0] * pool.n_pages
        holders = set(self.scheduler.requests.values()) | set(self.step.requests if self.step else ())
        for beams in self.scheduler.searching:
            holders |= set(beams.members)
        for request in holders:
            for page in request.pages:
                held[page] += page >= 0
        for page in self.scheduler.admission.sources:  # until what begins alike is copied
            held[page] += 1
        assert held == pool.references
        running = {r for r in holders if r.slot >= 0}
        slots = [r.slot for r in running] + [slot for beams in self.scheduler.searching for slot in beams.slots]
        assert sorted(slots + self.scheduler.admission.slots) == list(range(self.config.max_running))

    def _finish(self) -> None:
        if self.step is not None:
            self._update()
        for _ in range(3000):
            if not self.scheduler.has_work:
                break
            self._schedule()
            self._update()
        assert not self.scheduler.has_work
        assert self.scheduler.pool.n_used == 0
        assert self.scheduler.n_running == self.scheduler.n_waiting == len(self.scheduler.searching) == 0
        assert len(self.scheduler.admission.slots) == self.config.max_running
        assert len(self.scheduler._accounts) == 0


def test_no_page_of_a_search_is_lost_or_written_by_two() -> None:
    for seed in range(40):
        Walk(seed).go(150)
    assert min(Walk.seen[name] for name in ("forks", "copies", "preemptions", "catching up", "ends")) > 30, Walk.seen


def test_sequences_share_whole_pages() -> None:
    scheduler = Scheduler(SchedulerConfig(64, 4, 4, 64, 64))
    params = SamplingParams(temperature=0.0, max_tokens=9, use_beam_search=True, best_of=4)
    root = Request("a", list(range(1, 14)), params)
    scheduler.add(root)
    scheduler.update(scheduler.schedule(), [None])
    assert root.beams is not None
    scheduler.go_on(root, root.beams.search.advance([[(token, -float(token)) for token in range(1, 9)]], lambda beam: False))
    assert scheduler.pool.n_used == 4  # of all four: nothing is copied before it must be
    step = scheduler.schedule()
    assert len(step.copies) == 3
    assert scheduler.pool.n_used == 3 + 4
    assert [r.tokens[-1] for r in step.requests] == [1, 2, 3, 4]


def test_a_search_that_can_never_run_is_refused() -> None:
    scheduler = Scheduler(SchedulerConfig(64, 3, 4, 64, 64))
    with pytest.raises(InputError, match="a search of 4 beams needs as many running requests, and max_running=3"):
        scheduler.add(Request("a", [1], SamplingParams(temperature=0.0, use_beam_search=True, best_of=4)))
    small = Scheduler(SchedulerConfig(64, 4, 4, 10, 32))
    params = SamplingParams(temperature=0.0, max_tokens=16, use_beam_search=True, best_of=2)
    small.add(Request("a", [1] * 8, params))  # 2 pages of the prompt, and 4 more for each beam
    with pytest.raises(CapacityError, match="KV-cache pages"):
        small.add(Request("b", [1] * 8, SamplingParams(temperature=0.0, max_tokens=16, use_beam_search=True, best_of=3)))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"temperature": 0.7, "n": 2}, "temperature=0.7 draws tokens"),
        ({"n": 3, "best_of": 2}, "best_of=2 must be at least n=3"),
        ({"length_penalty": 11.0}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping='always'"),
        ({"best_of": 0}, "best_of=0"),
        ({"use_beam_search": 1}, "use_beam_search=1"),
    ],
)
def test_impossible_searches_are_refused_in_one_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        SamplingParams(**{"temperature": 0.0, "use_beam_search": True} | given)


def test_best_of_without_a_search_must_be_n() -> None:
    assert SamplingParams(n=2, best_of=2).n == 2
    with pytest.raises(InputError, match="best_of=3 must equal n=2") as refused:
        SamplingParams(n=2, best_of=3)
    assert refused.value.field == "best_of"


def test_a_finished_search_frees_its_slots_for_others() -> None:
    scheduler = Scheduler(SchedulerConfig(64, 4, 4, 64, 64))
    params = SamplingParams(temperature=0.0, max_tokens=1, use_beam_search=True, best_of=4)
    for name in "ab":
        scheduler.add(Request(name, [1, 2, 3], params))
    step = scheduler.schedule()
    assert [r.id for r in step.requests] == ["a"]  # all four slots are kept for it
    scheduler.update(step, [None])
    root = step.requests[0]
    assert root.beams is not None
    scheduler.go_on(root, root.beams.search.advance([[(t, -1.0 - t) for t in range(8)]], lambda beam: False))
    assert root.status is Status.FINISHED
    assert [r.id for r in scheduler.schedule().requests] == ["b"]
