"""The HTTP application: its routes, and its errors in the form that OpenAI's clients expect.

An error never holds a traceback, and logs hold neither prompts nor keys. The request of a client that disconnects is aborted,
and the engine computes at most the step that it is in.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from twostroke.core.version import __version__
from twostroke.server import embeddings_api, feedback_api, kv_events_api, messages_api, protocol, responses_api, tokens_api
from twostroke.server.admin_api import add_admin_routes
from twostroke.server.answers import ENCODER, ChatAnswer, CompletionAnswer, ScoreAnswer, answer_events
from twostroke.server.batch.batches import Batches
from twostroke.server.batch.routes import add_batch_routes
from twostroke.server.connections import ClientGoneError
from twostroke.server.errors import ApiError, encode_error
from twostroke.server.gate import Gate
from twostroke.server.openapi import adapter_route, admin_route, answer_route, describe, errors
from twostroke.server.page import add_page
from twostroke.server.service import Service
from twostroke.server.tool_answers import chat_answer
from twostroke.server.transfer import caller_of, parent_of, read_body, respond, respond_to, service_of, text_service_of


def make_app(service: Service, batches: Batches | None = None, admin: bool = False) -> ASGIApp:
    """The whole application, ready for an ASGI server. Without ``batches`` it has no routes for files and batches, without
    ``admin`` none below ``/admin``."""
    # No docs pages: FastAPI's load scripts from other hosts.
    app = FastAPI(title="Twostroke", version=__version__, docs_url=None, redoc_url=None)

    @app.get("/health", responses=errors())
    async def health() -> Response:
        """Whether this process is alive."""
        return _json({"status": "ok"})

    @app.get("/ready", responses=errors(503))
    async def ready() -> Response:
        """Whether a request that is sent now would be computed."""
        others = "draining" if service.draining else "asleep" if service.asleep else "loading"
        state = "ready" if service.ready else others
        return _json({"status": state}, 200 if service.ready or service.dozes else 503)

    @app.get("/metrics", response_class=PlainTextResponse, responses=errors())
    async def metrics() -> Response:
        service.metrics.ready.set(service.ready)
        service.metrics.active.set(service.admission.active)
        if service.kept is not None:
            service.metrics.show_kept(service.kept)
        engines = service.client if service.pool is None else service.pool
        service.metrics.restarts.set(engines.restarts)
        service.metrics.show_waiting(service.waiting)
        service.metrics.show_keys(() if service.keys is None else service.keys.accounts)
        service.metrics.usage_lost.set(0 if service.usage is None else service.usage.lost)
        stats = await engines.stats()
        if service.pool is not None:
            service.metrics.show_models(service.pool)
        else:
            service.metrics.show_engines(service.client)
            if service.client.info is not None:
                service.metrics.show_to_routers(service.names[0], service.client.info.page_tokens, stats)
        return Response(service.metrics.render(stats), media_type=service.metrics.content_type)

    @app.get("/v1/models", responses=errors())
    async def models() -> Response:
        return _json({"object": "list", "data": [_model(service, name) for name in service.served_names]})

    @app.get("/v1/models/{name:path}", responses=errors(404))
    async def model(name: str) -> Response:
        service.require_model(name)
        return _json(_model(service, name))

    async def completions(request: Request) -> Response:
        started = time.perf_counter()
        caller = caller_of(request)
        body = await read_body(request, service.incoming)
        parsed = await service.parse(protocol.parse_completion, body, caller.name)
        own = await service_of(service, request, parsed.model, body)

        async def compute() -> CompletionAnswer:
            return CompletionAnswer(own, await own.complete(parsed, started, caller), parsed)

        return await respond_to(own, request, caller.name, parsed, parsed, compute, answer_events)

    async def chat_completions(request: Request) -> Response:
        started = time.perf_counter()
        caller = caller_of(request)
        body = await read_body(request, service.incoming)
        parsed = await service.parse(protocol.parse_chat, body, caller.name)
        own = await service_of(service, request, parsed.model, body)

        async def compute() -> ChatAnswer:
            return chat_answer(own, await own.chat(parsed, started, caller), parsed)

        return await respond_to(own, request, caller.name, parsed, parsed, compute, answer_events)

    async def score(request: Request) -> Response:
        started = time.perf_counter()
        caller = caller_of(request)
        body = await read_body(request, service.incoming)
        parsed = await service.parse(protocol.parse_score, body, caller.name)
        own = await service_of(service, request, parsed.model, body)
        return await respond(request, ScoreAnswer(own, await own.score(parsed, started, caller)), service.outgoing)

    async def load_adapter(request: Request) -> Response:
        asked = protocol.parse_object(await read_body(request, service.incoming), protocol.LoadAdapter)
        own = await parent_of(service, request, asked.model)
        await own.load_adapter(asked.lora_name, asked.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    async def unload_adapter(request: Request) -> Response:
        asked = protocol.parse_object(await read_body(request, service.incoming), protocol.UnloadAdapter)
        own = service if service.pool is None else await parent_of(service, request, asked.lora_name)
        await own.unload_adapter(asked.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")

    # Plain routes: FastAPI's own look for dependencies and fields, which takes a third of the time of a short answer.
    kinds: dict[str, tuple[Callable[[Request], Awaitable[Response]], Any]] = {
        "/v1/completions": (completions, protocol.CompletionRequest),
        "/v1/chat/completions": (chat_completions, protocol.ChatRequest),
        "/v1/score": (score, protocol.ScoreRequest),
    }
    for module in (tokens_api, embeddings_api, messages_api, responses_api):
        kinds |= {path: (partial(route, service), kind) for path, (route, kind) in module.ROUTES.items()}
    for path, (route, _) in kinds.items():
        app.add_route(path, route, methods=["POST"], include_in_schema=False)
    app.add_route("/score", score, methods=["POST"], include_in_schema=False)  # the route's other name in vLLM
    changes = {
        "/v1/load_lora_adapter": (load_adapter, protocol.LoadAdapter),
        "/v1/unload_lora_adapter": (unload_adapter, protocol.UnloadAdapter),
    }
    for path, (route, _) in changes.items():
        app.add_route(path, route, methods=["POST"], include_in_schema=False)
    rated = service.capture is not None or (service.pool is not None and service.pool.split is not None)
    if rated:
        app.add_route("/v1/feedback", partial(feedback_api.feedback, service), methods=["POST"], include_in_schema=False)
    if service.kv_events is not None:
        app.add_route(kv_events_api.ROUTE, partial(kv_events_api.follow_kv_events, service), include_in_schema=False)
    add_page(app)
    answered = {path: answer_route(path, kind, service.served_names) for path, (_, kind) in kinds.items()}
    changed = {path: adapter_route(kind) for path, (_, kind) in changes.items()}
    if rated:
        changed["/v1/feedback"] = admin_route(feedback_api.Feedback)
    describe(app, answered | changed | (add_admin_routes(app, service, batches) if admin else {}))
    if batches is not None:
        add_batch_routes(app, service, batches)

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return _error(request, error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        texts = {404: f"there is no route {request.url.path[:80]}.", 405: f"{request.method} is not allowed on this route."}
        return _error(
            request,
            ApiError(error.status_code, texts.get(error.status_code, "the request was refused."), headers=error.headers),
        )

    @app.exception_handler(ClientGoneError)
    async def client_gone(_: Request, error: ClientGoneError) -> Response:
        return Response(status_code=499)  # the client cannot read it; the metrics count it as 499

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        return _error(request, ApiError(500, "the server failed on this request.", code="internal_error"))

    return Gate(app, service)


def _json(content: Any, status: int = 200) -> Response:
    return Response(ENCODER.encode(content), status, media_type="application/json")


def _error(request: Request, error: ApiError) -> Response:
    return Response(encode_error(error, request.url.path), error.status, error.headers, media_type="application/json")


def _model(service: Service, name: str) -> dict[str, Any]:
    own, found = text_service_of(service, name), {"id": name, "object": "model", "created": service.created}
    info = own.client.info
    found |= {"owned_by": "twostroke", "max_model_len": None if info is None else info.max_model_len}
    found["chat_template"] = own.text.has_template
    if service.pool is not None:
        found["state"] = service.pool.member_of(name).state
    return found if name in own.names else found | {"parent": own.names[0]}
