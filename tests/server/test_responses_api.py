"""OpenAI's responses against the echo engine: shapes of answers and events, refusals, and the unmodified client."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Served, echo_server, named_events

BODY: dict[str, Any] = {"model": "echo", "input": "x", "max_output_tokens": 5}
"""The template ends in ">", so the echo engine writes what follows it: ?@ABC…"""


def events(text: str) -> list[dict[str, Any]]:
    """Server-sent events, numbered from 0."""
    found = named_events(text)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def read(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The response that a stream ends with, after a look at what its events say of each other."""
    created, begun, item, part, *deltas, text, part_done, item_done, last = stream
    assert [e["type"].removeprefix("response.") for e in (created, begun, item, part, text, part_done, item_done)] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done",
    ]  # fmt: skip
    response = last["response"]
    assert last["type"] == f"response.{response['status']}"
    assert created["response"] == begun["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    assert item["item"]["content"] == []
    assert {d["type"] for d in deltas} <= {"response.output_text.delta"}
    assert {e["item_id"] for e in (part, *deltas, text, part_done)} == {item["item"]["id"]} == {response["output"][0]["id"]}
    assert "".join(d["delta"] for d in deltas) == text["text"] == part_done["part"]["text"]
    assert item_done["item"] == response["output"][0]
    assert item_done["item"]["content"] == [part_done["part"]]
    assert created["response"]["id"] == response["id"]
    return response


def same(response: dict[str, Any]) -> dict[str, Any]:
    """Without what is every response's own."""
    output = [item | {"id": ""} for item in response["output"]]
    return response | {"id": "", "created_at": 0, "output": output}


def test_a_response_has_a_text_a_status_and_usage(web: httpx.Client) -> None:
    answer = web.post("/v1/responses", json=BODY | {"metadata": {"a": "b"}, "instructions": "Be brief."}).json()
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert item["content"] == [{"type": "output_text", "text": "?@ABC", "annotations": [], "logprobs": []}]
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    count = web.post("/tokenize", json={"prompt": "<system>Be brief.<user>x<assistant>"}).json()["count"]
    assert answer["usage"] == {
        "input_tokens": count, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}, "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": count + 5,
    }  # fmt: skip
    assert (answer["id"][:5], item["id"][:4], answer["store"], answer["metadata"]) == ("resp_", "msg_", False, {"a": "b"})
    assert answer["system_fingerprint"] == "fp_echo"


@settings(max_examples=12, deadline=None)
@given(n=st.integers(1, 300), temperature=st.sampled_from([0, 0.5, 2]))
def test_a_stream_makes_up_the_whole_answer(web: httpx.Client, n: int, temperature: float) -> None:
    body = BODY | {"max_output_tokens": n, "temperature": temperature}
    whole = web.post("/v1/responses", json=body).json()
    streamed = read(events(web.post("/v1/responses", json=body | {"stream": True}).text))
    assert same(streamed) == same(whole)


def test_an_answer_is_history_and_what_changes_nothing_is_accepted(web: httpx.Client) -> None:
    (item,) = web.post("/v1/responses", json=BODY).json()["output"]
    conversation = [
        {"role": "developer", "content": "a"},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}],
        },
        item,
        {"role": "user", "content": "d"},
    ]
    body = BODY | {
        "input": conversation, "instructions": "i", "store": False, "tools": [], "tool_choice": "auto", "include": [],
        "previous_response_id": None, "text": {"format": {"type": "text"}, "verbosity": "medium"}, "truncation": "disabled",
        "reasoning": {"effort": "low"}, "user": "u", "prompt_cache_key": "k", "parallel_tool_calls": True, "top_p": 0.5,
        "stream": True, "stream_options": {"include_obfuscation": False},
    }  # fmt: skip
    response = web.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    text = "<system>i<system>a<user>bc<assistant>?@ABC<user>d<assistant>"
    count = web.post("/tokenize", json={"prompt": text}).json()["count"]
    assert read(events(response.text))["usage"]["input_tokens"] == count


