"""The routes below ``/admin``, which change the engine that runs: ``serve --admin`` has them."""

from __future__ import annotations

import time
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from msgspec import Struct

from twostroke.core.errors import InputError, TwostrokeError
from twostroke.server import protocol
from twostroke.server.answers import ENCODER
from twostroke.server.batch.batches import UNFINISHED, Batches
from twostroke.server.errors import ApiError
from twostroke.server.generation import api_error
from twostroke.server.openapi import admin_route
from twostroke.server.service import Service
from twostroke.server.transfer import read_body

WEIGHTS, SLEEP, WAKE = "/admin/weights", "/admin/sleep", "/admin/wake"


class ChangeWeights(Struct, forbid_unknown_fields=True):
    """Serve the weights in the server's directory ``path``, of the same shape. Requests under way finish on the weights they
    began with, or continue on the new ones, which compute their tokens again."""

    path: str
    in_flight: Literal["finish", "continue"] = "finish"


class Sleep(Struct, forbid_unknown_fields=True):
    """Give the memory of the KV cache (level 1), and of the weights (level 2), back to the system. Requests meanwhile get 503,
    or wake the engine."""

    level: Literal[1, 2] = 1
    on_request: Literal["refuse", "wake"] = "refuse"


class Wake(Struct, forbid_unknown_fields=True):
    """Let a sleeping engine compute again."""


class Admin:
    """What the routes share. Weights are replaced one after another."""

    def __init__(self, service: Service, batches: Batches | None) -> None:
        self._service, self._batches = service, batches
        self._changing = False

    def shown(self) -> dict[str, Any]:
        client = self._service.client
        others = "asleep" if client.asleep else "serving" if self._service.ready else "loading"
        state = "preparing" if self._changing else others
        return {"path": client.weights, "fingerprint": self._service.fingerprint, "state": state}

    async def change(self, asked: ChangeWeights) -> dict[str, Any]:
        """Raises ApiError, after which the weights that were served are served on."""
        if self._changing:
            raise ApiError(409, "other weights are being prepared. Ask again when they are served.", code="busy")
        if self._batches is not None and any(record.status in UNFINISHED for record in self._batches.records.values()):
            message = "a batch is under way, whose answers would come from several weights. Wait for its end, or cancel it."
            raise ApiError(409, message, code="busy")
        self._changing = True
        try:
            made = await self._service.client.change_weights(asked.path, asked.in_flight == "continue")
        except TwostrokeError as error:
            raise api_error(error) from None
        finally:
            self._changing = False
        return {
            "path": asked.path,
            "fingerprint": made.fingerprint,
            "prepare_s": made.prepare_s,
            "pause_s": made.pause_s,
            "finishing": made.finishing,
        }

    async def sleep(self, asked: Sleep) -> dict[str, Any]:
        """Raises ApiError, 409 if requests are under way."""
        try:
            slept = await self._service.client.sleep(asked.level, asked.on_request == "wake")
        except InputError as error:
            raise ApiError(409, str(error), "level", "busy") from None
        except TwostrokeError as error:
            raise api_error(error) from None
        return {"level": asked.level, "freed_bytes": slept.freed_bytes}

    async def wake(self) -> dict[str, Any]:
        """Raises ApiError."""
        began = time.perf_counter()
        try:
            await self._service.client.wake()
        except TwostrokeError as error:
            raise api_error(error) from None
        return {"fingerprint": self._service.fingerprint, "seconds": time.perf_counter() - began}


def add_admin_routes(app: FastAPI, service: Service, batches: Batches | None) -> dict[str, Any]:
    """Adds the routes. Returns their operations by path, for the document of the interface."""
    admin = Admin(service, batches)

    async def weights(request: Request) -> Response:
        if request.method == "GET":
            return _json(admin.shown())
        asked = protocol.parse_object(await read_body(request, service.incoming), ChangeWeights)
        return _json(await admin.change(asked))

    async def sleep(request: Request) -> Response:
        return _json(await admin.sleep(protocol.parse_object(await read_body(request, service.incoming), Sleep)))

    async def wake(request: Request) -> Response:
        protocol.parse_object(await read_body(request, service.incoming), Wake)
        return _json(await admin.wake())

    app.add_route(WEIGHTS, weights, methods=["GET", "POST"], include_in_schema=False)
    app.add_route(SLEEP, sleep, methods=["POST"], include_in_schema=False)
    app.add_route(WAKE, wake, methods=["POST"], include_in_schema=False)
    return {path: admin_route(kind) for path, kind in ((WEIGHTS, ChangeWeights), (SLEEP, Sleep), (WAKE, Wake))}


def _json(content: Any) -> Response:
    return Response(ENCODER.encode(content), media_type="application/json")
