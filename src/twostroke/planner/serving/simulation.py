"""A served model under load, simulated event by event: the scheduler that serves (or another engine's rules of it) on the
planner's step times.

Steps whose batch does not change are taken at once, with the same result as one by one (tests/planner/test_simulation.py).
Times are from when a request was due, as in ``bench.definitions``: TTFT to the first token, E2E to the last, TPOT =
(E2E − TTFT) ÷ (output tokens − 1) for each request, ITL all gaps between tokens together.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Annotated

from twostroke.core.distribution import Distribution
from twostroke.core.policy import PAGE_TOKENS
from twostroke.planner.serving.http import FrontEnd
from twostroke.planner.serving.policies import Policy
from twostroke.planner.serving.strategy import Chunk, StepSeconds
from twostroke.planner.serving.workload import Arrival, Workload
from twostroke.scheduling.pace import Pace
from twostroke.scheduling.pages import PagePool
from twostroke.scheduling.request import Request
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.scheduling.step import SchedulerConfig

TOKEN = 0
"""Stands for every token of a prompt: which one it is changes no time, and what is shared is known by its name."""


@dataclass(frozen=True)
class Simulated:
    """What came of a workload: latencies of the requests that are reported, rates of all while those are served."""

    n_requests: Annotated[int, "requests that are reported: without those that warm up and cool down"]
    ttft_s: Annotated[Distribution, "s", "to the first token of a prompt's first answer"]
    tpot_s: Annotated[Distribution, "s", "between tokens, the mean of each answer"]
    itl_s: Annotated[Distribution, "s", "between tokens, all gaps"]
    e2e_s: Annotated[Distribution, "s", "to the last token of all answers to a prompt"]
    wait_s: Annotated[Distribution, "s", "before a prompt is begun"]
    duration_s: Annotated[float, "s", "from the first reported arrival to the last reported token"]
    requests_per_s: Annotated[float, "requests that end, a second"]
    output_tok_per_s: Annotated[float, "tok/s", "of all answers"]
    concurrency: Annotated[float, "requests in flight, on average"]
    peak_concurrency: Annotated[int, "most requests in flight at one moment"]
    decoding: Annotated[float, "requests that decode, on average"]
    prompt_share: Annotated[float, "share of the time in which a step holds a prompt"]
    busy_share: Annotated[float, "share of the time in which a step runs"]
    steps: Annotated[int, "steps"]
    preemptions: Annotated[int, "times that a request lost its pages and was computed again, of all requests"]
    prefix_hit_share: Annotated[float, "share of prompt tokens that the cache held, of all requests"]


class CountedPages(PagePool):
    """Pages that are only counted: where none is found again, it does not matter which page a request has."""

    def __init__(self, n_pages: int) -> None:
        super().__init__(1)
        self.n_pages = self._free = n_pages

    @property
    def n_free(self) -> int:
        return self._free

    def allocate(self, n: int, after: int = -1) -> list[int] | None:
        if n > self._free:
            return None
        self._free -= n
        return [0] * n

    def release(self, pages: Sequence[int]) -> None:  # type: ignore[override]
        self.n_released += 1
        self._free += len(pages)


@dataclass
class _Group:
    """All answers to one prompt: how many are not done, when it was due, begun, and had a first token."""

    left: int
    reported: bool
    due_s: float
    begun_s: float = math.nan
    first_s: float = math.nan


@dataclass
class _Served:
    """One answer as it goes through: what stands for its tokens, the arrival it is of, when its first and its last known
    token came."""

    group: _Group
    number: int
    index: int
    first_s: float = math.nan
    last_s: float = math.nan
    decodes: bool = False


@dataclass
class _Times:
    """What is reported of requests."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)
    itl: Counter[float] = field(default_factory=Counter)

    def add(self, group: _Group, now_s: float) -> None:
        self.ttft.append(group.first_s - group.due_s)
        self.e2e.append(now_s - group.due_s)
        self.wait.append(group.begun_s - group.due_s)


@dataclass
class _Sums:
    """What has been since the start; the difference of two of them is what is reported."""

    at_s: float = 0.0
    in_flight_s: float = 0.0
    decoding_s: float = 0.0
    prompts_s: float = 0.0
    busy_s: float = 0.0
    tokens: int = 0
    ended: int = 0
    steps: int = 0


