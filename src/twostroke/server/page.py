"""The page at ``/``: files of this package, sent as they are. They hold no data: the page's script asks the other routes for
that, with the key if there is one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI, Request, Response

FILES = Path(__file__).parent / "page_files"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
PAGE_ROUTES = {"/": "index.html"} | {
    f"/page/{file.name}": file.name for file in FILES.iterdir() if file.suffix in (".css", ".js")
}
"""File of each route. The page names them relative to itself, so that a proxy may serve it below a path of its own."""

_HEADERS = {
    "cache-control": "no-cache",  # a browser asks each time, and mostly gets 304
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # The page takes scripts, styles and data from this server alone, and a model's text cannot become either.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


def add_page(app: FastAPI) -> None:
    """Add the page's routes to ``app``. They are not part of its description. Raises OSError if a file is missing."""
    for path, name in PAGE_ROUTES.items():
        app.add_route(path, _route(FILES / name), methods=["GET"], include_in_schema=False)


def _route(file: Path) -> Callable[[Request], Awaitable[Response]]:
    body = file.read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {**_HEADERS, "etag": tag}

    async def send(request: Request) -> Response:
        known = re.findall(r'"[^"]*"|\*', request.headers.get("if-none-match", ""))  # a weak tag compares as a strong one
        if tag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=TYPES[file.suffix])

    return send
