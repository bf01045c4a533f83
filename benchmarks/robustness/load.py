"""Clients that call and call again, with the retries of OpenAI's SDK, over plain sockets: a client costs microseconds, so that
the server is measured and not its clients.

    python load.py URL --clients 1280 --seconds 10      one JSON document on stdout
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

MAX_RETRIES = 2
RETRY_DELAY_S, MAX_RETRY_DELAY_S, MAX_RETRY_AFTER_S = 0.5, 8.0, 120.0
"""As openai 3.54 has them in ``_constants.py``."""


@dataclass
class Counts:
    """What all clients saw within the measured span."""

    begun_s: float
    answered_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    broken: int = 0
    given_up: int = 0
    other: dict[int, int] = field(default_factory=dict)

    def document(self, ended_s: float) -> dict[str, object]:
        span = ended_s - self.begun_s
        return {
            "answers_per_s": len(self.answered_s) / span,
            "answer_p50_s": percentile(self.answered_s, 50),
            "answer_p99_s": percentile(self.answered_s, 99),
            "refusals_per_s": len(self.refused_s) / span,
            "refusal_p50_s": percentile(self.refused_s, 50),
            "refusal_p99_s": percentile(self.refused_s, 99),
            "broken_connections": self.broken,
            "given_up": self.given_up,
            "other_statuses": {str(status): n for status, n in self.other.items()},
            "client_cpu_share": time.process_time() / (time.perf_counter() - _STARTED),
        }


_STARTED = time.perf_counter()


def percentile(values: list[float], share: int) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[share - 1]


class Client:
    """One caller: the next call when the last one has ended, on one connection that is kept."""

    def __init__(self, host: str, port: int, request: bytes, counts: Counts) -> None:
        self._address = host, port
        self._request = request
        self._counts = counts
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def run(self, until_s: float) -> None:
        try:
            while time.perf_counter() < until_s:
                await self._call(until_s)
        finally:
            self._drop()

    async def _call(self, until_s: float) -> None:
        """One call with its retries."""
        for attempt in range(MAX_RETRIES + 1):
            began = time.perf_counter()
            try:
                status, wait_s = await self._once()
            except (OSError, EOFError):
                self._drop()
                self._counts.broken += began >= self._counts.begun_s
                status, wait_s = 0, None
            took = time.perf_counter() - began
            if began >= self._counts.begun_s:
                if status == 200:
                    self._counts.answered_s.append(took)
                elif status == 429:
                    self._counts.refused_s.append(took)
                elif status:
                    self._counts.other[status] = self._counts.other.get(status, 0) + 1
            if status == 200 or time.perf_counter() >= until_s:
                return
            if attempt < MAX_RETRIES:
                if wait_s is None or not 0 < wait_s <= MAX_RETRY_AFTER_S:
                    wait_s = min(RETRY_DELAY_S * 2**attempt, MAX_RETRY_DELAY_S) * (1 - 0.25 * random.random())
                await asyncio.sleep(wait_s)
        self._counts.given_up += 1

    async def _once(self) -> tuple[int, float | None]:
        """Status, and the seconds that the answer asks to wait."""
        if self._streams is not None and self._streams[0].at_eof():
            self._drop()  # the server closed it while this client waited
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address)
        reader, writer = self._streams
        writer.write(self._request)
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
        await reader.readexactly(int(headers[b"content-length"]))
        if headers.get(b"connection") == b"close":
            self._drop()
        wait_s = None
        for name, unit_s in ((b"retry-after", 1.0), (b"retry-after-ms", 1e-3)):
            if name in headers:
                wait_s = float(headers[name]) * unit_s
        return int(lines[0].split()[1]), wait_s

    def _drop(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def request_bytes(url: str, body: dict[str, object]) -> bytes:
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload


async def load(url: str, clients: int, warm_s: float, seconds: float, body: dict[str, object]) -> dict[str, object]:
    """What ``clients`` saw in ``seconds``, after ``warm_s`` that do not count."""
    parts = urlsplit(url)
    began = time.perf_counter()
    counts = Counts(began + warm_s)
    until_s = began + warm_s + seconds
    request = request_bytes(url, body)
    callers = [Client(parts.hostname or "", parts.port or 80, request, counts) for _ in range(clients)]

    async def later(client: Client) -> None:
        await asyncio.sleep(random.random() * min(1.0, warm_s))  # people do not call in the same millisecond
        await client.run(until_s)

    tasks = [asyncio.create_task(later(client)) for client in callers]
    await asyncio.sleep(until_s - time.perf_counter())
    document = counts.document(time.perf_counter())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--warm-s", type=float, default=2.0)
    parser.add_argument("--body", type=json.loads, required=True)
    args = parser.parse_args()
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.install()
    json.dump(asyncio.run(load(args.url, args.clients, args.warm_s, args.seconds, args.body)), sys.stdout)


if __name__ == "__main__":
    main()
