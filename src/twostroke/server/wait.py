"""Predicts how long a request waits for its first token, so that one whose client would not wait so long is refused at once.

The planner knows the seconds of the engine's steps. This process knows what it has handed to the engine: prompts that wait for
their first token, and answers that are being written. From both follows what is ahead of another request: prompts, in the order
in which the scheduler takes turns, and answers that must end before there is room. What was predicted is held against each
first token that comes, and the running ratio of the two corrects the next prediction.
"""

from __future__ import annotations

import asyncio
import bisect
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from twostroke.core.engine_settings import EngineSettings
from twostroke.core.policy import PAGE_TOKENS
from twostroke.planner.serving.plan import ServingPlan, strategy_of
from twostroke.planner.serving.step_costs import pace_of
from twostroke.planner.serving.step_table import StepTable
from twostroke.planner.serving.strategy import Chunk
from twostroke.scheduling.prefix_tree import ROOT, chain_key, root_beside, root_of

DEVIATIONS = 3.0
"""Mean deviations above the mean ratio at which a prediction is held against a deadline: 99% of normally spread waits are
shorter (a standard deviation is 1.25 mean deviations)."""
FIRST_DEVIATION = 0.25
"""Mean deviation that is assumed of the first ratio."""
MEMORY = 16
"""First tokens that the running ratio remembers, about."""
TRUSTED = 8
"""First tokens that a server has measured before it refuses by its predictions."""
FORGOTTEN_S = 10.0
"""A ratio above 1 loses half of its logarithm in so many seconds without a first token. If everybody is refused there is none,
and a ratio that was high once would otherwise refuse for ever."""
CONTEXT_GRAIN = 64
"""Contexts are rounded to so many tokens, which bounds the step times that are kept."""
LAG_TICK_S, LAG_KEPT = 0.05, 0.95
"""How often this process looks how late it is itself, and what a tick later counts of that: half of it in 0.7 s."""
FRESH_S = 0.005
"""For so long what is known of the answers under way is used again, unless one begins or ends. Under overload thousands of
requests a second ask."""
KNOWN_PAGES = 2**16
"""Most pages of prompts that are remembered as cached: of a million tokens, in some 10 MB."""


class Steps(Protocol):
    """Seconds of the engine's steps as they are expected, and what it has room for."""

    engines: int
    """Of each of them is what follows."""
    max_running: int
    cache_tokens: float

    def prompt_tokens(self, answers: float, context: float, others: float) -> float:
        """Of prompts in a step in which so many answers get a token behind ``context`` tokens, while ``others`` wait beside the
        one whose prompt is computed."""
        ...

    def prompt_s(self, begin: int, end: int) -> float:
        """Of the tokens ``begin`` to ``end`` of a prompt, computed alone."""
        ...

    def decode_s(self, answers: int, context: float) -> float:
        """Of a step in which so many answers get a token, behind ``context`` tokens on average."""
        ...


