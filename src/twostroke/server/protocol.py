"""Requests of OpenAI's completions and chat completions, as msgspec structs.

The reader is strict. An unknown field gets a 400 that names it, and so does a field that asks for what this server does not
do: nothing is silently dropped. Clients also send fields of OpenAI's or vLLM's server with a value that changes nothing
(``tools=[]``, ``store=false``, ``user``). These are accepted with that value; ``NEUTRAL`` and ``BOOKKEEPING`` list
them.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from twostroke.core.errors import InputError, did_you_mean
from twostroke.scheduling.sampling_params import MAX_BIASED_TOKENS, MAX_LOGPROBS, MAX_N, SamplingParams
from twostroke.server.errors import ApiError, bad_request
from twostroke.server.structured import ConstrainedRequest, constraint_of
from twostroke.server.tools import Call, ToolChoice, Tools

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "store": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "spaces_between_special_tokens": (True, False),  # changes nothing with the tokenizers of today
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "logits_processors": ([],),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
}
"""Known fields that this server ignores, with the values (besides null) for which ignoring them changes nothing."""

NEUTRAL_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "refusal": (None,),
    "function_call": (None,),
    "annotations": (None, []),
    "audio": (None,),
}
"""Fields of OpenAI's answers beside their text, with the values that mean "none". Clients send answers back as history."""

UNUSED_WITH_NONE = {"tools": "tool_choice", "functions": "function_call"}
"""List → the choice among its items. If the choice is "none" the list may hold anything, for the model is not shown it."""

COMPLETION_ONLY = frozenset({"suffix"})
BOOKKEEPING = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
"""Labels for OpenAI's own records; they never change an output."""

MAX_PROMPTS = 64
MAX_SCORED = 2**21
"""As many characters as a body may have: one prompt for all texts is computed, and counts, beside each."""
MAX_PRIORITY = 1000
MAX_TIMEOUT_S = 86_400
DEFAULT_MAX_TOKENS = 16

Whole = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class CommonRequest(ConstrainedRequest, forbid_unknown_fields=True, kw_only=True):
    """Fields of both endpoints: OpenAI's, and some of vLLM's under vLLM's names.

    A ``priority`` above 0 lets requests without one go first; a request cannot put itself before others. A request that is
    unfinished ``timeout_s`` seconds after it was read ends with the tokens it has, and the finish reason ``"timeout"``."""

    model: str
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    max_tokens: Whole | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Whole] | None = None
    min_tokens: Whole | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Positive | None = None
    prompt_logprobs: Logprobs | None = None
    priority: Annotated[int, Meta(ge=0, le=MAX_PRIORITY)] | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None

    @property
    def places(self) -> int:
        """Places that a prompt takes: its answers, or the beams that are searched for them."""
        return max(self.n or 1, getattr(self, "best_of", None) or 1)

    @property
    def asked(self) -> int | None:
        """Most tokens of an answer, if the request says."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling(self, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None = None) -> SamplingParams:
        """The request as the engine's parameters. Raises ApiError 400 that names the field that is out of range."""
        form = constraint_of(self)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        try:
            return SamplingParams(
                temperature=(0.0 if self.use_beam_search else 1.0) if self.temperature is None else self.temperature,
                top_k=max(0, self.top_k or 0),
                top_p=1.0 if self.top_p is None else self.top_p,
                min_p=self.min_p or 0.0,
                presence_penalty=self.presence_penalty or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
                repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
                logit_bias=tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items()),
                seed=self.seed,
                max_tokens=max_tokens,
                min_tokens=self.min_tokens or 0,
                stop=stop,
                stop_token_ids=tuple(self.stop_token_ids or ()),
                ignore_eos=bool(self.ignore_eos),
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                n=self.n or 1,
                include_stop_str_in_output=bool(self.include_stop_str_in_output),
                skip_special_tokens=self.skip_special_tokens is not False,
                use_beam_search=bool(self.use_beam_search),
                best_of=getattr(self, "best_of", None),
                length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
                early_stopping=self.early_stopping or False,
                constraint=None if form is None else form[0],
            )
        except InputError as error:
            raise bad_request(str(error), error.field) from None


