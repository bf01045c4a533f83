"""Runs one server from start to end: HTTP in this process under uvicorn, the engine in its child, and a graceful stop.

The port answers ``/health`` while the model still loads, and completions get 503 with ``Retry-After``. SIGUSR1 replaces the
engines of a server that has several, one after another. After SIGTERM or SIGINT the server accepts nothing new, finishes
requests in flight (for at most ``grace_s``) and exits with 0. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from twostroke.server.engine_client import EngineClient
from twostroke.server.engines import Engines
from twostroke.server.handover.settings import HandoverSettings
from twostroke.server.http import make_app
from twostroke.server.keys import ApiKeys
from twostroke.server.kv_events import KVEvents
from twostroke.server.kv_sockets import KVSockets
from twostroke.server.launch import CaptureSettings, EngineChild, PoolSettings, ServeSettings, is_loopback, process_age_s
from twostroke.server.model_memory import memory_of
from twostroke.server.pool import Member, ModelPool
from twostroke.server.prefill import DecodingEngine
from twostroke.server.record import ServeRecord, Transfers
from twostroke.server.redaction import Redaction, read_patterns
from twostroke.server.replicas import Replicas
from twostroke.server.response_cache import opened_cache
from twostroke.server.served import Served
from twostroke.server.service import Service
from twostroke.server.split import Split
from twostroke.server.text import ModelText
from twostroke.server.traces import Traces, exporter_to
from twostroke.server.usage import UsageLog
from twostroke.server.wait import Waiting

log = logging.getLogger("twostroke.server")

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
    others = () if settings.pool is None else settings.pool.others
    models = [
        ServedModel(settings, choice),
        *(ServedModel(one, say=log.debug) for one in others),
    ]  # a machine's lack is told once

    def ready(engine: wire.Ready) -> None:
        startup_s, record = process_age_s(), models[0].record
        on_ready(Started(url_of(listener_address), settings.names, engine, startup_s, record.run_id))
        record.started(engine, startup_s)

    def ended(stats: dict[str, float]) -> None:
        for model, service in zip(models, services, strict=True):
            of_model = stats if service.pool is None else service.pool.last_stats(service)
            if of_model or service.pool is None:
                model.record.ended(service.served, of_model)

    async def run() -> None:
        client = engines_of(settings, child, events)
        local_only = is_loopback(listener_address[0])
        first = models[0].service(client, settings, Admission(settings.max_concurrent), keys, local_only, usage)
        first.kept = kept
        first.capture = capture
        first.traces, first.kv_events = traces, events
        services.append(first)
        if capture is not None:
            first.metrics.follow_capture(capture.counts)
        if settings.pool is not None:
            services.extend(model.beside(first, settings) for model in models[1:])
            pooled(settings.pool, models, services, usage)
        batches = None if store is None else Batches(store, first)
        await run_server(first, listener, settings.grace_s, ready, ended, batches, settings.admin)

    listener_address = listener.getsockname()
    services: list[Service] = []
    cached = opened_cache(
        settings.response_cache, settings.response_cache_bytes, settings.directory, read_chat_template(settings.directory)[0]
    )
    with opened_store(settings.files_dir) as store, cached as kept, asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            runner.run(run())
        finally:
            for written in (capture, usage, traces, sockets):
                if written is not None:
                    written.close()
    for model, service in zip(models, services, strict=True):
        model.record.stopped(service.totals)
    return {name: sum(service.totals[name] for service in services) for name in services[0].totals}


class ServedModel:
    """One of the models of a server: its text, and its entry in the ledger. Raises InputError for one that cannot be used."""

    def __init__(
        self, settings: ServeSettings, choice: ServerChoice | None = None, say: Callable[[str], None] = log.warning
    ) -> None:
        self.settings = settings
        self.text, self.spec = ModelText(settings.directory), read_spec(settings.directory)
        engine = replace(settings.engine, replicas=settings.replicas)
        transfers = None
        if settings.prefill_at or (settings.handover is not None and settings.handover.peers):
            transfers = Transfers(near=all(peer.startswith("/") for peer in (settings.handover or HandoverSettings()).peers))
        self.record = ServeRecord(settings.directory, engine, settings.adapters, choice, transfers, say)

    def _waiting(self, server: ServeSettings) -> Waiting:
        return Waiting(self.record.steps(), server.max_queued_tokens, server.engine.separate_prefixes)

    def service(
        self,
        client: Engines,
        server: ServeSettings,
        admission: Admission,
        keys: ApiKeys | None,
        local_only: bool,
        usage: UsageLog | None = None,
    ) -> Service:
        """What the routes share, before the engines of ``client``."""
        waiting = self._waiting(server)
        names = self.settings.names
        service = Service(client, self.text, self.spec, names, admission, keys, local_only, waiting=waiting, usage=usage)
        service.log_requests = server.log_requests
        self.record.show_prediction(service.metrics)
        return service

    def beside(self, first: Service, server: ServeSettings) -> Service:
        """The service of this model, which shares with ``first`` all that is not a model's own."""
        return replace(
            first,
            client=engines_of(self.settings),
            text=self.text,
            spec=self.spec,
            names=self.settings.names,
            waiting=self._waiting(server),
            served=Served(),
            totals=dict.fromkeys(first.totals, 0),
        )


