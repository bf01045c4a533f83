"""``/v1/files`` and ``/v1/batches`` in OpenAI's format."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Mapping, Sequence
from io import FileIO
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.types import Receive, Scope, Send

from twostroke.server import protocol
from twostroke.server.answers import ENCODER
from twostroke.server.batch.batches import Batches, BatchRecord, CreateBatch, shown
from twostroke.server.batch.multipart import FormReader, Head
from twostroke.server.batch.store import FileRecord, Upload
from twostroke.server.connections import ClientGoneError
from twostroke.server.errors import ApiError, bad_request
from twostroke.server.keys import ApiKeys
from twostroke.server.openapi import adapter_route, errors
from twostroke.server.service import Service
from twostroke.server.transfer import PIECE_BYTES, read_body

PIECE_TIMEOUT_S = 30.0
UPLOAD_TIMEOUT_S = 1800.0
"""Of a whole file: 200 MB at 1 Mbit/s."""
MOST_UPLOADS = 4
"""Files that arrive at one time; the next gets 429."""
MAX_FIELD_BYTES = 2**10
MOST_LISTED = {"files": 10_000, "batches": 100}
DEFAULT_LISTED = {"files": 10_000, "batches": 20}

_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string", "enum": ["batch"]}},
}


def add_batch_routes(app: FastAPI, service: Service, batches: Batches) -> None:
    """Let clients upload files and have batches of them computed."""
    store = batches.store
    uploads = [0]

    def owner_of(request: Request) -> str:
        """Under whose name files and batches are kept: a key's if there are keys, else everyone's."""
        authorization = dict(request.scope["headers"]).get(b"authorization")
        return "" if service.keys is None else ApiKeys.name(authorization)

    def file_of(request: Request, file_id: str) -> FileRecord:
        return store.of(owner_of(request), file_id)

    @app.post(
        "/v1/files",
        responses=errors(400, 408, 413, 415, 429, 507),
        openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}},
    )
    async def upload_file(request: Request) -> Response:
        """Keep a file of requests."""
        if uploads[0] >= MOST_UPLOADS:
            raise ApiError(429, f"{MOST_UPLOADS} files are arriving. Try again later.", headers={"retry-after": "5"})
        uploads[0] += 1
        try:
            with store.upload() as upload:
                filename = await _receive(request, upload)
                return _json(shown(await asyncio.to_thread(upload.keep, filename, "batch", owner_of(request))))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise ApiError(507, "the server's disk is full.", code="storage_full") from None
            raise
        finally:
            uploads[0] -= 1

    @app.get("/v1/files", responses=errors(400))
    async def list_files(request: Request) -> Response:
        """The files that can be read, the newest first."""
        asked = _query(request, "purpose", "order", "after", "limit")
        purpose, order = asked.get("purpose"), asked.get("order", "desc")
        if order not in ("asc", "desc"):
            raise bad_request(f"order={order!r:.40} must be asc or desc.", "order")
        owner = owner_of(request)
        found = [r for r in store.records.values() if r.owner == owner and purpose in (None, r.purpose)]
        return _json(_page(found if order == "asc" else found[::-1], asked, "files"))

    @app.get("/v1/files/{file_id}", responses=errors(404))
    async def retrieve_file(request: Request, file_id: str) -> Response:
        """What is known of a file."""
        return _json(shown(file_of(request, file_id)))

    @app.get("/v1/files/{file_id}/content", responses=errors(404))
    async def file_content(request: Request, file_id: str) -> Response:
        """The file itself."""
        record = file_of(request, file_id)
        return FileBody(store.content(record.id), record.bytes)

    @app.delete("/v1/files/{file_id}", responses=errors(400, 404))
    async def delete_file(request: Request, file_id: str) -> Response:
        """Remove a file, unless a batch that is not finished uses it."""
        record = file_of(request, file_id)
        user = batches.uses(record.id)
        if user is not None:
            raise bad_request(f"batch {user.id} uses the file and is {user.status}. Cancel it first.", "file_id", "file_in_use")
        await asyncio.to_thread(store.delete, record.id)
        return _json({"id": record.id, "object": "file", "deleted": True})

    @app.post(
        "/v1/batches",
        responses=errors(400, 404, 408, 413, 415, 429),
        openapi_extra={"requestBody": adapter_route(CreateBatch)["requestBody"]},
    )
    async def create_batch(request: Request) -> Response:
        """Compute the requests of a file, behind all others."""
        asked = protocol.parse_object(await read_body(request, service.incoming), CreateBatch)
        return _json(shown(await batches.create(asked, owner_of(request))))

    @app.get("/v1/batches", responses=errors(400))
    async def list_batches(request: Request) -> Response:
        """The batches, the newest first."""
        asked, owner = _query(request, "after", "limit"), owner_of(request)
        found = [record for record in batches.records.values() if record.owner == owner]
        return _json(_page(found[::-1], asked, "batches"))

    @app.get("/v1/batches/{batch_id}", responses=errors(404))
    async def retrieve_batch(request: Request, batch_id: str) -> Response:
        """How far a batch is."""
        return _json(shown(batches.get(batch_id, owner_of(request))))

    @app.post("/v1/batches/{batch_id}/cancel", responses=errors(400, 404))
    async def cancel_batch(request: Request, batch_id: str) -> Response:
        """Begin no further request of it. What is done can be read once it is cancelled."""
        record = batches.get(batch_id, owner_of(request))
        await batches.cancel(record)
        return _json(shown(record))


async def _receive(request: Request, upload: Upload) -> str:
    """Write the form's file to ``upload`` as it comes, and return what the client calls it. Raises ApiError 400, 408, 413 and
    415, and ClientGoneError."""
    reader = FormReader(request.headers.get("content-type", ""))
    filename: str | None = None
    fields: dict[str, bytes] = {}
    part: Head | None = None
    deadline = time.monotonic() + UPLOAD_TIMEOUT_S
    more = True
    while more:
        try:
            async with asyncio.timeout(min(PIECE_TIMEOUT_S, deadline - time.monotonic())):
                message = await request.receive()
        except TimeoutError:
            raise ApiError(408, "the file did not arrive in time.", headers={"connection": "close"}) from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        more = message.get("more_body", False)
        for event in reader.feed(message.get("body", b"")):
            if isinstance(event, Head):
                part = event
                if part.name not in ("file", "purpose"):
                    raise bad_request(f"{part.name[:64]} is not a known field.", part.name[:64], "unknown_field")
                if part.name in fields or (part.name == "file" and filename is not None):
                    raise bad_request(f"{part.name} is given twice.", part.name)
                if part.name == "file":
                    filename = part.filename or ""
                else:
                    fields[part.name] = b""
            elif event is not None and part is not None and part.name == "file":
                upload.write(event)
            elif event is not None and part is not None:
                fields[part.name] += event
                if len(fields[part.name]) > MAX_FIELD_BYTES:
                    raise bad_request(f"{part.name} has over {MAX_FIELD_BYTES} bytes.", part.name)
    if not reader.complete:
        raise bad_request("the form is not complete.", code="invalid_form")
    for name, given in (("file", filename), ("purpose", fields.get("purpose"))):
        if given is None:
            raise bad_request(f"{name} is missing.", name, "missing_field")
    purpose = fields["purpose"].decode(errors="replace")
    if purpose != "batch":
        raise bad_request(f"purpose={purpose[:40]!r} is not supported; only 'batch' is.", "purpose", "unsupported_value")
    return filename or "batch.jsonl"


def _query(request: Request, *known: str) -> Mapping[str, str]:
    for name in request.query_params:
        if name not in known:
            raise bad_request(f"{name[:64]} is not a known parameter. Known: {', '.join(known)}.", name[:64], "unknown_field")
    return request.query_params


def _page(records: Sequence[FileRecord] | Sequence[BatchRecord], asked: Mapping[str, str], what: str) -> dict[str, Any]:
    """The records after the one that ``asked`` names, at most ``limit``, in OpenAI's form of a list."""
    limit, most = asked.get("limit", str(DEFAULT_LISTED[what])), MOST_LISTED[what]
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 6 and 1 <= int(limit) <= most):
        raise bad_request(f"limit={limit[:40]!r} must be a whole number from 1 to {most}.", "limit")
    ids = [record.id for record in records]
    begin = 0
    if "after" in asked:
        if asked["after"] not in ids:
            raise bad_request(f"after={asked['after'][:80]!r} is not in the list.", "after")
        begin = ids.index(asked["after"]) + 1
    found = records[begin : begin + int(limit)]
    first, last = (found[0].id, found[-1].id) if found else (None, None)
    more = begin + len(found) < len(records)
    return {"object": "list", "data": [shown(r) for r in found], "first_id": first, "last_id": last, "has_more": more}


def _json(content: Any) -> Response:
    return Response(ENCODER.encode(content), media_type="application/json")


class FileBody(Response):
    """Sends a file piece by piece, as fast as the client reads it."""

    media_type = "application/jsonl"

    def __init__(self, stream: FileIO, n_bytes: int) -> None:
        super().__init__()
        self.headers["content-length"] = str(n_bytes)
        self._stream, self._left = stream, n_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stream:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            more = True
            while more:
                piece = self._stream.read(min(self._left, PIECE_BYTES))
                if not piece and self._left:
                    raise OSError(errno.EIO, "a file is shorter than its record says")
                self._left -= len(piece)
                more = self._left > 0
                await send({"type": "http.response.body", "body": piece, "more_body": more})
