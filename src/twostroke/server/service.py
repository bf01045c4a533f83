"""What happens between a parsed request and its answer: admission, tokens in, text out, one usage record."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from twostroke.core.errors import CapacityError, EngineError, InputError, TwostrokeError
from twostroke.core.spec import ModelSpec
from twostroke.engine.detokenize import IncrementalDetokenizer
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.server import protocol, wire
from twostroke.server.admission import Admission, ApiKeys
from twostroke.server.engine_client import EngineClient, EngineLostError, NotReadyError, SlowReaderError, TokenStream
from twostroke.server.errors import ApiError, bad_request, engine_lost, not_ready
from twostroke.server.metrics import Metrics
from twostroke.server.text import ModelText


@dataclass(frozen=True)
class TextDelta:
    """What one choice gained: text may lag behind tokens while a character or a possible stop string is incomplete."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[wire.TokenLogprobs] | None
    finish_reason: str | None


@dataclass
class Choice:
    """One prompt of a request while it is worked on."""

    index: int
    stream: TokenStream
    detokenizer: IncrementalDetokenizer
    param: str
    n_output: int = 0
    finished: bool = False

    async def next(self) -> TextDelta:
        """Everything that has arrived since the last call. Raises ApiError where the engine gave up on it."""
        try:
            deltas = await self.stream.next()
        except TwostrokeError as error:
            raise api_error(error, self.param) from None
        if deltas[-1].finish_reason == "error":
            self.finished = True
            raise ApiError(500, "the model's output for this request was not finite.", self.param, "engine_error")
        token_ids = [i for delta in deltas for i in delta.token_ids]
        logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
        finish = deltas[-1].finish_reason
        text = self.detokenizer.add(token_ids)
        n_new = self.detokenizer.n_tokens - self.n_output  # fewer than have come where a stop string ended the text among them
        token_ids, logprobs = token_ids[:n_new], logprobs[:n_new]
        self.n_output += n_new
        if self.detokenizer.stopped:
            self.stream.close()
            finish = "stop"
        elif finish is not None:
            text += self.detokenizer.finish()
        self.finished = finish is not None
        return TextDelta(self.index, text, token_ids, logprobs or None, finish)


def api_error(error: TwostrokeError, param: str | None = None) -> ApiError:
    """The answer to a request that the engine did not finish; ``param`` is the field that held the prompt."""
    if isinstance(error, NotReadyError):
        return not_ready()
    if isinstance(error, EngineLostError):
        return engine_lost()
    if isinstance(error, SlowReaderError):
        return ApiError(408, str(error), code="slow_reader")
    if isinstance(error, CapacityError):
        return bad_request(str(error), param, "context_length_exceeded")
    if isinstance(error, InputError):
        return bad_request(str(error))
    if isinstance(error, EngineError):
        return ApiError(500, str(error), code="engine_error")
    return ApiError(500, "the server failed on this request.", code="internal_error")


@dataclass
class Service:
    """Everything that the routes share."""

    client: EngineClient
    text: ModelText
    spec: ModelSpec
    names: tuple[str, ...]
    admission: Admission
    keys: ApiKeys | None = None
    local_only: bool = False  # listens on loopback: then only local names may be asked for
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    totals: dict[str, float] = field(default_factory=lambda: {"requests": 0, "prompt_tokens": 0, "output_tokens": 0})

    @property
    def ready(self) -> bool:
        return self.client.ready and not self.draining

    @property
    def max_model_len(self) -> int:
        if self.client.info is None:
            raise not_ready()
        return self.client.info.max_model_len

    def require_model(self, name: str) -> None:
        if name not in self.names:
            shown = name if len(name) <= 80 else f"{name[:80]}…"
            raise ApiError(
                404, f"model {shown!r} is not served here. Served: {', '.join(self.names)}.", "model", "model_not_found"
            )

    async def complete(self, request: protocol.CompletionRequest, started: float) -> Generation:
        self.require_model(request.model)
        prompts = protocol.prompts_of(request)
        generation = Generation(self, "cmpl", request.model, len(prompts), started)
        try:
            for prompt in prompts:
                ids = (
                    self._checked(prompt)
                    if isinstance(prompt, list)
                    else await self.text.encode(prompt, "prompt", special=True)
                )
                room = self._room(ids, request.max_tokens, "prompt")
                wanted = min(protocol.DEFAULT_MAX_TOKENS, room) if request.max_tokens is None else request.max_tokens
                generation.submit(ids, request.sampling(wanted, request.logprobs))
        except BaseException:
            generation.close()
            raise
        return generation

    async def chat(self, request: protocol.ChatRequest, started: float) -> Generation:
        self.require_model(request.model)
        generation = Generation(self, "chatcmpl", request.model, 1, started)
        try:
            ids = await self.text.encode_chat([m.for_template() for m in request.messages])
            asked = request.max_completion_tokens or request.max_tokens
            room = self._room(ids, asked, "messages")
            logprobs = (request.top_logprobs or 0) if request.logprobs else None
            generation.submit(ids, request.sampling(asked or room, logprobs))
        except BaseException:
            generation.close()
            raise
        return generation

    def _checked(self, ids: list[int]) -> list[int]:
        bad = next((i for i in ids if not 0 <= i < self.spec.vocab_size), None)
        if bad is not None:
            raise bad_request(f"prompt holds token id {bad}; ids are from 0 to {self.spec.vocab_size - 1}.", "prompt")
        return ids

    def _room(self, ids: list[int], asked: int | None, param: str) -> int:
        """Tokens that may follow the prompt. Raises ApiError 400 where prompt and ``asked`` do not fit the context."""
        longest = self.max_model_len
        if len(ids) + (asked or 1) > longest:
            output = f" and {asked} asked for" if asked is not None else ""
            raise bad_request(
                f"this model's context is {longest} tokens; the {param} has {len(ids)}{output}. Shorten one of them.",
                param,
                "context_length_exceeded",
            )
        return longest - len(ids)


