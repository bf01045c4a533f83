"""Tools of a request: which are refused, and that a model held to their grammar writes calls that are read back."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

from twostroke.server.errors import ApiError
from twostroke.server.tool_calls import FORMATS, CallFormat, CallReader
from twostroke.server.tools import MAX_TOOLS, AskedTools, NamedChoice, Tool, tools_of

grammars = pytest.importorskip("llguidance") and pytest.importorskip("twostroke.data.grammars")

FORM = {form.name: form for form in FORMATS}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"type": "string", "maxLength": 3}},
    "required": ["a"],
    "$defs": {"n": {"type": "integer"}},
    "additionalProperties": False,
}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def asked(
    *tools: dict[str, Any],
    choice: Any = None,
    parallel: bool = True,
    form: CallFormat | None = FORM["hermes"],
    special: Any = None,
) -> AskedTools | None:
    made = msgspec.json.decode(json.dumps(tools), type=list[Tool])
    if isinstance(choice, dict):
        choice = msgspec.json.decode(json.dumps(choice), type=NamedChoice)
    return tools_of(made, choice, parallel, form, special or (lambda text: None))


def takes(given: AskedTools | None, text: str) -> bool:
    """Whether the answer may be ``text``."""
    assert given is not None
    assert given.checked is not None
    matcher = grammars.compiled(given.checked, grammars.byte_vocabulary()).deep_copy()
    raw = list(text.encode())
    return bool(matcher.try_consume_tokens(raw) == len(raw) and matcher.is_accepting())


def written(form: CallFormat, *calls: tuple[str, str]) -> str:
    each = [f'{{"name": "{name}", "{form.arguments}": {arguments}}}' for name, arguments in calls]
    if form.in_list:
        return f"[TOOL_CALLS][{', '.join(each)}]"
    if form.after:
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in each)
    return "; ".join(each)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_have_the_form_of_their_tools(form: CallFormat, parallel: bool) -> None:
    given = asked(tool("f", parameters=SCHEMA), tool("g"), choice="required", parallel=parallel, form=form)
    one, two = [("f", '{"a": 5}')], [("f", '{"a": 5, "b": "x"}'), ("g", "{}")]
    assert takes(given, written(form, *one))
    assert takes(given, written(form, *two)) == parallel
    reader = CallReader(form)
    found = reader.add(written(form, *two))
    assert [(call.name, call.arguments) for call in found.calls] == two
    for wrong in ([("f", '{"b": "x"}')], [("h", "{}")], [("f", "{}")]):
        assert not takes(given, written(form, *wrong))
    assert not takes(given, "No.")
    named = {"type": "function", "function": {"name": "g"}}
    forced = asked(tool("f", parameters=SCHEMA), tool("g"), choice=named, parallel=parallel, form=form)
    assert takes(forced, written(form, ("g", '{"any": [1]}')))
    assert not takes(forced, written(form, *one))
    assert not takes(forced, written(form, ("g", "{}"), ("g", "{}")))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_strict_tools_may_be_called_in_their_form_only(form: CallFormat) -> None:
    given = asked(tool("f", parameters=SCHEMA, strict=True), tool("g", parameters=SCHEMA), form=form)
    good, bad = written(form, ("f", '{"a": 5}')), written(form, ("f", '{"c": 5}'))
    assert takes(given, good)
    assert not takes(given, bad)
    assert takes(given, written(form, ("g", '{"c": 5}'))), "it is not strict"
    for text in ("", "No, <b>never</b>.\n[1]"):
        assert takes(given, text)
    if form.before:
        assert takes(given, f"I look.\n{good}")
        assert not takes(given, f"I look.\n{bad}")


def test_without_strict_an_answer_is_free() -> None:
    given = asked(tool("f", parameters=SCHEMA))
    assert given is not None
    assert (given.constraint, given.keeps_special) == (None, False)
    assert given.variables == {"tools": [tool("f", parameters=SCHEMA)]}
    shown = asked(tool("f", description="D.", strict=True), tool("g", parameters=None))
    assert shown is not None
    assert shown.variables["tools"] == [
        tool("f", description="D.", parameters={"type": "object"}),
        tool("g", parameters={"type": "object"}),
    ]


def test_marks_that_are_special_tokens_are_tokens_and_stay_in_the_text() -> None:
    given = asked(tool("f"), choice="required", form=FORM["mistral"], special={"[TOOL_CALLS]": 9}.get)
    assert given is not None
    assert given.keeps_special
    assert given.constraint is not None
    assert "<[9]>" in given.constraint.text
    assert "TOOL_CALLS" not in given.constraint.text
    assert takes(given, '\0[{"name": "f", "arguments": {}}]')


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: asked(tool("f"), form=None), "tools"),
        (lambda: asked(tool("f"), tool("f")), "tools[1].function.name"),
        (lambda: asked(tool("f", parameters=[1])), "tools[0].function.parameters"),
        (lambda: asked(tool("f", parameters={"enum": ["x" * 2**17]})), "tools"),
        (lambda: asked(choice="required"), "tool_choice"),
        (lambda: asked(tool("f"), choice={"type": "function", "function": {"name": "g"}}), "tool_choice"),
    ],
)
def test_what_cannot_be_used_is_named(make: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        make()
    assert (caught.value.status, caught.value.param) == (400, param)
    assert re.fullmatch(r"[^\n]{10,300}\.", caught.value.message)


def test_no_tools_are_none() -> None:
    assert asked() is asked(tool("f"), choice="none") is asked(choice="auto") is None
    assert asked(*[tool(f"f{i}") for i in range(MAX_TOOLS)]) is not None
