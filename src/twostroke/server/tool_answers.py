"""Reads an answer's text into its parts, reasoning, text and calls of tools, and makes chat answers of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.server import protocol, responses
from twostroke.server.answers import ChatAnswer
from twostroke.server.generation import Generation, TextDelta
from twostroke.server.reasoning import ReasoningReader
from twostroke.server.service import Service
from twostroke.server.tool_calls import CallDelta, CallReader, Found


@dataclass
class Reasoning:
    """What the reasoning gained."""

    text: str


Piece = Reasoning | str | CallDelta


class AnswerReader:
    """Cuts the text of one answer into pieces, in its order. However the text comes, the pieces make up the same."""

    def __init__(self, generation: Generation) -> None:
        self._reasoning = None if generation.reasoning is None else ReasoningReader(generation.reasoning)
        self._calls = None if generation.call_format is None else CallReader(generation.call_format)

    @property
    def n_calls(self) -> int:
        return 0 if self._calls is None else self._calls.n_calls

    def add(self, delta: TextDelta) -> list[Piece]:
        """What the answer gained by ``delta``, with what was held back if it is the last one."""
        reasoning, text = ("", delta.text) if self._reasoning is None else self._reasoning.add(delta.text)
        found = self._rest(text)
        if delta.finish_reason is not None:
            if self._reasoning is not None:
                last, text = self._reasoning.finish()
                reasoning += last
                found += self._rest(text)
            if self._calls is not None:
                found += self._calls.finish().pieces
        return [Reasoning(reasoning), *found] if reasoning else found

    def _rest(self, text: str) -> list[Piece]:
        if self._calls is not None:
            return [*self._calls.add(text).pieces]
        return [text] if text else []

    def all(self, deltas: Sequence[TextDelta]) -> list[Piece]:
        """The pieces of a whole answer."""
        return [piece for delta in deltas for piece in self.add(delta)]


class ReadAnswer(ChatAnswer):
    """``ChatAnswer`` of a model that writes reasoning or calls."""

    def __init__(self, service: Service, generation: Generation, request: protocol.ChatRequest) -> None:
        super().__init__(service, generation, request)
        self._readers = [AnswerReader(generation) for _ in generation.choices]

    def _delta(self, delta: TextDelta) -> tuple[responses.ChatDelta, str | None] | None:
        reader = self._readers[delta.index]
        reasoning, found = _parts(reader.add(delta))
        calls = [
            responses.ToolCallDelta(
                call.index,
                responses.CalledFunction(call.arguments, call.name),
                call.id,
                None if call.name is None else "function",
            )
            for call in found.calls
        ]
        if not (reasoning or found.pieces or delta.finish_reason is not None or delta.logprobs):
            return None
        made = responses.ChatDelta(self._role(delta.index), found.content or None, calls or None, reasoning or None)
        return made, finish_of(reader, delta.finish_reason)

    def _message(self, deltas: Sequence[TextDelta]) -> tuple[responses.ChatMessage, str | None]:
        return read_message(self.generation, deltas)


def read_message(generation: Generation, deltas: Sequence[TextDelta]) -> tuple[responses.ChatMessage, str | None]:
    """The whole message that ``deltas`` make up, and its finish reason."""
    reader = AnswerReader(generation)
    reasoning, found = _parts(reader.all(deltas))
    calls = dict[int, responses.ToolCall]()
    for call in found.calls:
        if call.id is not None:
            calls[call.index] = responses.ToolCall(call.id, responses.CalledFunction("", call.name))
        calls[call.index].function.arguments += call.arguments
    message = responses.ChatMessage((found.content or None) if calls else found.content)
    if calls:
        message.tool_calls = list(calls.values())
    if generation.reasoning is not None:
        message.reasoning_content = reasoning or None
    return message, finish_of(reader, deltas[-1].finish_reason)


def _parts(pieces: Sequence[Piece]) -> tuple[str, Found]:
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    return reasoning, Found([piece for piece in pieces if not isinstance(piece, Reasoning)])


def finish_of(reader: AnswerReader, reason: str | None) -> str | None:
    return "tool_calls" if reason == "stop" and reader.n_calls else reason


def chat_answer(service: Service, generation: Generation, request: protocol.ChatRequest) -> ChatAnswer:
    """The answer to ``request``, whose tools, if it has any, ``Service.chat`` has shown to the model."""
    plain = generation.reasoning is None and generation.call_format is None
    return (ChatAnswer if plain else ReadAnswer)(service, generation, request)