class Generation:
    """One HTTP request in the engine: its choices, its places in the admission, its measurements. Must be closed."""

    def __init__(self, service: Service, prefix: str, model: str, n_prompts: int, started: float) -> None:
        if service.draining:
            raise not_ready(retry_after_s=5)
        if not service.client.ready:
            raise not_ready()
        service.admission.enter(n_prompts)
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.model = model
        self.created = int(time.time())
        self.prompt_tokens = 0
        self.choices: list[Choice] = []
        self._param = "prompt" if prefix == "cmpl" else "messages"
        self._service = service
        self._n_places = n_prompts
        self._started = started
        self._first: float | None = None
        self._closed = False

    def submit(self, prompt_ids: list[int], params: SamplingParams) -> None:
        try:
            stream = self._service.client.submit(prompt_ids, params)
        except TwostrokeError as error:
            raise api_error(error) from None
        eos = () if params.ignore_eos else self._service.spec.eos_token_ids
        hidden = {*eos, *params.stop_token_ids}
        tokenizer = self._service.text.tokenizer
        detokenizer = IncrementalDetokenizer(tokenizer, params.stop, hidden, params.min_tokens, prompt_ids)
        self.choices.append(Choice(len(self.choices), stream, detokenizer, self._param))
        self.prompt_tokens += len(prompt_ids)

    async def deltas(self) -> AsyncIterator[TextDelta]:
        """Text of all choices as it comes, interleaved; each ends with a ``finish_reason``. Raises ApiError."""
        source = self._one(self.choices[0]) if len(self.choices) == 1 else self._merged()
        async for delta in source:
            if self._first is None:
                self._first = time.perf_counter()
            yield delta

    async def _one(self, choice: Choice) -> AsyncIterator[TextDelta]:
        while not choice.finished:
            yield await choice.next()

    async def _merged(self) -> AsyncIterator[TextDelta]:
        waiting: dict[asyncio.Task[TextDelta], Choice] = {asyncio.create_task(c.next()): c for c in self.choices}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    choice = waiting.pop(task)
                    delta = task.result()
                    if not choice.finished:
                        waiting[asyncio.create_task(choice.next())] = choice
                    yield delta
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    @property
    def usage(self) -> protocol.Usage:
        n_output = sum(choice.n_output for choice in self.choices)
        return protocol.Usage(self.prompt_tokens, n_output, self.prompt_tokens + n_output)

    def close(self) -> None:
        """Give the places back, abort what is not finished, and count what was done. More than once does nothing."""
        if self._closed:
            return
        self._closed = True
        ended = time.perf_counter()
        complete = len(self.choices) == self._n_places and all(choice.finished for choice in self.choices)
        for choice in self.choices:
            if not choice.finished:
                choice.stream.close()
        self._service.admission.leave(self._n_places, ended - self._started if complete else None)
        metrics, totals, usage = self._service.metrics, self._service.totals, self.usage
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.finished.labels("complete" if complete else "cut short").inc()
        totals["requests"] += complete
        totals["prompt_tokens"] += usage.prompt_tokens
        totals["output_tokens"] += usage.completion_tokens
        if complete:
            for choice in self.choices:
                metrics.observe(self._started, self._first, ended, choice.n_output)
        else:
            metrics.output_tokens.inc(usage.completion_tokens)


def completion_logprobs(text: ModelText, delta: TextDelta, offset: int) -> protocol.CompletionLogprobs | None:
    """OpenAI's completion form: parallel lists; a token that is no whole character is written ``bytes:\\xe2\\x80``."""
    if delta.logprobs is None:
        return None
    result = protocol.CompletionLogprobs([], [], [], [])
    for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=True):
        shown = _shown(text.token_bytes(token_id))
        result.tokens.append(shown)
        result.token_logprobs.append(_finite(entry.logprob))
        result.top_logprobs.append({_shown(text.token_bytes(i)): _finite(logprob) for i, logprob in entry.top})
        result.text_offset.append(offset)
        offset += len(text.token_bytes(token_id).decode(errors="ignore"))
    return result


def chat_logprobs(text: ModelText, delta: TextDelta) -> protocol.ChatLogprobs | None:
    if delta.logprobs is None:
        return None

    def one(token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        raw = text.token_bytes(token_id)
        return raw.decode(errors="replace"), _finite(logprob), list(raw)

    return protocol.ChatLogprobs(
        [
            protocol.ChatTokenLogprob(
                *one(token_id, entry.logprob), top_logprobs=[protocol.TopLogprob(*one(i, logprob)) for i, logprob in entry.top]
            )
            for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=True)
        ]
    )


def _shown(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


def _finite(logprob: float) -> float:
    """JSON has no −∞; OpenAI writes −9999 for a token that cannot come."""
    return max(logprob, -9999.0)


def merge_logprobs(parts: list[Any]) -> Any:
    """The logprobs of a whole choice from those of its deltas."""
    parts = [part for part in parts if part is not None]
    if not parts:
        return None
    if isinstance(parts[0], protocol.ChatLogprobs):
        return protocol.ChatLogprobs([entry for part in parts for entry in part.content])
    return protocol.CompletionLogprobs(
        *([x for part in parts for x in getattr(part, name)] for name in protocol.CompletionLogprobs.__struct_fields__)
    )
