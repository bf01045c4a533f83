"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``: a chat request in another form, and its answer in that form.

``as_chat`` is the one place where a request is translated, and `MessageAnswer` the one where an answer is. What the chat route
does not do is refused by name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Request, Response
from msgspec import Meta, Raw, Struct

from twostroke.scheduling.sampling_params import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from twostroke.server import protocol
from twostroke.server.answers import ENCODER
from twostroke.server.errors import ApiError, anthropic_body, bad_request
from twostroke.server.item_answers import Change, Item, ItemAnswer, renamed
from twostroke.server.service import Service
from twostroke.server.structured import JsonSchemaFormat, ResponseFormat
from twostroke.server.tokens_api import chat_ids
from twostroke.server.tool_answers import finish_of
from twostroke.server.tools import MAX_TOOLS, Call, CalledFunction, Function, FunctionName, NamedChoice, Tool
from twostroke.server.transfer import caller_of, read_body, respond_to, service_of, text_service_of

NEUTRAL: dict[str, tuple[Any, ...]] = {
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

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

CHAT_NAMES = (
    (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"tools\[(\d+)\]\.function\.", r"tools[\1]."),
    (r"response_format\.json_schema\.schema", "output_config.format.schema"),
)
"""Fields of the chat request in its errors, and what they are called here."""


class CacheControl(Struct, forbid_unknown_fields=True):
    """Changes nothing: every prefix is cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Caller(Struct, forbid_unknown_fields=True):
    type: Literal["direct"]


class Block(Struct, forbid_unknown_fields=True, tag_field="type", kw_only=True):
    cache_control: CacheControl | None = None


class TextBlock(Block, tag="text", kw_only=True):
    text: str
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


class ToolUseBlock(Block, tag="tool_use", kw_only=True):
    """A call that the model made."""

    id: str
    name: str
    input: dict[str, Any]
    caller: Caller | None = None


class ToolResultBlock(Block, tag="tool_result", kw_only=True):
    """What a call gave. With ``is_error`` the model reads "Error: " before it."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(Block, tag="thinking", kw_only=True):
    """Reasoning of the model. Its signature is not looked at."""

    thinking: str
    signature: str | None = None


Texts = str | list[TextBlock]


class InputMessage(Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant"]
    content: str | list[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock]


class AnthropicTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """With ``strict`` calls always have the schema's form, without it if they are required."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    input_schema: Raw
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class Choice(Struct, forbid_unknown_fields=True, tag_field="type", kw_only=True):
    pass


class SomeChoice(Choice, kw_only=True):
    disable_parallel_tool_use: bool | None = None


class AutoChoice(SomeChoice, tag="auto", kw_only=True):
    pass


class AnyChoice(SomeChoice, tag="any", kw_only=True):
    pass


class ToolChoice(SomeChoice, tag="tool", kw_only=True):
    name: str


class NoChoice(Choice, tag="none", kw_only=True):
    pass


class ThinkingOn(Struct, forbid_unknown_fields=True, tag_field="type", tag="enabled"):
    """``budget_tokens`` is not a limit: ``max_tokens`` is, for the reasoning and the rest together."""

    budget_tokens: protocol.Positive
    display: Literal["summarized"] | None = None


class ThinkingAdaptive(Struct, forbid_unknown_fields=True, tag_field="type", tag="adaptive"):
    display: Literal["summarized"] | None = None


class ThinkingOff(Struct, forbid_unknown_fields=True, tag_field="type", tag="disabled"):
    pass


class OutputFormat(Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: Raw


class OutputConfig(Struct, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Struct, forbid_unknown_fields=True):
    user_id: str | None = None


class CountRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/messages/count_tokens``: how many tokens the model reads of these messages and tools."""

    model: str
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=4096)]
    system: Texts | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoChoice | None = None
    thinking: ThinkingOn | ThinkingAdaptive | ThinkingOff | None = None
    output_config: OutputConfig | None = None

    def as_chat(self) -> protocol.ChatRequest:
        """The same as a chat request. Raises ApiError 400."""
        last = len(self.messages) - 1
        if self.messages[last].role == "assistant":
            where = f"messages[{last}].role"
            raise bad_request(
                f"{where}: the last message must be the user's. An answer that was begun is not continued.", where
            )
        messages = [] if self.system is None else [protocol.Message(role="system", content=_text(self.system))]
        called: set[str] = set()
        for i, message in enumerate(self.messages):
            if isinstance(message.content, str):
                messages.append(protocol.Message(role=message.role, content=message.content))
            elif message.role == "user":
                messages += _of_user(message.content, f"messages[{i}].content", called)
            else:
                messages.append(_of_assistant(message.content, f"messages[{i}].content", called))
        chat = protocol.ChatRequest(model=self.model, messages=messages)
        self._add_tools(chat)
        config = self.output_config
        if config is not None:
            chat.reasoning_effort = "xhigh" if config.effort == "max" else config.effort
            if config.format is not None:
                schema = JsonSchemaFormat(name="answer", schema_=config.format.schema)
                chat.response_format = ResponseFormat("json_schema", schema)
        chat.chat_template_kwargs = protocol.TemplateVariables(self.thinks)
        return chat

    @property
    def thinks(self) -> bool:
        return not isinstance(self.thinking, ThinkingOff | None)

    def _add_tools(self, chat: protocol.ChatRequest) -> None:
        choice = self.tool_choice
        if not self.tools:
            if isinstance(choice, AnyChoice | ToolChoice):
                raise bad_request("tool_choice needs tools.", "tool_choice")
            return
        if isinstance(choice, NoChoice):
            return
        chat.tools = [
            Tool("function", Function(
                name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict,
            ))
            for tool in self.tools
        ]  # fmt: skip
        if choice is None:
            return
        chat.parallel_tool_calls = not choice.disable_parallel_tool_use
        if isinstance(choice, ToolChoice):
            chat.tool_choice = NamedChoice("function", FunctionName(choice.name))
        else:
            chat.tool_choice = "required" if isinstance(choice, AnyChoice) else "auto"


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
        if isinstance(self.thinking, ThinkingOn) and self.thinking.budget_tokens >= self.max_tokens:
            raise bad_request(
                f"thinking.budget_tokens={self.thinking.budget_tokens} must be less than max_tokens={self.max_tokens}, which "
                "limits the reasoning and the rest together.",
                "thinking.budget_tokens",
            )
        chat = super().as_chat()
        chat.max_tokens, chat.stop, chat.stream = self.max_tokens, self.stop_sequences, self.stream
        chat.temperature, chat.top_p, chat.top_k = self.temperature, self.top_p, self.top_k
        return chat


