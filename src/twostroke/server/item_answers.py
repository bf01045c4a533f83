"""Answers that are lists of items, each a reasoning, a text or a call of a tool: what Anthropic's messages and OpenAI's
responses have in common, whole and as events."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from twostroke.server import wire
from twostroke.server.errors import ApiError
from twostroke.server.generation import Generation, TextDelta
from twostroke.server.tool_answers import AnswerReader, Reasoning

Scores = list[tuple[int, wire.TokenLogprobs]]


@dataclass
class Item:
    """``text``: of a call its arguments. ``scores``: log-probabilities of a text's tokens, if they were asked for. ``whole`` is
    False for one that was cut off."""

    index: int
    kind: Literal["reasoning", "text", "call"]
    call_id: str = ""
    name: str = ""
    text: str = ""
    scores: Scores = field(default_factory=list)
    whole: bool = True


@dataclass
class Change:
    """``what`` happened to ``item``; what it gained is ``text`` with its ``scores``."""

    what: Literal["begun", "gained", "ended"]
    item: Item
    text: str = ""
    scores: Scores = field(default_factory=list)


class ItemAnswer(ABC):
    """The answer of a generation with one choice. An answer without any text has one text, which is empty."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.items: list[Item] = []
        self._reader = AnswerReader(generation)
        self._open: Item | None = None
        self._scores: Scores = []  # of tokens whose text has not come yet

    async def whole(self, deltas: list[list[TextDelta]]) -> list[bytes]:
        (mine,) = deltas
        for delta in mine:
            for _ in self._changes(delta):
                pass
        return [await self.document(mine[-1].finish_reason or "")]

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events. An error after the first one becomes the last one."""
        begun = False
        try:
            async for delta in self.generation.deltas():
                events = [] if begun else [self.beginning()]
                begun = True
                events += [await self.event(change) for change in self._changes(delta)]
                if delta.finish_reason is not None:
                    events.append(await self.end(delta.finish_reason))
                if events:
                    yield b"".join(events)
        except ApiError as error:
            if not begun:
                raise
            yield await self.failure(error)

    def _changes(self, delta: TextDelta) -> Iterator[Change]:
        self._scores += zip(delta.token_ids, delta.logprobs or (), strict=False)
        for piece in self._reader.add(delta):
            if isinstance(piece, str):
                yield from self._gained("text", piece)
            elif isinstance(piece, Reasoning):
                yield from self._gained("reasoning", piece.text)
            else:
                if piece.id is not None:
                    yield from self._start(Item(len(self.items), "call", piece.id, piece.name or ""))
                yield from self._gained("call", piece.arguments)
        if delta.finish_reason is not None:
            if not any(item.kind != "reasoning" for item in self.items):
                yield from self._gained("text", "")
            yield from self._close(whole=delta.finish_reason == "stop")

    def _start(self, item: Item) -> Iterator[Change]:
        yield from self._close()
        self._open = item
        self.items.append(item)
        yield Change("begun", item)

    def _gained(self, kind: Literal["reasoning", "text", "call"], text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind != kind:
            yield from self._start(Item(len(self.items), kind))
        assert self._open is not None
        scores, self._scores = (self._scores if kind == "text" else []), []
        self._open.text += text
        self._open.scores += scores
        if text or scores:
            yield Change("gained", self._open, text, scores)

    def _close(self, whole: bool = True) -> Iterator[Change]:
        if self._open is not None:
            ended, self._open = self._open, None
            ended.whole = whole
            yield Change("ended", ended)

    @abstractmethod
    async def document(self, finish_reason: str) -> bytes:
        """The whole answer."""

    @abstractmethod
    def beginning(self) -> bytes:
        """The events before the first item's."""

    @abstractmethod
    async def event(self, change: Change) -> bytes: ...

    @abstractmethod
    async def end(self, finish_reason: str) -> bytes:
        """The events behind the last item's."""

    @abstractmethod
    async def failure(self, error: ApiError) -> bytes: ...


def renamed(error: ApiError, names: Sequence[tuple[str, str]]) -> ApiError:
    """``error`` of the chat route with the names that its fields have here: (regular expression, what stands in its place)."""

    def new(text: Any) -> Any:
        for pattern, name in names:
            text = text and re.sub(pattern, name, text)
        return text

    return ApiError(error.status, new(error.message), new(error.param), error.code, error.headers)
