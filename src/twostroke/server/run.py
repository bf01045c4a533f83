"""Runs one server from start to end: HTTP in this process under uvicorn, the engine in its child, and a graceful stop.

The port answers ``/health`` while the model still loads, and completions get 503 with ``Retry-After``. SIGUSR1 replaces the
engines of a server that has several, one after another. After SIGTERM or SIGINT the server accepts nothing new, finishes
requests in flight (for at most ``grace_s``) and exits with 0. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import uvicorn

from twostroke.core.families import read_spec
from twostroke.data.chat import read_chat_template
from twostroke.planner.choosing.server_settings import ServerChoice
from twostroke.server import wire
from twostroke.server.admission import MAX_RETRY_AFTER_S, Admission
from twostroke.server.batch.batches import Batches
from twostroke.server.batch.store import opened_store
from twostroke.server.capture import Capture
from twostroke.server.connections import (
    BACKLOG,
    UNSENT_BYTES,
    Connections,
    guarded,
    most_connections,
    protocol_base,
    raise_file_limit,
    say_once,
)
from twostroke.server.engine_client import EngineClient, Engines
from twostroke.server.http import make_app
from twostroke.server.keys import ApiKeys
from twostroke.server.kv_events import KVEvents
from twostroke.server.kv_sockets import KVSockets
from twostroke.server.launch import CaptureSettings, EngineChild, ServeSettings, is_loopback, process_age_s
from twostroke.server.record import ServeRecord
from twostroke.server.redaction import Redaction, read_patterns
from twostroke.server.replicas import Replicas
from twostroke.server.response_cache import opened_cache
from twostroke.server.service import Service
from twostroke.server.text import ModelText
from twostroke.server.traces import Traces, exporter_to
from twostroke.server.usage import UsageLog
from twostroke.server.wait import Waiting

KEEP_ALIVE_S = int(MAX_RETRY_AFTER_S) + 5
"""A caller that a 429 sends away for the longest time finds its connection open. With 5 s some of 1,280 callers returned just
as the server closed their connection and lost the request, and the others connected anew: a 429 had a p99 of 0.04 to 4.4 s,
now 0.03 s."""


@dataclass(frozen=True)
class Started:
    """Facts of a server that can answer its first request. ``startup_s`` counts from the creation of this process."""

    url: str
    names: tuple[str, ...]
    engine: wire.Ready
    startup_s: float
    run_id: str | None


def serve_model(
    settings: ServeSettings,
    listener: socket.socket,
    child: EngineChild,
    on_ready: Callable[[Started], None],
    choice: ServerChoice | None = None,
) -> dict[str, float]:
    """Serve on a bound socket, with an engine that was launched a moment ago, until a signal. Returns what was served in all.
    ``choice``: what the engine was set by, whose expectation is frozen and scored.

    Raises InputError for a model or key file that cannot be used, and EngineError if the engine does not start.
    """
    keys = None if settings.api_key_file is None else ApiKeys.read(settings.api_key_file)
    capture = None if settings.capture is None else opened_capture(settings.capture)
    usage = None if settings.usage_log is None else UsageLog(settings.usage_log)
    traces = None if settings.otlp_endpoint is None else Traces(exporter_to(settings.otlp_endpoint))
    events, sockets = published_events(settings, listener.getsockname())
    text = ModelText(settings.directory)
    spec = read_spec(settings.directory)
    engine = replace(settings.engine, replicas=settings.replicas)
    record = ServeRecord(settings.directory, engine, settings.adapters, choice)

    def ready(engine: wire.Ready) -> None:
        startup_s = process_age_s()
        on_ready(Started(url_of(listener_address), settings.names, engine, startup_s, record.run_id))
        record.started(engine, startup_s)

    async def run() -> dict[str, float]:
        client = engines_of(settings, child, events)
        local_only = is_loopback(listener_address[0])
        waiting = Waiting(record.steps(), settings.max_queued_tokens, settings.engine.separate_prefixes)
        admission = Admission(settings.max_concurrent)
        service = Service(client, text, spec, settings.names, admission, keys, local_only, waiting=waiting, usage=usage)
        service.kept = kept
        service.capture, service.log_requests = capture, settings.log_requests
        service.traces, service.kv_events = traces, events
        if capture is not None:
            service.metrics.follow_capture(capture.counts)
        record.show_prediction(service.metrics)
        batches = None if store is None else Batches(store, service)
        ended = functools.partial(record.ended, service.served)
        await run_server(service, listener, settings.grace_s, ready, ended, batches, settings.admin)
        return service.totals

    listener_address = listener.getsockname()
    cached = opened_cache(
        settings.response_cache, settings.response_cache_bytes, settings.directory, read_chat_template(settings.directory)[0]
    )
    with opened_store(settings.files_dir) as store, cached as kept, asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            totals = runner.run(run())
        finally:
            for log in (capture, usage, traces, sockets):
                if log is not None:
                    log.close()
    record.stopped(totals)
    return totals


def opened_capture(settings: CaptureSettings) -> Capture:
    """Raises ConfigError for a folder, a file or a program that cannot be used."""
    patterns = [] if settings.redact is None else read_patterns(settings.redact)
    return Capture(settings.folder, Redaction(patterns, settings.command), settings.most_bytes)


def published_events(settings: ServeSettings, address: tuple[Any, ...]) -> tuple[KVEvents | None, KVSockets | None]:
    """What follows the caches, and what publishes that beside the server. Raises ConfigError if it cannot be published."""
    asked = settings.kv_events
    if asked is None:
        return None, None
    events = KVEvents()
    if asked.endpoint is None:
        return events, None
    topic = f"kv@{address[0]}:{address[1]}@{settings.names[0]}" if asked.topic is None else asked.topic
    return events, KVSockets(events, asked.endpoint, asked.replay, topic)


def engines_of(settings: ServeSettings, child: EngineChild, events: KVEvents | None = None) -> Engines:
    """The engine of ``settings``, or the several that they ask for. ``child`` is the first. ``events`` follow their caches."""
    launches = settings.launches()
    if len(launches) == 1:
        one = EngineClient(launches[0], child, adapters=settings.adapters)
        one.relaunch = partial(settings.relaunch, 0)
        one.pages = None if events is None else events.of_engine(0)
        return one
    engine = settings.engine
    several = Replicas(launches, child, settings.adapters, engine.token_budget, engine.separate_prefixes)
    for i, replica in enumerate(several.replicas):
        replica.relaunch = partial(settings.relaunch, i)
        replica.pages = None if events is None else events.of_engine(i)
    return several


def url_of(address: tuple[Any, ...]) -> str:
    host, port = address[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's event loop if it is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


class Uvicorn(uvicorn.Server):
    """uvicorn without its signal handling, which raises the signal again at the end. A graceful stop exits 0 here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run_server(
    service: Service,
    listener: socket.socket,
    grace_s: float = 30.0,
    on_ready: Callable[[wire.Ready], None] | None = None,
    on_end: Callable[[dict[str, float]], None] | None = None,
    batches: Batches | None = None,
    admin: bool = False,
) -> None:
    """Serve until a signal. ``on_end`` gets the engine's last counters. ``batches`` are computed beside. Raises TwostrokeError
    if the model cannot be loaded."""
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # its warnings are a line for every malformed request
    connections = Connections(most_connections(service.admission.limit, raise_file_limit()))
    config = uvicorn.Config(
        make_app(service, batches, admin),
        http=guarded(protocol_base(), connections),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,  # its lines hold query strings
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=None,  # ``stop`` keeps the grace, and so can tell its end from a second signal's
    )
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)  # accepted connections inherit it
    server = Uvicorn(config)
    gc.collect()
    gc.freeze()  # modules, tokenizer, routes: each full collection of them stopped the loop for 40 to 90 ms
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(say_once())

    def stop() -> None:
        connections.stopping = True
        if service.draining:
            server.force_exit = True
        for task in behind:
            task.cancel()
        service.draining = True  # a second signal finds it set and ends at once
        server.should_exit = True
        loop.call_later(grace_s, setattr, server, "force_exit", True)

    behind = [] if batches is None else [asyncio.create_task(batches.run())]
    handlers = {signal.SIGTERM: stop, signal.SIGINT: stop}
    if isinstance(service.client, Replicas):
        handlers[signal.SIGUSR1] = service.client.roll
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    engine = asyncio.create_task(service.client.run())
    http = asyncio.create_task(server.serve(sockets=[listener]))
    loaded = asyncio.create_task(service.client.wait_loaded())
    watches = [asyncio.create_task(connections.watch())]
    if service.waiting.steps is not None:
        watches.append(asyncio.create_task(service.waiting.watch_lag()))
    try:
        await asyncio.wait({engine, http, loaded}, return_when=asyncio.FIRST_COMPLETED)
        while not server.started and not http.done():
            await asyncio.sleep(0.01)
        if loaded.done() and on_ready is not None:
            on_ready(loaded.result())
        await asyncio.wait({engine, http}, return_when=asyncio.FIRST_COMPLETED)
        if engine.done() and not http.done():
            server.should_exit = server.force_exit = True
        await http
        await end_tasks(server)
        if service.kept is not None:
            await service.kept.written()
        if on_end is not None and loaded.done() and not engine.done():
            on_end(await service.client.stats())
    finally:
        for task in (loaded, *watches, *behind):
            task.cancel()
        await asyncio.gather(*behind, return_exceptions=True)  # they sync what they wrote
        service.client.close()
        try:
            await engine
        finally:
            service.client.kill()
            for number in handlers:
                loop.remove_signal_handler(number)


async def end_tasks(server: uvicorn.Server) -> None:
    """Cancel requests that outlive the grace, so that each closes its connection and is aborted in the engine."""
    tasks = [task for task in server.server_state.tasks if not task.done()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
