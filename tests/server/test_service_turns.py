"""What the engine is told of a request beside its tokens: whose turn it takes, its priority, and how long it may take."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from twostroke.core.families import read_spec
from twostroke.scheduling import sampling_params
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.server import protocol, wire
from twostroke.server.admission import Admission
from twostroke.server.callers import Caller
from twostroke.server.engine_server import EngineServer
from twostroke.server.errors import ApiError
from twostroke.server.keys import ApiKeys
from twostroke.server.service import Service
from twostroke.server.text import ModelText
from twostroke.server.token_stream import TokenStream


class RecordingClient:
    """Takes requests and never answers."""

    ready, tags = True, False
    info = SimpleNamespace(max_model_len=4096, fingerprint="f")

    def __init__(self) -> None:
        self.adapters = {"a": "folder"}
        self.submitted: list[tuple[Any, ...]] = []
        self.params: list[SamplingParams] = []

    def submit(self, ids: list[int], params: SamplingParams, wake: asyncio.Event, *others: Any) -> list[TokenStream]:
        self.submitted.append(others)
        self.params.append(params)
        return [TokenStream(self, "r", i, wake) for i in range(params.n)]  # type: ignore[arg-type]

    def abort(self, stream: TokenStream) -> None:
        pass


def service_of(model: Path, keys: ApiKeys | None = None) -> tuple[Service, RecordingClient]:
    client = RecordingClient()
    return Service(client, ModelText(model), read_spec(model), ("m",), Admission(8), keys), client  # type: ignore[arg-type]


def completion(**fields: Any) -> protocol.CompletionRequest:
    return protocol.parse_completion(json.dumps({"model": "m", "prompt": [1, 2], **fields}).encode())


def test_parameters_are_validated_once_for_all_prompts_of_a_request(echo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    validated = []
    check = sampling_params._biases
    monkeypatch.setattr(sampling_params, "_biases", lambda biases: (validated.append(1), check(biases))[1])

    async def scenario() -> list[int]:
        service, client = service_of(echo_model)
        context = client.info.max_model_len
        prompts = [[1, 2], [3] * (context - 5), [4, 5]]  # of which the second leaves room for five tokens
        generation = await service.complete(completion(prompt=prompts, logit_bias={"5": 1.0}), time.perf_counter())
        generation.close()
        with pytest.raises(ApiError, match="min_tokens=9 must be at most max_tokens=5") as refused:
            await service.complete(completion(prompt=prompts, min_tokens=9), time.perf_counter())
        assert refused.value.param == "min_tokens"
        return [params.max_tokens for params in client.params]

    assert asyncio.run(scenario())[:3] == [16, 5, 16]
    assert len(validated) == 2, "once a request"


def test_a_client_is_its_address_or_where_there_are_keys_its_key(echo_model: Path) -> None:
    open_service, _ = service_of(echo_model)
    assert open_service.client_name(b"Bearer a", "10.0.0.1") == "10.0.0.1"
    guarded, _ = service_of(echo_model, ApiKeys(["a", "b"]))
    names = {guarded.client_name(b"Bearer " + key, "10.0.0.1") for key in (b"a", b"b")}
    assert len(names) == 2
    assert names.isdisjoint({"a", "b", "10.0.0.1"})
    assert guarded.client_name(b"bearer  a", "10.0.0.2") in names, "the same key from elsewhere is the same client"


def test_priority_client_and_what_is_left_of_the_time_reach_the_engine(echo_model: Path) -> None:
    async def scenario() -> None:
        service, client = service_of(echo_model)
        began = time.perf_counter() - 1.0  # its body took a second to arrive
        generation = await service.complete(completion(priority=7, timeout_s=3.0, n=2), began, Caller("somebody"))
        assert len(generation.choices) == service.admission.active == 2
        generation.close()
        assert service.admission.active == 0
        ((priority, name, left_s, whole, lora),) = client.submitted
        assert whole, "nobody reads this answer before its end"
        assert (priority, name, lora) == (7, "somebody", None)
        assert 0 < left_s <= 2.0
        generation = await service.complete(completion(model="a"), time.perf_counter())
        generation.close()
        assert client.submitted[1] == (0, "", None, True, "a")

    asyncio.run(scenario())


def test_a_request_that_is_refused_half_way_gives_its_places_back(echo_model: Path) -> None:
    async def scenario() -> None:
        service, _ = service_of(echo_model)
        with pytest.raises(ApiError, match="token id 999"):
            await service.complete(completion(prompt=[[1], [999]], n=3), time.perf_counter())
        assert service.admission.active == 0
        with pytest.raises(ApiError, match="asks for 10 answers"):
            await service.complete(completion(prompt=[[1], [2]], n=5), time.perf_counter())
        assert service.admission.active == 0

    asyncio.run(scenario())


def test_the_engine_process_hands_on_all_of_it() -> None:
    calls: list[tuple[Any, ...]] = []
    engine = SimpleNamespace(add_request=lambda *a: calls.append(a), abort=lambda *a: calls.append(a))
    server = SimpleNamespace(_engine=engine, _owners={}, _preparing=[], _let_go=lambda key: None)
    server._ended = lambda key, indices: EngineServer._ended(server, key, indices)  # type: ignore[arg-type]
    connection: Any = SimpleNamespace(number=1, requests=set(), send=calls.append)
    params = SamplingParams(n=2)
    EngineServer._add(server, connection, wire.Add("r", [5], params, 3, "c", 1.5, lora="a"))  # type: ignore[arg-type]
    assert calls == [("1:r", [5], params, 3, "c", 1.5, "a")]
    handle: Any = EngineServer._handle
    handle(server, connection, wire.Abort("r", 1))
    handle(server, connection, wire.Abort("r", 1))  # one that crossed with the answer's end changes nothing
    assert server._owners["1:r"].open == {0}
    handle(server, connection, wire.Abort("r"))
    assert not server._owners
    assert not connection.requests


class PanicException(BaseException):
    """As the tokenizers library raises: no Exception."""


class PanickingDecoder:
    def __init__(self, n_good: int) -> None:
        self.n_good = n_good

    def decode(self, ids: list[int], **_: object) -> str:
        self.n_good -= 1
        if self.n_good < 0:
            raise PanicException("index out of bounds")
        return "a" * len(ids)


@pytest.mark.parametrize("n_good", [0, 1])
def test_a_tokenizer_that_fails_at_an_answer_is_a_sentence_and_gives_the_places_back(echo_model: Path, n_good: int) -> None:
    async def scenario() -> None:
        service, client = service_of(echo_model)
        service.text.tokenizer = PanickingDecoder(n_good)  # type: ignore[assignment]

        async def answer() -> None:
            generation = await service.complete(completion(), time.perf_counter())
            try:
                generation.choices[0].stream.push(wire.TokenDelta("r", [5] * 9))
                generation.choices[0].take()
            finally:
                generation.close()

        with pytest.raises(ApiError, match="tokenizer failed on this text") as caught:
            await answer()
        assert caught.value.code == "tokenizer_error"
        assert service.admission.active == 0
        assert bool(client.submitted) == (n_good > 0)

    asyncio.run(scenario())