def _text(content: Texts) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _of_user(blocks: Sequence[Block], where: str, called: set[str]) -> list[protocol.Message]:
    """A user's blocks: texts that follow each other are one message, and each result of a call is one."""
    found: list[protocol.Message] = []
    texts: list[str] = []
    for i, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            if block.tool_use_id not in called:
                param = f"{where}[{i}].tool_use_id"
                raise bad_request(f"{param}={block.tool_use_id!r:.60} names no tool_use of a message before it.", param)
            if texts:
                found.append(protocol.Message(role="user", content="".join(texts)))
                texts = []
            text = ("Error: " if block.is_error else "") + _text(block.content or "")
            found.append(protocol.Message(role="tool", content=text, tool_call_id=block.tool_use_id))
        else:
            raise _not_here(block, f"{where}[{i}]", "user")
    if texts or not found:
        found.append(protocol.Message(role="user", content="".join(texts)))
    return found


def _of_assistant(blocks: Sequence[Block], where: str, called: set[str]) -> protocol.Message:
    message = protocol.Message(role="assistant")
    texts: list[str] = []
    thoughts: list[str] = []
    for i, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            called.add(block.id)
            message.tool_calls = [*(message.tool_calls or ()), Call(block.id, CalledFunction(block.name, block.input))]
        else:
            raise _not_here(block, f"{where}[{i}]", "assistant")
    message.content = "".join(texts)
    message.reasoning_content = "\n".join(thoughts) or None
    return message


def _not_here(block: Block, where: str, role: str) -> ApiError:
    kind = msgspec.inspect.type_info(type(block)).tag  # type: ignore[attr-defined]
    return bad_request(f"{where}.type={kind!r} cannot stand in a message of the role {role!r}.", f"{where}.type")


def parse_count(body: bytes) -> CountRequest:
    request: CountRequest = protocol.parse_as(body, CountRequest, NEUTRAL, frozenset())
    return request


def parse_messages(body: bytes) -> MessagesRequest:
    request: MessagesRequest = protocol.parse_as(body, MessagesRequest, NEUTRAL, frozenset())
    return request


