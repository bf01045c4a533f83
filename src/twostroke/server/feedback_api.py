"""``POST /v1/feedback``: a rating of an answer that was captured."""

from __future__ import annotations

from typing import Annotated

from fastapi import Request, Response
from msgspec import Meta, Struct

from twostroke.server import protocol
from twostroke.server.answers import ENCODER
from twostroke.server.errors import ApiError
from twostroke.server.service import Service
from twostroke.server.transfer import caller_of, read_body


class Feedback(Struct, forbid_unknown_fields=True):
    """Rate choice ``choice`` of the answer ``id``, from -1 (bad) to 1 (good). The last rating counts."""

    id: Annotated[str, Meta(max_length=200)]
    rating: Annotated[float, Meta(ge=-1.0, le=1.0)]
    comment: Annotated[str, Meta(max_length=4000)] | None = None
    choice: Annotated[int, Meta(ge=0, le=127)] = 0


async def feedback(service: Service, request: Request) -> Response:
    given = protocol.parse_object(await read_body(request, service.incoming), Feedback)
    assert service.capture is not None
    if not service.capture.rate(given.id, caller_of(request).name, given.choice, given.rating, given.comment):
        message = f"no answer {given.id!r:.100} with a choice {given.choice} was captured for this client, or it is too old."
        raise ApiError(404, message, "id", "answer_not_found")
    return Response(ENCODER.encode({"id": given.id, "recorded": True}), media_type="application/json")