class CompletionRequest(CommonRequest, kw_only=True):
    """``POST /v1/completions``. ``prompt``: a text, a list of texts, token ids, or a list of token id lists.

    ``echo`` puts the prompt before each answer, and with ``logprobs`` the log-probabilities of its tokens too; the first is
    null. With ``echo``, ``max_tokens`` may be 0, which scores the prompt alone.
    ``best_of`` must equal ``n``, except in a beam search, whose beams it counts."""

    prompt: str | list[Any]  # a list is one that `_prompt_list` accepts
    logprobs: Logprobs | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """Alternatives to ask the engine for: the larger of ``prompt_logprobs`` and what ``echo`` needs."""
        wanted = [k for k in (self.prompt_logprobs, self.logprobs if self.echo else None) if k is not None]
        return max(wanted, default=None)


class TextPart(Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: Any = None
    function_call: Any = None
    annotations: Any = None
    audio: Any = None

    def for_template(self) -> dict[str, Any]:
        """The message as a chat template reads it, its text parts joined. "developer" is the newer name of "system"."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        optional = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning_content}
        return message | {name: value for name, value in optional.items() if value is not None}


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class TemplateVariables(Struct, forbid_unknown_fields=True):
    """``enable_thinking``: whether the model writes its reasoning before the answer, if its template lets that be chosen."""

    enable_thinking: bool | None = None


class ChatRequest(CommonRequest, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateVariables | None = None

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the chat template may read beside the messages. A template that does not use it renders the same."""
        effort, given = self.reasoning_effort, self.chat_template_kwargs
        found: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        if given is not None and given.enable_thinking is not None:
            found["enable_thinking"] = given.enable_thinking
        return found

    @property
    def asked(self) -> int | None:
        """Most tokens of the answer, by either name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def of_length(params: SamplingParams, max_tokens: int) -> SamplingParams:
    """``params`` for answers of ``max_tokens``. Raises ApiError 400."""
    try:
        return params if params.max_tokens == max_tokens else params.of_length(max_tokens)
    except InputError as error:
        raise bad_request(str(error), error.field) from None


def parse_completion(body: bytes) -> CompletionRequest:
    request: CompletionRequest = _parse(body, CompletionRequest, frozenset())
    if request.best_of not in (None, request.n or 1) and not request.use_beam_search:
        raise bad_request(
            f"best_of={request.best_of} is not supported; only best_of=n is, which gives every answer. Ask for n answers with "
            "logprobs and choose.",
            "best_of",
            "unsupported_value",
        )
    if request.max_tokens == 0 and not request.echo and request.prompt_logprobs is None:
        raise bad_request("max_tokens=0 asks for nothing, unless with echo=true or prompt_logprobs.", "max_tokens")
    _require_whole(request)
    return request


class ScoreRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/score`` and ``/score``: log-probabilities of the tokens of ``text``, given ``prompt`` before it.

    ``text`` is a text, a list of texts, token ids, or a list of token id lists; ``prompt`` is of the same kind, one for all or
    one for each. A text without a prompt follows the token that begins a text. Nothing predicts the first of token ids without
    a prompt, so it is not scored."""

    model: str
    text: str | list[Any]  # a list is one that `_prompt_list` accepts
    prompt: str | list[Any] | None = None
    priority: Annotated[int, Meta(ge=0, le=MAX_PRIORITY)] | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)] | None = None

    def as_completion(self) -> CompletionRequest:
        """What the engine is asked for: the prompt's scores, and no token."""
        return CompletionRequest(
            model=self.model, prompt="", temperature=0.0, max_tokens=0, prompt_logprobs=1, priority=self.priority,
            timeout_s=self.timeout_s,
        )  # fmt: skip


def parse_score(body: bytes) -> ScoreRequest:
    request: ScoreRequest = _parse(body, ScoreRequest, frozenset(NEUTRAL))
    return request


