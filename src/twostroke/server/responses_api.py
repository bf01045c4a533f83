"""OpenAI's ``/v1/responses``, without state: a chat request in another form, and its answer in that form.

``as_chat`` is the one place where a request is translated, and `ResponseAnswer` the one where an answer is. Nothing is stored,
so a conversation is sent whole. What the chat route does not do is refused by name.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from fastapi import Request, Response
from msgspec import Meta, Raw, Struct

from twostroke.server import protocol
from twostroke.server.answers import ENCODER, json_lists, slices
from twostroke.server.errors import ApiError, bad_request
from twostroke.server.generation import Generation
from twostroke.server.item_answers import Change, Item, ItemAnswer, Scores, renamed
from twostroke.server.logprobs import chat_logprobs
from twostroke.server.service import Service
from twostroke.server.structured import JsonSchemaFormat, ResponseFormat
from twostroke.server.tools import MAX_TOOLS, Call, CalledFunction, Function, FunctionName, NamedChoice, Tool
from twostroke.server.transfer import caller_of, read_body, respond_to, service_of

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "background": (False,),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "context_management": ([],),
    "moderation": (),
    "prompt_cache_retention": ("in_memory", "24h"),
    "prompt_cache_options": ({},),
}
"""OpenAI's other fields, with the values (besides null) that change nothing."""

LABELS = protocol.BOOKKEEPING - {"metadata"}

CHAT_NAMES = (
    (r"^messages$", "input"),
    (r"^max_tokens$", "max_output_tokens"),
    (r"tools\[(\d+)\]\.function\.", r"tools[\1]."),
    (r"response_format\.json_schema\.schema", "text.format.schema"),
    (r"response_format", "text.format"),
    (r"\.function\.arguments", ".arguments"),
)
"""Fields of the chat request in its errors, and what they are called here."""

LOGPROBS = "message.output_text.logprobs"


class InputText(Struct, forbid_unknown_fields=True, tag_field="type", tag="input_text"):
    text: str


class OutputText(Struct, forbid_unknown_fields=True, tag_field="type", tag="output_text"):
    text: str
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    logprobs: list[Any] | None = None


class ReasoningText(Struct, forbid_unknown_fields=True, tag_field="type", tag="reasoning_text"):
    text: str


class Caller(Struct, forbid_unknown_fields=True):
    type: Literal["direct"]


Texts = str | list[InputText | OutputText | ReasoningText]

FIELDS = {
    "message": (("role", "content"), ("phase",)),
    "function_call": (("call_id", "name", "arguments"), ("caller",)),
    "function_call_output": (("call_id", "output"), ("caller", "name")),
    "reasoning": ((), ("content", "summary")),
}
"""Fields that an item of each type must have, and those that it may have beside them and ``id`` and ``status``."""


