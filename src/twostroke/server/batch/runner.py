"""Computes the requests of a batch through the server's own service, some at a time, and writes each answer as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from twostroke.server import protocol
from twostroke.server.answers import Answer, CompletionAnswer, ScoreAnswer, whole_answer
from twostroke.server.batch.journal import Journal
from twostroke.server.batch.lines import BatchInput, Marks, Request
from twostroke.server.callers import NOBODY, Caller
from twostroke.server.errors import ApiError, bad_request, encode_error
from twostroke.server.gate import MAX_BODY_BYTES, too_large
from twostroke.server.generation import Generation
from twostroke.server.service import Service
from twostroke.server.tool_answers import chat_answer

SYNC_S = 1.0
"""Answers of at most so long are lost in a power cut, and computed again."""
AGAIN_S = 0.05
"""After which a request that found no place, or no engine, tries again."""
MAX_LOSSES = 3
"""An engine that is lost takes all its requests with it. They are computed again one at a time, and the one that was there each
of so many times gets an error."""

LATER = frozenset({"too_many_requests", "engine_not_ready"})
LOST = frozenset({"engine_lost", "slow_reader"})
"""Codes of errors that say nothing of the request itself."""


Outcome = Literal["done", "later", "lost"]
Computing = asyncio.Task[Outcome]


class _Route(NamedTuple):
    parse: Callable[[bytes], Any]
    start: Callable[..., Any]
    answer: Callable[[Service, Generation, Any], Answer]


_ROUTES: dict[str, _Route] = {
    "/v1/chat/completions": _Route(protocol.parse_chat, Service.chat, chat_answer),
    "/v1/completions": _Route(protocol.parse_completion, Service.complete, CompletionAnswer),
    "/v1/score": _Route(
        protocol.parse_score, Service.score, lambda service, generation, _: ScoreAnswer(service, generation)
    ),
}  # fmt: skip


async def begun(service: Service, request: Request, marks: Marks, priority: int = 0, caller: Caller = NOBODY) -> Answer:
    """The answer to ``request``, whose generation the engine has begun and which must be closed. Raises ApiError, after which
    the engine holds nothing of it."""
    parse, start, answer = _ROUTES[request.url]
    if len(memoryview(request.body)) > MAX_BODY_BYTES:
        raise too_large()
    parsed = await service.parse(parse, bytes(request.body), caller.name)
    if getattr(parsed, "stream", None):
        raise bad_request("the answers of a batch are not streamed. Use stream=false.", "stream", "unsupported_value")
    if isinstance(parsed, protocol.CommonRequest) and parsed.seed is None:
        parsed.seed = marks.seed
    parsed.priority = max(parsed.priority or 0, priority)
    generation: Generation = await start(service, parsed, time.perf_counter(), caller)
    return answer(service, generation, parsed)


class BatchRunner:
    """The requests of ``given`` that neither ``output`` nor ``errors`` has an answer to.

    ``marks`` are those of an id, ``created`` is what answers say of their time: both follow from the job, so an answer has the
    same bytes whenever it is computed. ``at_once`` says how many requests may be under way at the moment. ``on_line`` is called
    after each line that was written.
    """

    def __init__(
        self, service: Service, given: BatchInput, marks: Callable[[str], Marks], created: int, output: Journal,
        errors: Journal, *, at_once: Callable[[], int], priority: int = 0, caller: Caller = NOBODY,
        on_line: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._service, self._given, self._marks, self._created = service, given, marks, created
        self._output, self._errors = output, errors
        self._at_once, self._priority, self._caller, self._on_line = at_once, priority, caller, on_line
        self._losses: dict[int, int] = {}
        self.reasons: Counter[str] = Counter()  # why answers ended

    def left(self) -> list[int]:
        """Places of the requests that have no answer yet."""
        return self._given.without(self._output.done | self._errors.done)

    async def run(self) -> None:
        """Until all have an answer. Raises OSError if one cannot be written, and InputError if the input has changed. Whatever
        ends it, what was written is synced, and the engine holds nothing of the rest."""
        waiting, alone = deque(self.left()), deque[int]()
        running: dict[Computing, int] = {}
        ended: asyncio.Queue[Computing] = asyncio.Queue()

        def begin(i: int) -> None:
            task = asyncio.create_task(self._compute(i))
            task.add_done_callback(ended.put_nowait)
            running[task] = i

        synced_s = time.monotonic()
        try:
            while waiting or alone or running:
                if alone and not running:
                    begin(alone.popleft())
                while not alone and waiting and len(running) < self._at_once():
                    begin(waiting.popleft())
                for task in await _some(ended):
                    i, outcome = running.pop(task), task.result()
                    if outcome == "later":
                        waiting.appendleft(i)
                    elif outcome == "lost":
                        alone.append(i)
                if time.monotonic() - synced_s > SYNC_S:
                    await asyncio.to_thread(self._sync)
                    synced_s = time.monotonic()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            self._sync()

    async def fail(self, places: Iterable[int], code: str, message: str) -> None:
        """Write of each request that it was not computed, and why. Raises OSError."""
        for i in places:
            marks = self._marks(self._given.ids[i])
            self._errors.append(marks.custom_id, marks.unanswered(code, message))
            self._on_line()
            await self._service.loop_turns.wait()  # 50,000 of them take a second

    async def _compute(self, i: int) -> Outcome:
        while not self._service.client.ready:
            await asyncio.sleep(AGAIN_S)
        request = self._given.request(i)
        marks = self._marks(request.custom_id)
        try:
            body = await self._answer(request, marks)
        except ApiError as error:
            if error.code in LATER:
                await asyncio.sleep(AGAIN_S)
                return "later"
            if error.code in LOST:
                self._losses[i] = self._losses.get(i, 0) + 1
                if self._losses[i] < MAX_LOSSES:
                    return "lost"
            self._errors.append(marks.custom_id, marks.answered(error.status, [encode_error(error)]))
        else:
            self._output.append(marks.custom_id, marks.answered(200, body))
        self._on_line()
        return "done"

    async def _answer(self, request: Request, marks: Marks) -> list[bytes]:
        answer = await begun(self._service, request, marks, self._priority, self._caller)
        generation = answer.generation
        try:
            generation.id = f"{generation.id.partition('-')[0]}-{marks.hexadecimal}"
            generation.created = self._created
            generation.says_cached = False
            body = await whole_answer(answer)
            self.reasons += generation.reasons
            return body
        finally:
            generation.close()

    def _sync(self) -> None:
        self._output.sync()
        self._errors.sync()


async def _some(ended: asyncio.Queue[Computing]) -> list[Computing]:
    """Those that have ended; none after ``AGAIN_S``, because how many may run at once changes with the traffic beside."""
    found = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(AGAIN_S):
            found.append(await ended.get())
    while not ended.empty():
        found.append(ended.get_nowait())
    return found
