"""Sends a trace of each request that the engine worked on, by OpenTelemetry: spans of the request and of its time in the queue,
in prefill and in decode, with token counts and without any text. Imports OpenTelemetry when it is asked for.

Spans are made when a request has ended, from times that are measured anyway, so a server without traces pays nothing for them.
The names of attributes are those of OpenTelemetry's conventions for generative models where these have one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from twostroke.core.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

OPERATIONS = {"chatcmpl": "chat", "cmpl": "text_completion", "embd": "embeddings", "score": "score"}
"""Names of what requests ask for, by the beginnings of their ids."""
CLOSE_S = 5.0
"""Longest time that the end of a server waits for its last spans."""


@dataclass(frozen=True)
class Traced:
    """One request. Times are of ``time.perf_counter``: its headers, its hand-over to the engine, its first step there, its
    first token, its end; those that did not come are None. ``parent``: its header ``traceparent``."""

    id: str
    model: str
    parent: str | None
    came_s: float
    handed_s: float
    started_s: float | None
    first_s: float | None
    ended_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reasons: tuple[str, ...]
    complete: bool


def library() -> Any:
    """OpenTelemetry's SDK. Raises ConfigError with what to install."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export
    except ImportError:
        raise ConfigError(
            "--otlp-endpoint needs OpenTelemetry's SDK, which is not installed: pip install 'twostroke[otel]'."
        ) from None
    return opentelemetry


def exporter_to(endpoint: str) -> SpanExporter:
    """Sends spans to the collector at ``endpoint``, in OTLP over HTTP. Raises ConfigError for what is no URL."""
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"--otlp-endpoint {endpoint!r} must be a URL of a collector, as http://localhost:4318.")
    whole = endpoint if url.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
    exporter: SpanExporter = library().exporter.otlp.proto.http.trace_exporter.OTLPSpanExporter(endpoint=whole)
    return exporter


class Traces:
    """What a server tells ``exporter``, by a thread; spans that come faster than it takes them are dropped."""

    def __init__(self, exporter: SpanExporter) -> None:
        library()
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(resource=Resource.create({"service.name": "twostroke"}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("twostroke")
        self._propagator = TraceContextTextMapPropagator()
        self._server, self._error = SpanKind.SERVER, StatusCode.ERROR

    def add(self, request: Traced) -> None:
        """Waits for nothing."""
        at_0_ns = _wall_ahead_ns()

        def at(seconds: float) -> int:
            return at_0_ns + round(seconds * 1e9)

        operation = OPERATIONS[request.id.partition("-")[0]]
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": request.model,
            "gen_ai.response.id": request.id,
            "gen_ai.response.finish_reasons": request.finish_reasons,
            "gen_ai.usage.input_tokens": request.prompt_tokens,
            "gen_ai.usage.output_tokens": request.output_tokens,
            "twostroke.cached_tokens": request.cached_tokens,
        }
        context = self._propagator.extract({} if request.parent is None else {"traceparent": request.parent})
        name = f"{operation} {request.model}"
        whole = self._tracer.start_span(name, context, self._server, attributes, start_time=at(request.came_s))
        if not request.complete:
            whole.set_status(self._error, "cut short")
        if whole.is_recording():
            from opentelemetry.trace import set_span_in_context

            below = set_span_in_context(whole)
            ended_s = request.ended_s
            started_s = min(request.started_s or ended_s, request.first_s or ended_s)
            parts = [("queue", request.handed_s, started_s, {"twostroke.prompt_tokens": request.prompt_tokens})]
            if request.started_s is not None:
                computed = request.prompt_tokens - request.cached_tokens
                tokens = {"twostroke.computed_tokens": computed, "twostroke.cached_tokens": request.cached_tokens}
                parts.append(("prefill", started_s, request.first_s or ended_s, tokens))
            if request.first_s is not None:
                parts.append(("decode", request.first_s, ended_s, {"twostroke.output_tokens": request.output_tokens}))
            for part, from_s, to_s, tokens in parts:
                self._tracer.start_span(part, below, attributes=tokens, start_time=at(from_s)).end(at(to_s))
        whole.end(at(request.ended_s))

    def close(self) -> None:
        """Send what waits."""
        self._provider.force_flush(round(1000 * CLOSE_S))
        self._provider.shutdown()


def _wall_ahead_ns() -> int:
    """Nanoseconds from ``time.perf_counter`` to the time of day. Of three readings the one that took least: a thread may lose
    its processor between two clocks, and all spans would be as much too early."""
    readings = []
    for _ in range(3):
        before, now, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        readings.append((after - before, now - (before + after) // 2))
    return min(readings)[1]
