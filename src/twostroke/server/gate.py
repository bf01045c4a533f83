"""Wraps the application: request ids, keys, foreign hosts, overload, counting, and the last handler of exceptions.

It decides by a request's headers alone, so a refusal costs neither a body, nor a route, nor JSON.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
import traceback

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twostroke.core.errors import TwostrokeError
from twostroke.server.callers import CALLER, Caller
from twostroke.server.errors import MESSAGES_ROUTES, ApiError, asleep, encode_error, not_ready
from twostroke.server.generation import api_error
from twostroke.server.keys import ApiKeys
from twostroke.server.launch import is_own_name
from twostroke.server.page import PAGE_ROUTES
from twostroke.server.service import Service
from twostroke.server.split import ARM_HEADER

log = logging.getLogger("twostroke.server")

MAX_BODY_BYTES = 2 * 2**20
MAX_FORM_BYTES = 200 * 10**6 + 2**16
"""Of the one route that takes a file: the file, and the form around it."""
OPEN_ROUTES = frozenset({"/health", "/ready", *PAGE_ROUTES})
"""Routes that need no key: those for the probes of a service manager, which tell nothing but a state, and the page, which holds
no data and asks for the key itself."""
ANSWER_ROUTES = MESSAGES_ROUTES | {
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/score",
    "/score",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
}
"""Routes whose requests take places."""
TEXT_ROUTES = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})
"""Those of them whose requests need no engine."""
ADAPTER_ROUTES = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Routes that change what is served, and read files of this machine: for holders of a key, or for this machine alone."""
ADMIN_ROUTES = frozenset({"/admin/weights", "/admin/sleep", "/admin/wake", "/admin/kv-events"})
"""Routes that change the engine, or tell what its cache holds: for the same callers."""
FILES, BATCHES = "/v1/files", "/v1/batches"
"""Routes that write to the server's disk, with those below them: for the same callers."""
CHANGE_ROUTES = ADAPTER_ROUTES | ADMIN_ROUTES
ROUTES = ANSWER_ROUTES | CHANGE_ROUTES | OPEN_ROUTES | {"/v1/models", "/metrics", "/v1/feedback", FILES, BATCHES}
_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")
"""A client's own request id is repeated to it if it is short and plain, because it is written into a header."""


