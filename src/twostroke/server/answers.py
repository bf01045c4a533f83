"""Makes whole answers and chunks of streams from pieces of text, in the shapes of ``responses``, as JSON.

A whole answer may be tens of megabytes. It is encoded slice by slice, with turns of the loop between, and never exists twice.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from twostroke.server import protocol, responses, wire
from twostroke.server.errors import ApiError
from twostroke.server.generation import Choice, Generation, TextDelta
from twostroke.server.logprobs import CompletionLogprobs, chat_logprobs, finite, prompt_logprobs
from twostroke.server.service import Service
from twostroke.server.turns import LoopTurns

ENCODER = msgspec.json.Encoder()

SLICE_ENTRIES = 1024
"""Log-probabilities that are encoded at once, in about 2 ms. A thread would be worse: the event loop would wait up to 5 ms for
the interpreter, in every turn."""
_SMALL_BYTES = 2**18  # a smaller answer is sent as one body


class CompletionAnswer:
    """Turns text deltas into OpenAI completions. With ``echo`` a choice's first delta has the prompt before it."""

    def __init__(self, service: Service, generation: Generation, request: protocol.CompletionRequest) -> None:
        self.generation = generation
        self.include_usage = request.include_usage
        self.continuous_usage = request.continuous_usage
        self._text = service.text
        self._building = service.building
        self._echo = bool(request.echo)
        self._n_top = request.logprobs
        self._n_prompt_top = request.prompt_logprobs
        self._offsets = [0] * len(generation.choices)
        self._begun: set[int] = set()

    def _choice(self, delta: TextDelta) -> responses.CompletionChoice:
        text, prompt = delta.text, self.generation.choices[delta.index].prompt
        logprobs = None if self._n_top is None else CompletionLogprobs(self._text)
        if self._echo and delta.index not in self._begun:
            self._begun.add(delta.index)
            text = prompt.text + text
            self._offsets[delta.index] = len(prompt.text)
            if logprobs is not None:
                scores = (None, *self.generation.choices[delta.index].scores)
                logprobs.add_prompt(prompt.ids, scores, prompt.offsets, self._n_top or 0)
        if logprobs is not None:
            logprobs.add(delta.token_ids, delta.logprobs or (), self._offsets[delta.index])
        self._offsets[delta.index] += len(delta.text)
        lists = None if logprobs is None else logprobs.lists
        return responses.CompletionChoice(delta.index, text, lists, delta.finish_reason)

    def _of(self, choices: list[responses.CompletionChoice], usage: Any) -> responses.Completion:
        g = self.generation
        return responses.Completion(g.id, g.created, g.model, choices, usage=usage, system_fingerprint=g.fingerprint)

    def chunk(self, delta: TextDelta) -> Any:
        return self._of([self._choice(delta)], _chunk_usage(self))

    def usage_chunk(self) -> Any:
        return self._of([], self.generation.usage)

    async def whole(self, deltas: list[list[TextDelta]]) -> list[bytes]:
        parts: list[bytes] = []
        scores: dict[int, bytes] = {}  # by prompt, whose choices share them
        for choice, mine in zip(self.generation.choices, deltas, strict=True):
            lists: Any = None
            if self._n_top is not None:
                columns = len(responses.CompletionLogprobs.__struct_fields__)
                lists = responses.CompletionLogprobs(*await json_lists(self._lists(choice, mine), columns, self._building))
            text = (choice.prompt.text if self._echo else "") + "".join(delta.text for delta in mine)
            made = ENCODER.encode(responses.CompletionChoice(choice.index, text, lists, mine[-1].finish_reason))
            parts += [b",", made]
            if self._n_prompt_top is not None:
                of_prompt = scores.get(id(choice.prompt))
                if of_prompt is None:
                    of_prompt = await _prompt_scores(self._text, choice, self._n_prompt_top, self._building)
                    scores[id(choice.prompt)] = of_prompt
                parts[-1:] = _with_prompt_scores(made, of_prompt)
        return _whole(ENCODER.encode(self._of([], self.generation.usage)), parts[1:])

    def _lists(self, choice: Choice, deltas: Sequence[TextDelta]) -> Iterator[Sequence[Sequence[Any]]]:
        """The lists of the choice's logprobs, slice by slice."""
        offset, prompt = 0, choice.prompt
        if self._echo:
            scores, offset = (None, *choice.scores), len(prompt.text)
            for part in slices(len(prompt.ids), self._n_top):
                made = CompletionLogprobs(self._text)
                made.add_prompt(prompt.ids[part], scores[part], prompt.offsets[part], self._n_top or 0)
                yield made.columns
        for part in slices(len(deltas), self._n_top):
            made = CompletionLogprobs(self._text)
            for delta in deltas[part]:
                made.add(delta.token_ids, delta.logprobs or (), offset)
                offset += len(delta.text)
            yield made.columns


