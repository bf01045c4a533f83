"""Loads an OpenAI-compatible server and measures it.

In an open loop, requests arrive with gaps ~ Gamma(shape = burstiness, scale = 1 / (rate · burstiness)). Burstiness 1 is a
Poisson process, and smaller values are burstier. A concurrency cap delays requests without moving their scheduled time. In a
closed loop, each of N users sends the next request when the last one has ended.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from twostroke.bench.definitions import FORMULAS, LoadSummary, RequestRecord, Slo, summarise
from twostroke.bench.engine_counters import FORMULAS as ENGINE_FORMULAS
from twostroke.bench.engine_counters import Counters, engine_values, read_counters
from twostroke.bench.http_stream import Address, Answer, HttpError, exchange
from twostroke.bench.prompts import PromptMaker
from twostroke.core.described import As, plain
from twostroke.core.distribution import Distribution
from twostroke.core.errors import ConfigError, TwostrokeError
from twostroke.core.units import format_seconds
from twostroke.ledger.text import format_value
from twostroke.scheduling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Progress = Callable[[int, int], None]
"""``progress(ended, all)``, called when a request ends."""


@dataclass(frozen=True)
class LoadSpec:
    """A load. Give exactly one of ``request_rate`` (open loop, requests/s; inf sends all at once) and ``users`` (closed loop).
    Lengths in tokens are drawn uniformly from (least, most)."""

    n_requests: int = 64
    request_rate: float | None = None
    burstiness: float = 1.0
    max_concurrency: int | None = None
    users: int | None = None
    prompt_tokens: tuple[int, int] = (64, 64)
    output_tokens: tuple[int, int] = (64, 64)
    endpoint: Literal["completions", "chat"] = "completions"
    model: str | None = None  # None: the first that /v1/models names
    adapters: tuple[str, ...] = ()  # models that requests name in turn instead
    temperature: float = 0.0
    ignore_eos: bool = True
    prompt_text: str | None = None  # a text file; None: random words
    warmup_requests: int = 3
    seed: int = 0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if (self.request_rate is None) == (self.users is None):
            raise ConfigError("give exactly one of request_rate (open loop) and users (closed loop).")
        SamplingParams(temperature=self.temperature)  # a server would refuse every request
        if self.request_rate is not None and not self.request_rate > 0:
            raise ConfigError(f"request_rate={self.request_rate} must be above 0 requests/s, or inf.")
        if not 0 < self.burstiness < math.inf:
            raise ConfigError(f"burstiness={self.burstiness} must be above 0 and finite; 1 is Poisson.")
        for name in ("n_requests", "users", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1.")
        if self.users is not None and self.max_concurrency is not None:
            raise ConfigError("max_concurrency is for open loops; in a closed loop users is the concurrency.")
        if self.warmup_requests < 0:
            raise ConfigError(f"warmup_requests={self.warmup_requests} must be at least 0.")
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"timeout_s={self.timeout_s} must be above 0 and finite.")
        for name in ("prompt_tokens", "output_tokens"):
            least, most = getattr(self, name)
            if not 1 <= least <= most:
                raise ConfigError(f"{name}={least}:{most} must be two lengths of at least 1 token, the smaller first.")

    @property
    def rate_in_words(self) -> Annotated[float | str | None, "requests/s, or inf: all at once", As("request_rate")]:
        return "inf" if self.request_rate == math.inf else self.request_rate  # JSON has no infinity


@dataclass(frozen=True)
class PlannedRequest:
    index: int
    at_s: float  # scheduled time since the load began; always 0 in a closed loop, whose users decide when they send
    prompt: str
    max_tokens: int


def plan_requests(spec: LoadSpec, tokenizer: Tokenizer | None = None) -> list[PlannedRequest]:
    """All requests of a load, made in advance from ``spec`` and the tokenizer alone. Warm-up requests come first and have
    negative indices."""
    rng = random.Random(spec.seed)
    maker = PromptMaker(tokenizer, Path(spec.prompt_text) if spec.prompt_text else None)
    planned = []
    at = 0.0
    for index in range(-spec.warmup_requests, spec.n_requests):
        if index > 0 and spec.request_rate is not None and spec.request_rate != math.inf:
            at += rng.gammavariate(spec.burstiness, 1 / (spec.request_rate * spec.burstiness))
        n_prompt, n_output = rng.randint(*spec.prompt_tokens), rng.randint(*spec.output_tokens)
        planned.append(PlannedRequest(index, at, maker.make(n_prompt, rng), n_output))
    return planned


@dataclass(frozen=True)
class LoadResult:
    """The result of a load. ``records`` are the measured requests in scheduled order, without the warm-up."""

    url: Annotated[str, "where the server is"]
    model: Annotated[str, "as the server calls it"]
    spec: Annotated[LoadSpec, "what was sent", As("load")]
    slo: Annotated[Slo | None, "what goodput is of"]
    records: tuple[RequestRecord, ...]
    summary: Annotated[LoadSummary, "what was measured"]

    @property
    def definitions(self) -> Annotated[dict[str, str], "how each number of the summary is made"]:
        return FORMULAS | {name: ENGINE_FORMULAS[name] for name in self.summary.engine}

    def write_raw(self, path: Path) -> None:
        """Write one JSON line for the load, then one for each request with its raw times in seconds since the load began."""
        with path.open("w", encoding="utf-8") as file:
            head = {"url": self.url, "model": self.model, "load": plain(self.spec)}
            file.write(json.dumps(head) + "\n")
            for record in self.records:
                file.write(json.dumps(plain(record)) + "\n")

    def text(self) -> str:
        return summary_text(self.summary)


def run_load(
    url: str,
    spec: LoadSpec,
    slo: Slo | None = None,
    api_key: str | None = None,
    tokenizer: Tokenizer | None = None,
    progress: Progress | None = None,
) -> LoadResult:
    """Send the load and measure. Raises ConfigError for a bad address, TwostrokeError if the server does not answer. Single
    requests that fail are counted and raise nothing."""
    return asyncio.run(_run_load(url, spec, slo, api_key, tokenizer, progress))


async def _run_load(
    url: str, spec: LoadSpec, slo: Slo | None, api_key: str | None, tokenizer: Tokenizer | None, progress: Progress | None
) -> LoadResult:
    address = Address.parse(url)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    planned = plan_requests(spec, tokenizer)
    model = spec.model or await _first_model(address, headers)
    sender = _Sender(address, headers, spec, model)
    warmup, measured = planned[: spec.warmup_requests], planned[spec.warmup_requests :]
    warm: Counters = {}
    for request in warmup:
        first = await sender.send(request, time.perf_counter())
        if first.answer.status == 0:
            raise TwostrokeError(f"the server at {url} does not answer: {first.error}. Start it, or name another with --url.")
        warm = warm or await read_counters(address, headers)
    before = await read_counters(address, headers)
    ended = 0

    async def send(request: PlannedRequest, scheduled: float) -> _Sent:
        nonlocal ended
        result = await sender.send(request, scheduled)
        ended += 1
        if progress is not None:
            progress(ended, len(measured))
        return result

    start = time.perf_counter()
    if spec.users is not None:
        sent = await _closed_loop(measured, spec.users, send)
    else:
        sent = await _open_loop(measured, start, spec.max_concurrency, send)
    engine = engine_values(warm, before, await read_counters(address, headers), len(warmup) - 1)
    records = tuple(sorted((s.record(start) for s in sent), key=lambda r: r.index))
    return LoadResult(url, model, spec, slo, records, summarise(records, slo, engine))


async def _closed_loop(requests: list[PlannedRequest], users: int, send: _Send) -> list[_Sent]:
    waiting = iter(requests)
    results: list[_Sent] = []

    async def user() -> None:
        mine = [await send(request, time.perf_counter()) for request in waiting]  # one iterator shared by all users
        results.extend(mine)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(users, len(requests))):
            group.create_task(user())
    return results


async def _open_loop(requests: list[PlannedRequest], start: float, cap: int | None, send: _Send) -> list[_Sent]:
    places = asyncio.Semaphore(cap) if cap is not None else None

    async def one(request: PlannedRequest) -> _Sent:
        scheduled = start + request.at_s
        await asyncio.sleep(max(0.0, scheduled - time.perf_counter()))
        if places is None:
            return await send(request, scheduled)
        async with places:
            return await send(request, scheduled)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(request)) for request in requests]
    return [task.result() for task in tasks]


async def _first_model(address: Address, headers: dict[str, str]) -> str:
    try:
        answer = await exchange(address, "GET", "/v1/models", headers=headers, timeout_s=10.0)
    except HttpError as error:
        raise TwostrokeError(
            f"the server at {address.host}:{address.port} does not answer: {error}. Start it, or name another with --url."
        ) from None
    if answer.status != 200:
        raise TwostrokeError(f"GET /v1/models answered {answer.status}{_error_sentence(answer)}.")
    try:
        return str(json.loads(answer.body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise TwostrokeError("GET /v1/models did not name a model. Give one with --model.") from None


@dataclass
class _Sent:
    """The unparsed answer to one request. Parsing it during the load would delay the other streams."""

    request: PlannedRequest
    scheduled: float
    sent: float
    ended: float
    answer: Answer
    error: str | None

    def record(self, start: float) -> RequestRecord:
        times, n_prompt, n_output, finish, error = read_stream(self.answer)
        failure = self.error or (f"http {self.answer.status}" if self.answer.status != 200 else error)
        return RequestRecord(
            index=self.request.index,
            scheduled_s=self.scheduled - start,
            sent_s=self.sent - start,
            chunk_times_s=tuple(t - start for t in times),
            ended_s=self.ended - start,
            prompt_tokens=n_prompt,
            output_tokens=n_output,
            error=failure,
            finish_reason=finish,
        )


_Send = Callable[[PlannedRequest, float], Awaitable[_Sent]]


class _Sender:
    def __init__(self, address: Address, headers: dict[str, str], spec: LoadSpec, model: str) -> None:
        self._address, self._headers, self._spec = address, headers, spec
        self._models = itertools.cycle(spec.adapters or (model,))

    async def send(self, request: PlannedRequest, scheduled: float) -> _Sent:
        body: dict[str, Any] = {
            "model": next(self._models),
            "max_tokens": request.max_tokens,
            "temperature": self._spec.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._spec.ignore_eos:
            body["ignore_eos"] = True
        if self._spec.endpoint == "chat":
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": request.prompt}]
        else:
            path, body["prompt"] = "/v1/completions", request.prompt
        holder: list[Answer] = []
        error = None
        payload = json.dumps(body).encode()
        sent = time.perf_counter()
        try:
            await exchange(self._address, "POST", path, payload, self._headers, self._spec.timeout_s, holder)
        except HttpError as failure:
            error = str(failure)
        return _Sent(request, scheduled, sent, time.perf_counter(), holder[0], error)


def read_stream(answer: Answer) -> tuple[list[float], int, int, str | None, str | None]:
    """(times of the non-empty chunks, prompt tokens, output tokens, finish reason, error) of a stream of completion chunks.

    Output tokens are those of the server's usage record. If it sends no such record, they are the number of non-empty chunks.
    """
    times: list[float] = []
    prompt_tokens = 0
    output_tokens: int | None = None
    finish: str | None = None
    complete = False
    rest = b""
    for at, piece in answer.pieces:
        *events, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
            if not data:
                continue
            if data == b"[DONE]":
                complete = True
                continue
            try:
                chunk = json.loads(data)
                if chunk.get("error"):
                    return times, prompt_tokens, output_tokens or 0, finish, "stream error"
                for choice in chunk.get("choices") or ():
                    if choice.get("text") or (choice.get("delta") or {}).get("content"):
                        times.append(at)
                    finish = choice.get("finish_reason") or finish
                if usage := chunk.get("usage"):
                    prompt_tokens, output_tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
            except (ValueError, LookupError, TypeError, AttributeError):
                return times, prompt_tokens, output_tokens or 0, finish, "unreadable chunk"
    error = None if complete else "truncated stream"
    return times, prompt_tokens, len(times) if output_tokens is None else output_tokens, finish, error


def _error_sentence(answer: Answer) -> str:
    try:
        return f": {json.loads(answer.body)['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return ""


def summary_text(summary: LoadSummary) -> str:
    """The numbers for people, each with its formula."""
    s = summary
    lines = [f"{s.n_completed} of {s.n_requests} requests completed in {format_seconds(s.duration_s)}, all numbers measured"]
    if s.failures:
        lines.append("failed: " + ", ".join(f"{count} × {reason}" for reason, count in sorted(s.failures.items())))
    lines.append("")
    lines.append(f"{'':14}{'median':>10}{'p90':>10}{'p95':>10}{'p99':>10}")
    for name, title in (
        ("ttft_s", "TTFT"),
        ("tpot_s", "TPOT"),
        ("itl_s", "ITL"),
        ("e2e_s", "E2E"),
        ("send_delay_s", "send delay"),
    ):
        d: Distribution = getattr(s, name)
        cells = (d.median, d.p90, d.p95, d.p99)
        shown = "".join(f"{'–' if math.isnan(v) else format_seconds(v):>10}" for v in cells)
        lines.append(f"{title:14}{shown}  {FORMULAS[name]}")
    lines.append("")
    rates = [
        ("requests/s", f"{s.requests_per_s:.2f}", FORMULAS["requests_per_s"]),
        ("output tok/s", f"{s.output_tok_per_s:.1f}", FORMULAS["output_tok_per_s"]),
        ("total tok/s", f"{s.total_tok_per_s:.1f}", FORMULAS["total_tok_per_s"]),
        ("concurrency", f"{s.peak_concurrency}", FORMULAS["peak_concurrency"]),
    ]
    if s.goodput_per_s is not None:
        rates.append(("goodput/s", f"{s.goodput_per_s:.2f}", f"{FORMULAS['goodput_per_s']} ({s.slo_met} of {s.n_requests})"))
    lines += [f"{title:14}{value:>10}  {formula}" for title, value, formula in rates]
    if s.engine:
        lines += ["", "inside the engine"]
        lines += [f"{name:24}{format_value(name, value):>16}  {ENGINE_FORMULAS[name]}" for name, value in s.engine.items()]
    return "\n".join(lines)
