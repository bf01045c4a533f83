"""Takes a parsed request to its answer: admission, tokenising, the engine, text, and counting."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

from twostroke.core.adapter_names import check_adapter_name
from twostroke.core.errors import InputError, TwostrokeError
from twostroke.core.spec import ModelSpec
from twostroke.data.pairs import PairEncoder
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.server import protocol
from twostroke.server.admission import INCOMING_BYTES, OUTGOING_BYTES, Admission, ByteBudget
from twostroke.server.callers import NOBODY, Caller, Visit, read_timeout_of
from twostroke.server.engines import Engines
from twostroke.server.errors import ApiError, bad_request, not_ready
from twostroke.server.generation import Generation, Kept, Prompt, api_error
from twostroke.server.keys import ApiKeys
from twostroke.server.kv_events import KVEvents
from twostroke.server.metrics import Metrics
from twostroke.server.response_cache import ResponseCache
from twostroke.server.served import Served
from twostroke.server.structured import Forms, constraint_of
from twostroke.server.text import ModelText
from twostroke.server.tools import AskedTools, tools_of
from twostroke.server.traces import Traces
from twostroke.server.turns import LoopTurns, Turns
from twostroke.server.usage import UsageLog
from twostroke.server.wait import Asked, Waiting

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
            output = f", and the answer may have {asked}" if asked is not None and not at_least else ""
            have = "have" if param == "messages" else "has"
            raise bad_request(
                f"this model's context is {longest} tokens; the {param} {have} {'at least ' if at_least else ''}{n}{output}. "
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
