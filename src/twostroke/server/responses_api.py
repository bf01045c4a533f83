"""OpenAI's ``/v1/responses``, without state: a chat request in another form, and its answer in that form.

``as_chat`` is the one place where a request is translated, and `ResponseAnswer` the one where an answer is. Nothing is stored,
so a conversation is sent whole. What the chat route does not do is refused by name.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request, Response
from msgspec import Meta, Struct

from twostroke.server import protocol
from twostroke.server.answers import ENCODER
from twostroke.server.errors import ApiError
from twostroke.server.service import Generation, Service, TextDelta
from twostroke.server.transfer import client_of, read_body, respond, respond_streaming

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "background": (False,),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "max_tool_calls": (),
    "include": ([], ["reasoning.encrypted_content"]),  # answers hold no reasoning
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "service_tier": ("auto", "default"),
    "context_management": ([],),
    "moderation": (),
    "prompt_cache_retention": ("in_memory", "24h"),
    "prompt_cache_options": ({},),
}
"""OpenAI's other fields, with the values (besides null) that change nothing."""

LABELS = protocol.BOOKKEEPING - {"metadata"}

CHAT_NAMES: dict[str | None, str] = {"messages": "input", "max_tokens": "max_output_tokens"}
"""Fields of the chat request, and what they are called here."""


class InputText(Struct, forbid_unknown_fields=True, tag_field="type", tag="input_text"):
    text: str


class OutputText(Struct, forbid_unknown_fields=True, tag_field="type", tag="output_text"):
    text: str
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Meta(max_length=0)] | None = None


class InputItem(Struct, forbid_unknown_fields=True):
    """A message, as a client writes it or as an answer's ``output`` holds it."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText]
    type: Literal["message"] = "message"
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    def as_message(self) -> protocol.Message:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return protocol.Message(role=self.role, content=text)


class TextFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text"]


class TextConfig(Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Struct, forbid_unknown_fields=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: None = None
    generate_summary: None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/responses``. ``input``: a text, or a list of messages; ``instructions`` come before it."""

    token_lists: ClassVar[tuple[str, ...]] = ()
    model: str
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=4096)]
    instructions: str | None = None
    max_output_tokens: protocol.Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def as_chat(self) -> protocol.ChatRequest:
        """The same as a chat request."""
        given = [InputItem("user", self.input)] if isinstance(self.input, str) else self.input
        before = [] if self.instructions is None else [protocol.Message(role="system", content=self.instructions)]
        return protocol.ChatRequest(
            model=self.model, messages=[*before, *(item.as_message() for item in given)], max_tokens=self.max_output_tokens,
            temperature=self.temperature, top_p=self.top_p, stream=self.stream,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
        )  # fmt: skip


def parse_responses(body: bytes) -> ResponsesRequest:
    request: ResponsesRequest = protocol.parse_as(body, ResponsesRequest, NEUTRAL, LABELS)
    return request


class ResponseAnswer:
    """Turns the text deltas of a chat with one answer into OpenAI's response, whole or as events."""

    def __init__(self, generation: Generation, request: ResponsesRequest) -> None:
        self.generation = generation
        self._request = request
        name = generation.id.rpartition("-")[2]
        self._id, self._item_id = f"resp_{name}", f"msg_{name}"
        self._numbers = itertools.count()

    async def whole(self, deltas: list[list[TextDelta]]) -> list[bytes]:
        (mine,) = deltas
        return [ENCODER.encode(self._ended("".join(delta.text for delta in mine), mine[-1].finish_reason))]

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events. An error after the first one becomes the last one, ``response.failed``."""
        begun, pieces = False, list[str]()
        try:
            async for delta in self.generation.deltas():
                if not begun:
                    begun = True
                    yield self._beginning()
                if delta.text:
                    pieces.append(delta.text)
                    yield self._event("output_text.delta", **self._place(), delta=delta.text, logprobs=[])
                if delta.finish_reason is not None:
                    yield self._end("".join(pieces), delta.finish_reason)
        except ApiError as error:
            if not begun:
                raise
            failure = {"code": "server_error", "message": error.message}
            output = [self._item("incomplete", "".join(pieces))]
            yield self._event("failed", response=self._response("failed", output) | {"error": failure})

    def _beginning(self) -> bytes:
        response = self._response("in_progress", [])
        return (
            self._event("created", response=response)
            + self._event("in_progress", response=response)
            + self._event("output_item.added", output_index=0, item=self._item("in_progress", None))
            + self._event("content_part.added", **self._place(), part=_part(""))
        )

    def _end(self, text: str, finish_reason: str) -> bytes:
        response = self._ended(text, finish_reason)
        return (
            self._event("output_text.done", **self._place(), text=text, logprobs=[])
            + self._event("content_part.done", **self._place(), part=_part(text))
            + self._event("output_item.done", output_index=0, item=response["output"][0])
            + self._event(response["status"], response=response)
        )

    def _event(self, type: str, **fields: Any) -> bytes:
        name = f"response.{type}"
        document = {"type": name, "sequence_number": next(self._numbers)} | fields
        return b"event: " + name.encode() + b"\ndata: " + ENCODER.encode(document) + b"\n\n"

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _item(self, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _ended(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        status = "completed" if finish_reason == "stop" else "incomplete"
        response = self._response(status, [self._item(status, text)])
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        usage = self.generation.usage
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.generation.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.total_tokens,
        }
        return response

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        g, asked = self.generation, self._request
        effort = None if asked.reasoning is None else asked.reasoning.effort
        return {
            "id": self._id,
            "object": "response",
            "created_at": g.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": g.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": effort, "summary": None},
            "store": False,
            "system_fingerprint": g.fingerprint,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


async def responses(service: Service, request: Request) -> Response:
    started, client = time.perf_counter(), client_of(service, request)
    asked = await service.parse(parse_responses, await read_body(request, service.incoming), client)
    try:
        generation = await service.chat(asked.as_chat(), started, client)
    except ApiError as error:
        error.param = CHAT_NAMES.get(error.param, error.param)
        raise
    answer = ResponseAnswer(generation, asked)
    if asked.stream:
        return await respond_streaming(request, answer.generation, answer.events())
    return await respond(request, answer, service.outgoing)


ROUTES = {"/v1/responses": (responses, ResponsesRequest)}