class PlannedSteps:
    """Those of a plan, for each of ``engines`` alike."""

    def __init__(self, plan: ServingPlan, settings: EngineSettings, engines: int = 1) -> None:
        self.engines, self.max_running, self.token_budget = engines, settings.max_running, settings.token_budget
        self.cache_tokens = float(plan.pages * PAGE_TOKENS)
        self._steps = StepTable(strategy_of(plan.spec, plan.shape, plan.hardware).step_seconds)
        longest = min(settings.max_model_len or plan.spec.max_positions, plan.spec.max_positions)
        self._pace = pace_of(self._steps, settings.max_step_ratio, settings.token_budget)
        self._lengths, self._seconds = self._prompts(longest)

    def _prompts(self, longest: int) -> tuple[list[int], list[float]]:
        """Lengths of prompts, and the seconds of each alone. One chunk's cost grows linearly with what is before it."""
        budget = self.token_budget
        lengths = [0, *(n for n in (1, 16, 64, 128, 256) if n < min(budget, longest)), min(budget, longest)]
        seconds = [0.0, *(self._chunk_s(0, n) for n in lengths[1:])]
        while lengths[-1] < longest:
            begin, end = lengths[-1], min(2 * lengths[-1], longest)
            first, last = self._chunk_s(begin, min(budget, end - begin)), self._chunk_s(max(begin, end - budget), budget)
            seconds.append(seconds[-1] + math.ceil((end - begin) / budget) * (first + last) / 2)
            lengths.append(end)
        return lengths, seconds

    def _chunk_s(self, before: int, new: int) -> float:
        return self._steps(0, 0.0, (Chunk(before, new, True),))

    def prompt_tokens(self, answers: float, context: float, others: float) -> float:
        most = self.token_budget - answers
        if self._pace is None or answers < 1:
            return most
        return min(most, self._pace.tokens_beside(round(answers), context, round(others)))

    def prompt_s(self, begin: int, end: int) -> float:
        return max(0.0, self._alone_s(end) - self._alone_s(begin))

    def _alone_s(self, tokens: int) -> float:
        lengths, seconds = self._lengths, self._seconds
        i = min(max(1, bisect.bisect_left(lengths, tokens)), len(lengths) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (lengths[i] - lengths[i - 1])
        return seconds[i] + (tokens - lengths[i]) * slope

    def decode_s(self, answers: int, context: float) -> float:
        return self._steps(answers, CONTEXT_GRAIN * round(context / CONTEXT_GRAIN), ()) if answers else 0.0


class Ratio:
    """Measured over predicted seconds: mean and mean deviation of the logarithm, newer ones counting more."""

    def __init__(self) -> None:
        self.n = 0
        self._mean, self._deviation, self._last_s = 0.0, FIRST_DEVIATION, 0.0

    def add(self, predicted_s: float, measured_s: float, now_s: float) -> None:
        found = math.log(max(measured_s, 1e-9) / max(predicted_s, 1e-9))
        self.n, self._last_s = self.n + 1, now_s
        if self.n == 1:
            self._mean = found
            return
        weight, off = max(1 / MEMORY, 1 / self.n), found - self._mean
        self._mean += weight * off
        self._deviation += weight * (abs(off) - self._deviation)

    @property
    def mean(self) -> float:
        return math.exp(self._mean)

    def upper(self, now_s: float) -> float:
        """The factor on a prediction that most waits keep to."""
        found = self._mean + DEVIATIONS * self._deviation
        return math.exp(found * 0.5 ** ((now_s - self._last_s) / FORGOTTEN_S) if found > 0 else found)


class KnownPrefixes:
    """Full pages of prompts that the engine computed lately. It may have dropped some of them: nothing but a prediction depends
    on them."""

    def __init__(self, most: int = KNOWN_PAGES) -> None:
        self._most, self._pages = most, OrderedDict[bytes, None]()

    def cached(self, root: bytes, ids: Sequence[int]) -> tuple[int, list[bytes]]:
        """Tokens at the beginning of ``ids`` that the cache likely has, at most all but the last, and the keys of all pages."""
        keys, n_known, parent = [], 0, root
        for end in range(PAGE_TOKENS, len(ids) + 1, PAGE_TOKENS):
            parent = chain_key(parent, ids[end - PAGE_TOKENS : end])
            keys.append(parent)
            if n_known == end - PAGE_TOKENS and parent in self._pages:
                self._pages.move_to_end(parent)
                n_known = end
        return max(0, min(n_known, len(ids) - 1)), keys

    def add(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._pages[key] = None
            self._pages.move_to_end(key)
        while len(self._pages) > self._most:
            self._pages.popitem(last=False)


class Asked(NamedTuple):
    """What a request asks of the engine. ``tokens`` of its prompts, of which ``new`` are not cached, as far as is known; that
    many ``answers`` run at once. ``prompt_s``: planned seconds of its prompts alone."""

    tokens: int = 1
    new: int = 1
    answers: int = 1
    prompt_s: float = 0.0
    priority: int = 0
    client: str = ""


@dataclass(eq=False)
class Ticket:
    """A prompt that the engine has, from being handed over to the end of its last answer. ``most``: tokens that each answer may
    have, and ``is_certain`` whether it will. ``predicted_s``: its wait, uncorrected, if that is to be compared. ``written``:
    the tokens of the answer that was heard of last, of a whole answer none before its end."""

    asked: Asked
    most: int
    is_certain: bool
    handed_s: float
    predicted_s: float | None
    keys: list[bytes]
    left: int = 0
    first_s: float | None = None
    written: int = 0


class Waiting:
    """Everything that this process has handed to the engine and that is not finished. Without ``steps``, on a machine that was
    not calibrated, nothing is predicted. ``max_tokens`` bounds the tokens of prompts that wait; None does not."""

    def __init__(
        self,
        steps: Steps | None = None,
        max_tokens: int | None = None,
        separate: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.steps, self.max_tokens, self._separate, self._clock = steps, max_tokens, separate, clock
        self.ratio = Ratio()
        self.lag_s = 0.0  # by which this process is late, at its worst lately
        self._waiting: dict[Ticket, None] = {}
        self._queues: dict[tuple[int, str], _Queue] = {}  # of those that wait, by priority and client
        self._decoding: dict[Ticket, None] = {}
        self._seen: _Decoding | None = None
        self._prefixes = KnownPrefixes()
        self._share, self._length = 1.0, 1.0  # of ``most`` that answers have, and their tokens

    # -- what goes in and comes out

    def asked(
        self, prompts: Sequence[Sequence[int]], answers: int, priority: int, client: str, model: str, cacheable: bool
    ) -> tuple[list[Asked], list[list[bytes]]]:
        """What each of ``prompts`` asks for, and the keys of its pages. Nothing is looked up if nobody will ask."""
        if self.steps is None and self.max_tokens is None:
            return [Asked(len(ids), len(ids), answers, 0.0, priority, client) for ids in prompts], [[] for _ in prompts]
        root = root_of(client) if self._separate else ROOT
        root = root_beside(root, model.encode(errors="surrogatepass")) if model else root
        found, pages = [], []
        for ids in prompts:
            cached, keys = self._prefixes.cached(root, ids) if cacheable else (0, [])
            seconds = 0.0 if self.steps is None else self.steps.prompt_s(cached, len(ids))
            found.append(Asked(len(ids), len(ids) - cached, answers, seconds, priority, client))
            pages.append(keys)
        return found, pages

    def hand(self, asked: Asked, keys: list[bytes], most: int, is_certain: bool, compares: bool) -> Ticket:
        """The engine gets a prompt. ``compares``: its first token is as late as the prompt and the queue make it."""
        predicted_s = self._seconds([asked]) if compares and self.steps is not None else None
        ticket = Ticket(asked, most, is_certain, self._clock(), predicted_s, keys, asked.answers)
        self._waiting[ticket] = None
        self._queues.setdefault((asked.priority, asked.client), _Queue()).add(asked)
        return ticket

    def began(self, ticket: Ticket) -> None:
        """Its first token has come."""
        if not self._leave_queue(ticket):
            return
        self._decoding[ticket] = None
        self._seen = None
        ticket.first_s = now_s = self._clock()
        self._prefixes.add(ticket.keys)
        if ticket.predicted_s:
            self.ratio.add(ticket.predicted_s, now_s - ticket.handed_s, now_s)

    def ended(self, ticket: Ticket, n_output: int) -> None:
        """One of its answers is complete."""
        ticket.left -= 1
        self._seen = None
        weight = 1 / MEMORY
        self._share += weight * (min(1.0, n_output / max(1, ticket.most)) - self._share)
        self._length += weight * (n_output - self._length)
        if not ticket.left:
            self.gone(ticket)

    def gone(self, ticket: Ticket) -> None:
        """The engine has it no longer. A second call does nothing."""
        self._leave_queue(ticket)
        if ticket in self._decoding:
            del self._decoding[ticket]
            self._seen = None

    def _leave_queue(self, ticket: Ticket) -> bool:
        """Whether it was in one."""
        if ticket not in self._waiting:
            return False
        del self._waiting[ticket]
        key = ticket.asked.priority, ticket.asked.client
        self._queues[key].take(ticket.asked)
        if not self._queues[key].n:
            del self._queues[key]
        return True

    # -- what is asked

    @property
    def tokens(self) -> int:
        """Tokens of prompts that wait for their first token, without those that are known to be cached."""
        return round(sum(queue.new for queue in self._queues.values()))

    def is_over(self, new: int) -> bool:
        """Whether ``new`` tokens more would be too many. A prompt that finds no other waiting is never too long."""
        return self.max_tokens is not None and bool(self._waiting) and self.tokens + new > self.max_tokens

    def drained_s(self) -> float:
        """Planned seconds of the prompts that wait, or one without a plan."""
        return self.ratio.mean * sum(queue.seconds for queue in self._queues.values()) if self.predicts else 1.0

    @property
    def predicts(self) -> bool:
        """Whether predictions exist and were held against enough first tokens of this server."""
        return self.steps is not None and self.ratio.n >= TRUSTED

    def first_token_s(self, asked: Sequence[Asked]) -> float:
        """Seconds after which most requests for ``asked``, prompts that come together, have their first tokens. What this
        process is late by, a request meets twice: before it is read, and before its token is sent."""
        return self.ratio.upper(self._clock()) * self._seconds(asked) + 2 * self.lag_s

    async def watch_lag(self) -> None:
        """Look how late this process is, until cancelled."""
        while True:
            before_s = self._clock()
            await asyncio.sleep(LAG_TICK_S)
            self.lag_s = max(self._clock() - before_s - LAG_TICK_S, LAG_KEPT * self.lag_s)

    def alone_s(self, asked: Sequence[Asked]) -> float:
        """The same if nothing was ahead of them."""
        return self.ratio.upper(self._clock()) * sum(each.prompt_s for each in asked)

    def later_s(self, tokens: int, asked: Sequence[Asked]) -> float:
        """Seconds of ``tokens`` more of each answer."""
        if self.steps is None or tokens <= 0:
            return 0.0
        seen = self._look()
        answers = seen.answers + sum(each.answers for each in asked)
        return self.ratio.mean * tokens * self._step_s(answers, seen.context)

    def _step_s(self, answers: float, context: float) -> float:
        """Planned seconds of a step of one engine, if all together have so many answers under way."""
        assert self.steps is not None
        return self.steps.decode_s(min(math.ceil(answers / self.steps.engines), self.steps.max_running), context)

    def _look(self) -> _Decoding:
        """The answers under way. How far one is that is not streamed follows from the time alone."""
        steps, now_s = self.steps, self._clock()
        if self._seen is not None and now_s - self._seen.at_s < FRESH_S:
            return self._seen
        assert steps is not None
        answers = sum(ticket.left for ticket in self._decoding)
        step_s = self.ratio.mean * self._step_s(max(1, answers), 0.0)
        ends, total, held = [], 0.0, 0.0
        for ticket in self._decoding:
            most = float(ticket.most)
            written = float(ticket.written)
            if written < 1 and step_s > 0:
                written = min(most, (now_s - (ticket.first_s or now_s)) / step_s)
            pages = ticket.asked.tokens + ticket.left * written
            ends.append((max(1.0, (most if ticket.is_certain else most * self._share) - written), ticket.left, pages))
            total, held = total + ticket.asked.tokens + written, held + pages
        context = total / len(ends) if ends else 0.0
        step_s = self._step_s(answers, context)
        self._seen = _Decoding(now_s, answers, context, step_s, held, sorted(ends))
        return self._seen

    def _seconds(self, asked: Sequence[Asked]) -> float:
        """Planned seconds to the last first token of ``asked``, without the correction."""
        steps, one = self.steps, asked[0]
        assert steps is not None
        own = _Queue()
        for each in asked:
            own.add(each)
        mine_s, others, before = own.seconds, list[_Queue](), _Queue()
        for (priority, client), queue in self._queues.items():
            if priority < one.priority:
                before.add_share(queue, 1.0)
            elif priority == one.priority and client == one.client:
                own.add_share(queue, 1.0)
            elif priority == one.priority:
                others.append(queue)
        # Clients take turns: of another's prompts as much is ahead as this client has waiting with these.
        for queue in others:
            before.add_share(queue, 1.0 if queue.seconds <= own.seconds else own.seconds / queue.seconds)
        ahead_s = before.seconds + own.seconds - mine_s
        answers, tokens = before.answers + own.answers, before.tokens + own.tokens
        seen = self._look()
        share = 1 / steps.engines  # requests go to the engine that has least before them
        n_others = max(0.0, share * (before.n + own.n) - 1)
        most = steps.prompt_tokens(share * seen.answers, seen.context, n_others)
        n_steps = math.ceil(share * (before.new + own.new) / max(1.0, most))
        room_s = self._steps_to_room(answers, tokens, seen) * (seen.step_s or self._step_s(answers, seen.context))
        return room_s + share * ahead_s + mine_s + (n_steps + 0.5) * seen.step_s

    def _steps_to_room(self, answers: float, tokens: float, seen: _Decoding) -> float:
        """Steps until so many answers more, with so many tokens, have a place in a step and pages. Those that take a place that
        comes free are as long as answers were lately, and free it again."""
        steps = self.steps
        assert steps is not None
        places = seen.answers + answers - steps.engines * steps.max_running
        pages = seen.held + tokens - steps.engines * steps.cache_tokens
        if places <= 0 and pages <= 0:
            return 0.0
        if not seen.ends:  # those before this one begin together, and end so
            return self._length * max(0, math.ceil(places / (steps.engines * steps.max_running)))
        rounds = max(0.0, (places - 1) // seen.answers, (pages - 1) // seen.held if pages > 0 else 0.0)
        places, pages, passed = places - rounds * seen.answers, pages - rounds * seen.held, 0.0
        for to_end, left, held in seen.ends:
            if places <= 0 and pages <= 0:
                break
            places, pages, passed = places - left, pages - held, to_end
        return passed + rounds * self._length


class _Decoding(NamedTuple):
    """The answers under way at a moment: how many, tokens before their next one on average, planned seconds of their step,
    tokens in the cache. ``ends``: of each prompt's answers the steps to their end, how many they are, and their tokens; those
    that end first come first."""

    at_s: float
    answers: int
    context: float
    step_s: float
    held: float
    ends: list[tuple[float, int, float]]


@dataclass
class _Queue:
    """Prompts together."""

    n: int = 0
    seconds: float = 0.0
    new: float = 0.0
    tokens: float = 0.0
    answers: float = 0.0

    def add(self, asked: Asked, sign: int = 1) -> None:
        self.n += sign
        self.seconds += sign * asked.prompt_s
        self.new += sign * asked.new
        self.tokens += sign * asked.tokens
        self.answers += sign * asked.answers

    def take(self, asked: Asked) -> None:
        self.add(asked, -1)

    def add_share(self, other: _Queue, share: float) -> None:
        self.seconds += share * other.seconds
        self.new += share * other.new
        self.tokens += share * other.tokens
        self.answers += share * other.answers
