"""From pieces of text to whole answers and to chunks of a stream, in the shapes of ``responses``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from twostroke.server import protocol, responses
from twostroke.server.errors import ApiError
from twostroke.server.logprobs import CompletionLogprobs, chat_logprobs, merge_logprobs, prompt_logprobs
from twostroke.server.service import Choice, Generation, Service, TextDelta

ENCODER = msgspec.json.Encoder()

_MANY_SCORES = 4096
"""Prompt tokens above which an answer is put together in a thread: others' streams shall not wait for it."""


class CompletionAnswer:
    """Text deltas as OpenAI completions; with ``echo`` a choice's first one has the prompt before it."""

    def __init__(self, service: Service, generation: Generation, request: protocol.CompletionRequest) -> None:
        self.generation = generation
        self.include_usage = request.include_usage
        self.continuous_usage = request.continuous_usage
        self._text = service.text
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
                scores = self.generation.choices[delta.index].scores
                logprobs.add_prompt(prompt.ids, scores, prompt.offsets, self._n_top or 0)
        if logprobs is not None:
            logprobs.add(delta.token_ids, delta.logprobs or (), self._offsets[delta.index])
        self._offsets[delta.index] += len(delta.text)
        lists = None if logprobs is None else logprobs.lists
        return responses.CompletionChoice(delta.index, text, lists, delta.finish_reason)

    def _of(self, choices: list[responses.CompletionChoice], usage: Any) -> responses.Completion:
        g = self.generation
        return responses.Completion(g.id, g.created, g.model, choices, usage=usage)

    def chunk(self, delta: TextDelta) -> Any:
        return self._of([self._choice(delta)], _chunk_usage(self))

    def usage_chunk(self) -> Any:
        return self._of([], self.generation.usage)

    def whole(self, deltas: list[list[TextDelta]]) -> Any:
        choices = []
        for index, parts in enumerate(deltas):
            made = [self._choice(delta) for delta in parts]
            text = "".join(choice.text for choice in made)
            logprobs = merge_logprobs([choice.logprobs for choice in made])
            scores = _prompt_scores(self._text, self.generation.choices[index], self._n_prompt_top)
            choices.append(responses.CompletionChoice(index, text, logprobs, made[-1].finish_reason, scores))
        return self._of(choices, self.generation.usage)


class ChatAnswer:
    """Text deltas as OpenAI chat completions. The role comes with the first text: one event less than a chunk of its own."""

    def __init__(self, service: Service, generation: Generation, request: protocol.ChatRequest) -> None:
        self.generation = generation
        self.include_usage = request.include_usage
        self.continuous_usage = request.continuous_usage
        self._text = service.text
        self._n_prompt_top = request.prompt_logprobs
        self._begun: set[int] = set()

    def chunk(self, delta: TextDelta) -> Any:
        g = self.generation
        begun = delta.index in self._begun
        self._begun.add(delta.index)
        content = responses.ChatDelta(None if begun else "assistant", delta.text if delta.text or not begun else None)
        logprobs = chat_logprobs(self._text, delta.token_ids, delta.logprobs)
        choice = responses.ChatChunkChoice(delta.index, content, logprobs, delta.finish_reason)
        return responses.ChatChunk(g.id, g.created, g.model, [choice], usage=_chunk_usage(self))

    def usage_chunk(self) -> Any:
        g = self.generation
        return responses.ChatChunk(g.id, g.created, g.model, [], usage=g.usage)

    def whole(self, deltas: list[list[TextDelta]]) -> Any:
        g = self.generation
        choices = [
            responses.ChatChoice(
                index,
                responses.ChatMessage("".join(delta.text for delta in parts)),
                parts[-1].finish_reason,
                merge_logprobs([chat_logprobs(self._text, delta.token_ids, delta.logprobs) for delta in parts]),
            )
            for index, parts in enumerate(deltas)
        ]
        scores = _prompt_scores(self._text, g.choices[0], self._n_prompt_top)
        return responses.ChatCompletion(g.id, g.created, g.model, choices, g.usage, prompt_logprobs=scores)


Answer = CompletionAnswer | ChatAnswer


async def collect(answer: Answer) -> Any:
    """The whole answer, when it is there."""
    generation = answer.generation
    parts: list[list[TextDelta]] = [[] for _ in generation.choices]
    async for delta in generation.deltas():
        parts[delta.index].append(delta)
    if sum(len(choice.scores) for choice in generation.choices) > _MANY_SCORES:
        return await asyncio.to_thread(answer.whole, parts)
    return answer.whole(parts)


async def answer_events(answer: Answer) -> AsyncIterator[bytes]:
    """Server-sent events of a whole stream. An error after the first event becomes an event itself and ends the stream."""
    begun = False
    try:
        async for delta in answer.generation.deltas():
            if delta.text or delta.finish_reason is not None or delta.logprobs:
                begun = True
                yield _event(answer.chunk(delta))
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


def _chunk_usage(answer: Answer) -> Any:
    if answer.continuous_usage:
        return answer.generation.usage
    return None if answer.include_usage else msgspec.UNSET


def _prompt_scores(text: Any, choice: Choice, n_top: int | None) -> Any:
    return msgspec.UNSET if n_top is None else prompt_logprobs(text, choice.prompt.ids, choice.scores, n_top)
