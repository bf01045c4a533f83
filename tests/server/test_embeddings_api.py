"""``/v1/embeddings`` against the echo engine, whose vectors begin with the mean or the last of the tokens and their number."""

from __future__ import annotations

import base64
import json
from typing import Any

import echo_engine
import httpx
import numpy as np
import openai
import pytest
from serving import Served, metric, until


def all_places_are_free(web: httpx.Client) -> bool:
    return metric(web, "twostroke_http_requests_active") == 0


def test_each_input_has_a_vector_in_its_place(web: httpx.Client) -> None:
    answer = web.post("/v1/embeddings", json={"model": "echo", "input": [[33, 35], [40]]}).json()
    assert (answer["object"], answer["model"], answer["system_fingerprint"]) == ("list", "echo", "fp_echo")
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == 3
    assert [(e["index"], e["object"], e["embedding"][:2]) for e in answer["data"]] == [
        (0, "embedding", [34.0, 2.0]), (1, "embedding", [40.0, 1.0]),
    ]  # fmt: skip
    assert {len(e["embedding"]) for e in answer["data"]} == {16}
    last = web.post("/v1/embeddings", json={"model": "echo", "input": [33, 35], "pooling": "last", "dimensions": 16}).json()
    assert last["data"][0]["embedding"][:2] == [35.0, 2.0]
    text = web.post("/v1/embeddings", json={"model": "echo", "input": "AC", "encoding_format": "base64", "user": "u"}).json()
    assert np.frombuffer(base64.b64decode(text["data"][0]["embedding"]), "<f4")[:2].tolist() == [34.0, 2.0]
    cut = web.post("/v1/embeddings", json={"model": "echo", "input": [1, 2, 3], "truncate_prompt_tokens": 2}).json()
    assert cut["data"][0]["embedding"][:2] == [2.5, 2.0]


def test_more_inputs_than_places_come_in_turns(web: httpx.Client) -> None:
    inputs = [[i % 200, 1] for i in range(300)]
    answer = web.post("/v1/embeddings", json={"model": "echo", "input": inputs}).json()
    assert [e["embedding"][0] for e in answer["data"]] == [(i % 200 + 1) / 2 for i in range(300)]
    assert [e["index"] for e in answer["data"]] == list(range(300))
    assert answer["usage"]["prompt_tokens"] == 600
    until(lambda: all_places_are_free(web))


def test_the_openai_client_reads_vectors(echo: Served) -> None:
    with openai.OpenAI(base_url=f"{echo.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        by_default = client.embeddings.create(model="echo", input=["A", "C"])
        as_floats = client.embeddings.create(model="echo", input=["A", "C"], encoding_format="float")
        with pytest.raises(openai.BadRequestError, match="not trained to be cut") as caught:
            client.embeddings.create(model="echo", input="A", dimensions=8)
    assert caught.value.param == "dimensions"
    assert [e.embedding for e in by_default.data] == [e.embedding for e in as_floats.data]
    assert [e.embedding[0] for e in as_floats.data] == [33.0, 35.0]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "input is missing."),
        ({"input": None}, "input", "input is not valid"),
        ({"input": 7}, "input", "input is not valid"),
        ({"input": {"a": 1}}, "input", "input is not valid"),
        ({"input": ""}, "input", "input is empty"),
        ({"input": ["a", ""]}, "input", "input is empty"),
        ({"input": []}, "input", "input is an empty list."),
        ({"input": [[1], []]}, "input", "input holds an empty list of token ids."),
        ({"input": [1, "a"]}, "input", "input must be a text, a list of texts"),
        ({"input": [[[1]]]}, "input", "input must be a text, a list of texts"),
        ({"input": ["a"] * 2049}, "input", "input holds 2049 inputs; at most 2048 may share a request."),
        ({"input": [[1]] * 2049}, "input", "input holds 2049 inputs; at most 2048 may share a request."),
        ({"input": [300]}, "input", "input holds token id 300; ids are from 0 to 299."),
        ({"input": [[5] * 4096]}, "input", "context is 4096 tokens; the input has 4096"),
        ({"input": "fox " * 50_000}, "input", "context is 4096 tokens; the input has at least"),
        ({"input": "\ud800"}, None, "half of a surrogate pair"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "encoding_format is not valid"),
        ({"input": "a", "pooling": "max"}, "pooling", "pooling is not valid"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions must be at least 1."),
        ({"input": "a", "dimensions": 8}, "dimensions", "dimensions=8 is not supported: this model's vectors have 16 numbers"),
        ({"input": "a", "max_tokens": 3}, "max_tokens", "is not a known field."),
        ({"input": "a", "model": "other"}, "model", "model 'other' is not served here."),
        ({"input": [echo_engine.REFUSE]}, None, "refused by the echo engine"),
    ],
)  # fmt: skip
def test_what_cannot_be_embedded_is_said(web: httpx.Client, body: dict[str, Any], param: str | None, says: str) -> None:
    content = json.dumps({"model": "echo"} | body)
    response = web.post("/v1/embeddings", content=content, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == (404 if "model" in body else 400)
    assert says in error["message"], error
    assert error["param"] == param
    until(lambda: all_places_are_free(web))


def test_a_vector_that_did_not_come_in_time_is_an_error(web: httpx.Client) -> None:
    body = {"model": "echo", "input": [[1], [echo_engine.SLOW]], "timeout_s": 5}
    response = web.post("/v1/embeddings", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (408, "timeout_s")
    until(lambda: all_places_are_free(web))
