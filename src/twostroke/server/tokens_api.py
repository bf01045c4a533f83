"""``/tokenize`` and ``/detokenize``, with vLLM's fields: the tokens of a text or of a conversation, and the text of tokens."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from fastapi import Request, Response
from msgspec import Meta, Struct

from twostroke.server import protocol
from twostroke.server.answers import ENCODER
from twostroke.server.errors import bad_request
from twostroke.server.service import Service
from twostroke.server.transfer import caller_of, read_body, text_service_of

NEUTRAL = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "tools": ([],),
    "mm_processor_kwargs": ({},),
}
"""vLLM's other fields, with the values (besides null) that change nothing."""

NAMES_AT_ONCE = 4096
"""Tokens whose names are looked up in one turn of the event loop, in 2 ms."""


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /tokenize``: the tokens of ``prompt``, or of ``messages`` as a chat would read them.

    ``add_special_tokens``: whether the tokenizer adds its own, by default as in completions and in chats.
    ``return_token_strs``: the tokens' names in the vocabulary too."""

    token_lists: ClassVar[tuple[str, ...]] = ()
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[protocol.Message], Meta(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /detokenize``: the text of ``tokens``."""

    tokens: list[protocol.Whole]
    model: str | None = None


def parse_tokenize(body: bytes) -> TokenizeRequest:
    request: TokenizeRequest = protocol.parse_as(body, TokenizeRequest, NEUTRAL)
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("give either prompt or messages.", "prompt")
    protocol.require_texts(request.messages or [])
    return request


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    request: DetokenizeRequest = protocol.parse_as(body, DetokenizeRequest, {})
    return request


async def tokenize(service: Service, request: Request) -> Response:
    caller = caller_of(request)
    asked = await service.parse(parse_tokenize, await read_body(request, service.incoming), caller.name)
    service = text_service_of(service, asked.model)
    if asked.model is not None:
        service.require_model(asked.model)
    special = asked.add_special_tokens
    with service.place(caller):
        if asked.messages is None:
            text = asked.prompt or ""
            (ids,) = await service.text.encode([text], "prompt", special is not False, caller.name, may_be_empty=True)
        else:
            chat = protocol.ChatRequest(model=asked.model or "", messages=asked.messages, add_special_tokens=special)
            ids = await chat_ids(service, chat, caller.name)
        answer: dict[str, Any] = {
            "count": len(ids), "max_model_len": service.max_model_len, "tokens": ids, "token_strs": None,
        }  # fmt: skip
        if asked.return_token_strs:
            answer["token_strs"] = await _names(service, ids)
    return Response(ENCODER.encode(answer), media_type="application/json")


async def detokenize(service: Service, request: Request) -> Response:
    caller = caller_of(request)
    asked = await service.parse(parse_detokenize, await read_body(request, service.incoming), caller.name)
    service = text_service_of(service, asked.model)
    if asked.model is not None:
        service.require_model(asked.model)
    ids = service.checked(asked.tokens, "tokens") if asked.tokens else []
    with service.place(caller):
        text = await service.text.decode(ids, caller.name)
    return Response(ENCODER.encode({"prompt": text}), media_type="application/json")


async def chat_ids(service: Service, request: protocol.ChatRequest, client: str) -> list[int]:
    """The tokens of a conversation. Raises ApiError 400."""
    text, special = await service.rendered(request, client, service.asked_tools(request))
    (ids,) = await service.text.encode([text], "messages", special, client)
    return ids


async def _names(service: Service, ids: list[int]) -> list[str | None]:
    name, found = service.text.tokenizer.id_to_token, list[str | None]()
    for at in range(0, len(ids), NAMES_AT_ONCE):
        await service.building.wait()
        found += map(name, ids[at : at + NAMES_AT_ONCE])
    return found


ROUTES = {"/tokenize": (tokenize, TokenizeRequest), "/detokenize": (detokenize, DetokenizeRequest)}
