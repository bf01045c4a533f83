"""Loads an OpenAI-compatible server and measures it.

What is sent when is a ``Workload`` (``load_spec.LoadSpec.workload``), the same that the planner simulates. In an open loop,
conversations begin when they are due; a cap delays them without moving their scheduled time. In a closed loop, each of N users
begins the next one when the last one has ended. A conversation's later turns are sent when the answer before has come and been
thought about, with all that was said before.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from twostroke.bench.definitions import FORMULAS, LoadSummary, RequestRecord, Slo, summarise
from twostroke.bench.engine_counters import FORMULAS as ENGINE_FORMULAS
from twostroke.bench.engine_counters import Counters, engine_values, read_counters
from twostroke.bench.http_stream import Address, Answer, HttpError, exchange
from twostroke.bench.load_spec import LoadSpec
from twostroke.bench.precise_loop import run_precisely, without_collections
from twostroke.bench.prompts import PromptMaker
from twostroke.core.described import As, plain
from twostroke.core.distribution import Distribution
from twostroke.core.errors import TwostrokeError
from twostroke.core.units import format_seconds
from twostroke.ledger.text import format_value

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Progress = Callable[[int, int], None]
"""``progress(ended, all)``, called when a request ends."""


@dataclass(frozen=True)
class PlannedRequest:
    """One request. ``text`` is what its prompt adds to the conversation before it, which is turn ``after``."""

    index: int
    at_s: float  # since the load began; of a later turn since the answer before; always 0 for a user's first turns
    text: str
    max_tokens: int
    after: int | None = None


def plan_requests(spec: LoadSpec, tokenizer: Tokenizer | None = None, salt: int = 0) -> list[PlannedRequest]:
    """All requests of a load, made in advance from ``spec``, the tokenizer and ``salt`` alone. Warm-up requests come first and
    have negative indices; they are as long as the first requests and share no prefix with them.

    Words of prompts are drawn from the seed and ``salt``, arrivals and lengths from the seed only."""
    workload = spec.workload
    maker = PromptMaker(tokenizer, Path(spec.prompt_text) if spec.prompt_text else None)
    blocks: dict[int, str] = {}

    def block(number: int) -> str:
        if number not in blocks:
            blocks[number] = maker.make(workload.block_tokens, random.Random(f"{spec.seed} {salt} block {number}"))
        return blocks[number]

    def text(index: int, n_tokens: int, shared: Sequence[int]) -> str:
        """Of ``n_tokens``: the shared blocks as far as they go, then words of its own."""
        rng = random.Random(f"{spec.seed} {salt} {index}")
        n_whole = min(len(shared), n_tokens // workload.block_tokens)
        parts = [block(number) for number in shared[:n_whole]]
        rest = n_tokens - n_whole * workload.block_tokens
        if rest and n_whole < len(shared):
            parts.append(maker.beginning(block(shared[n_whole]), rest))
        elif rest:
            parts.append(maker.make(rest, rng))
        return " ".join(part.strip() for part in parts)

    arrivals = workload.arrivals
    planned = []
    for i in range(spec.warmup_requests):
        like = arrivals[i % len(arrivals)]
        index = i - spec.warmup_requests
        planned.append(PlannedRequest(index, 0.0, text(index, like.prompt_tokens, ()), like.output_tokens))
    for index, arrival in enumerate(arrivals):
        if arrival.after is None:
            own = text(index, arrival.prompt_tokens, arrival.blocks)
        else:
            before = arrivals[arrival.after]
            own = text(index, arrival.prompt_tokens - before.prompt_tokens - before.output_tokens, ())
        planned.append(PlannedRequest(index, arrival.at_s, own, arrival.output_tokens, arrival.after))
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
    def refusal(self) -> Annotated[str | None, "why the numbers are not the server's alone; null if they are"]:
        """A sentence where the load generator kept to its schedule so badly that the server's latencies cannot be told from its
        own. A closed loop has no schedule: its users ask again when they can."""
        return None if self.spec.users is not None else self.summary.lateness

    @property
    def definitions(self) -> Annotated[dict[str, str], "how each number of the summary is made"]:
        return FORMULAS | {name: ENGINE_FORMULAS[name] for name in self.summary.engine}

    def write_raw(self, path: Path) -> None:
        """Write one JSON line for the load, then one for each request with its raw times in seconds since the load began.
        Raises TwostrokeError, and leaves no part of it, if the file cannot be written."""
        head = {"url": self.url, "model": self.model, "load": plain(self.spec)}
        try:
            with path.open("w", encoding="utf-8") as file:
                for each in (head, *map(plain, self.records)):
                    file.write(json.dumps(each) + "\n")
        except OSError as error:
            if path.is_file():  # and not a device
                path.unlink()
            raise TwostrokeError(
                f"the raw times cannot be written to {path}: {error.strerror}. Free space, or name another file."
            ) from error

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
    return run_precisely(lambda: _run_load(url, spec, slo, api_key, tokenizer, progress))


async def _run_load(
    url: str, spec: LoadSpec, slo: Slo | None, api_key: str | None, tokenizer: Tokenizer | None, progress: Progress | None
) -> LoadResult:
    address = Address.parse(url)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    planned = plan_requests(spec, tokenizer, 0 if spec.same_prompts else secrets.randbits(64))
    model = spec.model or await _first_model(address, headers)
    sender = _Sender(address, headers | dict(spec.more_headers), spec, model)
    warmup, measured = planned[: spec.warmup_requests], planned[spec.warmup_requests :]
    warm: Counters = {}
    for request in warmup:
        first = await sender.send(sender.body(request, ()), request, time.perf_counter())
        if first.answer.status == 0:
            raise TwostrokeError(f"the server at {url} does not answer: {first.error}. Start it, or name another with --url.")
        warm = warm or await read_counters(address, headers)
    before = await read_counters(address, headers)
    ended = 0

    def one_ended() -> None:
        nonlocal ended
        ended += 1
        if progress is not None:
            progress(ended, len(measured))

    conversations = [_Conversation(turns, sender, one_ended) for turns in _by_conversation(measured)]
    with without_collections():
        start = time.perf_counter()
        if spec.users is not None:
            sent = await _closed_loop(conversations, spec.users, start)
        else:
            sent = await _open_loop(conversations, start, spec.max_concurrency)
    engine = engine_values(warm, before, await read_counters(address, headers), len(warmup) - 1)
    records = tuple(sorted((s.record(start) for s in sent), key=lambda r: r.index))
    return LoadResult(url, model, spec, slo, records, summarise(records, slo, engine))


def _by_conversation(requests: Sequence[PlannedRequest]) -> list[list[PlannedRequest]]:
    """The turns of each conversation, in the order in which conversations begin."""
    of: dict[int, list[PlannedRequest]] = {}
    for request in requests:
        turns = [] if request.after is None else of[request.after]
        turns.append(request)
        of[request.index] = turns
    return [turns for index, turns in of.items() if turns[0].index == index]


class _Conversation:
    """Sends the turns of one conversation, each after the answer to the one before."""

    def __init__(self, turns: list[PlannedRequest], sender: _Sender, one_ended: Callable[[], None]) -> None:
        self.turns, self._sender, self._one_ended = turns, sender, one_ended
        self._first_body = sender.body(turns[0], ())  # encoding takes a tenth of a millisecond, so not when it is due

    async def run(self, scheduled: float, ready: float) -> list[_Sent]:
        """``ready`` is when it was due and had a place."""
        sent: list[_Sent] = []
        said: list[str] = []
        body = self._first_body
        for number, request in enumerate(self.turns):
            if number:
                last = sent[-1]
                text = None if last.error else answer_text(last.answer)
                if text is None:
                    sent += [last.not_sent(turn) for turn in self.turns[number:]]
                    for _ in self.turns[number:]:
                        self._one_ended()
                    break
                said += [self.turns[number - 1].text, text]
                body = self._sender.body(request, said)
                scheduled = ready = last.ended + request.at_s
                await _sleep_until(scheduled)
            sent.append(await self._sender.send(body, request, scheduled, ready))
            self._one_ended()
        return sent


async def _sleep_until(at: float) -> None:
    left = at - time.perf_counter()
    if left > 0:
        await asyncio.sleep(left)


async def _closed_loop(conversations: list[_Conversation], users: int, start: float) -> list[_Sent]:
    waiting = iter(conversations)
    results: list[_Sent] = []

    async def user() -> None:
        free = start
        for conversation in waiting:  # one iterator shared by all users
            sent = await conversation.run(free, free)
            results.extend(sent)
            free = sent[-1].ended

    async with asyncio.TaskGroup() as group:
        for _ in range(min(users, len(conversations))):
            group.create_task(user())
    return results


async def _open_loop(conversations: list[_Conversation], start: float, cap: int | None) -> list[_Sent]:
    places: asyncio.Queue[float] = asyncio.Queue()  # free ones, by the time since when
    for _ in range(cap or 0):
        places.put_nowait(start)

    async def one(conversation: _Conversation) -> list[_Sent]:
        scheduled = start + conversation.turns[0].at_s
        await _sleep_until(scheduled)
        if cap is None:
            return await conversation.run(scheduled, scheduled)
        free = await places.get()
        sent = await conversation.run(scheduled, max(scheduled, free))
        places.put_nowait(sent[-1].ended)
        return sent

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(conversation)) for conversation in conversations]
    return [sent for task in tasks for sent in task.result()]


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
    ready: float
    sent: float
    ended: float
    answer: Answer
    error: str | None

    def not_sent(self, turn: PlannedRequest) -> _Sent:
        """A later turn of a conversation in which this one failed."""
        return _Sent(turn, self.ended, self.ended, self.ended, self.ended, Answer(), "the turn before failed")

    def record(self, start: float) -> RequestRecord:
        times, n_prompt, n_output, finish, error = read_stream(self.answer)
        failure = self.error or (f"http {self.answer.status}" if self.answer.status != 200 else error)
        return RequestRecord(
            index=self.request.index,
            scheduled_s=self.scheduled - start,
            ready_s=self.ready - start,
            sent_s=self.sent - start,
            chunk_times_s=tuple(t - start for t in times),
            ended_s=self.ended - start,
            prompt_tokens=n_prompt,
            output_tokens=n_output,
            error=failure,
            finish_reason=finish,
        )


class _Sender:
    def __init__(self, address: Address, headers: dict[str, str], spec: LoadSpec, model: str) -> None:
        self._address, self._headers, self._spec = address, headers, spec
        self._models = spec.adapters or (model,)
        self._path = "/v1/chat/completions" if spec.endpoint == "chat" else "/v1/completions"

    def body(self, request: PlannedRequest, said: Sequence[str]) -> bytes:
        """The request after what was ``said`` before: prompts and answers in turn."""
        body: dict[str, Any] = {
            "model": self._models[request.index % len(self._models)],
            "max_tokens": request.max_tokens,
            "temperature": self._spec.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._spec.ignore_eos:
            body["ignore_eos"] = True
        texts = [*said, request.text]
        if self._spec.endpoint == "chat":
            body["messages"] = [
                {"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(texts)
            ]
        else:
            # Words of a later turn begin with a space, which belongs to their first token.
            body["prompt"] = "".join(f" {text}" if number and number % 2 == 0 else text for number, text in enumerate(texts))
        return json.dumps({**body, **self._spec.more_fields}).encode()

    async def send(self, body: bytes, request: PlannedRequest, scheduled: float, ready: float | None = None) -> _Sent:
        holder: list[Answer] = []
        error = None
        sent = time.perf_counter()
        try:
            await exchange(self._address, "POST", self._path, body, self._headers, self._spec.timeout_s, holder)
        except HttpError as failure:
            error = str(failure)
        # The end is when the last piece came, and not when this task had its turn: a user's next request counts from it.
        answer = holder[0]
        ended = time.perf_counter() if error or not answer.pieces else answer.pieces[-1][0]
        return _Sent(request, scheduled, scheduled if ready is None else ready, sent, ended, answer, error)


def answer_text(answer: Answer) -> str | None:
    """What a whole stream of completion chunks said; None for an error, and for a stream that ended early."""
    said: list[str] = []
    complete = False
    for event in answer.body.replace(b"\r\n", b"\n").split(b"\n\n"):
        data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
        if not data or data == b"[DONE]":
            complete = complete or bool(data)
            continue
        try:
            chunk = json.loads(data)
            if chunk.get("error"):
                return None
            choices = chunk.get("choices") or ()
            said += [choice.get("text") or (choice.get("delta") or {}).get("content") or "" for choice in choices]
        except (ValueError, LookupError, TypeError, AttributeError):
            return None
    return "".join(said) if complete and answer.status == 200 else None


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
                    delta = choice.get("delta") or {}
                    if choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
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
    lines.append(f"{'':16}{'median':>10}{'p90':>10}{'p95':>10}{'p99':>10}")
    for name, title in (
        ("ttft_s", "TTFT"),
        ("tpot_s", "TPOT"),
        ("itl_s", "ITL"),
        ("e2e_s", "E2E"),
        ("ttft_from_sent_s", "TTFT from sent"),
        ("e2e_from_sent_s", "E2E from sent"),
        ("send_delay_s", "send delay"),
        ("start_delay_s", "start delay"),
    ):
        d: Distribution = getattr(s, name)
        cells = (d.median, d.p90, d.p95, d.p99)
        shown = "".join(f"{'–' if math.isnan(v) else format_seconds(v):>10}" for v in cells)
        lines.append(f"{title:16}{shown}  {FORMULAS[name]}")
    lines.append("")
    rates = [
        ("requests/s", f"{s.requests_per_s:.2f}", FORMULAS["requests_per_s"]),
        ("output tok/s", f"{s.output_tok_per_s:.1f}", FORMULAS["output_tok_per_s"]),
        ("total tok/s", f"{s.total_tok_per_s:.1f}", FORMULAS["total_tok_per_s"]),
        ("concurrency", f"{s.peak_concurrency}", FORMULAS["peak_concurrency"]),
    ]
    if s.goodput_per_s is not None:
        rates.append(("goodput/s", f"{s.goodput_per_s:.2f}", f"{FORMULAS['goodput_per_s']} ({s.slo_met} of {s.n_requests})"))
    lines += [f"{title:16}{value:>10}  {formula}" for title, value, formula in rates]
    if s.engine:
        lines += ["", "inside the engine"]
        lines += [f"{name:24}{format_value(name, value):>16}  {ENGINE_FORMULAS[name]}" for name, value in s.engine.items()]
    return "\n".join(lines)