def simulate(
    workload: Workload,
    policy: Policy,
    step_seconds: StepSeconds,
    pages: int,
    *,
    max_running: int | None = None,
    token_budget: int | None = None,
    page_tokens: int = PAGE_TOKENS,
    window: int | None = None,
    front: FrontEnd | None = None,
    pace: Pace | None = None,
    one_by_one: bool = False,
) -> Simulated:
    """Serve ``workload`` on one copy of a model whose cache has ``pages``. ``max_running`` and ``token_budget`` replace the
    policy's. Requests and tokens go through ``front``, None: at once. ``pace`` bounds prompts beside requests that decode.
    Raises CapacityError for a request that never fits."""
    budget = token_budget or policy.token_budget
    config = SchedulerConfig(
        token_budget=budget,
        max_running=min(budget, max_running or policy.max_running),
        page_tokens=page_tokens,
        n_pages=pages,
        max_model_len=1 + max(a.prompt_tokens + a.output_tokens for a in workload.arrivals),
        window=window,
        parts_of_pages=False,
    )
    if not any(arrival.blocks or arrival.answers > 1 or arrival.after is not None for arrival in workload.arrivals):
        alone = replace(config, prefix_cache=False)
        found = _Run(workload, policy, alone, step_seconds, CountedPages(pages), front, pace).to_the_end(one_by_one)
        if not found.preemptions:  # a preempted request finds its own pages again
            return found
    return _Run(workload, policy, config, step_seconds, None, front, pace).to_the_end(one_by_one)