DEEP = b'{"model": "echo", "input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"model": 7}, "model", "model is not valid"),
        ({"input": None}, "input", "input is not valid"),
        ({"input": []}, "input", "input is not valid"),
        ({"input": [1, 2]}, "input[0]", "input[0] is not valid"),
        ({"input": ["x"]}, "input[0]", "input[0] is not valid"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "invalid enum value 'tool'"),
        (
            {"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]},
            "input[0].call_id", "='1' names no function_call before it.",
        ),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input[0].arguments", "is missing."),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "[1"}]},
            "input[0].arguments", "input[0].arguments must be a text that holds a JSON object.",
        ),
        ({"input": [{"role": "user", "content": "x", "output": "y"}]}, "input[0].output", "is not a field of a message."),
        ({"input": [{"content": "x"}]}, "input[0].role", "is missing."),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0].type", "'item_reference'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type", "invalid value 'input_image'",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "input[0].content[0].type", "invalid value 'input_file'",
        ),
        ({"input": "fox " * 50_000}, "input", "this model's context is 4096 tokens"),
        ({"input": "\ud800"}, None, "half of a surrogate pair"),
        ({"max_output_tokens": 0}, "max_output_tokens", "must be at least 1."),
        ({"max_output_tokens": 5000}, "input", "this model's context is 4096 tokens"),
        ({"store": True}, "store", "store=true is not supported by this server; only false is."),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "only null is."),
        ({"conversation": "c"}, "conversation", "only null is."),
        ({"background": True}, "background", "only false is."),
        ({"tools": [{"type": "function", "name": "look"}]}, "tools", "tools are not supported with this model"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid enum value 'web_search'"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools."),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "invalid enum value 'grammar'"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "is missing."),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}},
            "text.format.schema", "text.format.schema: ",
        ),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "is not valid"),
        ({"include": ["file_search_call.results"]}, "include[0]", "invalid enum value"),
        ({"truncation": "auto"}, "truncation", "truncation=auto"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "is not valid"),
        ({"top_logprobs": 2}, "top_logprobs", 'top_logprobs needs include=["message.output_text.logprobs"].'),
        ({"top_logprobs": 21}, "top_logprobs", "must be at most 20."),
        ({"temperature": 3}, "temperature", "must be at most 2."),
        ({"messages": []}, "messages", "messages is not a known field."),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage", "is not a known field."),
        pytest.param(DEEP, None, "not valid JSON", id="deep"),
        (b"", None, "not valid JSON"),
        (b"null", None, "must be a JSON object"),
    ],
)  # fmt: skip
def test_what_is_not_done_is_refused_by_its_name(web: httpx.Client, change: Any, param: str | None, says: str) -> None:
    content = change if isinstance(change, bytes) else json.dumps(BODY | change)
    response = web.post("/v1/responses", content=content, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == 400
    assert says in error["message"], error
    assert error["param"] == param


def test_an_engine_that_is_lost_fails_the_response(echo_model: Path, tmp_path: Path) -> None:
    with echo_server(echo_model, tmp_path, ["--engine=--step-s", "--engine=0.01"]) as served:
        body = BODY | {"max_output_tokens": 4000, "stream": True}
        with httpx.stream("POST", f"{served.url}/v1/responses", json=body, timeout=20, trust_env=False) as stream:
            pieces = stream.iter_text()
            text = next(pieces)
            os.kill(served.engine_pid, signal.SIGKILL)
            text += "".join(pieces)
        last = events(text)[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert "the engine was lost" in last["response"]["error"]["message"]


def test_the_openai_client_works_unchanged(echo: Served) -> None:
    with openai.OpenAI(base_url=f"{echo.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        whole = client.responses.create(model="echo", input="x", max_output_tokens=9, instructions="Be brief.")
        assert (whole.output_text, whole.status) == ("?@ABCDEFG", "incomplete")
        assert whole.usage is not None
        assert whole.usage.output_tokens == 9
        chunks = list(client.responses.create(model="echo", input="x", max_output_tokens=9, stream=True))
        assert "".join(e.delta for e in chunks if e.type == "response.output_text.delta") == whole.output_text
        with client.responses.stream(model="echo", input="x", max_output_tokens=9) as stream:
            kinds = {event.type for event in stream}
        assert {"response.created", "response.output_text.delta", "response.incomplete"} <= kinds
        history = [{"role": "user", "content": "x"}, *whole.output, {"role": "user", "content": "y"}]
        again = client.responses.create(model="echo", input=history, max_output_tokens=2)  # type: ignore[arg-type]
        assert again.output_text == "?@"
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="echo", input="x", previous_response_id="resp_1")
        assert caught.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError, match="not served here"):
            client.responses.create(model="gpt-9", input="x")