def scored_pairs(request: ScoreRequest) -> list[tuple[str, str]] | list[tuple[list[int], list[int]]]:
    """(prompt, text) of each text, both texts or both token ids. Raises ApiError 400."""
    texts = items_of(request.text, "text")
    kind = str if isinstance(texts[0], str) else list
    nothing: Any = "" if kind is str else []
    prompts = [nothing] if request.prompt is None else items_of(request.prompt, "prompt")
    if len(prompts) not in (1, len(texts)):
        raise bad_request(f"{len(prompts)} prompts for {len(texts)} texts. Give one for all, or one for each.", "prompt")
    if not isinstance(prompts[0], kind):
        raise bad_request("prompt and text must both be texts, or both token ids.", "prompt")
    for text in texts:
        if not text:
            raise bad_request("text holds nothing to score.", "text")
    longest = sum(map(len, texts)) + sum(map(len, prompts)) * (len(texts) // len(prompts))
    if longest > MAX_SCORED:
        raise bad_request(
            f"texts with their prompts have {longest} characters or token ids; at most {MAX_SCORED} may share a request.",
            "text",
        )
    pairs: Any = list(zip(prompts * len(texts) if len(prompts) == 1 else prompts, texts, strict=True))
    return pairs


class LoadAdapter(Struct, forbid_unknown_fields=True):
    """Serve the adapter in the server's directory ``lora_path`` as the model ``lora_name``, beside ``model``, of several
    models: by default the first."""

    lora_name: str
    lora_path: str
    model: str | None = None


class UnloadAdapter(Struct, forbid_unknown_fields=True):
    """Serve the adapter ``lora_name`` no longer. Requests under way are finished."""

    lora_name: str


A = TypeVar("A", bound=Struct)


def parse_object(body: bytes, kind: type[A]) -> A:
    """``body`` as ``kind``, whose fields are all that there may be. Raises ApiError 400."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise bad_request("the request body is not valid JSON.", code="invalid_json") from None


def parse_chat(body: bytes) -> ChatRequest:
    request: ChatRequest = _parse(body, ChatRequest, COMPLETION_ONLY)
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs=true.", "top_logprobs")
    if None not in (request.max_tokens, request.max_completion_tokens) and request.max_tokens != request.max_completion_tokens:
        raise bad_request("max_tokens and max_completion_tokens differ. Give one of them.", "max_completion_tokens")
    if request.asked == 0 and request.prompt_logprobs is None:
        field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        raise bad_request(f"{field}=0 asks for nothing, unless with prompt_logprobs.", field)
    require_texts(request.messages)
    _require_whole(request)
    return request


def require_texts(messages: list[Message]) -> None:
    """Refuse messages with more than text and calls of tools. What else an answer may hold must be empty."""
    for i, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            raise bad_request(
                f"messages[{i}].content is missing or null; only an assistant's may be.",
                f"messages[{i}].content",
                "invalid_value",
            )
        if (message.tool_call_id is None) == (message.role == "tool"):
            param = f"messages[{i}].tool_call_id"
            raise bad_request(f"{param} must be given with the role tool, and with no other.", param, "invalid_value")
        for name in ("tool_calls", "reasoning_content"):
            if getattr(message, name) and message.role != "assistant":
                param = f"messages[{i}].{name}"
                raise bad_request(f"{param} is an assistant's; this message's role is {message.role}.", param, "invalid_value")
        for j, call in enumerate(message.tool_calls or ()):
            call.read_arguments(f"messages[{i}].tool_calls[{j}]")
        for name, neutral in NEUTRAL_IN_MESSAGES.items():
            value = getattr(message, name)
            if value not in neutral:
                allowed = " or ".join("null" if v is None else "[]" for v in neutral)
                raise bad_request(
                    f"messages[{i}].{name} is not supported by this server; only {allowed} is.",
                    f"messages[{i}].{name}",
                    "unsupported_value",
                )


def _require_whole(request: CommonRequest) -> None:
    """Refuse fields that do not go together, and biases that do not name tokens."""
    bias = request.logit_bias or {}
    if len(bias) > MAX_BIASED_TOKENS:
        raise bad_request(f"logit_bias names {len(bias)} tokens; at most {MAX_BIASED_TOKENS} are allowed.", "logit_bias")
    for token in bias:
        if not re.fullmatch(r"0|[1-9][0-9]{0,8}", token):  # one spelling a token: two would add up beyond ±100
            raise bad_request(f"logit_bias={token!r:.40} must name tokens by their ids, as 0 or 15.", "logit_bias")
    if request.stream and request.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs cannot be streamed. Use stream=false.", "prompt_logprobs")
    if request.use_beam_search:
        if request.stream:
            raise bad_request("the answers of a beam search are known only at its end. Use stream=false.", "stream")
    else:
        for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(request, name) not in (None, neutral):
                raise bad_request(f"{name} needs use_beam_search=true.", name)
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options needs stream=true.", "stream_options")


_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MOST_NEUTRAL_BYTES = 256


def _parse(body: bytes, kind: Any, unknown_here: frozenset[str]) -> Any:
    return parse_as(body, kind, {name: values for name, values in NEUTRAL.items() if name not in unknown_here})


def parse_as(body: bytes, kind: Any, neutral: Mapping[str, tuple[Any, ...]], labels: frozenset[str] = BOOKKEEPING) -> Any:
    """Decode ``body`` as the struct ``kind``. Fields of ``neutral`` may have the values named there, ``labels`` any text or
    object. Fields that ``kind.token_lists`` names may be texts or token ids, and hold at most ``kind.most_items``.

    Only the values of known fields become objects: to skip 2 MB of others takes 7 ms, and to build 600,000 empty lists 400 ms,
    most of it in the garbage collector. Raises ApiError 400."""
    try:
        body.decode()  # msgspec does not check the encoding of what it skips
        table = _OBJECT.decode(body)
    except msgspec.ValidationError:
        raise bad_request("the request body must be a JSON object.", code="invalid_json") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise bad_request(f"the request body is not valid JSON: {_json_fault(body, error)}.", code="invalid_json") from None
    known = frozenset(kind.__struct_fields__)
    for name, choice in UNUSED_WITH_NONE.items():
        if _first(table.get(name)) == b"[" and _small(table.get(choice)) == "none":
            del table[name], table[choice]
    for name in tuple(table):
        if name in known:
            continue
        if name in labels:
            if _first(table[name]) not in (b'"', b"{", b"n"):
                raise bad_request(f"{name} must be text or an object.", name)
        elif name in neutral:
            _require_neutral(name, table[name], neutral[name])
        else:
            candidates = known | neutral.keys() | labels
            raise bad_request(
                f"{_shown(name)} is not a known field. {_nearest(name, candidates)}".strip(), name[:64], "unknown_field"
            )
        del table[name]
    lists: dict[str, list[Any]] = {}
    for name in getattr(kind, "token_lists", ("prompt", "text")):
        if name not in table:
            continue
        if _first(table[name]) == b"n" and kind is CompletionRequest:
            raise bad_request(f"{name} must be given.", name)
        if _first(table[name]) == b"[":
            lists[name] = _prompt_list(table[name], name, getattr(kind, "most_items", MAX_PROMPTS))
            table[name] = msgspec.Raw(b'""')
    try:
        request = msgspec.json.decode(msgspec.json.encode(table), type=kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None
    except RecursionError:
        raise bad_request("the request body is nested too deeply.", code="invalid_json") from None
    for name, items in lists.items():
        setattr(request, name, items)
    return request


def _first(value: msgspec.Raw | None) -> bytes:
    """First byte of the value, which tells its kind: ``"``, ``[``, ``{``, n, t, f, a digit or a minus."""
    return b"" if value is None else bytes(memoryview(value)[:1])


def _small(value: msgspec.Raw | None) -> Any:
    """The value if it is short enough to be a neutral one, else its beginning as text."""
    if value is None:
        return None
    if len(memoryview(value)) <= _MOST_NEUTRAL_BYTES:
        return msgspec.json.decode(value)
    return bytes(memoryview(value)[:_MOST_NEUTRAL_BYTES]).decode(errors="replace")


def _prompt_list(value: msgspec.Raw, name: str, most: int) -> list[Any]:
    """Decode a list of texts, of token ids, or of lists of token ids. The first item tells which, and all must be alike."""
    raw = memoryview(value)
    begin = re.match(rb"\[\s*(.)", raw, re.DOTALL)
    first = begin[1] if begin else b""
    kind: Any = {b'"': list[str], b"[": list[list[int]]}.get(first, list[int])
    if first == b"[" and (n := bytes(raw).count(b"[") - 1) > most:
        raise _too_many_prompts(n, name, most)
    try:
        found: list[Any] = msgspec.json.decode(value, type=kind)
    except (msgspec.ValidationError, RecursionError):
        raise bad_request(
            f"{name} must be a text, a list of texts, a list of token ids, or a list of token id lists.", name
        ) from None
    return found


def _too_many_prompts(n: int, name: str, most: int) -> ApiError:
    return bad_request(f"{name} holds {n} {name}s; at most {most} may share a request.", name)


def _json_fault(body: bytes, error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    if not isinstance(error, msgspec.DecodeError):
        return "it is nested too deeply"
    if re.search(rb"\\u[dD][89a-fA-F]", body):
        # For half of a surrogate pair msgspec reports a truncated input or a bad escape. Python's reader accepts it.
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(body)
            return r"a text holds half of a surrogate pair (\ud800 to \udfff), which is not a character"
    return str(error)


def _require_neutral(name: str, raw: msgspec.Raw, neutral: tuple[Any, ...]) -> None:
    value = _small(raw)
    if value is None or any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in neutral):
        return
    allowed = " or ".join(msgspec.json.encode(v).decode() for v in neutral) or "null"
    raise bad_request(f"{name}={_shown(value)} is not supported by this server; only {allowed} is.", name, "unsupported_value")


def _nearest(name: str, known: frozenset[str]) -> str:
    hint = did_you_mean(name[:64], known)  # its cost grows with the name's length
    return hint if hint.startswith("Did") else ""


def _shown(value: Any) -> str:
    """The value as JSON, cut to 40 characters: an error must neither repeat a prompt nor grow with the request."""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode(errors="replace")
    return text if len(text) <= 40 else f"{text[:40]}…"


_WHERE = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)


