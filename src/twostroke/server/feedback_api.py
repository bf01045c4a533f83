"""``POST /v1/feedback``: a rating of an answer that was captured, or that belongs to an A/B test."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import Request, Response
from msgspec import Meta, Struct

from twostroke.server import protocol
from twostroke.server.answers import ENCODER
from twostroke.server.errors import ApiError
from twostroke.server.service import Service
from twostroke.server.transfer import caller_of, read_body
from twostroke.server.usage import RatingLine


class Feedback(Struct, forbid_unknown_fields=True):
    """Rate choice ``choice`` of the answer ``id``, from -1 (bad) to 1 (good). The last rating counts."""

    id: Annotated[str, Meta(max_length=200)]
    rating: Annotated[float, Meta(ge=-1.0, le=1.0)]
    comment: Annotated[str, Meta(max_length=4000)] | None = None
    choice: Annotated[int, Meta(ge=0, le=127)] = 0


async def feedback(service: Service, request: Request) -> Response:
    given = protocol.parse_object(await read_body(request, service.incoming), Feedback)
    caller, pool = caller_of(request), service.pool
    found = service.capture is not None and service.capture.rate(
        given.id, caller.name, given.choice, given.rating, given.comment
    )
    if pool is not None and pool.split is not None and service.usage is not None:
        key = None if caller.account is None else caller.account.name
        of_test = pool.rateable.find(given.id, key, given.choice)
        if of_test is not None:
            found = True
            service.usage.add(RatingLine(time.time(), given.id, key, given.choice, given.rating, *of_test))
            pool.split.count(of_test[0], given.rating)
    if not found:
        message = f"no answer {given.id!r:.100} with a choice {given.choice} can be rated by this client, or it is too old."
        raise ApiError(404, message, "id", "answer_not_found")
    return Response(ENCODER.encode({"id": given.id, "recorded": True}), media_type="application/json")
