"""Responses of completions and chat completions, in the shapes of OpenAI's API and vLLM's additions to it."""

from __future__ import annotations

import msgspec
from msgspec import Struct


class PromptTokensDetails(Struct):
    """``cached_tokens``: of the prompts, those that were found in the prefix cache and not computed."""

    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | msgspec.UnsetType


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]  # None: a prompt's first token, which nothing predicts
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct):
    """vLLM's form. ``rank`` counts from 1, and is null if the token is not among the alternatives that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""For each token of a prompt its scores by token id, and null for the first, which nothing predicts."""


class Score(Struct):
    """Of one text: the sum of its tokens' log-probabilities, whether greedy decoding would write it, and each token's."""

    index: int
    score: float
    is_greedy: bool
    token_ids: list[int]
    tokens: list[str]
    token_logprobs: list[float]
    object: str = "score"


class Scores(Struct):
    """The shape of vLLM's answer to a score request, with more in each score."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: Usage
    object: str = "list"
    system_fingerprint: str | None = None


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Completion(Struct):
    """Also the chunk of a stream: OpenAI gives both the same shape."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    system_fingerprint: str | None = None


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CalledFunction(Struct, omit_defaults=True):
    arguments: str
    name: str | None = None


class ToolCall(Struct):
    id: str
    function: CalledFunction
    type: str = "function"


class ToolCallDelta(Struct, omit_defaults=True):
    """What a call gained. The first of a call has its id, type and name."""

    index: int
    function: CalledFunction
    id: str | None = None
    type: str | None = None


class ChatMessage(Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None


class ChatCompletion(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    system_fingerprint: str | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    reasoning_content: str | None = None


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    system_fingerprint: str | None = None