class ChatAnswer:
    """Turns text deltas into OpenAI chat completions. The role comes with the first text, which saves an event."""

    def __init__(self, service: Service, generation: Generation, request: protocol.ChatRequest) -> None:
        self.generation = generation
        self.include_usage = request.include_usage
        self.continuous_usage = request.continuous_usage
        self._text = service.text
        self._building = service.building
        self._n_top = (request.top_logprobs or 0) if request.logprobs else None
        self._n_prompt_top = request.prompt_logprobs
        self._begun: set[int] = set()

    def chunk(self, delta: TextDelta) -> Any:
        """None if there is nothing to send yet."""
        found = self._delta(delta)
        if found is None:
            return None
        content, finish = found
        logprobs = chat_logprobs(self._text, delta.token_ids, delta.logprobs)
        return self._chunk([responses.ChatChunkChoice(delta.index, content, logprobs, finish)], _chunk_usage(self))

    def _delta(self, delta: TextDelta) -> tuple[responses.ChatDelta, str | None] | None:
        """What the choice's message gained, and its finish reason."""
        role = self._role(delta.index)
        return responses.ChatDelta(role, delta.text if delta.text or role is not None else None), delta.finish_reason

    def _role(self, index: int) -> str | None:
        """With the first text of a choice."""
        if index in self._begun:
            return None
        self._begun.add(index)
        return "assistant"

    def _message(self, deltas: Sequence[TextDelta]) -> tuple[responses.ChatMessage, str | None]:
        """The whole message of a choice, and its finish reason."""
        return responses.ChatMessage("".join(delta.text for delta in deltas)), deltas[-1].finish_reason

    def usage_chunk(self) -> Any:
        return self._chunk([], self.generation.usage)

    def _chunk(self, choices: list[responses.ChatChunkChoice], usage: Any) -> responses.ChatChunk:
        g = self.generation
        return responses.ChatChunk(g.id, g.created, g.model, choices, usage=usage, system_fingerprint=g.fingerprint)

    async def whole(self, deltas: list[list[TextDelta]]) -> list[bytes]:
        g = self.generation
        parts: list[bytes] = []
        for choice, mine in zip(g.choices, deltas, strict=True):
            logprobs: Any = None
            if self._n_top is not None:
                logprobs = responses.ChatLogprobs(*await json_lists(self._contents(mine), 1, self._building))
            message, finish = self._message(mine)
            parts += [b",", ENCODER.encode(responses.ChatChoice(choice.index, message, finish, logprobs))]
        document = responses.ChatCompletion(g.id, g.created, g.model, [], g.usage, system_fingerprint=g.fingerprint)
        whole = _whole(ENCODER.encode(document), parts[1:])
        if self._n_prompt_top is None:
            return whole
        scores = await _prompt_scores(self._text, g.choices[0], self._n_prompt_top, self._building)
        return [*whole[:-1], *_with_prompt_scores(whole[-1], scores)]

    def _contents(self, deltas: Sequence[TextDelta]) -> Iterator[Sequence[Sequence[Any]]]:
        for part in slices(len(deltas), self._n_top):
            made = [chat_logprobs(self._text, delta.token_ids, delta.logprobs) for delta in deltas[part]]
            yield [[entry for logprobs in made if logprobs is not None for entry in logprobs.content]]


class ScoreAnswer:
    """Turns the scores of prompts into ``responses.Scores``. It is never streamed."""

    def __init__(self, service: Service, generation: Generation) -> None:
        self.generation = generation
        self._text = service.text
        self._building = service.building

    async def whole(self, deltas: list[list[TextDelta]]) -> list[bytes]:
        g = self.generation
        parts: list[bytes] = []
        for choice in g.choices:
            tokens = choice.prompt.ids[choice.prompt.first :]
            if len(choice.scores) < len(tokens):
                raise ApiError(408, "the scores were not computed within timeout_s.", "timeout_s", "timeout")
            scored = list(zip(tokens, choice.scores, strict=True))
            lists: list[Any] = await json_lists(self._columns(scored), 3, self._building)
            total = math.fsum(finite(entry.logprob) for _, entry in scored)
            greedy = all(entry.top[0][0] == token for token, entry in scored)
            parts += [b",", ENCODER.encode(responses.Score(choice.index, total, greedy, *lists))]
        document = responses.Scores(g.id, g.created, g.model, [], g.usage, system_fingerprint=g.fingerprint)
        return _whole(ENCODER.encode(document), parts[1:], b"data")

    def _columns(self, scored: Sequence[tuple[int, wire.TokenLogprobs]]) -> Iterator[Sequence[Sequence[Any]]]:
        """Ids, texts and log-probabilities of the tokens, slice by slice."""
        for part in slices(len(scored), 1):
            ids = [token for token, _ in scored[part]]
            yield ids, [self._text.token_text(i) for i in ids], [finite(entry.logprob) for _, entry in scored[part]]


