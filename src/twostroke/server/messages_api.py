"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``: a chat request in another form, and its answer in that form.

``as_chat`` is the one place where a request is translated, and `MessageAnswer` the one where an answer is. What the chat route
does not do is refused by name.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import Request, Response
from msgspec import Meta, Struct

from twostroke.scheduling.sampling_params import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from twostroke.server import protocol
from twostroke.server.answers import ENCODER
from twostroke.server.errors import ApiError, anthropic_body, bad_request
from twostroke.server.service import Generation, Service, TextDelta
from twostroke.server.tokens_api import chat_ids
from twostroke.server.transfer import client_of, read_body, respond, respond_streaming

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ({"type": "auto"}, {"type": "none"}),
    "thinking": ({"type": "disabled"},),
    "output_config": ({},),
    "output_format": (),
    "cache_control": ({"type": "ephemeral"},),
    "container": (),
    "context_management": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}
"""Anthropic's other fields, with the values (besides null) that change nothing."""

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class CacheControl(Struct, forbid_unknown_fields=True):
    """Changes nothing: every prefix is cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


Content = str | list[TextBlock]


class InputMessage(Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant"]
    content: Content


class Metadata(Struct, forbid_unknown_fields=True):
    user_id: str | None = None


class CountRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/messages/count_tokens``: how many tokens the model reads of these messages."""

    model: str
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=4096)]
    system: Content | None = None

    def as_chat(self) -> protocol.ChatRequest:
        """The same as a chat request. Raises ApiError 400."""
        last = len(self.messages) - 1
        if self.messages[last].role == "assistant":
            where = f"messages[{last}].role"
            raise bad_request(
                f"{where}: the last message must be the user's. An answer that was begun is not continued.", where
            )
        system = [] if self.system is None else [protocol.Message(role="system", content=_text(self.system))]
        messages = [protocol.Message(role=message.role, content=_text(message.content)) for message in self.messages]
        return protocol.ChatRequest(model=self.model, messages=[*system, *messages])


class MessagesRequest(CountRequest, kw_only=True):
    """``POST /v1/messages``."""

    max_tokens: protocol.Positive
    stop_sequences: (
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]], Meta(max_length=MAX_STOP_STRINGS)]
        | None
    ) = None
    stream: bool | None = None
    temperature: protocol.Share | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: protocol.Whole | None = None
    metadata: Metadata | None = None

    def as_chat(self) -> protocol.ChatRequest:
        chat = super().as_chat()
        chat.max_tokens, chat.stop, chat.stream = self.max_tokens, self.stop_sequences, self.stream
        chat.temperature, chat.top_p, chat.top_k = self.temperature, self.top_p, self.top_k
        return chat


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def parse_count(body: bytes) -> CountRequest:
    request: CountRequest = protocol.parse_as(body, CountRequest, NEUTRAL, frozenset())
    return request


def parse_messages(body: bytes) -> MessagesRequest:
    request: MessagesRequest = protocol.parse_as(body, MessagesRequest, NEUTRAL, frozenset())
    return request


class MessageAnswer:
    """Turns the text deltas of a chat with one answer into Anthropic's message, whole or as events."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self._id = f"msg_{generation.id.rpartition('-')[2]}"

    async def whole(self, deltas: list[list[TextDelta]]) -> list[bytes]:
        (mine,) = deltas
        content = [{"type": "text", "text": "".join(delta.text for delta in mine)}]
        return [ENCODER.encode(self._message(content, mine[-1].finish_reason))]

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events. An error after the first one becomes the last one."""
        begun = False
        try:
            async for delta in self.generation.deltas():
                if not begun:
                    begun = True
                    yield self._beginning()
                if delta.text:
                    yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": delta.text})
                if delta.finish_reason is not None:
                    yield self._end(delta.finish_reason)
        except ApiError as error:
            if not begun:
                raise
            yield _event(**anthropic_body(error))

    def _beginning(self) -> bytes:
        start = _event("message_start", message=self._message([], None))
        return start + _event("content_block_start", index=0, content_block={"type": "text", "text": ""}) + _event("ping")

    def _end(self, finish_reason: str) -> bytes:
        delta = self._ended(finish_reason)
        ended = _event("message_delta", delta=delta, usage=self._usage())
        return _event("content_block_stop", index=0) + ended + _event("message_stop")

    def _message(self, content: list[dict[str, str]], finish_reason: str | None) -> dict[str, Any]:
        g = self.generation
        named = {"id": self._id, "type": "message", "role": "assistant", "model": g.model, "content": content}
        return named | self._ended(finish_reason) | {"usage": self._usage(), "system_fingerprint": g.fingerprint}

    def _ended(self, finish_reason: str | None) -> dict[str, str | None]:
        """Why it ended, and the stop sequence if one ended it. All is null before."""
        if finish_reason is None:
            return {"stop_reason": None, "stop_sequence": None}
        detokenizer = self.generation.choices[0].detokenizer
        if detokenizer.stopped:
            return {"stop_reason": "stop_sequence", "stop_sequence": detokenizer.stop_string}
        return {"stop_reason": STOP_REASONS[finish_reason], "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        """``input_tokens`` are those that were not cached."""
        usage, cached = self.generation.usage, self.generation.cached_tokens
        return {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
        }


def _event(type: str, **fields: Any) -> bytes:
    return b"event: " + type.encode() + b"\ndata: " + ENCODER.encode({"type": type} | fields) + b"\n\n"


async def messages(service: Service, request: Request) -> Response:
    started, client = time.perf_counter(), client_of(service, request)
    asked = await service.parse(parse_messages, await read_body(request, service.incoming), client)
    answer = MessageAnswer(await service.chat(asked.as_chat(), started, client))
    if asked.stream:
        return await respond_streaming(request, answer.generation, answer.events())
    return await respond(request, answer, service.outgoing)


async def count_tokens(service: Service, request: Request) -> Response:
    client = client_of(service, request)
    asked = await service.parse(parse_count, await read_body(request, service.incoming), client)
    service.require_model(asked.model)
    with service.place():
        ids = await chat_ids(service, asked.as_chat(), client)
    return Response(ENCODER.encode({"input_tokens": len(ids)}), media_type="application/json")


ROUTES = {"/v1/messages": (messages, MessagesRequest), "/v1/messages/count_tokens": (count_tokens, CountRequest)}
