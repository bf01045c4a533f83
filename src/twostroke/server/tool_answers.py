"""Chat answers that may call tools: the calls apart from the text, whole or as they are written."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.server import protocol, responses
from twostroke.server.answers import ChatAnswer
from twostroke.server.service import Generation, Service, TextDelta
from twostroke.server.tool_calls import CallFormat, CallReader


class ToolAnswer(ChatAnswer):
    """``ChatAnswer`` of a model that writes calls in ``form``."""

    def __init__(self, service: Service, generation: Generation, request: protocol.ChatRequest, form: CallFormat) -> None:
        super().__init__(service, generation, request)
        self._form = form
        self._readers = [CallReader(form) for _ in generation.choices]

    def _delta(self, delta: TextDelta) -> tuple[responses.ChatDelta, str | None] | None:
        reader = self._readers[delta.index]
        pieces = [reader.add(delta.text)]
        if delta.finish_reason is not None:
            pieces.append(reader.finish())
        content = "".join(found.content for found in pieces)
        calls = [
            responses.ToolCallDelta(
                call.index,
                responses.CalledFunction(call.arguments, call.name),
                call.id,
                None if call.name is None else "function",
            )
            for found in pieces
            for call in found.calls
        ]
        if not (content or calls or delta.finish_reason is not None or delta.logprobs):
            return None
        made = responses.ChatDelta(self._role(delta.index), content or None, calls or None)
        return made, _finish(reader, delta.finish_reason)

    def _message(self, deltas: Sequence[TextDelta]) -> tuple[responses.ChatMessage, str | None]:
        reader = CallReader(self._form)
        pieces = [reader.add("".join(delta.text for delta in deltas)), reader.finish()]
        content = "".join(found.content for found in pieces)
        calls = [
            responses.ToolCall(call.id, responses.CalledFunction(call.arguments, call.name))
            for found in pieces
            for call in found.calls
            if call.id is not None
        ]
        finish = _finish(reader, deltas[-1].finish_reason)
        if not calls:
            return responses.ChatMessage(content), finish
        return responses.ChatMessage(content or None, tool_calls=calls), finish


def _finish(reader: CallReader, reason: str | None) -> str | None:
    return "tool_calls" if reason == "stop" and reader.n_calls else reason


def chat_answer(service: Service, generation: Generation, request: protocol.ChatRequest) -> ChatAnswer:
    """The answer to ``request``, whose tools, if it has any, ``Service.chat`` has shown to the model."""
    form = service.text.call_format
    if form is None or not request.tools:
        return ChatAnswer(service, generation, request)
    return ToolAnswer(service, generation, request, form)
