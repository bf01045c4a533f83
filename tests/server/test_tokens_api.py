"""``/tokenize`` and ``/detokenize``, cached tokens and the fingerprint, against the echo engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import echo_server

from twostroke.data.tokenizer import load_tokenizer


@settings(max_examples=25, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=30))
def test_a_text_comes_back_from_its_tokens(web: httpx.Client, echo_model: Path, text: str) -> None:
    ids = load_tokenizer(echo_model).encode(text).ids
    answer = web.post("/tokenize", json={"model": "echo", "prompt": text}).json()
    assert answer == {"count": len(ids), "max_model_len": 4096, "tokens": ids, "token_strs": None}
    assert web.post("/detokenize", json={"model": "echo", "tokens": ids}).json() == {"prompt": text}


def test_names_are_those_of_the_vocabulary(web: httpx.Client, echo_model: Path) -> None:
    answer = web.post("/tokenize", json={"prompt": "the fox " * 5000, "return_token_strs": True}).json()
    tokenizer = load_tokenizer(echo_model)
    assert answer["count"] == len(answer["token_strs"]) > 8192, "more than one turn of the loop"
    assert answer["token_strs"] == [tokenizer.id_to_token(i) for i in answer["tokens"]]


def test_a_conversation_has_as_many_tokens_as_a_chat_reads(web: httpx.Client) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "the fox"}]}]
    answer = web.post("/tokenize", json={"messages": messages}).json()
    chat = web.post("/v1/chat/completions", json={"model": "echo", "messages": messages, "max_tokens": 1}).json()
    assert answer["count"] == chat["usage"]["prompt_tokens"]
    text = web.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"]
    assert text == "<system>Be brief.<user>the fox<assistant>"


def test_nothing_has_no_tokens(web: httpx.Client) -> None:
    assert web.post("/tokenize", json={"prompt": "", "add_special_tokens": False}).json()["tokens"] == []
    assert web.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


DEEP = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/tokenize", {}, "prompt", "give either prompt or messages."),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt", "either"),
        ("/tokenize", {"prompt": ["a"]}, "prompt", "prompt is not valid"),
        ("/tokenize", {"prompt": [1]}, "prompt", "prompt is not valid"),
        ("/tokenize", {"prompt": 7}, "prompt", "prompt is not valid"),
        ("/tokenize", {"messages": []}, "messages", "messages is not valid"),
        ("/tokenize", {"messages": [{"role": "user", "content": None}]}, "messages[0].content", "missing or null"),
        ("/tokenize", {"prompt": "a", "temperature": 1}, "temperature", "is not a known field"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template", "only null is"),
        ("/tokenize", {"prompt": "a", "return_token_strs": "yes"}, "return_token_strs", "is not valid"),
        ("/tokenize", {"prompt": "\ud800"}, None, "half of a surrogate pair"),
        pytest.param("/tokenize", DEEP, None, "not valid JSON", id="deep"),
        ("/tokenize", b"[]", None, "must be a JSON object"),
        ("/detokenize", {}, "tokens", "tokens is missing."),
        ("/detokenize", {"tokens": [300]}, "tokens", "tokens holds token id 300; ids are from 0 to 299."),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "must be at least 0."),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]", "is not valid"),
        ("/detokenize", {"tokens": "abc"}, "tokens", "is not valid"),
        ("/detokenize", {"tokens": [1], "prompt": "a"}, "prompt", "is not a known field"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model", "not served here"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(web: httpx.Client, path: str, body: Any, param: str | None, says: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body)
    response = web.post(path, content=content, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == (404 if says == "not served here" else 400)
    assert says in error["message"], error
    assert error["param"] == param


def test_every_answer_names_what_computed_it_and_says_what_was_cached(web: httpx.Client) -> None:
    chat = {"model": "echo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    text = {"model": "echo", "prompt": "x", "max_tokens": 3}
    for path, body in (
        ("/v1/completions", text),
        ("/v1/chat/completions", chat),
        ("/v1/score", {"model": "echo", "text": "x"}),
    ):
        answer = web.post(path, json=body).json()
        assert answer["system_fingerprint"] == "fp_echo"
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    for path, body in (("/v1/completions", text), ("/v1/chat/completions", chat)):
        lines = web.post(path, json=body | {"stream": True}).text.split("\n\n")[:-2]
        assert {json.loads(line.removeprefix("data: "))["system_fingerprint"] for line in lines} == {"fp_echo"}


ROUTES = {
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/v1/embeddings": {"model": "echo", "input": "x"},
    "/v1/messages": {"model": "echo", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]},
    "/v1/messages/count_tokens": {"model": "echo", "messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"model": "echo", "input": "x", "max_output_tokens": 1},
}


def test_each_route_needs_a_key_takes_it_in_either_header_and_takes_a_place(echo_model: Path, tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("sesame\n")
    with echo_server(echo_model, tmp_path, ["--api-key-file", str(key_file)]) as served:
        with httpx.Client(base_url=served.url, timeout=20, trust_env=False) as web:
            for path, body in ROUTES.items():
                for headers in ({}, {"x-api-key": "guess"}, {"authorization": "Bearer guess", "x-api-key": "sesame"}):
                    refused = web.post(path, json=body, headers=headers)
                    assert refused.status_code == 401, path
                    assert refused.json()["error"]["type"] == "authentication_error"
                    assert ("type" in refused.json()) == path.startswith("/v1/messages")
                for headers in ({"authorization": "Bearer sesame"}, {"x-api-key": "sesame"}):
                    assert web.post(path, json=body, headers=headers).status_code == 200, path
        assert "sesame" not in served.stderr.read_text()
        assert served.stop() == 0


def test_the_routes_are_described(web: httpx.Client) -> None:
    paths = web.get("/openapi.json").json()["paths"]
    for path, body in ROUTES.items():
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body.keys() <= schema["properties"].keys()
        assert schema["additionalProperties"] is False
