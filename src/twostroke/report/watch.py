"""Serves a live page about a run on this machine's loopback address, from the run's own process or from another.

Its thread sleeps until a browser asks, and then reads the new lines of the log. A run without a browser is not slowed.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from twostroke.core.errors import InputError, TwostrokeError
from twostroke.ledger.store import Ledger
from twostroke.report.run_reader import RunReader

HOST = "127.0.0.1"
PORTS = range(8765, 8775)
"""Ports that are tried in this order if no port is given, before any free one."""

LOOKING_S = 6.0
"""A page that sent a request within this time counts as open."""

TEMPLATES = Path(__file__).parent / "templates"
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # The page fetches nothing from elsewhere, and a model's text cannot load a script.
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


def page() -> str:
    """The page as HTML with its style and script. It has no numbers; its script fetches them."""
    html = (TEMPLATES / "watch.html").read_text(encoding="utf-8")
    for name in ("watch.css", "watch_charts.js", "watch_page.js"):
        html = html.replace(f"/* {name} */", (TEMPLATES / name).read_text(encoding="utf-8"))
    return html


class WatchServer:
    """Serves the page of one run until ``close``. Raises InputError if ``port`` cannot be used."""

    def __init__(self, directory: Path, port: int | None = None, ledger: Ledger | None = None) -> None:
        self._reader, self._lock = RunReader(directory, ledger), threading.Lock()
        self._last_asked = -float("inf")
        self._last_told: dict[str, Any] = {}
        self._server = _listen(port, self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, name="watch", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/"

    def _state(self, known: dict[str, str]) -> dict[str, Any]:
        with self._lock:
            self._reader.refresh()
            document = self._reader.state(known)
            self._last_asked, self._last_told = time.monotonic(), document
        return document

    def close(self, linger_s: float = 0.0) -> None:
        """Stop serving. An open page gets up to ``linger_s`` to fetch the run's last state."""
        with self._lock:
            self._reader.expect_news()
        asked = time.monotonic()
        while (
            time.monotonic() - asked < linger_s
            and time.monotonic() - self._last_asked < LOOKING_S
            and (self._last_asked < asked or self._last_told.get("more"))
        ):
            time.sleep(0.05)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        tell = self._state

        class Handler(_Handler):
            def state(self, known: dict[str, str]) -> dict[str, Any]:
                return tell(known)

        return Handler


class _Handler(BaseHTTPRequestHandler):
    timeout = 10.0  # seconds until a client that sends nothing is disconnected

    def state(self, known: dict[str, str]) -> dict[str, Any]:
        raise NotImplementedError

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in (HOST, "localhost", "[::1]"):  # DNS rebinding: a foreign page whose name resolves to this address
            self._answer(403, "text/plain", b"This page answers requests to localhost only.\n")
            return
        where = urllib.parse.urlsplit(self.path)
        if where.path == "/":
            self._answer(200, "text/html; charset=utf-8", page().encode())
        elif where.path == "/state":
            try:
                document = self.state(dict(urllib.parse.parse_qsl(where.query)))
            except (TwostrokeError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                body = json.dumps({"error": f"the run's files cannot be read: {error}"}).encode()
                self._answer(500, "application/json", body)
                return
            self._answer(200, "application/json", json.dumps(document).encode())
        else:
            self._answer(404, "text/plain", b"This server has two addresses, / and /state.\n")

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        with contextlib.suppress(OSError):  # the browser has disconnected
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            for name, value in _HEADERS.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests, because the console shows the run's log."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that disconnect."""


def _listen(port: int | None, handler: type[BaseHTTPRequestHandler]) -> _Server:
    if port is not None:
        try:
            return _Server((HOST, port), handler)
        except (OSError, OverflowError) as error:
            reason = (getattr(error, "strerror", None) or str(error)).rstrip(".")
            raise InputError(
                f"the page cannot be served on port {port}: {reason}. Name another port, or 0 for any that is free."
            ) from None
    for candidate in (*PORTS, 0):
        with contextlib.suppress(OSError):
            return _Server((HOST, candidate), handler)
    raise InputError(f"no port of {HOST} is free for the page. Close a program that listens, or train without the page.")
