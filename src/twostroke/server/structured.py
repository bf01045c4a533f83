"""Fields that give an answer's form: OpenAI's ``response_format``, vLLM's ``structured_outputs`` and its older ``guided_…``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from twostroke.core.errors import InputError
from twostroke.data.grammar_check import GrammarCheck
from twostroke.scheduling.constraint import Constraint
from twostroke.server.errors import bad_request
from twostroke.server.turns import Turns


class JsonSchemaFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    """``strict`` changes nothing: the answer always has the schema's form."""

    name: str
    description: str | None = None
    schema_: Raw = msgspec.field(name="schema", default_factory=Raw)
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True, kw_only=True):
    """One of these. ``json`` is a schema, as an object or as its text; ``grammar`` is in llguidance's variety of Lark."""

    json: Raw = msgspec.field(default_factory=Raw)
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class ConstrainedRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of both endpoints, of which at most one may be given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Raw = msgspec.field(default_factory=Raw)
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


def constraint_of(request: ConstrainedRequest) -> tuple[Constraint, str] | None:
    """The form that ``request`` asks for, and the field that gives it. Raises ApiError 400."""
    found: list[tuple[str, Callable[[], Constraint]]] = []
    if (given := request.response_format) is not None:
        found += _of_format(given)
    if (outputs := request.structured_outputs) is not None:
        inner = _of_kinds(outputs.json, outputs.regex, outputs.choice, outputs.grammar)
        if outputs.json_object:
            inner["json_object"] = Constraint.json_object
        if len(inner) != 1:
            raise bad_request(
                "structured_outputs must have one of json, regex, choice, grammar and json_object.", "structured_outputs"
            )
        found += [(f"structured_outputs.{name}", make) for name, make in inner.items()]
    guided = _of_kinds(request.guided_json, request.guided_regex, request.guided_choice, request.guided_grammar)
    found += [(f"guided_{name}", make) for name, make in guided.items()]
    if not found:
        return None
    if len(found) > 1:
        (first, _), (second, _), *_others = found
        raise bad_request(f"{second} and {first} both give the answer's form. Give one of them.", second)
    name, make = found[0]
    try:
        return make(), name
    except InputError as error:
        raise bad_request(f"{name}: {error}", name) from None


def _of_format(given: ResponseFormat) -> list[tuple[str, Callable[[], Constraint]]]:
    if given.type == "text":
        return []
    if given.type == "json_object":
        return [("response_format", Constraint.json_object)]
    if given.json_schema is None or not _given(given.json_schema.schema_):
        raise bad_request("response_format.json_schema.schema is missing.", "response_format.json_schema", "missing_field")
    schema = given.json_schema.schema_
    return [("response_format.json_schema.schema", lambda: Constraint.json_schema(_text(schema)))]


def _of_kinds(
    schema: Raw, regex: str | None, choice: list[str] | None, grammar: str | None
) -> dict[str, Callable[[], Constraint]]:
    found: dict[str, Callable[[], Constraint]] = {}
    if _given(schema):
        found["json"] = lambda: Constraint.json_schema(_text(schema))
    if regex is not None:
        found["regex"] = lambda: Constraint.regex(regex)
    if choice is not None:
        found["choice"] = lambda: Constraint.choice(choice)
    if grammar is not None:
        found["grammar"] = lambda: Constraint.grammar(grammar)
    return found


def _given(value: Raw) -> bool:
    return bytes(memoryview(value)[:5]) not in (b"", b"null")


def _text(schema: Raw) -> str:
    """The schema's JSON. A text is one that holds it, as vLLM's clients send it."""
    raw = bytes(memoryview(schema))
    found: Any = msgspec.json.decode(raw) if raw[:1] == b'"' else raw.decode()
    return str(found)


class Forms:
    """Compiles the forms that clients ask for, in a process with limits, before the engine does."""

    def __init__(self) -> None:
        self._check = GrammarCheck()
        self._turns = Turns("forms")

    async def require(self, constraint: Constraint, param: str, client: str = "") -> None:
        """Return if ``constraint`` can be used. Raises ApiError 400 that names the field ``param``."""
        try:
            if not self._check.knows(constraint):
                await self._turns.run(client, partial(self._check.require, constraint))
        except InputError as error:
            raise bad_request(f"{param}: {error}", param) from None