def pooled(
    settings: PoolSettings, models: Sequence[ServedModel], services: Sequence[Service], usage: UsageLog | None
) -> ModelPool:
    """Puts ``services`` into one pool."""
    members = []
    for model, service in zip(models, services, strict=True):
        own, plan = model.settings, model.record.planned
        assert isinstance(service.client, EngineClient)
        memory = memory_of(own.directory, model.spec, own.engine, plan)
        load_s = None if plan is None else plan.warm_startup_s
        started = None if model is models[0] else model.record.started
        members.append(Member(service, service.client, partial(_connected, own), memory, load_s, started))
    split = None if settings.split is None else Split(services[0].names[0], *settings.split)
    pool = ModelPool(members, settings.most_bytes, settings.wait_s, split)
    if split is not None and usage is not None:
        pool.rateable.read(usage.path)
    return pool


def _connected(settings: ServeSettings, adapters: Mapping[str, str]) -> EngineClient:
    return EngineClient(settings.launches()[0], adapters=adapters)


def service_of(
    settings: ServeSettings, client: Engines, text: ModelText, record: ServeRecord, keys: ApiKeys | None, local_only: bool
) -> Service:
    """What the routes share, before the engines of ``client``."""
    waiting = Waiting(record.steps(), settings.max_queued_tokens, settings.engine.separate_prefixes)
    spec, admission = read_spec(settings.directory), Admission(settings.max_concurrent)
    service = Service(client, text, spec, settings.names, admission, keys, local_only, waiting=waiting)
    service.log_requests = settings.log_requests
    record.show_prediction(service.metrics)
    return service


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


def engines_of(settings: ServeSettings, child: EngineChild | None = None, events: KVEvents | None = None) -> Engines:
    """The engine of ``settings``, or the several that they ask for. ``child`` is the first, if it was started already.
    ``events`` follow their caches."""
    launches = settings.launches()
    if settings.prefill_at:
        apart = DecodingEngine(launches[0], child, settings.adapters, settings.prefill_launches())
        apart.relaunch = partial(settings.relaunch, 0)
        apart.pages = None if events is None else events.of_engine(0)
        for i, each in enumerate(apart.prefills):
            each.relaunch = partial(settings.relaunch_prefill, i)
        return apart
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

    engines = service.client if service.pool is None else service.pool
    services = [service] if service.pool is None else [member.service for member in service.pool.members]

    def stop() -> None:
        connections.stopping = True
        if service.draining:
            server.force_exit = True
        for task in behind:
            task.cancel()
        for each in services:
            each.draining = True  # a second signal finds it set and ends at once
        server.should_exit = True
        loop.call_later(grace_s, setattr, server, "force_exit", True)

    behind = [] if batches is None else [asyncio.create_task(batches.run())]
    handlers = {signal.SIGTERM: stop, signal.SIGINT: stop}
    if isinstance(service.client, Replicas):
        handlers[signal.SIGUSR1] = service.client.roll
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    engine = asyncio.create_task(engines.run())
    http = asyncio.create_task(server.serve(sockets=[listener]))
    loaded = asyncio.create_task(engines.wait_loaded())
    watches = [asyncio.create_task(connections.watch())]
    watches += [asyncio.create_task(each.waiting.watch_lag()) for each in services if each.waiting.steps is not None]
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
            on_end(await engines.stats())
    finally:
        for task in (loaded, *watches, *behind):
            task.cancel()
        await asyncio.gather(*behind, return_exceptions=True)  # they sync what they wrote
        engines.close()
        try:
            await engine
        finally:
            engines.kill()
            for number in handlers:
                loop.remove_signal_handler(number)


async def end_tasks(server: uvicorn.Server) -> None:
    """Cancel requests that outlive the grace, so that each closes its connection and is aborted in the engine."""
    tasks = [task for task in server.server_state.tasks if not task.done()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