class MessageAnswer(ItemAnswer):
    """Turns the items of a chat's answer into Anthropic's message, whole or as events. A whole message has no call that was cut
    off, whose ``input`` would be no object; a stream has begun it before."""

    def beginning(self) -> bytes:
        return _event("message_start", message=self._message([], None)) + _event("ping")

    async def event(self, change: Change) -> bytes:
        index, kind = change.item.index, change.item.kind
        if change.what == "begun":
            return _event("content_block_start", index=index, content_block=_block(change.item, {}))
        if change.what == "gained":
            if not change.text:
                return b""
            delta = {
                "text": {"type": "text_delta", "text": change.text},
                "reasoning": {"type": "thinking_delta", "thinking": change.text},
                "call": {"type": "input_json_delta", "partial_json": change.text},
            }[kind]
            return _event("content_block_delta", index=index, delta=delta)
        signed = b""
        if kind == "reasoning":
            signed = _event("content_block_delta", index=index, delta={"type": "signature_delta", "signature": ""})
        return signed + _event("content_block_stop", index=index)

    async def end(self, finish_reason: str) -> bytes:
        ended = _event("message_delta", delta=self._ended(finish_reason), usage=self._usage())
        return ended + _event("message_stop")

    async def failure(self, error: ApiError) -> bytes:
        return _event(**anthropic_body(error))

    async def document(self, finish_reason: str) -> bytes:
        blocks = []
        for item in self.items:
            given = _object(item.text) if item.kind == "call" else {}
            if given is not None:
                blocks.append(_block(item, given, item.text))
        return ENCODER.encode(self._message(blocks or [_block(Item(0, "text"), {})], finish_reason))

    def _message(self, content: list[dict[str, Any]], finish_reason: str | None) -> dict[str, Any]:
        g = self.generation
        name = f"msg_{g.id.rpartition('-')[2]}"
        named = {"id": name, "type": "message", "role": "assistant", "model": g.model, "content": content}
        return named | self._ended(finish_reason) | {"usage": self._usage(), "system_fingerprint": g.fingerprint}

    def _ended(self, finish_reason: str | None) -> dict[str, str | None]:
        """Why it ended, and the stop sequence if one ended it. All is null before."""
        if finish_reason is None:
            return {"stop_reason": None, "stop_sequence": None}
        detokenizer = self.generation.choices[0].detokenizer
        if detokenizer.stopped:
            return {"stop_reason": "stop_sequence", "stop_sequence": detokenizer.stop_string}
        return {"stop_reason": STOP_REASONS[finish_of(self._reader, finish_reason) or ""], "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        """``input_tokens`` are those that were not cached."""
        usage, cached = self.generation.usage, self.generation.cached_tokens
        return {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
        }


def _object(arguments: str) -> dict[str, Any] | None:
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _block(item: Item, given: dict[str, Any], text: str = "") -> dict[str, Any]:
    if item.kind == "call":
        return {"type": "tool_use", "id": item.call_id, "name": item.name, "input": given}
    if item.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _event(type: str, **fields: Any) -> bytes:
    return b"event: " + type.encode() + b"\ndata: " + ENCODER.encode({"type": type} | fields) + b"\n\n"


def _require_thinking(service: Service, asked: CountRequest) -> None:
    if asked.thinks and not service.text.reasons:
        raise bad_request(
            "thinking is not supported with this model: its chat template shows no reasoning. Leave it out.",
            "thinking",
            "unsupported_value",
        )


async def messages(service: Service, request: Request) -> Response:
    started, caller = time.perf_counter(), caller_of(request)
    body = await read_body(request, service.incoming)
    asked = await service.parse(parse_messages, body, caller.name)
    service = await service_of(service, request, asked.model, body)
    _require_thinking(service, asked)
    chat = asked.as_chat()

    async def compute() -> MessageAnswer:
        try:
            return MessageAnswer(await service.chat(chat, started, caller, always_objects=True))
        except ApiError as error:
            raise renamed(error, CHAT_NAMES) from None

    return await respond_to(service, request, caller.name, asked, chat, compute, MessageAnswer.events)


async def count_tokens(service: Service, request: Request) -> Response:
    caller = caller_of(request)
    asked = await service.parse(parse_count, await read_body(request, service.incoming), caller.name)
    service.require_model(asked.model)
    service = text_service_of(service, asked.model)
    _require_thinking(service, asked)
    with service.place(caller):
        try:
            ids = await chat_ids(service, asked.as_chat(), caller.name)
        except ApiError as error:
            raise renamed(error, CHAT_NAMES) from None
    return Response(ENCODER.encode({"input_tokens": len(ids)}), media_type="application/json")


ROUTES = {"/v1/messages": (messages, MessagesRequest), "/v1/messages/count_tokens": (count_tokens, CountRequest)}
