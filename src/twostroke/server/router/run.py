"""Runs one router from start to end, as ``server.run`` runs a server."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Sequence

import httpx
import uvicorn

from twostroke.core.errors import ConfigError
from twostroke.server.connections import BACKLOG, UNSENT_BYTES, Connections, guarded, protocol_base, raise_file_limit, say_once
from twostroke.server.keys import ApiKeys
from twostroke.server.launch import is_loopback
from twostroke.server.router.endpoint import Endpoint
from twostroke.server.router.health import Watch
from twostroke.server.router.proxy import Router
from twostroke.server.run import KEEP_ALIVE_S, Uvicorn, end_tasks, loop_factory

CONNECT_S = 5.0
SILENCE_S = 600.0
"""Longest wait for the next byte of an answer, as OpenAI's own client waits."""
FIRST_LOOK_S = 6.0
"""Longest wait for the first look at the servers before the router says where it listens."""
_SPARE_FILES = 64


def base_url(given: str) -> str:
    """``http://host:port[/prefix]`` without a slash or ``/v1`` at its end. Raises ConfigError."""
    try:
        url = httpx.URL(given)
        good = url.scheme in ("http", "https") and url.host and not url.query and not url.fragment and not url.userinfo
    except (httpx.InvalidURL, ValueError):
        good = False
    if not good:
        raise ConfigError(f"url={given!r:.200} must look like http://127.0.0.1:8000.")
    return given.rstrip("/").removesuffix("/v1").rstrip("/")


def base_urls(given: Sequence[str]) -> list[str]:
    """Each as ``base_url`` has it. Raises ConfigError for one that is named twice."""
    urls = [base_url(each) for each in given]
    for url in urls:
        if urls.count(url) > 1:
            raise ConfigError(f"{url} is named twice. Name each server once.")
    return urls


def run_router(
    urls: Sequence[str],
    listener: socket.socket,
    keys: ApiKeys | None,
    endpoint_key: str,
    grace_s: float,
    on_ready: Callable[[list[Endpoint]], None],
) -> dict[str, float]:
    """Route to ``urls`` (of ``base_urls``) on a bound socket until a signal. Returns what was passed on in all."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_run([Endpoint(url) for url in urls], listener, keys, endpoint_key, grace_s, on_ready))


async def _run(
    endpoints: list[Endpoint],
    listener: socket.socket,
    keys: ApiKeys | None,
    endpoint_key: str,
    grace_s: float,
    on_ready: Callable[[list[Endpoint]], None],
) -> dict[str, float]:
    for name in ("uvicorn.error", "httpx"):  # a line for every malformed request, and for every request
        logging.getLogger(name).setLevel(logging.ERROR)
    limit = raise_file_limit()
    connections = Connections(max(16, (limit - _SPARE_FILES) // 2))  # each may need another to a server
    # No limit of its own: the clients' connections are limited. Nothing of the environment: no proxy stands between.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=4.0)
    client = httpx.AsyncClient(timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S), limits=limits, trust_env=False)
    async with client:
        watch = Watch(client, endpoints, endpoint_key)
        router = Router(client, watch, endpoints, keys, is_loopback(listener.getsockname()[0]))
        config = uvicorn.Config(
            router,
            http=guarded(protocol_base(), connections),
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=None,
        )
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        server = Uvicorn(config)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(say_once())

        def stop() -> None:
            connections.stopping = True
            if router.draining:
                server.force_exit = True
            router.draining = server.should_exit = True
            loop.call_later(grace_s, setattr, server, "force_exit", True)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        behind = [asyncio.create_task(watch.run()), asyncio.create_task(connections.watch())]
        http = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            try:
                async with asyncio.timeout(FIRST_LOOK_S):
                    await watch.looked.wait()
            except TimeoutError:
                pass
            while not server.started and not http.done():
                await asyncio.sleep(0.01)
            on_ready(endpoints)
            await http
            await end_tasks(server)
        finally:
            for task in behind:
                task.cancel()
            await asyncio.gather(*behind, return_exceptions=True)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
    names = ("requests", "moved", "failures")
    return {name: float(sum(getattr(endpoint, name) for endpoint in endpoints)) for name in names}
