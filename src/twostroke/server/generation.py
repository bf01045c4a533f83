"""``Generation``: one HTTP request while the engine computes it, and its answers as text."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from twostroke.core.errors import CapacityError, EngineError, InputError, TwostrokeError
from twostroke.engine.detokenize import IncrementalDetokenizer
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.server import protocol, responses, wire
from twostroke.server.callers import Caller
from twostroke.server.engine_client import EngineLostError, NotReadyError
from twostroke.server.errors import ApiError, bad_request, engine_lost, not_ready
from twostroke.server.keys import Account
from twostroke.server.reasoning import ReasoningFormat
from twostroke.server.served import Answer
from twostroke.server.text import tokenizer_failed
from twostroke.server.token_stream import SlowReaderError, TokenStream
from twostroke.server.tool_calls import CallFormat
from twostroke.server.traces import Traced
from twostroke.server.usage import UsageLine
from twostroke.server.wait import Asked, Ticket

if TYPE_CHECKING:
    from twostroke.server.service import Service

_FAILED = "the model's output for this request was not finite, or its form reached the limits of llguidance."


@dataclass(frozen=True)
class TextDelta:
    """New tokens and text of one choice. Text lags behind while a character or a possible stop string is incomplete."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[wire.TokenLogprobs] | None
    finish_reason: str | None


@dataclass
class Prompt:
    """One prompt of a request. If the answer repeats it: its ``text``, and the ``offsets`` at which its tokens begin there.
    ``first``: of its tokens the first that is scored, if the request asks for scores."""

    ids: list[int]
    text: str = ""
    offsets: list[int] = field(default_factory=list)
    first: int = 1


@dataclass
class Kept:
    """A chat that is captured: its messages and tools, as the template got them, and the text of its answers so far."""

    messages: list[dict[str, Any]]
    tools: Any
    deltas: list[TextDelta] = field(default_factory=list)


@dataclass
class Choice:
    """One answer to one prompt while the engine computes it. ``silent``: the request asks about its prompt alone, and no token
    of the answer is shown. ``scores``: those of the prompt's tokens from ``prompt.first`` on, if asked for. They are complete
    when the first token of the answer comes."""

    index: int
    stream: TokenStream
    detokenizer: IncrementalDetokenizer
    prompt: Prompt
    scores: list[wire.TokenLogprobs]
    param: str
    ticket: Ticket
    silent: bool = False
    n_output: int = 0
    finished: bool = False

    def take(self) -> TextDelta | None:
        """What has arrived since the last call, or None. Raises ApiError if the engine ended the answer with an error."""
        try:
            deltas = self.stream.take()
        except TwostrokeError as error:
            raise api_error(error, self.param) from None
        if not deltas:
            return None
        finish = deltas[-1].finish_reason
        if finish == "error":
            self.finished = True
            raise ApiError(500, _FAILED, self.param, "engine_error")
        if self.silent:
            self.finished = finish is not None
            # The client asked for no token, so the model's end token has not ended anything.
            return TextDelta(self.index, "", [], None, "length" if finish == "stop" else finish)
        token_ids = [i for delta in deltas for i in delta.token_ids]
        logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
        try:
            text = self.detokenizer.add(token_ids)
            if finish is not None and not self.detokenizer.stopped:
                text += self.detokenizer.finish()
        except BaseException as error:
            raise tokenizer_failed(error) from None
        n_new = self.detokenizer.n_tokens - self.n_output  # fewer than came if a stop string ended the text
        token_ids, logprobs = token_ids[:n_new], logprobs[:n_new]
        self.n_output += n_new
        if self.detokenizer.stopped:
            self.stream.close()  # the engine knows no stop strings and would write on
            finish = "stop"
        self.finished = finish is not None
        return TextDelta(self.index, text, token_ids, logprobs or None, finish)


def api_error(error: TwostrokeError, param: str | None = None) -> ApiError:
    """The HTTP answer to a request that the engine did not finish. ``param`` is the field that held the prompt."""
    if isinstance(error, NotReadyError):
        return not_ready()
    if isinstance(error, EngineLostError):
        return engine_lost()
    if isinstance(error, SlowReaderError):
        return ApiError(408, str(error), code="slow_reader")
    if isinstance(error, CapacityError):
        return bad_request(str(error), param, "context_length_exceeded")
    if isinstance(error, InputError):
        return bad_request(str(error), error.field)
    if isinstance(error, EngineError):
        return ApiError(500, str(error), code="engine_error")
    return ApiError(500, "the server failed on this request.", code="internal_error")


