"""Errors in the form that OpenAI's clients expect: ``{"error": {"message", "type", "param", "code"}}`` and an HTTP status."""

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


def encode_error(error: ApiError) -> bytes:
    return msgspec.json.encode(error.body())


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code)


def engine_lost() -> ApiError:
    # OpenAI's SDKs obey x-should-retry. Without it they send the request twice more, and it may be what ended the engine.
    return ApiError(
        500, "the engine was lost while it worked on this request.", code="engine_lost", headers={"x-should-retry": "false"}
    )


def not_ready(retry_after_s: int = 1) -> ApiError:
    message = "the engine is loading or being restarted. Try again in a moment."
    return ApiError(503, message, code="engine_not_ready", headers={"retry-after": str(retry_after_s)})
