"""Errors in the form that OpenAI's clients expect, ``{"error": {"message", "type", "param", "code"}}`` and an HTTP status, and
in Anthropic's on its routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class ApiError(Exception):
    """An error that is sent as the answer. ``param`` names the request's field; ``code`` is a word that programs can test."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        if self.status >= 500:
            return "server_error"
        return {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error"
        )

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


MESSAGES_ROUTES = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
"""Routes of Anthropic's interface, whose errors have another form."""

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """The error in the form that Anthropic's clients expect. It has no place for the field's name but the sentence."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def encode_error(error: ApiError, path: str = "") -> bytes:
    """The body that the route ``path`` answers with."""
    return msgspec.json.encode(anthropic_body(error) if path in MESSAGES_ROUTES else error.body())


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code)


def engine_lost() -> ApiError:
    # OpenAI's SDKs obey x-should-retry. Without it they send the request twice more, and it may be what ended the engine.
    return ApiError(
        500, "the engine was lost while it worked on this request.", code="engine_lost", headers={"x-should-retry": "false"}
    )


def asleep() -> ApiError:
    message = "the engine sleeps until POST /admin/wake."
    return ApiError(503, message, code="asleep", headers={"retry-after": "30"})


def not_ready(retry_after_s: int = 1) -> ApiError:
    message = "the engine is loading or being restarted. Try again in a moment."
    return ApiError(503, message, code="engine_not_ready", headers={"retry-after": str(retry_after_s)})
