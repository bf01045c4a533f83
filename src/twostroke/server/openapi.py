"""Adds to ``/openapi.json`` what FastAPI does not find out itself: bodies, and every status with its form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI

from twostroke.server.errors import MESSAGES_ROUTES

_MEANINGS = {
    400: "A field is missing, unknown, out of its range, asks for what this server does not do, or does not go with another "
    "one or with the model (its vocabulary, its context), of which this schema says only a part.",
    401: "No valid API key.",
    403: "A server on loopback without keys was asked for under a foreign name or by a web page, or one without keys that "
    "others reach was asked to change adapters or to keep files.",
    409: "Something else is under way that does not go with it.",
    404: "No such model, file, batch or route.",
    408: "The body did not arrive in time, or the answer was not read.",
    413: "The body is over 2 MiB, a file over 200 MB, or the server keeps as many files as it may.",
    415: "The body's type is not application/json, or a file's not multipart/form-data.",
    429: "All places are taken.",
    500: "The engine or the server failed on this request.",
    503: "The engine is loading or the server is stopping.",
    507: "The server's disk is full.",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_RETRY = {
    "retry-after": {"schema": {"type": "integer"}, "description": "Seconds after which a request may find a place."},
    "retry-after-ms": {"schema": {"type": "integer"}, "description": "The same in milliseconds (429 only)."},
}


def errors(*statuses: int, form: dict[str, Any] = _ERROR) -> dict[int | str, dict[str, Any]]:
    """FastAPI's ``responses`` of a route that may answer ``statuses``, and as every route 401 and 403, in ``form``."""
    found: dict[int | str, dict[str, Any]] = {}
    for status in sorted({401, 403, *statuses}):
        found[status] = {"description": _MEANINGS[status], "content": {"application/json": {"schema": form}}}
        if status in (429, 503):
            found[status]["headers"] = _RETRY
    return found


def answer_route(path: str, kind: Any, names: Sequence[str]) -> dict[str, Any]:
    """The operation of the route ``path``, whose body is the msgspec struct ``kind``. ``names`` are the served models'."""
    (schema,), components = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    body = _inline(schema, components)
    body["properties"]["model"]["enum"] = [*names] if "model" in body.get("required", ()) else [*names, None]
    answers: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if "stream" in body["properties"]:
        if "stream_options" in body["properties"]:
            body["allOf"] = [
                _if_given("stream_options", {"stream": {"const": True}}),
                _if_given("prompt_logprobs", {"stream": {"enum": [False, None]}}, required=False),
            ]
        # In OpenAPI before 3.2 the schema of a stream describes each event.
        event: dict[str, Any] = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
        last = "The last one's data is [DONE]." if "stream_options" in body["properties"] else "Its data names its type."
        event["description"] = f"With stream=true: an event. {last}"
        answers["text/event-stream"] = {"schema": event}
    form = _ANTHROPIC_ERROR if path in MESSAGES_ROUTES else _ERROR
    refusals = errors(400, 404, 408, 413, 415, 429, 500, 503, form=form)
    return {
        "summary": (kind.__doc__ or "").partition("\n")[0],
        "operationId": kind.__name__,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": "The answer.", "content": answers}}
        | {str(status): refusal for status, refusal in refusals.items()},
    }


def admin_route(kind: Any) -> dict[str, Any]:
    """The operation of a route below ``/admin``, whose body is the msgspec struct ``kind``."""
    operation = adapter_route(kind)
    done = {"description": "It is done.", "content": {"application/json": {"schema": {"type": "object"}}}}
    refusals = {str(status): refusal for status, refusal in errors(409).items()}
    return operation | {"responses": operation["responses"] | refusals | {"200": done}}


def adapter_route(kind: Any) -> dict[str, Any]:
    """The operation of a route that changes what is served, whose body is the msgspec struct ``kind``."""
    (schema,), components = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    return {
        "summary": (kind.__doc__ or "").partition("\n")[0],
        "operationId": kind.__name__,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _inline(schema, components)}}},
        "responses": {"200": {"description": "It is done.", "content": {"text/plain": {"schema": {"type": "string"}}}}}
        | {str(status): refusal for status, refusal in errors(400, 404, 408, 413, 415, 500, 503).items()},
    }


def describe(app: FastAPI, posts: Mapping[str, dict[str, Any]]) -> None:
    """Add operations, by path, to the document that FastAPI makes of its own routes."""
    made = app.openapi

    def document() -> dict[str, Any]:
        whole = made()
        whole["paths"].update({path: {"post": operation} for path, operation in posts.items()})
        return whole

    app.openapi = document  # type: ignore[method-assign]


def _if_given(field: str, others: dict[str, Any], required: bool = True) -> dict[str, Any]:
    """A schema that allows ``field``, unless it is null, only together with ``others``."""
    given = {"required": [field], "properties": {field: {"not": {"type": "null"}}}}
    return {"if": given, "then": {"properties": others, "required": list(others) if required else []}}


def _inline(schema: Any, components: dict[str, Any]) -> Any:
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inline(components[schema["$ref"].rpartition("/")[2]], components)
        # A discriminator names schemas that are written out here.
        return {key: _inline(value, components) for key, value in schema.items() if key != "discriminator"}
    if isinstance(schema, list):
        return [_inline(item, components) for item in schema]
    return schema
