"""Tools in chats: what a request says of them, what the chat template is shown, and the form that calls must have."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from twostroke.core.errors import InputError
from twostroke.data.grammars import FREELY
from twostroke.scheduling.constraint import MAX_CHARACTERS, Constraint
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.server.errors import ApiError, bad_request
from twostroke.server.structured import Forms
from twostroke.server.tool_calls import FORMATS, CallFormat

MAX_TOOLS = 128


class Function(Struct, forbid_unknown_fields=True, kw_only=True):
    """``parameters`` is a JSON schema. With ``strict`` calls always have its form, without it if they are required."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Raw = msgspec.field(default_factory=Raw)
    strict: bool | None = None


class Tool(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class FunctionName(Struct, forbid_unknown_fields=True):
    name: str


class NamedChoice(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionName


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class CalledFunction(Struct, forbid_unknown_fields=True):
    """``arguments`` is a text that holds a JSON object, or the object itself."""

    name: str
    arguments: str | dict[str, Any]


class Call(Struct, forbid_unknown_fields=True):
    """A call in a conversation so far."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"

    def read_arguments(self, param: str) -> None:
        """Make the object of the text, because templates write it themselves. Raises ApiError 400 that names ``param``."""
        given = self.function.arguments
        if isinstance(given, dict):
            return
        try:
            found = json.loads(given or "{}")
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            param = f"{param}.function.arguments"
            raise bad_request(f"{param} must be a text that holds a JSON object.", param)
        self.function.arguments = found

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


@dataclass(frozen=True)
class AskedTools:
    """The tools that a model may or with ``must`` has to call, in the ``form`` in which it writes calls. ``constraint`` is that
    of the whole answer, if it has one, and ``checked`` the same without ids of special tokens."""

    tools: list[Tool]
    form: CallFormat
    constraint: Constraint | None
    checked: Constraint | None
    keeps_special: bool
    must: bool = False

    @property
    def variables(self) -> dict[str, Any]:
        """What the chat template is shown."""
        return {"tools": [_described(tool) for tool in self.tools]}

    async def applied(self, params: SamplingParams, forms: Forms, client: str) -> SamplingParams:
        """``params`` of an answer that may call these tools. Raises ApiError 400 for parameters that are no schema, and if the
        answer must have another form."""
        if params.constraint is not None:
            raise bad_request(
                "an answer whose form is given cannot call tools. Leave tools or the form out, or use tool_choice='none'.",
                "tools",
                "unsupported_value",
            )
        if self.checked is not None:
            try:
                await forms.require(self.checked, "tools", client)
            except ApiError:
                for i, tool in enumerate(self.tools):  # which of them it is
                    schema = Constraint.json_schema(_schema(tool))
                    await forms.require(schema, f"tools[{i}].function.parameters", client)
                raise
        shown = params.skip_special_tokens and not self.keeps_special
        try:
            return replace(params, constraint=self.constraint, skip_special_tokens=shown)
        except InputError as error:
            raise bad_request(str(error), error.field) from None


def tools_of(
    tools: list[Tool] | None,
    choice: ToolChoice | None,
    parallel: bool,
    form: CallFormat | None,
    special: Callable[[str], int | None],
    always_objects: bool = False,
) -> AskedTools | None:
    """What a request's tools ask for; None without any. ``form`` is that of the model's calls, if its template shows it tools.
    ``special`` gives the id of a special token, else None. With ``always_objects`` the arguments of a call are always an
    object in JSON, which else holds only for tools of which the request asks it. Raises ApiError 400."""
    if not tools or choice == "none":
        if not tools and choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools.", "tool_choice")
        return None
    if form is None:
        known = ", ".join(row.name for row in FORMATS)
        raise bad_request(
            f"tools are not supported with this model: its chat template shows none, or not in a known format ({known}).",
            "tools",
            "unsupported_value",
        )
    _require_usable(tools)
    names = [tool.function.name for tool in tools]
    if isinstance(choice, NamedChoice):
        name = choice.function.name
        if name not in names:
            raise bad_request(f"tool_choice names {name!r:.80}, which is not among the tools.", "tool_choice")
        callable_tools, must, parallel = [tools[names.index(name)]], True, False
    else:
        callable_tools, must = tools, choice == "required"
    ids = {mark: special(mark) for mark in (form.before, form.after) if mark}
    constraint = checked = None
    if must or always_objects or any(tool.function.strict for tool in tools):
        try:
            constraint, checked = (
                Constraint.grammar(_grammar(callable_tools, form, must, parallel, marks))
                for marks in (ids, {mark: None if id is None else 0 for mark, id in ids.items()})
            )
        except InputError:
            raise bad_request(f"tools are longer than the {MAX_CHARACTERS} characters that are allowed.", "tools") from None
    return AskedTools(tools, form, constraint, checked, any(id is not None for id in ids.values()), must)


def _require_usable(tools: list[Tool]) -> None:
    if sum(len(memoryview(tool.function.parameters)) for tool in tools) > MAX_CHARACTERS:
        raise bad_request(f"tools are longer than the {MAX_CHARACTERS} characters that are allowed.", "tools")
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        name = tool.function.name
        if name in seen:
            raise bad_request(f"tools[{i}].function.name {name!r} is given twice.", f"tools[{i}].function.name")
        seen.add(name)
        if not isinstance(_parameters(tool), dict):
            param = f"tools[{i}].function.parameters"
            raise bad_request(f"{param} must be a JSON schema, an object.", param)


def _parameters(tool: Tool) -> Any:
    """Those that are given, and {} without any."""
    raw = bytes(memoryview(tool.function.parameters))
    try:
        return (msgspec.json.decode(raw) if raw else None) or {}
    except RecursionError:
        return None


def _schema(tool: Tool) -> dict[str, Any]:
    return _parameters(tool) or {"type": "object"}


def _described(tool: Tool) -> dict[str, Any]:
    """The tool in OpenAI's form, as models saw it in training: ``strict`` is not for them."""
    function: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    return {"type": "function", "function": function | {"parameters": _schema(tool)}}


def _grammar(tools: list[Tool], form: CallFormat, must: bool, parallel: bool, ids: dict[str, int | None]) -> str:
    """llguidance's grammar of an answer that calls ``tools``, or with ``must`` False may also be text. ``ids`` are those of
    marks that are special tokens. Each schema stays a document of its own, so that its references find what they name."""

    def mark(text: str) -> str:
        id = ids[text]
        return json.dumps(text) if id is None else f"<[{id}]>"

    calls: list[str] = []
    lines: list[str] = []
    for i, tool in enumerate(tools):
        schema = _schema(tool) if must or tool.function.strict else {"type": "object"}
        begin = json.dumps(f'{{"name": "{tool.function.name}", "{form.arguments}": ')
        lines.append(f'call_{i}: {begin} arguments_{i} "}}"')
        lines.append(f"arguments_{i}: %json {json.dumps(schema)}")
        calls.append(f"call_{i}")
    lines.append("call: " + " | ".join(calls))

    def several(one: str, between: str) -> str:
        return f"{one} ({json.dumps(between)} {one})*" if parallel else one

    if form.in_list:
        lines.append(f'calls: "[" {several("call", ", ")} "]"')
    elif form.before:
        end = f' "\\n" {mark(form.after)}' if form.after else ""
        lines.append(f'marked: "\\n" call{end}')
    body = "calls" if form.in_list else "marked"
    if not form.before:
        whole = several("call", f"{form.between} ")
        lines.append(f"start: {whole}" if must else f"start: {whole} | other")
        lines += [] if must else ["other: OTHER", r"OTHER: /([^{ \t\r\n](.|\n)*)?/"]
    elif must:
        one = f"{mark(form.before)} {body}"
        lines.append("start: " + (one if form.in_list else several("one", "\n")))
        lines += [] if form.in_list else [f"one: {one}"]
    else:
        # As llguidance's own ``StructTag``: text ends lazily, at the first mark.
        lines += ["start: one* text" if parallel else "start: one? text", "text: TEXT", r"TEXT: /(.|\n)*/"]
        if ids[form.before] is None:
            lines += [f"begin[lazy]: TEXT {mark(form.before)}", f"one: begin {body}"]
        else:
            lines.append(f"one: TEXT {mark(form.before)} {body}")
    return "\n".join([FREELY, *lines])