class Generation:
    """One HTTP request while the engine computes it: its choices, its places in the admission, its measurements. Must be
    closed.

    It has ``n`` choices for each of ``n_prompts`` prompts, in the order of the prompts. ``n_places``: those that it takes, if
    its prompts are not submitted together."""

    def __init__(
        self,
        service: Service,
        prefix: str,
        request: protocol.CommonRequest,
        n_prompts: int,
        started: float,
        caller: Caller,
        n_places: int | None = None,
    ) -> None:
        if service.draining:
            raise not_ready(retry_after_s=5)
        if not service.client.ready:
            raise not_ready()
        n, n_places = request.n or 1, n_prompts * request.places if n_places is None else n_places
        service.enter(n_places, caller, "n" if n > 1 else "prompt")
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.model = request.model
        self.created = int(time.time())
        self._fingerprint = service.fingerprint
        self.says_cached = True  # how much of the prompts was cached, which other requests decide
        self.reasoning: ReasoningFormat | None = None  # how the answers' reasoning and calls are written, if they may have any
        self.call_format: CallFormat | None = None
        self.prompt_tokens = 0
        self.choices: list[Choice] = []
        self.reasons: Counter[str] = Counter()  # why choices ended
        self._param = {"cmpl": "prompt", "score": "text", "embd": "input"}.get(prefix, "messages")
        self._service = service
        self._n_prompts = n_prompts
        self._n_choices = n_prompts * n
        self.n_places = n_places
        self._started = started
        self._caller = caller
        self.client = caller.name
        self.kept: Kept | None = None
        self._request = request
        self._admitted = deque[tuple[Asked, list[bytes]]]()
        self._priority = request.priority or 0
        self._timeout_s = request.timeout_s
        self._lora = request.model if request.model in service.client.adapters else None
        # This process finds stop strings, so with them it needs every token as soon as there is one.
        self._whole = not request.stream and not request.stop
        self._wake = asyncio.Event()
        self._first: float | None = None
        self._took_s: float | None = None
        self._finished = False
        self._closed = False

    def admit(self, prompts: Sequence[Sequence[int]], cacheable: bool = True) -> None:
        """Ask whether ``prompts``, which are handed over next in this order, may come now. ``cacheable``: they may begin with
        what the cache holds. Raises ApiError 429 if they would wait too long, or the key's limit of tokens is reached."""
        service, caller, request = self._service, self._caller, self._request
        asked, keys = service.waiting.asked(prompts, request.places, self._priority, caller.name, self._lora or "", cacheable)
        now_s = time.perf_counter()
        first_s = None if self._timeout_s is None else self._timeout_s - (now_s - self._started)
        whole = None
        if caller.read_timeout_s is not None:
            left_s = caller.read_timeout_s - (now_s - (caller.came_s or self._started))
            if request.stream:
                first_s = left_s if first_s is None else min(first_s, left_s)
            else:
                least = (request.asked if request.ignore_eos else request.min_tokens) or 1
                whole = left_s, least
        service.require_time(asked, caller, first_s, whole)
        if caller.account is not None and caller.limited:
            caller.account.charge_prompt(sum(each.tokens for each in asked), self._param)
        self._admitted.extend(zip(asked, keys, strict=True))

    def submit(self, prompt: Prompt, params: SamplingParams, silent: bool = False) -> None:
        """Hand one prompt to the engine, with ``params.n`` choices. Raises ApiError."""
        service, left_s = self._service, self._timeout_s
        if left_s is not None:
            # Tokenising took some of it. The engine refuses a timeout of 0; 1 ms lets it answer with the reason "timeout".
            left_s = max(1e-3, left_s - (time.perf_counter() - self._started))
        eos = service.spec.eos_token_ids
        try:
            text, n = service.text, params.n
            readers = [IncrementalDetokenizer.of(text.tokenizer, params, eos, prompt.ids, text.lengths) for _ in range(n)]
        except BaseException as error:
            raise tokenizer_failed(error) from None
        if not self._admitted:
            self.admit([prompt.ids])
        try:
            streams = service.client.submit(
                prompt.ids, params, self._wake, self._priority, self._caller.name, left_s, self._whole, self._lora
            )
        except TwostrokeError as error:
            raise api_error(error) from None
        # What an adapter, a form or a search takes is no prompt's time, and a first token that was seen is compared.
        plain = self._lora is None and params.constraint is None and not params.use_beam_search and params.pooling is None
        ticket = service.waiting.hand(*self._admitted.popleft(), params.max_tokens, params.ignore_eos, plain)
        for stream, detokenizer in zip(streams, readers, strict=True):
            scores = streams[0].prompt_logprobs
            self.choices.append(Choice(len(self.choices), stream, detokenizer, prompt, scores, self._param, ticket, silent))
        self.prompt_tokens += len(prompt.ids)

    async def deltas(self) -> AsyncIterator[TextDelta]:
        """New text of all choices as it comes. The last delta of each choice has a ``finish_reason``. Raises ApiError."""
        waiting = list(self.choices)
        while waiting:
            await self._wake.wait()
            await self._service.loop_turns.wait()  # a step ends many answers at once: eight go on in one turn of the loop
            self._wake.clear()  # before taking, so that what arrives meanwhile sets it again
            for choice in waiting:
                delta = choice.take()
                if delta is not None:
                    if self._first is None:
                        self._first = choice.stream.first_s or time.perf_counter()
                    if choice.ticket.first_s is None:
                        self._service.waiting.began(choice.ticket)
                    choice.ticket.written = choice.n_output
                    if delta.finish_reason is not None:
                        self.reasons[delta.finish_reason] += 1
                        self._service.waiting.ended(choice.ticket, choice.n_output)
                    if self.kept is not None:
                        self.kept.deltas.append(delta)
                    yield delta
            waiting = [choice for choice in waiting if not choice.finished]

    @property
    def fingerprint(self) -> str | None:
        """Of the weights that computed the answers; "+" between those of several, where they were replaced meanwhile."""
        if not self._service.client.tags:
            return self._fingerprint
        found = [each or self._fingerprint for choice in self.choices for each in choice.stream.computed_by]
        return "+".join(dict.fromkeys(filter(None, found))) or self._fingerprint

    @property
    def usage(self) -> responses.Usage:
        n_output = sum(choice.n_output for choice in self.choices)
        cached = responses.PromptTokensDetails(self.cached_tokens) if self.says_cached else msgspec.UNSET
        return responses.Usage(self.prompt_tokens, n_output, self.prompt_tokens + n_output, cached)

    @property
    def is_whole(self) -> bool:
        """Whether every answer has ended as it would again: neither by an error, nor by a timeout, nor by its client."""
        ended = len(self.choices) == self._n_choices and all(choice.finished for choice in self.choices)
        return ended and self.reasons.keys() <= {"stop", "length"}

    @property
    def cached_tokens(self) -> int:
        """Of the prompts, those that were found in the prefix cache."""
        return sum(choice.stream.cached_tokens for choice in self.choices)

    def finish(self) -> None:
        """Abort unfinished choices, count what was computed and drop the answers. A second call does nothing."""
        if self._finished:
            return
        self._finished = True
        ended = time.perf_counter()
        complete = len(self.choices) == self._n_choices and all(choice.finished for choice in self.choices)
        for choice in self.choices:
            if not choice.finished:
                choice.stream.close()
            self._service.waiting.gone(choice.ticket)
        metrics, totals, usage = self._service.metrics, self._service.totals, self.usage
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.finished.labels("complete" if complete else "cut short").inc()
        totals["requests"] += complete
        totals["prompt_tokens"] += usage.prompt_tokens
        totals["output_tokens"] += usage.completion_tokens
        self._count(usage, complete, ended)
        if complete:
            if self.kept is not None and self._service.capture is not None:
                self._service.capture.keep(self, self.kept.messages, self.kept.tools, self.kept.deltas)
            self._took_s = ended - self._started
            for choice in self.choices:
                metrics.observe(self._started, self._first, ended, choice.n_output)
                first_s = None if self._first is None else self._first - self._started
                answer = Answer(self.prompt_tokens // self._n_prompts, choice.n_output, first_s, ended - self._started, ended)
                self._service.served.answers.append(answer)
        else:
            metrics.output_tokens.inc(usage.completion_tokens)
        self.choices = []

    def _count(self, usage: responses.Usage, complete: bool, ended: float) -> None:
        """Count what the key used, and write the line of the usage log."""
        account, log = self._caller.account, self._service.usage
        if not self.choices:
            return  # refused before the engine had anything of it
        if self._service.traces is not None and self._caller.limited:
            self._service.traces.add(self._traced(usage, complete, ended))
        if account is not None:
            account.charge_output(usage.completion_tokens)
            account.used.requests += 1
            account.used.prompt_tokens += usage.prompt_tokens
            account.used.cached_tokens += self.cached_tokens
            account.used.output_tokens += usage.completion_tokens
        if log is not None:
            log.add(
                UsageLine(
                    time.time(),
                    self.id,
                    None if account is None else account.name,
                    self.model,
                    "complete" if complete else "cut short",
                    usage.prompt_tokens,
                    self.cached_tokens,
                    usage.completion_tokens,
                    dict(self.reasons),
                    None if self._first is None else self._first - self._started,
                    ended - self._started,
                    *self._counted_in_arm(account),
                )
            )

    def _traced(self, usage: responses.Usage, complete: bool, ended: float) -> Traced:
        to_perf_counter = time.perf_counter() - time.monotonic()
        first = self.choices[0].stream
        started_s = None if first.started_s is None else first.started_s + to_perf_counter
        return Traced(
            self.id, self.model, self._caller.traceparent, self._caller.came_s or self._started,
            first.asked_s + to_perf_counter, started_s, self._first, ended, usage.prompt_tokens, self.cached_tokens,
            usage.completion_tokens, tuple(self.reasons.elements()), complete,
        )  # fmt: skip

    def _counted_in_arm(self, account: Account | None) -> tuple[str, str, float] | tuple[()]:
        """Of an answer in an A/B test, its arm and client and the second arm's share; it may be rated from now on."""
        visit, pool = self._caller.visit, self._service.pool
        if visit is None or pool is None or pool.split is None or visit.arm is None or visit.unit is None:
            return ()
        key = None if account is None else account.name
        pool.rateable.add(self.id, key, self.reasons.total(), visit.arm, visit.unit)
        return visit.arm, visit.unit, pool.split.share

    def close(self) -> None:
        """Finish, and give the places back to the admission. A second call does nothing."""
        self.finish()
        if not self._closed:
            self._closed = True
            self._service.leave(self.n_places, self._caller, self._took_s)