class InputItem(Struct, forbid_unknown_fields=True, kw_only=True):
    """A message (``role``, ``content``), a call of a function (``call_id``, ``name``, ``arguments``), what it gave
    (``call_id``, ``output``), or reasoning (``content``), as a client writes it or as an answer's ``output`` holds it."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Texts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputText] | None = None
    summary: Annotated[list[Any], Meta(max_length=0)] | None = None
    encrypted_content: None = None
    caller: Caller | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    def require_fields(self, where: str) -> None:
        """Raises ApiError 400 unless the item has the fields of its type, and no others."""
        needed, optional = FIELDS[self.type]
        for name in needed:
            if getattr(self, name) is None:
                raise bad_request(f"{where}.{name} is missing.", f"{where}.{name}", "missing_field")
        for name in self.__struct_fields__:
            if getattr(self, name) is not None and name not in ("type", "id", "status", *needed, *optional):
                raise bad_request(f"{where}.{name} is not a field of a {self.type}.", f"{where}.{name}", "unknown_field")


class FunctionTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """``parameters`` is a JSON schema. With ``strict`` calls always have its form, without it if they are required."""

    type: Literal["function"]
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: Raw = msgspec.field(default_factory=Raw)
    strict: bool | None = None
    defer_loading: Literal[False] | None = None

    @property
    def shown(self) -> dict[str, Any]:
        """The tool in the answer."""
        parameters = self.parameters if bytes(memoryview(self.parameters)) else None
        return {
            "type": "function", "name": self.name, "description": self.description, "parameters": parameters,
            "strict": bool(self.strict),
        }  # fmt: skip


class FunctionChoice(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str


class TextFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    """``schema`` and ``name`` belong to json_schema. ``strict`` changes nothing: the answer always has the schema's form."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Raw = msgspec.field(name="schema", default_factory=Raw)
    description: str | None = None
    strict: bool | None = None

    def as_response_format(self) -> ResponseFormat:
        given = None
        if self.type == "json_schema":
            if self.name is None:
                raise bad_request("text.format.name is missing.", "text.format.name", "missing_field")
            given = JsonSchemaFormat(name=self.name, schema_=self.schema_)
        return ResponseFormat(self.type, given)

    @property
    def shown(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        found = {"type": self.type, "name": self.name, "schema": self.schema_, "strict": bool(self.strict)}
        return found | ({} if self.description is None else {"description": self.description})


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
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: protocol.Logprobs | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def as_chat(self) -> protocol.ChatRequest:
        """The same as a chat request. Raises ApiError 400."""
        if self.top_logprobs and not self.wants_logprobs:
            raise bad_request(f'top_logprobs needs include=["{LOGPROBS}"].', "top_logprobs")
        given = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        before = [] if self.instructions is None else [protocol.Message(role="system", content=self.instructions)]
        chat = protocol.ChatRequest(
            model=self.model, messages=[*before, *_messages(given)], max_tokens=self.max_output_tokens,
            temperature=self.temperature, top_p=self.top_p, stream=self.stream,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            parallel_tool_calls=self.parallel_tool_calls,
        )  # fmt: skip
        if self.wants_logprobs:
            chat.logprobs, chat.top_logprobs = True, self.top_logprobs
        if self.text is not None and self.text.format is not None:
            chat.response_format = self.text.format.as_response_format()
        if self.tools and self.tool_choice != "none":
            chat.tools = [
                Tool("function", Function(
                    name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict,
                ))
                for tool in self.tools
            ]  # fmt: skip
        choice = self.tool_choice
        chat.tool_choice = NamedChoice("function", FunctionName(choice.name)) if isinstance(choice, FunctionChoice) else choice
        return chat


def _messages(items: Sequence[InputItem]) -> list[protocol.Message]:
    """The conversation of ``items``: reasoning, text and calls that follow each other are one message of the assistant."""
    found: list[protocol.Message] = []
    open_one: protocol.Message | None = None  # the assistant's, which calls may join
    called: set[str] = set()
    for i, item in enumerate(items):
        where = f"input[{i}]"
        item.require_fields(where)
        if item.type == "function_call_output":
            if item.call_id not in called:
                raise bad_request(f"{where}.call_id={item.call_id!r:.60} names no function_call before it.", f"{where}.call_id")
            found.append(protocol.Message(role="tool", content=_text(item.output), tool_call_id=item.call_id))
            open_one = None
        elif item.type == "message" and item.role != "assistant":
            assert item.role is not None
            found.append(protocol.Message(role=item.role, content=_text(item.content)))
            open_one = None
        else:
            again = open_one is not None and (
                item.type == "reasoning" or (item.type == "message" and (open_one.content or open_one.tool_calls))
            )
            if open_one is None or again:
                open_one = protocol.Message(role="assistant", content="")
                found.append(open_one)
            if item.type == "message":
                open_one.content = _text(item.content)
            elif item.type == "reasoning":
                open_one.reasoning_content = _text(item.content) or None
            else:
                assert item.call_id is not None
                assert item.name is not None
                assert item.arguments is not None
                called.add(item.call_id)
                call = Call(item.call_id, CalledFunction(item.name, item.arguments))
                call.read_arguments(where)
                open_one.tool_calls = [*(open_one.tool_calls or ()), call]
    return found


def _text(content: str | Sequence[InputText | OutputText | ReasoningText] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


def parse_responses(body: bytes) -> ResponsesRequest:
    request: ResponsesRequest = protocol.parse_as(body, ResponsesRequest, NEUTRAL, LABELS)
    return request


class ResponseAnswer(ItemAnswer):
    """Turns the items of a chat's answer into OpenAI's response, whole or as events."""

    def __init__(self, service: Service, generation: Generation, request: ResponsesRequest) -> None:
        super().__init__(generation)
        self._service = service
        self._request = request
        self._name = generation.id.rpartition("-")[2]
        self._numbers = itertools.count()
        self._made: list[dict[str, Any]] = []  # the items that have ended

    async def document(self, finish_reason: str) -> bytes:
        self._made = [await self._item(item) for item in self.items]
        return ENCODER.encode(await self._ended(finish_reason))

    def beginning(self) -> bytes:
        response = self._response("in_progress", [])
        return self._event("created", response=response) + self._event("in_progress", response=response)

    async def event(self, change: Change) -> bytes:
        item, text = change.item, change.text
        kind = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}[item.kind]
        place: dict[str, Any] = {"item_id": self._item_id(item), "output_index": item.index}
        if item.kind != "call":
            place["content_index"] = 0
        if change.what == "begun":
            begun = await self._item(Item(item.index, item.kind, item.call_id, item.name))
            begun["status"] = "in_progress"
            begun |= {} if item.kind == "call" else {"content": []}
            added = self._event("output_item.added", output_index=item.index, item=begun)
            return (
                added if item.kind == "call" else added + self._event("content_part.added", **place, part=_part(item, "", []))
            )
        if change.what == "gained":
            scores = {"logprobs": await self._logprobs(change.scores)} if item.kind == "text" else {}
            return self._event(f"{kind}.delta", **place, delta=text, **scores)
        made = await self._item(item)
        self._made.append(made)
        if item.kind == "call":
            done = self._event(f"{kind}.done", **place, name=item.name, arguments=item.text)
        else:
            (part,) = made["content"]
            scores = {"logprobs": part["logprobs"]} if item.kind == "text" else {}
            done = self._event(f"{kind}.done", **place, text=item.text, **scores)
            done += self._event("content_part.done", **place, part=part)
        return done + self._event("output_item.done", output_index=item.index, item=made)

    async def end(self, finish_reason: str) -> bytes:
        response = await self._ended(finish_reason)
        return self._event(response["status"], response=response)

    async def failure(self, error: ApiError) -> bytes:
        for item in self.items[len(self._made) :]:  # the one that was under way
            item.whole = False
            self._made.append(await self._item(item))
        failure = {"code": "server_error", "message": error.message}
        return self._event("failed", response=self._response("failed", self._made) | {"error": failure})

    def _event(self, type: str, **fields: Any) -> bytes:
        name = f"response.{type}"
        document = {"type": name, "sequence_number": next(self._numbers)} | fields
        return b"event: " + name.encode() + b"\ndata: " + ENCODER.encode(document) + b"\n\n"

    def _item_id(self, item: Item) -> str:
        kind = {"text": "msg", "reasoning": "rs", "call": "fc"}[item.kind]
        return f"{kind}_{self._name}" + (f"_{item.index}" if item.index else "")

    async def _item(self, item: Item) -> dict[str, Any]:
        found: dict[str, Any] = {"id": self._item_id(item), "status": "completed" if item.whole else "incomplete"}
        if item.kind == "call":
            return found | {"type": "function_call", "call_id": item.call_id, "name": item.name, "arguments": item.text}
        if item.kind == "reasoning":
            return found | {"type": "reasoning", "summary": [], "content": [_part(item, item.text, [])]}
        scores = await self._logprobs(item.scores)
        return found | {"type": "message", "role": "assistant", "content": [_part(item, item.text, scores)]}

    async def _logprobs(self, scores: Scores) -> Any:
        """As JSON, slice by slice, with turns of the event loop between."""
        if not scores:
            return []
        text = self._service.text

        def entries(part: Scores) -> list[Any]:
            made = chat_logprobs(text, [token for token, _ in part], [entry for _, entry in part])
            return [] if made is None else list(made.content)

        parts = ([entries(scores[part])] for part in slices(len(scores), self._request.top_logprobs))
        return (await json_lists(parts, 1, self._service.building))[0]

    async def _ended(self, finish_reason: str) -> dict[str, Any]:
        status = "completed" if finish_reason == "stop" else "incomplete"
        response = self._response(status, self._made)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        usage = self.generation.usage
        thoughts = "".join(item.text for item in self.items if item.kind == "reasoning")
        reasoning = await self._service.text.encode([thoughts], "input", special=False, may_be_empty=True)
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.generation.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": len(reasoning[0])},
            "total_tokens": usage.total_tokens,
        }
        return response

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        g, asked = self.generation, self._request
        effort = None if asked.reasoning is None else asked.reasoning.effort
        text = None if asked.text is None else asked.text.format
        return {
            "id": f"resp_{self._name}",
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
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": effort, "summary": None},
            "store": False,
            "system_fingerprint": g.fingerprint,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": {"type": "text"} if text is None else text.shown},
            "tool_choice": asked.tool_choice or "auto",
            "tools": [tool.shown for tool in asked.tools or ()],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _part(item: Item, text: str, scores: Any) -> dict[str, Any]:
    if item.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}


async def responses(service: Service, request: Request) -> Response:
    started, caller = time.perf_counter(), caller_of(request)
    body = await read_body(request, service.incoming)
    asked = await service.parse(parse_responses, body, caller.name)
    try:
        chat = asked.as_chat()
    except ApiError as error:
        raise renamed(error, CHAT_NAMES) from None
    service = await service_of(service, request, asked.model, body)

    async def compute() -> ResponseAnswer:
        try:
            return ResponseAnswer(service, await service.chat(chat, started, caller), asked)
        except ApiError as error:
            raise renamed(error, CHAT_NAMES) from None

    return await respond_to(service, request, caller.name, asked, chat, compute, ResponseAnswer.events)


ROUTES = {"/v1/responses": (responses, ResponsesRequest)}