Streamed = CompletionAnswer | ChatAnswer


class Answer(Protocol):
    """What makes a whole answer of all that a generation gave."""

    generation: Generation

    async def whole(self, deltas: list[list[TextDelta]]) -> list[bytes]: ...


async def whole_answer(answer: Answer) -> list[bytes]:
    """Wait for the whole answer and return its JSON, in parts."""
    generation = answer.generation
    deltas: list[list[TextDelta]] = [[] for _ in generation.choices]
    async for delta in generation.deltas():
        deltas[delta.index].append(delta)
    return await answer.whole(deltas)


def slices(n: int, n_top: int | None) -> Iterator[slice]:
    """Ranges of ``n`` tokens that together have `SLICE_ENTRIES` log-probabilities."""
    size = max(1, SLICE_ENTRIES // ((n_top or 0) + 1))
    return (slice(at, at + size) for at in range(0, n, size))


async def json_lists(slices: Iterable[Sequence[Sequence[Any]]], n: int, building: LoopTurns) -> list[Any]:
    """``n`` lists as `msgspec.Raw`. Their slices are made one at a time, and of all answers together one a turn of the loop."""
    lists: list[list[bytes]] = [[] for _ in range(n)]
    waiting = iter(slices)
    while True:
        await building.wait()
        made = next(waiting, None)
        if made is None:
            return [msgspec.Raw(b"[" + b",".join(pieces) + b"]") for pieces in lists]
        for pieces, items in zip(lists, made, strict=True):
            if items:
                pieces.append(ENCODER.encode(items)[1:-1])


async def _prompt_scores(text: Any, choice: Choice, n_top: int, building: LoopTurns) -> bytes:
    """vLLM's ``prompt_logprobs`` of a choice's prompt."""
    ids = choice.prompt.ids
    scores: tuple[wire.TokenLogprobs | None, ...] = (None, *choice.scores)
    made = ([prompt_logprobs(text, ids[part], scores[part], n_top)] for part in slices(len(ids), n_top))
    return bytes((await json_lists(made, 1, building))[0])


def _with_prompt_scores(made: bytes, scores: bytes) -> list[bytes]:
    """``made``, an encoded struct without ``prompt_logprobs``, with ``scores`` as that field, the last one."""
    return [made[:-1] + b',"prompt_logprobs":', scores, b"}"]


def _whole(document: bytes, items: list[bytes], name: bytes = b"choices") -> list[bytes]:
    """``document``, in which the list ``name`` was encoded empty, with ``items`` in it. The marker that is searched for cannot
    stand in a model's name, because quotes are escaped there."""
    head, _, tail = document.partition(b'"' + name + b'":[]')
    parts = [head + b'"' + name + b'":[', *items, b"]" + tail]
    return joined(parts)


def joined(parts: list[bytes]) -> list[bytes]:
    """A small answer as one part, so that it is sent at once."""
    return [b"".join(parts)] if sum(map(len, parts)) <= _SMALL_BYTES else parts


async def answer_events(answer: Streamed) -> AsyncIterator[bytes]:
    """Server-sent events of a whole stream. An error after the first event becomes the last event."""
    begun = False
    try:
        async for delta in answer.generation.deltas():
            if delta.text or delta.finish_reason is not None or delta.logprobs:
                made = answer.chunk(delta)
                if made is not None:
                    begun = True
                    yield _event(made)
    except ApiError as error:
        if not begun:
            raise
        yield _event(error.body())
        return
    if answer.include_usage:
        yield _event(answer.usage_chunk())
    yield b"data: [DONE]\n\n"


def _event(message: Any) -> bytes:
    return b"data: " + ENCODER.encode(message) + b"\n\n"


def _chunk_usage(answer: Streamed) -> Any:
    if answer.continuous_usage:
        return answer.generation.usage
    return None if answer.include_usage else msgspec.UNSET
