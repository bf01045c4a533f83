"""Predicts how long a request waits for its first token, so that one whose client would not wait so long is refused at once.

The planner knows the seconds of the engine's steps. This process knows what it has handed to the engine: prompts that wait for
their first token, and answers that are being written. From both follows what is ahead of another request: prompts, in the order
in which the scheduler takes turns, and answers that must end before there is room. What was predicted is held against each
first token that comes, and the running ratio of the two corrects the next prediction.
"""

from __future__ import annotations

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
KNOWN_PAGES = 2**16
"""Most pages of prompts that are remembered as cached: of a million tokens, in some 10 MB."""


class Steps(Protocol):
    """Seconds of the engine's steps as they are expected, and what it has room for."""

    max_running: int
    token_budget: int
    cache_tokens: float

    def prompt_s(self, begin: int, end: int) -> float:
        """Of the tokens ``begin`` to ``end`` of a prompt, computed alone."""
        ...

    def decode_s(self, answers: int, context: float) -> float:
        """Of a step in which so many answers get a token, behind ``context`` tokens on average."""
        ...


class PlannedSteps:
    """Those of a plan."""

    def __init__(self, plan: ServingPlan, settings: EngineSettings) -> None:
        self.max_running, self.token_budget = settings.max_running, settings.token_budget
        self.cache_tokens = float(plan.pages * PAGE_TOKENS)
        self._steps = StepTable(strategy_of(plan.spec, plan.shape, plan.hardware).step_seconds)
        longest = min(settings.max_model_len or plan.spec.max_positions, plan.spec.max_positions)
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
    have, and ``is_certain`` whether it will. ``predicted_s``: its wait, uncorrected, if that is to be compared."""

    asked: Asked
    most: int
    is_certain: bool
    handed_s: float
    predicted_s: float | None
    keys: list[bytes]
    left: int = 0
    first_s: float | None = None


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
        self._waiting: dict[Ticket, None] = {}
        self._decoding: dict[Ticket, None] = {}
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
        return ticket

    def began(self, ticket: Ticket) -> None:
        """Its first token has come."""
        if ticket not in self._waiting:
            return
        del self._waiting[ticket]
        self._decoding[ticket] = None
        ticket.first_s = now_s = self._clock()
        self._prefixes.add(ticket.keys)
        if ticket.predicted_s:
            self.ratio.add(ticket.predicted_s, now_s - ticket.handed_s, now_s)

    def ended(self, ticket: Ticket, n_output: int) -> None:
        """One of its answers is complete."""
        ticket.left -= 1
        weight = 1 / MEMORY
        self._share += weight * (min(1.0, n_output / max(1, ticket.most)) - self._share)
        self._length += weight * (n_output - self._length)
        if not ticket.left:
            self.gone(ticket)

    def gone(self, ticket: Ticket) -> None:
        """The engine has it no longer. A second call does nothing."""
        self._waiting.pop(ticket, None)
        self._decoding.pop(ticket, None)

    # -- what is asked

    @property
    def tokens(self) -> int:
        """Tokens of prompts that wait for their first token, without those that are known to be cached."""
        return sum(ticket.asked.new for ticket in self._waiting)

    def is_over(self, new: int) -> bool:
        """Whether ``new`` tokens more would be too many. A prompt that finds no other waiting is never too long."""
        return self.max_tokens is not None and bool(self._waiting) and self.tokens + new > self.max_tokens

    def drained_s(self) -> float:
        """Planned seconds of the prompts that wait, or one without a plan."""
        return self.ratio.mean * sum(ticket.asked.prompt_s for ticket in self._waiting) if self.predicts else 1.0

    @property
    def predicts(self) -> bool:
        """Whether predictions exist and were held against enough first tokens of this server."""
        return self.steps is not None and self.ratio.n >= TRUSTED

    def first_token_s(self, asked: Sequence[Asked]) -> float:
        """Seconds after which most requests for ``asked``, prompts that come together, have their first tokens."""
        return self.ratio.upper(self._clock()) * self._seconds(asked)

    def alone_s(self, asked: Sequence[Asked]) -> float:
        """The same if nothing was ahead of them."""
        return self.ratio.upper(self._clock()) * sum(each.prompt_s for each in asked)

    def later_s(self, tokens: int, asked: Sequence[Asked]) -> float:
        """Seconds of ``tokens`` more of each answer."""
        if self.steps is None or tokens <= 0:
            return 0.0
        answers = self._n_decoding + sum(each.answers for each in asked)
        context = self._context(self._written())
        return self.ratio.mean * tokens * self.steps.decode_s(min(answers, self.steps.max_running), context)

    @property
    def _n_decoding(self) -> int:
        return sum(ticket.left for ticket in self._decoding)

    def _written(self) -> dict[Ticket, float]:
        """Tokens of each answer so far, by the time: of an answer that is not streamed nothing else is known."""
        assert self.steps is not None
        step_s = self.ratio.mean * self.steps.decode_s(min(max(1, self._n_decoding), self.steps.max_running), 0.0)
        now_s = self._clock()
        return {
            ticket: min(float(ticket.most), (now_s - (ticket.first_s or now_s)) / step_s) if step_s > 0 else 0.0
            for ticket in self._decoding
        }

    @staticmethod
    def _context(written: dict[Ticket, float]) -> float:
        """Tokens before an answer's next one, on average."""
        return sum(ticket.asked.tokens + n for ticket, n in written.items()) / len(written) if written else 0.0

    def _seconds(self, asked: Sequence[Asked]) -> float:
        """Planned seconds to the last first token of ``asked``, without the correction."""
        steps, one = self.steps, asked[0]
        assert steps is not None
        own = _Queue()
        for each in asked:
            own.add(each)
        mine_s, others, before = own.seconds, dict[str, _Queue](), _Queue()
        for ticket in self._waiting:
            there = ticket.asked
            if there.priority < one.priority:
                before.add(there)
            elif there.priority == one.priority and there.client == one.client:
                own.add(there)
            elif there.priority == one.priority:
                others.setdefault(there.client, _Queue()).add(there)
        # Clients take turns: of another's prompts as much is ahead as this client has waiting with these.
        for queue in others.values():
            before.add_share(queue, 1.0 if queue.seconds <= own.seconds else own.seconds / queue.seconds)
        ahead_s = before.seconds + own.seconds - mine_s
        answers, tokens = before.answers + own.answers, before.tokens + own.tokens
        decoding, written = self._n_decoding, self._written()
        context = self._context(written)
        step_s = steps.decode_s(min(decoding, steps.max_running), context)
        n_steps = math.ceil((before.new + own.new) / max(1, steps.token_budget - decoding))
        room_s = self._steps_to_room(answers, tokens, written) * (step_s or steps.decode_s(1, context))
        return room_s + ahead_s + mine_s + (n_steps + 0.5) * step_s

    def _steps_to_room(self, answers: float, tokens: float, written: dict[Ticket, float]) -> float:
        """Steps until so many answers more, with so many tokens, have a place in a step and pages."""
        steps = self.steps
        assert steps is not None
        places = self._n_decoding + answers - steps.max_running
        held = {ticket: ticket.asked.tokens + ticket.left * n for ticket, n in written.items()}
        pages = sum(held.values()) + tokens - steps.cache_tokens
        if places <= 0 and pages <= 0:
            return 0.0
        to_end = {ticket: self._to_end(ticket, n) for ticket, n in written.items()}
        passed = 0.0
        for ticket in sorted(to_end, key=to_end.__getitem__):
            passed = to_end[ticket]
            places, pages = places - ticket.left, pages - held[ticket]
            if places <= 0 and pages <= 0:
                return passed
        rounds = max(places / steps.max_running, pages / max(1.0, steps.cache_tokens))
        return passed + math.ceil(rounds) * self._length if self._decoding else 0.0

    def _to_end(self, ticket: Ticket, written: float) -> float:
        expected = ticket.most if ticket.is_certain else ticket.most * self._share
        return max(1.0, expected - written)


@dataclass
class _Queue:
    """Prompts together."""

    seconds: float = 0.0
    new: float = 0.0
    tokens: float = 0.0
    answers: float = 0.0

    def add(self, asked: Asked) -> None:
        self.seconds += asked.prompt_s
        self.new += asked.new
        self.tokens += asked.tokens
        self.answers += asked.answers

    def add_share(self, other: _Queue, share: float) -> None:
        self.seconds += share * other.seconds
        self.new += share * other.new
        self.tokens += share * other.tokens
        self.answers += share * other.answers