class _Run:
    def __init__(
        self, workload: Workload, policy: Policy, config: SchedulerConfig, step_seconds: StepSeconds, pool: PagePool | None,
        front: FrontEnd | None, pace: Pace | None,
    ) -> None:  # fmt: skip
        self.workload, self.step_seconds = workload, step_seconds
        self.front = front or FrontEnd(0.0, 0.0)
        self.front_free_s = 0.0
        self.scheduler = policy.scheduler(config, pool, pace=pace)
        self.params: dict[int, SamplingParams] = {}
        self.now = 0.0
        self.sent_s = 0.0  # when the last step's tokens came to their clients
        # arrivals
        self.places, self.next = workload.places, 0  # free places, the first arrival without one
        self.followers = workload.followers  # of turns of conversations
        self.first_turn = _first_turns(workload.arrivals)
        self.due: list[tuple[float, int]] = []  # a heap of those that have a place, by the time that they come
        self.coming: deque[tuple[float, float, int]] = deque()  # sent to the front end: when they are through, sent, which
        self.waiting: deque[tuple[float, int]] = deque()  # are through, and the scheduler would only queue them
        self.taking = policy.taking
        self.began_s = -math.inf  # when the last step began
        self.since_look = 0  # steps that only decoded since the engine looked for requests
        self.holding, self.held = False, 0  # whether waiting prompts are held back, and for how many steps they were
        self.n_added = 0
        self.served: dict[str, _Served] = {}  # unfinished requests in the scheduler
        self.n_groups = 0  # unfinished prompts in the scheduler
        self.pending: dict[str, tuple[Request, int]] = {}  # prompts under way, with their tokens so far
        self.outside: set[str] = set()  # requests of which nothing is computed: new ones, and those that were preempted
        # tokens
        self.n_decoding = 0  # reported requests that have a token and are not done
        self.fresh: Counter[float] = Counter()  # those of them that have had none since: how many, by the time of that token
        self.last_decode_s = 0.0
        # results
        self.times = _Times()
        self.sums = _Sums()
        self.began, self.ended = _Sums(), _Sums()
        self.peak = 0
        self._take_places(0.0)

    # -- arrivals

    def _take_places(self, free_s: float) -> None:
        """Give free places to the next conversations. In a closed loop one begins when its place is free; in an open one when
        it is due, or later, where the client holds it back. Its later turns come in the same place."""
        arrivals = self.workload.arrivals
        while self.places and self.next < len(arrivals):
            if arrivals[self.next].after is None:
                heappush(self.due, (max(free_s, arrivals[self.next].at_s), self.next))
                self.places -= 1
            self.next += 1

    def _receive(self) -> None:
        """The front end takes what was sent until now, one request after another."""
        while self.due and self.due[0][0] <= self.now:
            sent_s, index = heappop(self.due)
            self.front_free_s = max(self.front_free_s, sent_s) + self.front.handling_s
            self.coming.append((self.front_free_s + self.front.delay_s, sent_s, index))
            self.sums.in_flight_s += self.now - sent_s  # it came during the last step

    def _let_in(self) -> None:
        """Hand the scheduler what has come through, as the engine takes it. More than it has slots for would only lie there."""
        self._receive()
        works, taking = self.scheduler.has_work, self.taking
        if not works or self.since_look >= taking.every:
            self.since_look = 0
            seen_s = self.began_s if works and taking.ahead else self.now
            while self.coming and self.coming[0][0] <= seen_s:
                _, sent_s, index = self.coming.popleft()
                self.waiting.append((sent_s, index))
        self.peak = max(self.peak, self.n_groups + len(self.coming) + len(self.waiting))
        self.holding = works and bool(self.waiting) and self._holds()
        if self.holding:
            return
        self.held, room = 0, self.scheduler.config.token_budget if works and taking.hold_steps else math.inf
        while self.waiting and room > 0 and self.scheduler.n_waiting <= self.scheduler.config.max_running:
            room -= self.workload.arrivals[self.waiting[0][1]].prompt_tokens
            self._add(*self.waiting.popleft())

    def _holds(self) -> bool:
        """Whether the engine waits for more prompts beside those that decode."""
        taking, decoding = self.taking, len(self.scheduler.decoding)
        if not decoding or self.held >= taking.hold_steps:
            return False
        if taking.hold_prompts:
            return len(self.waiting) < taking.hold_prompts
        tokens = sum(self.workload.arrivals[index].prompt_tokens for _, index in self.waiting)
        return tokens + decoding < taking.hold_tokens

    def _count_step(self, begun_s: float, prompts: bool) -> None:
        """A step is done that began at ``begun_s``: what the engine counts to its next look and to the end of holding."""
        self.began_s = begun_s
        if prompts:
            self.since_look = self.taking.every
        else:  # where steps are taken at once, looks that find nothing are between them
            self.since_look = 1 + (self.since_look if self.since_look < self.taking.every else 0)
        self.held += self.holding

    def _add(self, came_s: float, index: int) -> None:
        arrival, workload, config = self.workload.arrivals[index], self.workload, self.scheduler.config
        if index == workload.warmup:
            self.began = replace(self.sums)
        params = self._params(arrival.output_tokens)
        due_s = came_s if workload.users or arrival.after is not None else arrival.at_s
        talks = arrival.after is not None or index in self.followers
        group = _Group(arrival.answers, workload.reports(index), due_s)
        original = None
        for answer in range(arrival.answers):
            request = Request(f"{index}.{answer}", [TOKEN] * arrival.prompt_tokens, params, fork_of=original)
            if config.prefix_cache:
                first, known = self.first_turn[index], arrival.prompt_tokens
                if talks and arrival.answers == 1:  # the next turn finds the answer, too
                    known += arrival.output_tokens
                request.page_keys = _page_keys(arrival, first, known, workload.block_tokens, config.page_tokens)
            self.scheduler.add(request)
            self.n_added += 1
            self.outside.add(request.id)
            self.served[request.id] = _Served(group, TOKEN if talks else self.n_added, index)
            original = original or request
        self.n_groups += 1

    def _params(self, n_tokens: int) -> SamplingParams:
        """Of an answer of ``n_tokens``: made once, because they are checked."""
        if n_tokens not in self.params:
            self.params[n_tokens] = SamplingParams(max_tokens=n_tokens, ignore_eos=True)
        return self.params[n_tokens]

    # -- steps

    def to_the_end(self, one_by_one: bool) -> Simulated:
        while True:
            self._let_in()
            if not self.scheduler.has_work:
                next_s = self._next_s()
                if next_s == math.inf:
                    return self._result()
                self._wait(next_s - self.now)
                self.now = next_s
                continue
            n_steps = 0 if one_by_one or self.pending or self._decodes_first() else self.scheduler.steady_steps()
            if self.holding:
                n_steps = min(n_steps, self.taking.hold_steps - self.held)
            elif self.waiting and self.taking.hold_steps:
                n_steps = 0  # those that the scheduler had no slots for may be held from the next step on
            ended = self._steady(n_steps) if n_steps > 1 else self._step()
            before = len(self.times.e2e)
            for request in ended:
                self._end(request)
            if len(self.times.e2e) > before:
                self.ended = replace(self.sums, at_s=self.sent_s)

    def _decodes_first(self) -> bool:
        """Whether a request decodes of which nothing was computed yet: the cache holds all of its prompt but the last token."""
        return bool(self.outside) and any(request.id in self.outside for request in self.scheduler.decoding)

    def _next_s(self) -> float:
        """When a request is sent or comes through the front end; inf after the last."""
        return min(self.due[0][0] if self.due else math.inf, self.coming[0][0] if self.coming else math.inf)

    def _step(self) -> list[Request]:
        step = self.scheduler.schedule()
        for name in step.preempted:
            self._leave(name)
            self.outside.add(name)
        n, tokens = step.n_decodes, sum(step.starts[: step.n_decodes])
        prompts = range(n, len(step.requests))
        for request in step.requests if self.outside else ():
            if request.id in self.outside:
                self.outside.remove(request.id)
                self.pending[request.id] = (request, len(request.tokens))
                group = self.served[request.id].group
                if math.isnan(group.begun_s):
                    group.begun_s = self.now
        chunks = [Chunk(step.starts[i], step.counts[i], step.samples(i)) for i in prompts]
        begun_s = self.now
        self._pass(n, tokens, chunks)
        self._count_step(begun_s, bool(chunks))
        sampled = self._tokens(step.requests)
        ended = self.scheduler.update(step, sampled[:n] + [sampled[i] if chunks[i - n].samples else None for i in prompts])
        for i, chunk in zip(prompts, chunks, strict=True):
            request = step.requests[i]
            if chunk.samples:
                self._token(request)
            else:
                self.pending[request.id] = (request, len(request.tokens))
        for request, n_tokens in [*self.pending.values()]:
            if len(request.tokens) > n_tokens:  # one token was left of its prompt, or not cached: that counts as decoding
                self._token(request)
        return ended

    def _steady(self, n_steps: int) -> list[Request]:
        """Up to ``n_steps`` steps in which the same requests decode, until another comes."""
        decoding = self.scheduler.decoding
        n, tokens = len(decoding), sum(request.n_computed for request in decoding)
        until_s = self._next_s()
        taken = 0
        while taken < n_steps and (taken == 0 or self.now < until_s):
            begun_s = self.now
            self._pass(n, tokens + taken * n, ())
            self._count_step(begun_s, prompts=False)
            taken += 1
        return self.scheduler.advance(taken, self._tokens(decoding))

    def _tokens(self, requests: Sequence[Request]) -> list[int]:
        """A token for each: where prefixes are found again, no two answers are alike."""
        if not self.scheduler.config.prefix_cache:
            return [TOKEN] * len(requests)
        return [self.served[request.id].number for request in requests]

    def _pass(self, n: int, tokens: int, chunks: Sequence[Chunk]) -> None:
        """A step of ``n`` decoding requests with ``tokens`` before them in all."""
        if not n and not chunks:
            return
        seconds = self.step_seconds(n, tokens / n if n else 0.0, chunks)
        self._wait(seconds)
        sums, n_tokens = self.sums, n + sum(chunk.samples for chunk in chunks)
        sums.busy_s += seconds
        sums.decoding_s += n * seconds
        sums.prompts_s += seconds if chunks else 0.0
        sums.tokens += n_tokens
        sums.steps += 1
        self._receive()
        self.sent_s = self.front_free_s = max(self.front_free_s, self.now) + n_tokens * self.front.token_s
        if n:
            gaps, older = self.times.itl, self.n_decoding
            for at_s, count in self.fresh.items():
                gaps[self.sent_s - at_s] += count
                older -= count
            gaps[self.sent_s - self.last_decode_s] += older
            self.fresh.clear()
            self.last_decode_s = self.sent_s

    def _wait(self, seconds: float) -> None:
        self.now += seconds
        self.sums.at_s = self.now
        self.sums.in_flight_s += seconds * (self.n_groups + len(self.coming) + len(self.waiting))

    # -- what happens to a request

    def _token(self, request: Request) -> None:
        """A token at the end of a prompt: its first, or one more after it was preempted."""
        self.pending.pop(request.id, None)
        served = self.served[request.id]
        reported = served.group.reported
        if math.isnan(served.first_s):
            served.first_s = self.sent_s
            if math.isnan(served.group.first_s):
                served.group.first_s = self.sent_s
        elif reported:
            self.times.itl[self.sent_s - served.last_s] += 1
        served.last_s = self.sent_s
        if reported:
            served.decodes = True
            self.n_decoding += 1
            self.fresh[self.sent_s] += 1

    def _leave(self, name: str) -> _Served:
        """It decodes no longer: it has ended, or was preempted."""
        self.pending.pop(name, None)
        served = self.served[name]
        if served.decodes:
            served.decodes = False
            self.n_decoding -= 1
            if served.last_s >= self.last_decode_s:  # it has had no token since its first
                self.fresh[served.last_s] -= 1
            served.last_s = max(served.last_s, self.last_decode_s)
        return served

    def _end(self, request: Request) -> None:
        served, times = self._leave(request.id), self.times
        del self.served[request.id]
        group, n = served.group, request.n_output
        if group.reported and n > 1:
            times.tpot.append((self.sent_s - served.first_s) / (n - 1))
        group.left -= 1
        if group.left:
            return
        self.n_groups -= 1
        self.sums.ended += 1
        self.sums.in_flight_s += self.sent_s - self.now
        if group.reported:
            times.add(group, self.sent_s)
        free_s = self.sent_s + (self.workload.turnaround_s if self.workload.users else 0.0)
        follower = self.followers.get(served.index)
        if follower is not None:
            heappush(self.due, (free_s + self.workload.arrivals[follower].at_s, follower))
            return
        self.places += 1
        self._take_places(free_s)

    def _result(self) -> Simulated:
        times, scheduler, began, ended = self.times, self.scheduler, self.began, self.ended
        duration_s = ended.at_s - began.at_s
        return Simulated(
            n_requests=len(times.e2e),
            ttft_s=Distribution.of(times.ttft),
            tpot_s=Distribution.of(times.tpot),
            itl_s=Distribution.of_counted((gap, n) for gap, n in times.itl.items() if n),
            e2e_s=Distribution.of(times.e2e),
            wait_s=Distribution.of(times.wait),
            duration_s=duration_s,
            requests_per_s=(ended.ended - began.ended) / duration_s,
            output_tok_per_s=(ended.tokens - began.tokens) / duration_s,
            concurrency=(ended.in_flight_s - began.in_flight_s) / duration_s,
            peak_concurrency=self.peak,
            decoding=(ended.decoding_s - began.decoding_s) / duration_s,
            prompt_share=(ended.prompts_s - began.prompts_s) / duration_s,
            busy_share=(ended.busy_s - began.busy_s) / duration_s,
            steps=ended.steps - began.steps,
            preemptions=scheduler.n_preemptions,
            prefix_hit_share=scheduler.admission.n_prefix_hit_tokens / max(1, scheduler.admission.n_prompt_tokens),
        )


def _first_turns(arrivals: Sequence[Arrival]) -> list[int]:
    """The first turn of the conversation that each arrival is of."""
    first: list[int] = []
    for index, arrival in enumerate(arrivals):
        first.append(index if arrival.after is None else first[arrival.after])
    return first


def _page_keys(arrival: Arrival, conversation: int, known: int, block_tokens: int, page_tokens: int) -> list[bytes]:
    """A name for each full page of the first ``known`` tokens: those of ``blocks`` are the same in every request, the others in
    this conversation only. A page that is in two blocks is named by both; blocks imply all before them."""
    shared = len(arrival.blocks) * block_tokens
    keys = []
    for page in range(known // page_tokens):
        begin, end = page * page_tokens, (page + 1) * page_tokens
        if end <= shared:
            blocks = arrival.blocks[begin // block_tokens], arrival.blocks[(end - 1) // block_tokens]
            keys.append(b"%d/%d/%d" % (*blocks, begin % block_tokens))
        else:
            keys.append(b"%d:%d" % (conversation, page))
    return keys
