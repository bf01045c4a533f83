"""What the applications share that pass requests on, the router and Ray's ingress: who may ask, and answers of their own."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from prometheus_client import Counter
from starlette.types import Message, Scope, Send

from twostroke.server.connections import ClientGoneError
from twostroke.server.errors import ApiError, encode_error
from twostroke.server.gate import MAX_BODY_BYTES, refused_caller, too_large, with_bearer
from twostroke.server.keys import ApiKeys

log = logging.getLogger("twostroke.router")

_JSON = (b"content-type", b"application/json")


@contextlib.asynccontextmanager
async def answering(scope: Scope, send: Send, responses: Counter, who: str) -> AsyncIterator[Send]:
    """Yields ``send``, which counts ``responses`` by status. What is raised inside becomes an error's answer, in the name of
    ``who``; if an answer has begun, it is raised on, because only the end of the connection can tell the client."""
    started = False

    async def counted(message: Message) -> None:
        nonlocal started
        if message["type"] == "http.response.start":
            started = True
            responses.labels(str(message["status"])).inc()
        await send(message)

    try:
        yield counted
    except ApiError as error:
        await send_error(counted, error, scope["path"])
    except ClientGoneError:
        pass
    except Exception as error:
        # Neither the message nor values are logged, because an exception may carry a prompt.
        log.error("%s on a request", type(error).__name__)
        if started:
            raise
        failed = ApiError(500, f"the {who} failed on this request.", code="internal_error")
        await send_error(counted, failed, scope["path"])


def checked_headers(scope: Scope, keys: ApiKeys | None, local_only: bool) -> dict[bytes, bytes]:
    """The request's headers. Raises ApiError for a caller who may not ask, and for a body longer than any may be."""
    headers = with_bearer(dict(scope["headers"]))
    refusal = refused_caller(keys, local_only, scope["path"], headers)
    if refusal is not None:
        raise refusal
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise too_large()
    return headers


async def send_json(send: Send, content: Any, status: int = 200) -> None:
    await send_whole(send, status, [_JSON], json.dumps(content).encode())


async def send_error(send: Send, error: ApiError, path: str) -> None:
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in error.headers.items()]
    await send_whole(send, error.status, [_JSON, *headers], encode_error(error, path))


async def send_whole(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})
