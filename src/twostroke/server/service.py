"""Takes a parsed request to its answer: admission, tokenising, the engine, text, and counting."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Struct

from twostroke.core.adapter_names import check_adapter_name
from twostroke.core.errors import CapacityError, EngineError, InputError, TwostrokeError
from twostroke.core.spec import ModelSpec
from twostroke.data.pairs import PairEncoder
from twostroke.engine.detokenize import IncrementalDetokenizer
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.server import protocol, responses, wire
from twostroke.server.admission import INCOMING_BYTES, OUTGOING_BYTES, Admission, ByteBudget
from twostroke.server.callers import NOBODY, Caller, Visit, read_timeout_of
from twostroke.server.engine_client import EngineLostError, Engines, NotReadyError, SlowReaderError, TokenStream
from twostroke.server.errors import ApiError, bad_request, engine_lost, not_ready
from twostroke.server.keys import Account, ApiKeys
from twostroke.server.kv_events import KVEvents
from twostroke.server.metrics import Metrics
from twostroke.server.reasoning import ReasoningFormat
from twostroke.server.response_cache import ResponseCache
from twostroke.server.served import Answer, Served
from twostroke.server.structured import Forms, constraint_of
from twostroke.server.text import ModelText, tokenizer_failed
from twostroke.server.tool_calls import CallFormat
from twostroke.server.tools import AskedTools, tools_of
from twostroke.server.traces import Traced, Traces
from twostroke.server.turns import LoopTurns, Turns
from twostroke.server.usage import UsageLine, UsageLog
from twostroke.server.wait import Asked, Ticket, Waiting

if TYPE_CHECKING:
    from twostroke.server.capture import Capture
    from twostroke.server.pool import ModelPool

R = TypeVar("R", bound=Struct)

LARGE_BODY_BYTES = 64 * 2**10
"""A larger body is parsed in a thread, one body at a time: 2 MB of token ids take 30 ms. The thread holds the interpreter for
as long, but twenty such bodies that arrive together do not block the event loop in one piece."""
MAX_WAITING_BODIES = 32
"""Large bodies that may wait to be parsed: 64 MB. The next gets 429."""
MAX_SCORES = 2**19
"""Most log-probabilities of one whole answer: tens of megabytes of JSON. A stream sends them as they come and holds none."""


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


@dataclass
class Service:
    """Everything that the routes share, of one model. Those of several models share all but what is a model's own, and have a
    ``pool``, which knows which of them answers a request."""

    client: Engines
    text: ModelText
    spec: ModelSpec
    names: tuple[str, ...]
    admission: Admission
    keys: ApiKeys | None = None
    local_only: bool = False  # bound to loopback, so only local Host names are answered
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    incoming: ByteBudget = field(default_factory=lambda: ByteBudget(INCOMING_BYTES))
    outgoing: ByteBudget = field(default_factory=lambda: ByteBudget(OUTGOING_BYTES))
    building: LoopTurns = field(default_factory=lambda: LoopTurns(1))  # one piece of a large answer a turn of the loop
    loop_turns: LoopTurns = field(default_factory=LoopTurns)
    served: Served = field(default_factory=Served)
    capture: Capture | None = None  # of chats
    log_requests: bool = False  # a line for each
    parsing: Turns = field(default_factory=lambda: Turns("parse"))
    forms: Forms = field(default_factory=Forms)
    kept: ResponseCache | None = None
    waiting: Waiting = field(default_factory=Waiting)
    usage: UsageLog | None = None
    traces: Traces | None = None
    kv_events: KVEvents | None = None  # what the engines' caches hold, for those who ask
    totals: dict[str, float] = field(default_factory=lambda: {"requests": 0, "prompt_tokens": 0, "output_tokens": 0})
    pool: ModelPool | None = None

    def __post_init__(self) -> None:
        self._pairs = PairEncoder(self.text.tokenizer, self.spec.eos_token_ids, self.spec.bos_token_id)

    @property
    def ready(self) -> bool:
        return (self.client if self.pool is None else self.pool).ready and not self.draining

    @property
    def asleep(self) -> int:
        """The level at which the engine sleeps. Those of several models are woken by who needs them."""
        return self.client.asleep if self.pool is None else 0

    @property
    def dozes(self) -> bool:
        """Whether it sleeps, and the next request wakes it."""
        return self.pool is None and self.client.dozes and not self.draining

    @property
    def max_model_len(self) -> int:
        if self.client.info is None:
            if self.pool is not None:
                return self.spec.max_positions  # of a model that was never loaded, of which texts may be tokenised
            raise not_ready()
        return self.client.info.max_model_len

    @property
    def fingerprint(self) -> str | None:
        """The engine's, of its weights and of how it computes."""
        return None if self.client.info is None else self.client.info.fingerprint

    @property
    def own_names(self) -> tuple[str, ...]:
        """The model's names, then those of its adapters."""
        return (*self.names, *self.client.adapters)

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names that requests may have: its own, or those of all models that are served beside it."""
        return self.own_names if self.pool is None else self.pool.names

    def require_model(self, name: str, param: str = "model") -> None:
        if name not in self.served_names:
            shown = name if len(name) <= 80 else f"{name[:80]}…"
            served = ", ".join(self.served_names)
            raise ApiError(404, f"model {shown!r} is not served here. Served: {served:.500}.", param, "model_not_found")

    async def load_adapter(self, name: str, directory: str) -> None:
        """Serve the adapter in ``directory`` under ``name``. Raises ApiError."""
        try:
            check_adapter_name(name)
            if name in self.served_names:
                raise InputError(f"{name!r} is served already. Unload it first, or take another name.", field="lora_name")
            await self.client.change_adapter(name, directory)
        except TwostrokeError as error:
            raise api_error(error) from None

    async def unload_adapter(self, name: str) -> None:
        """Serve it no longer; requests under way are finished. Raises ApiError, 404 for a name that is not an adapter's."""
        if name not in self.client.adapters:
            raise ApiError(404, f"adapter {name!r:.100} is not served here.", "lora_name", "model_not_found")
        try:
            await self.client.change_adapter(name, None)
        except TwostrokeError as error:
            raise api_error(error) from None

    def may_capture(self, client: str) -> bool:
        """Whether chats of ``client`` may be captured: with keys, those whose holder has consented (``capture=yes``)."""
        return self.keys is None or self.keys.captures(client)

    def client_name(self, authorization: bytes | None, host: str) -> str:
        """The client under whose name a request queues: its key's if there are keys, else its address."""
        return host if self.keys is None else ApiKeys.name(authorization)

    def caller(self, headers: Mapping[bytes, bytes], host: str) -> Caller:
        """Who sends these headers. Their key, where one is needed, has been checked."""
        authorization = headers.get(b"authorization")
        account = None if self.keys is None else self.keys.account(authorization)
        name, came_s = self.client_name(authorization, host), time.perf_counter()
        trace = None if self.traces is None else headers.get(b"traceparent", b"").decode("latin-1")
        visit = None if self.pool is None else Visit()
        return Caller(name, account, read_timeout_of(headers), came_s=came_s, traceparent=trace, visit=visit)

    def early_refusal(self, caller: Caller, for_engine: bool) -> ApiError | None:
        """Why a request is refused by its headers alone: there is no place, its key may not send another, or even a prompt of
        one token would wait too long in the engine."""
        if self.admission.full:
            return self.refused("places", self.admission.refusal())
        try:
            if caller.account is not None:
                caller.account.require()
            if for_engine and self.pool is None:  # which of several engines is in the body
                self.require_time([Asked(client=caller.name)], caller, caller.read_timeout_s, None)
        except ApiError as error:
            return error
        return None

    def refused(self, why: str, error: ApiError) -> ApiError:
        """``error``, counted."""
        self.metrics.refused.labels(why).inc()
        return error

    def require_time(
        self, asked: Sequence[Asked], caller: Caller, first_s: float | None, whole: tuple[float, int] | None
    ) -> None:
        """Raises ApiError 429 if too many tokens wait, or if prompts that are handed over now are predicted to have their first
        tokens more than ``first_s`` from now, or the answer its last one beyond ``whole``: (seconds, least tokens)."""
        waiting = self.waiting
        if not caller.limited:
            return
        if waiting.is_over(sum(each.new for each in asked)):
            message = f"prompts of {waiting.tokens} tokens wait; at most {waiting.max_tokens} may. Try again later."
            raise self.refused("queue", self.admission.too_late(message, "too_many_tokens", waiting.drained_s()))
        if not waiting.predicts or (first_s is None and whole is None):
            return
        found_s, alone_s = waiting.first_token_s(asked), waiting.alone_s(asked)
        for left_s, later_s, what in (
            (first_s, 0.0, "first token"),
            (whole and whole[0], waiting.later_s(whole[1] - 1, asked) if whole else 0.0, "answer"),
        ):
            if left_s is not None and found_s + later_s > left_s:
                over_s = found_s + later_s - left_s
                message = (
                    f"the {what} is predicted to take up to {found_s + later_s:.3g} s, and the client waits "
                    f"{max(0.0, left_s):.3g} s. Try again later, or allow more time."
                )
                may_retry = alone_s + later_s <= left_s  # else an empty server would take too long as well
                raise self.refused("deadline", self.admission.too_late(message, "deadline_not_met", over_s, may_retry))

    async def parse(self, parse: Callable[[bytes], R], body: bytes, client: str = "") -> R:
        """Parse ``body``, in a thread if it is large. Raises ApiError 400, and 429 if too many large bodies wait."""
        if len(body) <= LARGE_BODY_BYTES:
            return parse(body)
        if self.parsing.n_waiting >= MAX_WAITING_BODIES:
            raise self.admission.refusal()
        return await self.parsing.run(client, partial(parse, body))

    async def complete(self, request: protocol.CompletionRequest, started: float, caller: Caller = NOBODY) -> Generation:
        """Hand every prompt of the request to the engine. Raises ApiError, after which the engine holds none of them."""
        self.require_model(request.model)
        self._check_tokens(request)
        prompts = protocol.prompts_of(request)
        if request.truncate_prompt_tokens is None:
            for given in prompts:  # too many token ids are refused before a loop over them
                if isinstance(given, list):
                    self._room(len(given), request.max_tokens, "prompt")
        generation, client = Generation(self, "cmpl", request, len(prompts), started, caller), caller.name
        special = request.add_special_tokens is not False
        n_scores, params = 0, None
        try:
            texts = [given for given in prompts if isinstance(given, str)]
            encoded = iter(await self._encode(texts, request, special, "prompt", client))
            listed = []
            for given in prompts:
                ids = self.checked(given) if isinstance(given, list) else next(encoded)
                listed.append(ids[-(request.truncate_prompt_tokens or 0) :])
                self._room(len(listed[-1]), request.max_tokens, "prompt")
            generation.admit(listed, request.wanted_prompt_logprobs is None)
            for given, ids in zip(prompts, listed, strict=True):
                room = self._room(len(ids), request.max_tokens, "prompt")
                wanted = min(protocol.DEFAULT_MAX_TOKENS, room) if request.max_tokens is None else request.max_tokens
                if params is None:  # once a request: 64 prompts × a thousand biases take 0.1 s to validate
                    params = request.sampling(max(1, wanted), request.logprobs, request.wanted_prompt_logprobs)
                    await self._require_form(request, client)
                params = protocol.of_length(params, max(1, wanted))
                n_scores += _scores_of(ids, params, bool(request.echo), bool(request.stream))
                _require_few(n_scores)
                prompt = Prompt(ids)
                if request.echo:
                    prompt.text, prompt.offsets = await self.text.echo(given, ids, special, client)
                generation.submit(prompt, params, silent=wanted == 0)
        except BaseException:
            generation.close()
            raise
        return generation

    async def chat(
        self, request: protocol.ChatRequest, started: float, caller: Caller = NOBODY, always_objects: bool = False
    ) -> Generation:
        """Hand the conversation to the engine as one prompt. ``always_objects``: arguments of calls must be objects in JSON.
        Raises ApiError, after which the engine does not hold it."""
        self.require_model(request.model)
        self._check_tokens(request)
        generation, client = Generation(self, "chatcmpl", request, 1, started, caller), caller.name
        try:
            tools = self.asked_tools(request, always_objects)
            text, special = await self.rendered(request, client, tools)
            (ids,) = await self._encode([text], request, special, "messages", client)
            ids = ids[-(request.truncate_prompt_tokens or 0) :]
            asked = request.asked
            room = self._room(len(ids), asked, "messages")
            generation.admit([ids], request.prompt_logprobs is None)
            logprobs = (request.top_logprobs or 0) if request.logprobs else None
            if asked is None and logprobs is not None and not request.stream:
                # The other half of the scores is for the prompt's.
                room = min(room, MAX_SCORES // 2 // ((logprobs + 1) * (request.n or 1)))
            params = request.sampling(max(1, room if asked is None else asked), logprobs, request.prompt_logprobs)
            await self._require_form(request, client)
            free = params.constraint is None and (tools is None or not tools.must)
            if tools is not None:
                params = await tools.applied(params, self.forms, client)
                generation.call_format = tools.form
            generation.reasoning = self.text.reasoning_after(text) if free else None  # a form has no room for it
            if generation.reasoning is not None and self.text.special_id(generation.reasoning.end) is not None:
                params = replace(params, skip_special_tokens=False)
            _require_few(_scores_of(ids, params, False, bool(request.stream)))
            if self.capture is not None and self.may_capture(client) and asked != 0:
                shown = None if tools is None else tools.variables.get("tools")
                generation.kept = Kept([m.for_template() for m in request.messages], shown)
            generation.submit(Prompt(ids), params, silent=asked == 0)
        except BaseException:
            generation.close()
            raise
        return generation

    def asked_tools(self, request: protocol.ChatRequest, always_objects: bool = False) -> AskedTools | None:
        """See `tools_of`. Raises ApiError 400."""
        parallel = request.parallel_tool_calls is not False
        form, special = self.text.call_format, self.text.special_id
        return tools_of(request.tools, request.tool_choice, parallel, form, special, always_objects)

    async def rendered(
        self, request: protocol.ChatRequest, client: str = "", tools: AskedTools | None = None
    ) -> tuple[str, bool]:
        """The conversation as text, with ``tools`` shown in it, and whether the tokenizer is to add its special tokens to it.
        Raises ApiError 400."""
        variables = request.template_variables | ({} if tools is None else tools.variables)
        text = await self.text.render([m.for_template() for m in request.messages], variables, client)
        return text, self.text.adds_special(request.add_special_tokens)

    async def embed(
        self, request: protocol.CommonRequest, inputs: list[str | list[int]], started: float, caller: Caller, at_once: int
    ) -> tuple[Generation, list[list[int]]]:
        """A generation for the vectors of ``inputs``, to which none has been submitted, and their token ids. It has places for
        ``at_once`` of them. Raises ApiError."""
        self.require_model(request.model)
        for given in inputs:  # too many token ids are refused before a loop over them
            if isinstance(given, list) and request.truncate_prompt_tokens is None:
                self._room(len(given), None, "input")
        generation = Generation(self, "embd", request, len(inputs), started, caller, min(at_once, len(inputs)))
        try:
            texts = [given for given in inputs if isinstance(given, str)]
            encoded = iter(await self._encode(texts, request, request.add_special_tokens is not False, "input", caller.name))
            found = []
            for given in inputs:
                ids = self.checked(given, "input") if isinstance(given, list) else next(encoded)
                found.append(ids[-(request.truncate_prompt_tokens or 0) :])
                self._room(len(found[-1]), None, "input")
            generation.admit(found, cacheable=False)
        except BaseException:
            generation.close()
            raise
        return generation, found

    @contextlib.contextmanager
    def place(self, caller: Caller = NOBODY) -> Iterator[None]:
        """A place of the admission, for work that needs no engine. Raises ApiError 429 if all are taken."""
        self.enter(1, caller, "prompt")
        try:
            yield
        finally:
            self.leave(1, caller)

    def enter(self, n: int, caller: Caller, param: str) -> None:
        """Take ``n`` places, of the server's and of the key's. Raises ApiError."""
        account = caller.account if caller.limited else None
        if account is not None:
            account.enter(n, param)
        try:
            self.admission.enter(n, param)
        except ApiError:
            if account is not None:
                account.leave(n)
            raise

    def leave(self, n: int, caller: Caller, took_s: float | None = None) -> None:
        self.admission.leave(n, took_s)
        if caller.account is not None and caller.limited:
            caller.account.leave(n)

    async def score(self, request: protocol.ScoreRequest, started: float, caller: Caller = NOBODY) -> Generation:
        """Hand every text of the request to the engine, to be scored. Raises ApiError, after which the engine holds none."""
        self.require_model(request.model)
        pairs, completion = protocol.scored_pairs(request), request.as_completion()
        generation = Generation(self, "score", completion, len(pairs), started, caller)
        try:
            sequences = await self._split(pairs, caller.name)
            _require_few(2 * sum(len(ids) - first for ids, first in sequences))
            for ids, _ in sequences:
                self._room(len(ids), None, "text")
            generation.admit([ids for ids, _ in sequences], cacheable=False)
            for ids, first in sequences:
                params = completion.sampling(1, None, completion.prompt_logprobs)
                generation.submit(Prompt(ids, first=first), replace(params, prompt_logprobs_start=first), silent=True)
        except BaseException:
            generation.close()
            raise
        return generation

    async def _split(
        self, pairs: list[tuple[str, str]] | list[tuple[list[int], list[int]]], client: str
    ) -> list[tuple[list[int], int]]:
        """(ids, first one that is scored) of each (prompt, text)."""
        texts, sequences = [], []
        for prompt, text in pairs:
            if isinstance(prompt, str) and isinstance(text, str):  # what cannot fit is refused before it is tokenised
                self._room(self.text.fewest_tokens.of(prompt + text), None, "text", at_least=True)
                texts.append((prompt, text))
            elif isinstance(prompt, list) and isinstance(text, list):
                self._room(len(prompt) + len(text), None, "text")
                sequences.append((self.checked([*prompt, *text], "text"), max(1, len(prompt))))
        return sequences or await self.text.split(self._pairs, texts, client)

    async def _encode(
        self, texts: list[str], request: protocol.CommonRequest, special: bool, param: str, client: str
    ) -> list[list[int]]:
        """Token ids of each text. A text that cannot fit the context is refused before it is tokenised."""
        if request.truncate_prompt_tokens is None:
            for text in texts:
                self._room(self.text.fewest_tokens.of(text), 1, param, at_least=True)
        return await self.text.encode(texts, param, special, client)

    async def _require_form(self, request: protocol.CommonRequest, client: str) -> None:
        form = constraint_of(request)
        if form is not None:
            await self.forms.require(*form, client)

    def _check_tokens(self, request: protocol.CommonRequest) -> None:
        """Reject ids outside the vocabulary: they have no effect and usually come from another model's tokenizer."""
        size = self.spec.vocab_size
        biased = map(int, request.logit_bias or ())  # ``protocol`` has checked that they are digits
        for name, ids in (("logit_bias", biased), ("stop_token_ids", request.stop_token_ids or ())):
            most = max(ids, default=0)
            if most >= size:
                raise bad_request(f"{name} names token {most}; ids are from 0 to {size - 1}.", name)

    def checked(self, ids: list[int], param: str = "prompt") -> list[int]:
        """``ids``, which are not empty. Raises ApiError 400 for one outside the vocabulary."""
        for bad in (min(ids), max(ids)):
            if not 0 <= bad < self.spec.vocab_size:
                shown = f"token id {bad}" if abs(bad) < 2**64 else "a token id of over 64 bits"
                raise bad_request(f"{param} holds {shown}; ids are from 0 to {self.spec.vocab_size - 1}.", param)
        return ids

    def _room(self, n: int, asked: int | None, param: str, at_least: bool = False) -> int:
        """Tokens that may follow a prompt of ``n``. Raises ApiError 400 if it and ``asked`` do not fit the context."""
        longest = self.max_model_len
        if n + (asked or 1) > longest:
            output = f" and {asked} asked for" if asked is not None and not at_least else ""
            raise bad_request(
                f"this model's context is {longest} tokens; the {param} has {'at least ' if at_least else ''}{n}{output}. "
                "Shorten one of them.",
                param,
                "context_length_exceeded",
            )
        return longest - n


def _scores_of(ids: list[int], params: SamplingParams, echo: bool, stream: bool) -> int:
    """Most log-probabilities that the answer can hold, of the prompt's tokens and of its own."""
    n_each = (params.prompt_logprobs + 1) if params.prompt_logprobs is not None else int(echo)
    n_own = 0 if stream or params.logprobs is None else (params.logprobs + 1) * params.max_tokens
    return (n_each * len(ids) + n_own) * params.n


def _require_few(n_scores: int) -> None:
    if n_scores > MAX_SCORES:
        raise bad_request(
            f"the answer could hold {n_scores} log-probabilities (tokens × alternatives × n); at most {MAX_SCORES} fit in one. "
            "Ask for fewer tokens or alternatives, stream, or send several requests."
        )


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