def _field_error(sentence: str) -> ApiError:
    """msgspec's ``Expected `int`, got `str` - at `$.max_tokens` `` as a 400 that names the field."""
    if len(sentence) > 400:  # it repeats the whole name of an unknown field
        sentence = f"{sentence[:200]} … {sentence[-200:]}"
    match = _WHERE.match(sentence)
    what, path = (match["what"], match["path"]) if match else (sentence, None)
    what = what.replace("`", "")
    if path is not None and len(path) > 64:
        path = f"{path[:64]}…"
    if missing := re.match(r"Object missing required field (\S+)", what):
        path = f"{path}.{missing[1]}" if path else missing[1]
        return bad_request(f"{path} is missing.", path, "missing_field")
    if unknown := re.match(r"Object contains unknown field (\S+)", what):
        path = f"{path}.{unknown[1][:64]}" if path else unknown[1][:64]
        return bad_request(f"{path} is not a known field.", path, "unknown_field")
    name = path or "the request"
    if bound := re.match(r"Expected (?:int|float) ([<>]=?) (\S+)$", what):
        rule = {"<=": "at most", ">=": "at least", "<": "below", ">": "above"}[bound[1]]
        return bad_request(f"{name} must be {rule} {bound[2].removesuffix('.0')}.", path, "invalid_value")
    return bad_request(f"{name} is not valid: {what[:1].lower()}{what[1:]}.", path, "invalid_value")


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts of one request, each a text or token ids. Raises ApiError 400."""
    return items_of(request.prompt, "prompt")


def items_of(given: str | list[Any], name: str, most: int = MAX_PROMPTS) -> list[str | list[int]]:
    """The texts or lists of token ids that the field ``name`` holds. Raises ApiError 400."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise bad_request(f"{name} is an empty list.", name)
    if isinstance(given[0], int):
        return [given]
    if len(given) > most:
        raise _too_many_prompts(len(given), name, most)
    if not all(isinstance(item, str) or item for item in given):
        raise bad_request(f"{name} holds an empty list of token ids.", name)
    return given
