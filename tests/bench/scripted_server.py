"""An HTTP server in a thread that answers completions by a script: known chunks at known times, errors, cut streams."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Script:
    """How every request is answered. ``first_s`` and ``gap_s`` are waits before the first chunk and between chunks."""

    first_s: float = 0.0
    gap_s: float = 0.0
    statuses: list[int] = field(default_factory=list)  # taken one a request; 200 when used up
    cut_after: int | None = None  # chunks after which the connection is closed
    error_after: int | None = None  # chunks after which an error event ends the stream
    usage: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)  # what was asked
    heads: list[bytes] = field(default_factory=list)  # with which headers
    most_at_once: int = 0
    now: int = 0


def _chunk(body: dict[str, Any]) -> bytes:
    data = body if isinstance(body, str) else json.dumps(body)
    event = f"data: {data}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(event), event)


async def _answer(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0)
    body = json.loads(await reader.readexactly(length)) if length else {}
    if head.startswith(b"GET"):
        payload = json.dumps({"data": [{"id": "scripted"}]}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(payload), payload))
        return
    script.bodies.append(body)
    script.heads.append(head)
    status = script.statuses.pop(0) if script.statuses else 200
    if status != 200:
        writer.write(b"HTTP/1.1 %d Nope\r\ncontent-length: 2\r\n\r\n{}" % status)
        return
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    chat = "messages" in body
    if chat:
        writer.write(_chunk({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
    await asyncio.sleep(script.first_s)
    for index in range(body["max_tokens"]):
        if script.cut_after == index:
            return
        if script.error_after == index:
            writer.write(_chunk({"error": {"message": "as scripted"}}))
            writer.write(b"0\r\n\r\n")
            return
        if index:
            await asyncio.sleep(script.gap_s)
        text = {"delta": {"content": "x"}} if chat else {"text": "x"}
        writer.write(_chunk({"choices": [text | {"finish_reason": None}]}))
        await writer.drain()
    if script.usage:
        usage = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}
        writer.write(_chunk({"choices": [], "usage": usage}))
    writer.write(_chunk("[DONE]"))  # type: ignore[arg-type]
    writer.write(b"0\r\n\r\n")


@contextmanager
def scripted(script: Script) -> Iterator[str]:
    """The URL of a server that follows ``script``."""
    loop = asyncio.new_event_loop()
    ready: dict[str, Any] = {}
    started = threading.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        script.now += 1
        script.most_at_once = max(script.most_at_once, script.now)
        try:
            await _answer(script, reader, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            script.now -= 1
            writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        ready["port"] = server.sockets[0].getsockname()[1]
        ready["stop"] = asyncio.Event()
        started.set()
        async with server:
            await ready["stop"].wait()
        rest = asyncio.all_tasks() - {asyncio.current_task()}  # answers that a client gave up on
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await asyncio.sleep(0)  # transports close in the next turn

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    started.wait(5)
    try:
        yield f"http://127.0.0.1:{ready['port']}"
    finally:
        loop.call_soon_threadsafe(ready["stop"].set)
        thread.join()
        loop.close()