class Gate:
    """The application, behind checks of a request's headers. It never sees a request that they refuse."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        route = path if path in ROUTES else "other"
        headers = with_bearer(dict(scope["headers"]))
        if b"x-api-key" in headers:
            scope = {**scope, "headers": list(headers.items())}
        request_id = headers.get(b"x-request-id", b"")
        if not _SANE_ID.fullmatch(request_id):
            request_id = b"req-" + secrets.token_hex(12).encode()

        began, status = time.perf_counter(), 0

        async def marked_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._service.metrics.responses.labels(route, str(message["status"])).inc()
                own = [(b"x-request-id", request_id)]
                if caller.visit is not None and caller.visit.arm is not None:
                    own.append((ARM_HEADER, caller.visit.arm.encode()))
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        peer = scope.get("client")
        caller = self._service.caller(headers, peer[0] if peer else "")
        scope = {**scope, CALLER: caller}
        try:
            await self._checked(scope, receive, marked_send, route, headers, caller)
        finally:
            if caller.visit is not None:
                caller.visit.holds.close()
            if self._service.log_requests:
                fields = {"request_id": request_id.decode(), "method": scope["method"], "route": route, "status": status}
                log.info("request", extra={"fields": fields | {"seconds": round(time.perf_counter() - began, 6)}})

    async def _checked(
        self, scope: Scope, receive: Receive, marked_send: Send, route: str, headers: dict[bytes, bytes], caller: Caller
    ) -> None:
        path = scope["path"]
        refusal = self._refusal(scope["method"], path, headers, caller)
        if refusal is not None:
            await _send_error(marked_send, refusal, path)
            return
        if path in ANSWER_ROUTES | ADAPTER_ROUTES and self._service.asleep:
            try:
                await self._service.client.wake()
            except TwostrokeError as error:
                await _send_error(marked_send, api_error(error), path)
                return
        if path in ANSWER_ROUTES:
            if caller.account is not None:
                caller.account.count_request()
            # Counted while it waits: else a burst would pass here, and be refused only after its bodies were read.
            self._service.admission.arriving += 1
            try:
                await self._service.loop_turns.wait()
            finally:
                self._service.admission.arriving -= 1
        try:
            await self._app(scope, receive, marked_send)
        except Exception as error:
            # Neither the message nor values are logged, because an exception may carry a prompt.
            where = "".join(traceback.format_tb(error.__traceback__))
            log.error("%s on %s\n%s", type(error).__name__, route, where)

    def _refusal(self, method: str, path: str, headers: dict[bytes, bytes], caller: Caller) -> ApiError | None:
        service, keys = self._service, self._service.keys
        stranger = refused_caller(keys, service.local_only, path, headers)
        if stranger is not None:
            return stranger
        if keys is None and not service.local_only and (path in CHANGE_ROUTES or path.startswith((FILES, BATCHES))):
            what = "adapters, files, batches and /admin are used"
            message = f"{what} with an API key, or from this machine on a server on loopback."
            return ApiError(403, message, code="key_needed", headers={"connection": "close"})
        if keys is None and method == "POST" and path == FILES and b"origin" in headers:
            # A form is the one body that a foreign web page may send without asking first.
            message = "files are not taken from web pages by a server without keys."
            return ApiError(403, message, code="foreign_origin", headers={"connection": "close"})
        length = headers.get(b"content-length", b"0")
        most = MAX_FORM_BYTES if path == FILES else MAX_BODY_BYTES
        if length.isdigit() and int(length) > most:
            return too_large(most)
        if method == "POST" and path in ANSWER_ROUTES | ADAPTER_ROUTES:
            if service.asleep and not service.dozes and not service.draining:
                return asleep()
            if not service.ready and not service.dozes:
                return not_ready(retry_after_s=5 if service.draining else 1)
            if path in ANSWER_ROUTES:
                return service.early_refusal(caller, path not in TEXT_ROUTES)
        return None


def with_bearer(headers: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """``headers`` with the key where OpenAI's clients send it, if it came where Anthropic's do."""
    if b"x-api-key" in headers and b"authorization" not in headers:
        return {**headers, b"authorization": b"Bearer " + headers[b"x-api-key"]}
    return headers


def refused_caller(keys: ApiKeys | None, local_only: bool, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
    """Why a caller with these headers is refused: no known key where one is needed, a foreign name of a server on loopback, or
    a length that is ambiguous."""
    if keys is not None and path not in OPEN_ROUTES and not keys.allow(headers.get(b"authorization")):
        message = "a valid API key is needed, as `Authorization: Bearer <key>` or `x-api-key: <key>`."
        return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer", "connection": "close"})
    host = headers.get(b"host", b"").decode("latin-1")
    if keys is None and local_only and not is_own_name(host):
        # A web page whose own name was made to point to 127.0.0.1 (DNS rebinding) could otherwise use the model.
        message = "this server listens on loopback without a key and answers only to localhost and to addresses."
        return ApiError(403, message, code="foreign_host", headers={"connection": "close"})
    if b"transfer-encoding" in headers and b"content-length" in headers:
        # h11 obeys the first, as it may. A proxy in front that obeys the second would see other requests than we do.
        message = "content-length and transfer-encoding exclude each other."
        return ApiError(400, message, code="ambiguous_length", headers={"connection": "close"})
    return None


def too_large(most: int = MAX_BODY_BYTES) -> ApiError:
    message = f"the request body is over {most} bytes."
    return ApiError(413, message, code="request_too_large", headers={"connection": "close"})


async def _send_error(send: Send, error: ApiError, path: str) -> None:
    body = encode_error(error, path)
    headers = {"content-type": "application/json", "content-length": str(len(body))} | error.headers
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
