"""Anthropic's messages against the echo engine: shapes of answers and events, refusals, and Anthropic's own client."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import echo_engine
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Served, echo_server, named_events

USER = {"role": "user", "content": "x"}
BODY: dict[str, Any] = {"model": "echo", "max_tokens": 5, "messages": [USER]}
"""The template ends in ">", so the echo engine writes what follows it: ?@ABC…"""


def read(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's events make up, by Anthropic's rules."""
    start, ping, block, *deltas, stop, ended, last = stream
    assert [e["type"] for e in (start, ping, block, stop, ended, last)] == [
        "message_start", "ping", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert (block["index"], block["content_block"]) == (0, {"type": "text", "text": ""})
    assert {(d["type"], d["index"], d["delta"]["type"]) for d in deltas} <= {("content_block_delta", 0, "text_delta")}
    message = start["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    content = [{"type": "text", "text": "".join(d["delta"]["text"] for d in deltas)}]
    return message | ended["delta"] | {"content": content, "usage": message["usage"] | ended["usage"]}


def test_a_message_has_a_text_a_reason_and_usage(web: httpx.Client) -> None:
    answer = web.post("/v1/messages", json=BODY).json()
    assert answer.pop("id").startswith("msg_")
    n = web.post("/v1/messages/count_tokens", json={"model": "echo", "messages": [USER]}).json()
    usage = {
        "input_tokens": n["input_tokens"], "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 5,
    }  # fmt: skip
    assert answer == {
        "type": "message", "role": "assistant", "model": "echo", "content": [{"type": "text", "text": "?@ABC"}],
        "stop_reason": "max_tokens", "stop_sequence": None, "usage": usage, "system_fingerprint": "fp_echo",
    }  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(n=st.integers(1, 300), stops=st.lists(st.sampled_from(["C", "BCD", "xyz", "é", "ZZ"]), max_size=3))
def test_a_stream_makes_up_the_whole_answer(web: httpx.Client, n: int, stops: list[str]) -> None:
    body = BODY | {"max_tokens": n, "stop_sequences": stops}
    whole = web.post("/v1/messages", json=body).json()
    streamed = read(named_events(web.post("/v1/messages", json=body | {"stream": True}).text))
    assert streamed | {"id": ""} == whole | {"id": ""}
    assert whole["stop_sequence"] in (None, *stops)
    assert whole["stop_reason"] == ("max_tokens" if whole["stop_sequence"] is None else "stop_sequence")


def test_what_changes_nothing_is_accepted(web: httpx.Client) -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
    blocks = [{"type": "text", "text": "a", **cached}, {"type": "text", "text": "b", "citations": None}]
    conversation = [{"role": "user", "content": blocks}, {"role": "assistant", "content": blocks}, USER]
    body = BODY | {
        "messages": conversation, "system": blocks, "tools": [], "tool_choice": {"type": "auto"},
        "thinking": {"type": "disabled"}, "service_tier": "auto", "metadata": {"user_id": "u"},
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "container": None,
    }  # fmt: skip
    answer = web.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    text = "<system>ab<user>ab<assistant>ab<user>x<assistant>"
    count = web.post("/tokenize", json={"prompt": text}).json()["count"]
    assert answer.json()["usage"]["input_tokens"] == count


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
DEEP = b'{"model": "echo", "max_tokens": 1, "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": None}, "model is not valid"),
        ({"max_tokens": None}, "max_tokens is not valid"),
        ({"max_tokens": 0}, "max_tokens must be at least 1."),
        ({"max_tokens": 5000}, "this model's context is 4096 tokens"),
        ({"messages": []}, "messages is not valid"),
        ({"messages": "x"}, "messages is not valid"),
        ({"messages": [USER, {"role": "assistant", "content": "I"}]}, "messages[1].role: the last message must be the user's."),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role is not valid: invalid enum value 'system'."),
        (user(None), "messages[0].content is not valid"),
        (user([IMAGE]), "messages[0].content[0].type is not valid: invalid value 'image'."),
        (user([{"type": "document", "source": {}}]), "invalid value 'document'."),
        (
            user([{"type": "thinking", "thinking": "x"}]),
            "messages[0].content[0].type='thinking' cannot stand in a message of the role 'user'.",
        ),
        (
            user([{"type": "tool_result", "tool_use_id": "x"}]),
            "messages[0].content[0].tool_use_id='x' names no tool_use of a message before it.",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}, USER]},
            "'tool_result' cannot stand in a message of the role 'assistant'.",
        ),
        (user([{"type": "text"}]), "text is missing."),
        (user([{"type": "text", "text": "a", "citations": [{}]}]), "citations is not valid"),
        (user("fox " * 50_000), "this model's context is 4096 tokens"),
        (user("\ud800"), "half of a surrogate pair"),
        ({"system": 7}, "system is not valid"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences is not valid"),
        ({"stop_sequences": [""]}, "stop_sequences[0] is not valid"),
        ({"stop_sequences": "x"}, "stop_sequences is not valid"),
        ({"temperature": 1.5}, "temperature must be at most 1."),
        ({"top_p": 0}, "top_p must be above 0."),
        ({"top_k": -1}, "top_k must be at least 0."),
        ({"metadata": {"a": "b"}}, "metadata.a is not a known field."),
        ({"tools": [{"name": "look", "input_schema": {"type": "object"}}]}, "tools are not supported with this model"),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema is missing."),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type is not valid: invalid enum value 'bash_"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools."),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type is not valid"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4}}, "thinking is not supported with this model"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}, "model": "echo"}, "thinking"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "output_config.format.schema: "),
        ({"mcp_servers": [{}]}, "mcp_servers="),
        ({"seed": 1}, "seed is not a known field."),
        ({"stop": ["x"]}, "stop is not a known field."),
        ({"stream": "yes"}, "stream is not valid"),
        pytest.param(DEEP, "not valid JSON", id="deep"),
        (b"", "not valid JSON"),
        (b"[]", "must be a JSON object"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_in_anthropics_form(web: httpx.Client, change: Any, says: str) -> None:
    content = change if isinstance(change, bytes) else json.dumps(BODY | change)
    response = web.post("/v1/messages", content=content, headers={"content-type": "application/json"})
    document = response.json()
    assert response.status_code == 400
    assert document.keys() == {"type", "error"}
    assert (document["type"], document["error"]["type"]) == ("error", "invalid_request_error")
    assert says in document["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_other_errors_have_anthropics_form_too(web: httpx.Client, path: str) -> None:
    body = {"model": "other", "messages": [USER]} | ({"max_tokens": 1} if path == "/v1/messages" else {})
    big = b"x" * (2 * 2**20 + 1)
    for status, kind, response in (
        (404, "not_found_error", web.post(path, json=body)),
        (405, "invalid_request_error", web.get(path)),
        (413, "request_too_large", web.post(path, content=big, headers={"content-type": "application/json"})),
        (415, "invalid_request_error", web.post(path, content=b"{}", headers={"content-type": "text/plain"})),
        (403, "permission_error", web.post(path, json=body, headers={"host": "rebound.example"})),
    ):
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)


def test_counting_takes_no_length(web: httpx.Client) -> None:
    refused = web.post("/v1/messages/count_tokens", json=BODY)
    assert refused.status_code == 400
    assert "max_tokens is not a known field." in refused.json()["error"]["message"]


def test_an_engine_that_is_lost_ends_a_stream_with_an_error(echo_model: Path, tmp_path: Path) -> None:
    with echo_server(echo_model, tmp_path, ["--engine=--step-s", "--engine=0.01"]) as served:
        body = BODY | {"max_tokens": 4000, "stream": True}
        with httpx.stream("POST", f"{served.url}/v1/messages", json=body, timeout=20, trust_env=False) as stream:
            pieces = stream.iter_text()
            text = next(pieces)
            os.kill(served.engine_pid, signal.SIGKILL)
            text += "".join(pieces)
        last = named_events(text)[-1]
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")


def test_anthropics_client_works_unchanged(echo: Served) -> None:
    anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed (the test extra has it).")
    request = {"model": "echo", "max_tokens": 40, "messages": [USER], "system": "Be brief.", "stop_sequences": ["HI"]}
    with anthropic.Anthropic(base_url=echo.url, api_key="none", max_retries=0, timeout=20) as client:
        whole = client.messages.create(**request)
        assert (whole.content[0].text, whole.stop_reason, whole.stop_sequence) == ("?@ABCDEFG", "stop_sequence", "HI")
        with client.messages.stream(**request) as stream:
            assert "".join(stream.text_stream) == whole.content[0].text
            final = stream.get_final_message()
        assert (final.content[0].text, final.stop_reason, final.usage.output_tokens) == (
            whole.content[0].text, whole.stop_reason, whole.usage.output_tokens,
        )  # fmt: skip
        raw = list(client.messages.create(**request, stream=True))
        assert raw[0].type == "message_start"
        again = client.messages.create(
            model="echo", max_tokens=2, messages=[USER, {"role": "assistant", "content": whole.content}, USER]
        )
        assert again.content[0].text == "?@"
        assert client.messages.count_tokens(model="echo", messages=[USER]).input_tokens > 0
        with pytest.raises(anthropic.BadRequestError, match="tools are not supported"):
            client.messages.create(**request, tools=[{"name": "look", "input_schema": {"type": "object"}}])
        with pytest.raises(anthropic.NotFoundError, match="not served here"):
            client.messages.create(**request | {"model": "claude"})


def test_anthropics_client_knows_our_refusals(echo_model: Path, tmp_path: Path) -> None:
    anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed (the test extra has it).")
    key_file = tmp_path / "keys"
    key_file.write_text("sesame\n")
    with echo_server(echo_model, tmp_path, ["--api-key-file", str(key_file), "--max-concurrent", "1"]) as served:
        request = {"model": "echo", "max_tokens": 3, "messages": [USER]}
        with anthropic.Anthropic(base_url=served.url, api_key="guess", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError):
                client.messages.create(**request)
        with anthropic.Anthropic(base_url=served.url, api_key="sesame", max_retries=0) as client:
            assert client.messages.create(**request).content[0].text == "?@A"
            slow = {"model": "echo", "prompt": [echo_engine.SLOW], "max_tokens": 40, "stream": True}
            headers = {"authorization": "Bearer sesame"}
            with httpx.stream("POST", f"{served.url}/v1/completions", json=slow, headers=headers, trust_env=False) as stream:
                lines = stream.iter_lines()
                next(lines)
                with pytest.raises(anthropic.RateLimitError):
                    client.messages.create(**request)
