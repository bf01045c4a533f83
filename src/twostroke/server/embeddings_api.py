"""OpenAI's ``/v1/embeddings``: a vector for each text, from the model's hidden states after the final norm."""

from __future__ import annotations

import base64
import struct
import time
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request, Response
from msgspec import Meta, Struct

from twostroke.scheduling.sampling_params import Pooling, SamplingParams
from twostroke.server import protocol, responses
from twostroke.server.answers import ENCODER, joined
from twostroke.server.errors import ApiError, bad_request
from twostroke.server.generation import Generation, Prompt, TextDelta
from twostroke.server.service import Service
from twostroke.server.transfer import caller_of, read_body, respond, service_of

MAX_INPUTS = 2048
"""OpenAI's bound."""
AT_ONCE = 32
"""Inputs of one request that are in the engine together, and the places that it takes."""
MAX_NUMBERS = 2**20
"""Most numbers of one answer: 20 MB of JSON, or 6 in base64."""


class EmbeddingRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/embeddings``. ``input``: a text, a list of texts, token ids, or a list of token id lists.

    ``pooling``: "mean" (the default) of the hidden states of all tokens, or the "last" token's. ``dimensions`` may only be the
    model's own. ``encoding_format`` "base64": fp32 numbers, the lowest byte of each first."""

    token_lists: ClassVar[tuple[str, ...]] = ("input",)
    most_items: ClassVar[int] = MAX_INPUTS
    model: str
    input: str | list[Any]  # a list is one that `protocol.items_of` accepts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: protocol.Positive | None = None
    pooling: Pooling | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: protocol.Positive | None = None
    priority: Annotated[int, Meta(ge=0, le=protocol.MAX_PRIORITY)] | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=protocol.MAX_TIMEOUT_S)] | None = None

    def as_completion(self) -> protocol.CompletionRequest:
        """What the engine is asked for, but for the pooling."""
        return protocol.CompletionRequest(
            model=self.model, prompt="", temperature=0.0, max_tokens=1, add_special_tokens=self.add_special_tokens,
            truncate_prompt_tokens=self.truncate_prompt_tokens, priority=self.priority, timeout_s=self.timeout_s,
        )  # fmt: skip


class Embedding(Struct):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class Embeddings(Struct):
    """All of an answer but its list of `Embedding`, ``data``, which is written before."""

    id: str
    created: int
    model: str
    usage: responses.Usage
    system_fingerprint: str | None


def parse_embedding(body: bytes) -> EmbeddingRequest:
    request: EmbeddingRequest = protocol.parse_as(body, EmbeddingRequest, {})
    return request


class EmbeddingAnswer:
    """Hands the inputs to the engine, as many together as the generation has places, and turns their vectors into JSON."""

    def __init__(self, service: Service, generation: Generation, request: EmbeddingRequest, inputs: list[list[int]]) -> None:
        self.generation = generation
        self._building = service.building
        self._base64 = request.encoding_format == "base64"
        self._params = SamplingParams(max_tokens=1, temperature=0.0, pooling=request.pooling or "mean")
        self._at_once = generation.n_places
        self._waiting = inputs
        self._submit()

    def _submit(self) -> None:
        now, self._waiting = self._waiting[: self._at_once], self._waiting[self._at_once :]
        for ids in now:
            self.generation.submit(Prompt(ids), self._params, silent=True)

    async def whole(self, deltas: list[list[TextDelta]]) -> list[bytes]:
        g = self.generation
        while self._waiting:
            self._submit()
            async for _ in g.deltas():
                pass
        parts = [b'{"object":"list","data":[']
        for choice in g.choices:
            await self._building.wait()
            vector = choice.stream.embedding
            if vector is None:
                raise ApiError(408, "the vectors were not computed within timeout_s.", "timeout_s", "timeout")
            numbers = (
                base64.b64encode(vector).decode() if self._base64 else list(struct.unpack(f"<{len(vector) // 4}f", vector))
            )
            parts.append((b"," if choice.index else b"") + ENCODER.encode(Embedding(choice.index, numbers)))
        rest = ENCODER.encode(Embeddings(g.id, g.created, g.model, g.usage, g.fingerprint))
        return joined([*parts, b"]," + rest[1:]])


async def embeddings(service: Service, request: Request) -> Response:
    started, caller = time.perf_counter(), caller_of(request)
    body = await read_body(request, service.incoming)
    asked = await service.parse(parse_embedding, body, caller.name)
    service = await service_of(service, request, asked.model, body)
    inputs = protocol.items_of(asked.input, "input", MAX_INPUTS)
    width = service.spec.d_model
    if asked.dimensions not in (None, width):
        raise bad_request(
            f"dimensions={asked.dimensions} is not supported: this model's vectors have {width} numbers and were not trained "
            "to be cut.",
            "dimensions",
            "unsupported_value",
        )
    if len(inputs) * width > MAX_NUMBERS:
        raise bad_request(
            f"input asks for {len(inputs)} vectors of {width} numbers; at most {MAX_NUMBERS} numbers fit in one answer.",
            "input",
        )
    at_once = min(AT_ONCE, service.admission.limit)
    generation, ids = await service.embed(asked.as_completion(), inputs, started, caller, at_once)
    try:
        answer = EmbeddingAnswer(service, generation, asked, ids)
    except BaseException:
        generation.close()
        raise
    return await respond(request, answer, service.outgoing)


ROUTES = {"/v1/embeddings": (embeddings, EmbeddingRequest)}
