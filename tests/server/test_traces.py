"""Traces: a span for each request with its parts, below the client's own, without any text."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from serving import echo_server, until

from twostroke.core.errors import ConfigError
from twostroke.server.traces import Traced, Traces, exporter_to

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def spans_of(*requests: Traced) -> dict[str, ReadableSpan]:
    exporter = InMemorySpanExporter()
    traces = Traces(exporter)
    for request in requests:
        traces.add(request)
    traces.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def traced(
    started_s: float | None = 3.0, first_s: float | None = 4.0, parent: str | None = PARENT, complete: bool = True
) -> Traced:
    return Traced("chatcmpl-1", "m", parent, 1.0, 2.0, started_s, first_s, 6.0, 30, 10, 7, ("stop",), complete)


def test_a_request_and_its_parts_are_spans_below_the_clients() -> None:
    spans = spans_of(traced())
    whole = spans["chat m"]
    assert whole.context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert whole.parent is not None
    assert whole.parent.span_id == 0xB7AD6B7169203331
    assert {name: span.parent.span_id for name, span in spans.items() if span is not whole and span.parent} == dict.fromkeys(
        ("queue", "prefill", "decode"), whole.context.span_id
    )
    seconds = {name: ((span.end_time or 0) - (span.start_time or 0)) / 1e9 for name, span in spans.items()}
    assert seconds == pytest.approx({"chat m": 5.0, "queue": 1.0, "prefill": 1.0, "decode": 2.0}, abs=1e-6)
    assert dict(whole.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 30,
        "gen_ai.usage.output_tokens": 7,
        "twostroke.cached_tokens": 10,
    }
    assert dict(spans["prefill"].attributes or {}) == {"twostroke.computed_tokens": 20, "twostroke.cached_tokens": 10}
    assert whole.status.is_ok
    assert abs((whole.end_time or 0) / 1e9 - time.time() + time.perf_counter() - 6.0) < 1, "clock times"


def test_what_did_not_come_has_no_span() -> None:
    assert set(spans_of(traced(None, None, complete=False))) == {"chat m", "queue"}
    spans = spans_of(traced(3.0, None, complete=False))
    assert set(spans) == {"chat m", "queue", "prefill"}
    assert not spans["chat m"].status.is_ok


def test_a_client_that_is_not_sampled_is_not_traced_and_nonsense_begins_a_trace() -> None:
    assert spans_of(traced(parent=PARENT[:-1] + "0")) == {}
    for parent in (None, "", "nonsense", PARENT[:20]):
        assert spans_of(traced(parent=parent))["chat m"].parent is None


def test_what_is_missing_or_no_url_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"must be a URL of a collector"):
        exporter_to("localhost:4317")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"not installed: pip install 'twostroke\[otel\]'"):
        exporter_to("http://localhost:4318")


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", bodies
        server.shutdown()
        thread.join()


def test_a_server_sends_the_traces_of_what_it_answered(echo_model: Path, tmp_path: Path) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with collector() as (url, bodies), echo_server(echo_model, tmp_path, ["--otlp-endpoint", url]) as served:
        body = {"model": "echo", "prompt": "the quick secret fox", "max_tokens": 3}
        before_ns, ahead_ns = time.time_ns(), time.time_ns() - time.perf_counter_ns()
        with httpx.Client(base_url=served.url, trust_env=False, timeout=20) as web:
            assert web.post("/v1/completions", json=body, headers={"traceparent": PARENT}).status_code == 200
            assert web.post("/v1/completions", json=body | {"max_tokens": -1}).status_code == 400
        after_ns = time.time_ns()
        set_by_ns = abs(time.time_ns() - time.perf_counter_ns() - ahead_ns)  # the system may set its clock meanwhile
        until(lambda: bodies)
        assert served.stop() == 0
    (spans,) = [
        scope.spans
        for received in map(ExportTraceServiceRequest.FromString, bodies)
        for resource in received.resource_spans
        for scope in resource.scope_spans
    ]
    found = {span.name: span for span in spans}
    assert set(found) == {"text_completion echo", "queue", "prefill", "decode"}
    assert {span.trace_id.hex() for span in spans} == {PARENT.split("-")[1]}
    assert found["text_completion echo"].parent_span_id.hex() == PARENT.split("-")[2]
    for span in spans:
        assert before_ns - set_by_ns < span.start_time_unix_nano <= span.end_time_unix_nano < after_ns + set_by_ns, span.name
    assert not any(b"secret" in body for body in bodies)
