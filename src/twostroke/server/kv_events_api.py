"""``GET /admin/kv-events``: what the engines' caches hold (``kv_events``), as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from twostroke.server.answers import ENCODER
from twostroke.server.errors import bad_request
from twostroke.server.kv_events import shown
from twostroke.server.service import Service

ROUTE = "/admin/kv-events"
_LOOK_S = 0.5
"""Time between two looks whether the server stops."""
_SIGN_S = 15.0
"""Time after which a silent stream says that it is there."""


async def follow_kv_events(service: Service, request: Request) -> Response:
    """An event for each batch, with its number as ``id``. Whoever comes again with the last one that it has seen, in the header
    ``Last-Event-ID``, gets those that it has missed."""
    events = service.kv_events
    assert events is not None
    last = request.headers.get("last-event-id")
    if last is not None and not (last.isascii() and last.isdigit() and len(last) < 16):
        raise bad_request(f"the header last-event-id is {last!r:.40}; it must be the number of a batch.", "last-event-id")
    since = None if last is None else int(last) + 1

    async def stream() -> AsyncIterator[bytes]:
        silent_s = 0.0
        async for found in events.follow(since, _LOOK_S):
            if service.draining:
                return
            if found is not None:
                silent_s = 0.0
                number, batch = found
                named = b"id: %d\n" % number if number >= 0 else b""  # before the first batch there is no last one
                yield named + b"data: %b\n\n" % ENCODER.encode(shown(batch))
                continue
            silent_s += _LOOK_S
            if silent_s >= _SIGN_S:
                silent_s = 0.0
                yield b":\n\n"

    return StreamingResponse(stream(), media_type="text/event-stream", headers={"cache-control": "no-cache"})
