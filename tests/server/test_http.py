"""The HTTP process against the scripted engine: routes, errors, limits, disconnects, faults of the engine, the stop."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import echo_engine
import httpx
import psutil
import pytest
from serving import SOURCE, Served, echo_command, echo_server, environment, held, is_open, metric, until

BODY: dict[str, Any] = {"model": "echo", "prompt": "the fox", "max_tokens": 4}


def raw_request(payload: bytes) -> bytes:
    head = (
        "POST /v1/completions HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {len(payload)}",
    )
    return "\r\n".join(head).encode() + b"\r\n\r\n" + payload


def events(response: httpx.Response) -> list[Any]:
    """Server-sent events; the closing [DONE] as the text itself."""
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def usage(prompt: int, output: int) -> dict[str, Any]:
    """Of an answer for which nothing was cached."""
    details = {"prompt_tokens_details": {"cached_tokens": 0}}
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output} | details


def test_a_server_answers_for_its_life_and_its_readiness(web: httpx.Client) -> None:
    assert web.get("/health").json() == {"status": "ok"}
    assert (web.get("/ready").status_code, web.get("/ready").json()) == (200, {"status": "ready"})


def test_models_are_listed_and_described(web: httpx.Client) -> None:
    (model,) = web.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("echo", "model", 4096)
    assert web.get("/v1/models/echo").json() == model
    assert web.get("/v1/models/other").status_code == 404


def test_a_completion_carries_text_reason_and_usage(web: httpx.Client) -> None:
    answer = web.post("/v1/completions", json=BODY | {"prompt": [35, 36]}).json()
    assert answer["choices"] == [{"index": 0, "text": "EFGH", "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == usage(2, 4)


def test_several_prompts_give_as_many_choices_in_order(web: httpx.Client) -> None:
    answer = web.post("/v1/completions", json=BODY | {"prompt": [[35], [45], [55]], "max_tokens": 2}).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "DE"), (1, "NO"), (2, "XY")]
    assert answer["usage"]["completion_tokens"] == 6


def test_a_stream_adds_up_to_the_whole_answer(web: httpx.Client) -> None:
    body = BODY | {"prompt": [[35], [45]], "max_tokens": 9}
    whole = web.post("/v1/completions", json=body).json()
    *chunks, done = events(web.post("/v1/completions", json=body | {"stream": True}))
    assert done == "[DONE]"
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_ends_a_stream_that_asks_for_it(web: httpx.Client) -> None:
    body = BODY | {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = events(web.post("/v1/completions", json=body))
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)


def test_the_first_chunk_of_a_chat_names_the_role(web: httpx.Client) -> None:
    body = {"model": "echo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "stream": True}
    *chunks, _ = events(web.post("/v1/chat/completions", json=body))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert deltas[0]["content"]


def test_a_stop_string_ends_the_text_before_it_and_the_work_in_the_engine(web: httpx.Client) -> None:
    body = BODY | {"prompt": [35], "max_tokens": 4000, "stop": ["HI", "never"]}
    (choice,) = web.post("/v1/completions", json=body).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("DEFG", "stop")
    *chunks, _ = events(web.post("/v1/completions", json=body | {"stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "DEFG"
    until(lambda: metric(web, "twostroke_requests_running") == 0)


def test_logprobs_have_one_entry_a_token(web: httpx.Client) -> None:
    (choice,) = web.post("/v1/completions", json=BODY | {"prompt": [35], "logprobs": 2}).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["D", "E", "F", "G"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [3] * 4  # two, and the token itself
    chat = {
        "model": "echo",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 3,
        "logprobs": True,
        "top_logprobs": 1,
    }
    (choice,) = web.post("/v1/chat/completions", json=chat).json()["choices"]
    entries = choice["logprobs"]["content"]
    assert "".join(e["token"] for e in entries) == choice["message"]["content"]
    assert all(len(e["top_logprobs"]) == 1 and bytes(e["bytes"]).decode() == e["token"] for e in entries)


@pytest.mark.parametrize(
    ("change", "status", "param", "code"),
    [
        ({"model": "other"}, 404, "model", "model_not_found"),
        ({"frobnicate": 1}, 400, "frobnicate", "unknown_field"),
        ({"n": 200}, 400, "n", "invalid_value"),
        ({"prompt": [[35], [36]], "n": 65}, 400, "n", None),
        ({"best_of": 2}, 400, "best_of", "unsupported_value"),
        ({"logit_bias": {"300": 1}}, 400, "logit_bias", None),
        ({"stop_token_ids": [300]}, 400, "stop_token_ids", None),
        ({"max_tokens": 5000}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": [1] * 4096}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": [300]}, 400, "prompt", None),
        ({"prompt": [-1]}, 400, "prompt", None),
        ({"prompt": ""}, 400, "prompt", None),
        ({"prompt": [echo_engine.REFUSE]}, 400, None, None),
        ({"prompt": [echo_engine.TOO_LARGE]}, 400, "prompt", "context_length_exceeded"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_openais_shape(
    web: httpx.Client, change: dict[str, Any], status: int, param: str | None, code: str | None, stream: bool
) -> None:
    response = web.post("/v1/completions", json=BODY | change | {"stream": stream})
    assert response.status_code == status
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code)
    until(lambda: metric(web, "twostroke_http_requests_active") == 0)


@pytest.mark.parametrize(
    ("method", "path", "content", "headers", "status"),
    [
        ("GET", "/nowhere", b"", {}, 404),
        ("GET", "/v1/completions", b"", {}, 405),
        ("POST", "/v1/completions", b"{", {"content-type": "application/json"}, 400),
        ("POST", "/v1/completions", b"{}", {"content-type": "text/plain"}, 415),
        ("POST", "/v1/completions", b"x" * (2 * 2**20 + 1), {"content-type": "application/json"}, 413),
    ],
)
def test_refused_requests_are_json_too(
    web: httpx.Client, method: str, path: str, content: bytes, headers: dict[str, str], status: int
) -> None:
    response = web.request(method, path, content=content, headers=headers)
    assert response.status_code == status
    assert response.json()["error"]["message"]


def test_refusals_state_the_rule(web: httpx.Client) -> None:
    def said(path: str, body: dict[str, object]) -> str:
        return str(web.post(f"/v1/{path}", json=body).json()["error"]["message"])

    for value, sentence in ((-1, "temperature must be at least 0."), (5, "temperature must be at most 2.")):
        assert said("completions", BODY | {"temperature": value}) == sentence
    chat = {"model": "echo", "messages": [{"role": "user", "content": "a"}], "max_tokens": 5000}
    assert re.search(
        r"the messages have \d+, and the answer may have 5000\. Shorten one of them", said("chat/completions", chat)
    )


def test_a_loopback_server_without_a_key_answers_to_no_foreign_name(web: httpx.Client) -> None:
    refused = web.get("/v1/models", headers={"host": "rebound.example:80"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_host")
    for name in ("localhost:1", "127.0.0.1", "[::1]:8000"):
        assert web.get("/v1/models", headers={"host": name}).status_code == 200


def test_a_body_without_an_announced_length_is_limited_as_well(web: httpx.Client) -> None:
    pieces = (b"x" * 2**16 for _ in range(40))
    response = web.post("/v1/completions", content=pieces, headers={"content-type": "application/json"})
    assert response.status_code == 413


def test_n_answers_have_an_index_a_text_and_a_reason_each(web: httpx.Client) -> None:
    body = BODY | {"prompt": [[35], [65]], "n": 2, "max_tokens": 3}
    answer = web.post("/v1/completions", json=body).json()
    texts = [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]]
    assert texts == [(0, "DEF", "length"), (1, "NOP", "length"), (2, "bcd", "length"), (3, "lmn", "length")]
    assert answer["usage"] == usage(2, 12)  # a prompt is computed once
    *chunks, done = events(web.post("/v1/completions", json=body | {"stream": True}))
    assert done == "[DONE]"
    for choice in answer["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]


def test_one_answer_that_stops_does_not_end_the_others(web: httpx.Client) -> None:
    body = BODY | {"prompt": [35], "n": 2, "max_tokens": 6, "stop": "F"}
    answer = web.post("/v1/completions", json=body).json()
    assert [(c["text"], c["finish_reason"]) for c in answer["choices"]] == [("DE", "stop"), ("NOPQRS", "length")]
    kept = web.post("/v1/completions", json=body | {"include_stop_str_in_output": True}).json()
    assert kept["choices"][0]["text"] == "DEF"
    until(lambda: metric(web, "twostroke_requests_running") == 0)


def test_n_chats_begin_with_a_role_each(web: httpx.Client) -> None:
    body = {"model": "echo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "n": 3}
    answer = web.post("/v1/chat/completions", json=body).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    *chunks, _ = events(web.post("/v1/chat/completions", json=body | {"stream": True}))
    for choice in answer["choices"]:
        parts = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert [part.get("role") for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert "".join(part.get("content") or "" for part in parts) == choice["message"]["content"]


def test_an_echo_carries_the_prompt_and_its_logprobs(web: httpx.Client) -> None:
    body = BODY | {"prompt": [33, 34, 35], "echo": True, "logprobs": 1, "max_tokens": 2}
    (choice,) = web.post("/v1/completions", json=body).json()["choices"]
    assert choice["text"] == "ABCDE"
    scores = choice["logprobs"]
    assert scores["tokens"] == ["A", "B", "C", "D", "E"]
    assert scores["token_logprobs"] == [None, -0.5, -1.5, -0.5, -0.5]  # nothing predicts the first
    assert scores["text_offset"] == [0, 1, 2, 3, 4]
    assert scores["top_logprobs"][0] is None
    assert scores["top_logprobs"][2]["C"] == -1.5, "the token itself is among its alternatives"
    *chunks, _ = events(web.post("/v1/completions", json=body | {"stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ABCDE"
    assert [x for chunk in chunks for x in chunk["choices"][0]["logprobs"]["token_logprobs"]] == scores["token_logprobs"]


@pytest.mark.parametrize("n", [1, 2])
def test_a_prompt_can_be_scored_without_writing(web: httpx.Client, n: int) -> None:
    body = BODY | {"prompt": [[33, 34, 35], [40, 41]], "echo": True, "logprobs": 1, "max_tokens": 0, "n": n}
    answer = web.post("/v1/completions", json=body).json()
    assert [c["text"] for c in answer["choices"]] == ["ABC"] * n + ["HI"] * n
    assert [c["logprobs"]["token_logprobs"] for c in answer["choices"]] == [[None, -0.5, -1.5]] * n + [[None, -0.5]] * n
    assert [c["finish_reason"] for c in answer["choices"]] == ["length"] * 2 * n
    assert answer["usage"] == usage(5, 0)


def test_a_prompt_of_text_is_echoed_as_it_was_written(web: httpx.Client) -> None:
    body = BODY | {"prompt": "the quick é fox", "echo": True, "logprobs": 0, "max_tokens": 0}
    (choice,) = web.post("/v1/completions", json=body).json()["choices"]
    assert choice["text"] == "the quick é fox"
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    for token, begin in zip(choice["logprobs"]["tokens"], offsets, strict=True):
        assert token.startswith("bytes:") or choice["text"][begin:].startswith(token)
    cut = web.post("/v1/completions", json=body | {"truncate_prompt_tokens": 3}).json()["choices"][0]
    assert choice["text"].endswith(cut["text"])
    assert (len(cut["logprobs"]["tokens"]), cut["logprobs"]["text_offset"][0]) == (3, 0)


def test_prompt_logprobs_have_vllms_form(web: httpx.Client) -> None:
    body = BODY | {"prompt": [33, 34], "prompt_logprobs": 2}
    answer = web.post("/v1/completions", json=body).json()
    first, second = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second.keys() == {"0", "1", "34"}
    assert second["34"] == {"logprob": -0.5, "rank": None, "decoded_token": "B"}
    chat = {"model": "echo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "prompt_logprobs": 1}
    assert web.post("/v1/chat/completions", json=chat).json()["prompt_logprobs"][0] is None


def test_a_request_for_too_many_prompt_logprobs_is_refused(web: httpx.Client) -> None:
    body = BODY | {"prompt": [[33] * 4000] * 8, "prompt_logprobs": 20}
    refused = web.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert str(2**19) in refused.json()["error"]["message"]
    until(lambda: metric(web, "twostroke_requests_running") == 0)
    until(lambda: metric(web, "twostroke_http_requests_active") == 0)


def test_usage_may_stand_in_every_chunk(web: httpx.Client) -> None:
    body = BODY | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last, _ = events(web.post("/v1/completions", json=body))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-1] == last["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_request(web: httpx.Client, echo: Served, stream: bool) -> None:
    payload = json.dumps(BODY | {"max_tokens": 4000, "prompt": [echo_engine.SLOW], "stream": stream, "n": 3}).encode()
    url = httpx.URL(echo.url)
    with socket.create_connection((url.host, url.port)) as peer:
        peer.sendall(raw_request(payload))
        until(lambda: metric(web, "twostroke_requests_running") == 3)
        assert metric(web, "twostroke_kv_pages_used") > 0
    until(lambda: metric(web, "twostroke_requests_running") == 0, within_s=30)  # of its own it would take 200 s
    until(lambda: metric(web, "twostroke_kv_pages_used") == 0)
    until(lambda: metric(web, "twostroke_http_requests_active") == 0)


def test_a_client_that_never_reads_is_cut_off_and_its_request_freed(web: httpx.Client, echo: Served) -> None:
    # 30 choices with wide logprobs make megabytes: more than the sockets' buffers and the 1 MiB that may wait.
    body = BODY | {"prompt": [[n] for n in range(30, 60)], "max_tokens": 4000, "logprobs": 5, "stream": True}
    payload = json.dumps(body).encode()
    url = httpx.URL(echo.url)
    with socket.create_connection((url.host, url.port)) as peer:
        peer.sendall(raw_request(payload))
        until(lambda: metric(web, "twostroke_requests_running") > 0)
        until(lambda: metric(web, "twostroke_requests_running") == 0)
    until(lambda: metric(web, "twostroke_http_requests_active") == 0)


def test_metrics_count_what_was_done(web: httpx.Client) -> None:
    before = {
        name: metric(web, f"twostroke_{name}") for name in ("prompt_tokens_total", "output_tokens_total", "e2e_seconds_count")
    }
    web.post("/v1/completions", json=BODY | {"prompt": [35, 36, 37], "max_tokens": 5})
    after = {name: metric(web, f"twostroke_{name}") for name in before}
    assert {name: after[name] - before[name] for name in before} == {
        "prompt_tokens_total": 3,
        "output_tokens_total": 5,
        "e2e_seconds_count": 1,
    }


def test_the_interface_describes_itself(web: httpx.Client) -> None:
    paths = web.get("/openapi.json").json()["paths"]
    schema = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"model", "messages", "temperature"} <= schema["properties"].keys()


def test_logs_hold_no_prompt(web: httpx.Client, echo: Served) -> None:
    secret = "xyzzy-plugh"
    for change in ({"prompt": secret}, {"prompt": secret, "suffix": secret}, {"prompt": secret, "model": secret}):
        web.post("/v1/completions", json=BODY | change, headers={"authorization": f"Bearer {secret}"})
    web.get(f"/nowhere?{secret}")
    assert secret not in echo.stderr.read_text()


# Servers of their own: tests that end something, or need other limits.


def test_keys_guard_everything_but_the_probes(echo_model: Path, tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("sesame\n")
    with echo_server(echo_model, tmp_path, ["--api-key-file", str(key_file)]) as served:
        with httpx.Client(base_url=served.url, trust_env=False) as web:
            for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
                assert web.get(path).status_code == 401
            assert web.post("/v1/completions", json=BODY, headers={"authorization": "Bearer guess"}).status_code == 401
            assert web.get("/health").status_code == web.get("/ready").status_code == 200
            assert web.post("/v1/completions", json=BODY, headers={"authorization": "Bearer sesame"}).status_code == 200
        assert served.stop() == 0
        assert "sesame" not in served.stderr.read_text()


def test_requests_over_the_limit_are_turned_away_at_once(echo_model: Path, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    with echo_server(echo_model, tmp_path, ["--max-concurrent", "2", f"--engine=--hold={hold}"]) as served:
        with httpx.Client(base_url=served.url, timeout=30, trust_env=False) as web:
            threads = [threading.Thread(target=web.post, args=("/v1/completions",), kwargs={"json": BODY}) for _ in range(2)]
            with held(hold):
                for thread in threads:
                    thread.start()
                until(lambda: metric(web, "twostroke_http_requests_active") == 2)
                refused = web.post("/v1/completions", json=BODY)
                assert refused.status_code == 429
                assert 1 <= int(refused.headers["retry-after"]) <= 30
                assert refused.json()["error"]["type"] == "rate_limit_error"
            for thread in threads:
                thread.join()
            assert web.post("/v1/completions", json=BODY).status_code == 200


def test_a_killed_engine_is_told_to_clients_and_replaced(echo_model: Path, tmp_path: Path) -> None:
    with echo_server(echo_model, tmp_path) as served, httpx.Client(base_url=served.url, timeout=20, trust_env=False) as web:
        long = BODY | {"prompt": [echo_engine.SLOW], "max_tokens": 4000}
        with web.stream("POST", "/v1/completions", json=long | {"stream": True}) as stream, ThreadPoolExecutor(1) as pool:
            lines = stream.iter_lines()
            next(lines)
            whole = pool.submit(web.post, "/v1/completions", json=long)
            until(lambda: metric(web, "twostroke_requests_running") == 2)
            os.kill(served.engine_pid, signal.SIGKILL)
            response = whole.result()
            assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_lost")
            assert response.headers["x-should-retry"] == "false"
            *_, last = [line for line in lines if line]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_lost"
        unready = web.get("/ready")
        assert (unready.status_code, unready.json()["status"]) == (503, "loading")
        refused = web.post("/v1/completions", json=BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert web.get("/health").status_code == 200
        until(lambda: web.get("/ready").status_code == 200)
        assert web.post("/v1/completions", json=BODY).status_code == 200
        assert metric(web, "twostroke_engine_restarts") == 1


def test_sigterm_finishes_what_is_in_flight_takes_nothing_new_and_exits_0(echo_model: Path, tmp_path: Path) -> None:
    with echo_server(echo_model, tmp_path) as served:
        body = BODY | {"prompt": [echo_engine.SLOW], "max_tokens": 100, "stream": True}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=20, trust_env=False) as stream:
            lines = stream.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            until(lambda: not is_open(served.url))
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert served.process.wait(60) == 0
        assert served.process.stdout is not None
        assert json.loads(served.process.stdout.readline())["requests"] == 1
        assert not Path(f"/proc/{served.engine_pid}").exists()


def test_a_request_that_outlives_the_grace_is_cut_and_the_exit_is_still_0(echo_model: Path, tmp_path: Path) -> None:
    with echo_server(echo_model, tmp_path, ["--grace-s", "0.5"]) as served:
        body = BODY | {"prompt": [echo_engine.SLOW], "max_tokens": 4000, "stream": True}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=20, trust_env=False) as stream:
            lines = stream.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        assert served.process.wait(60) == 0


def test_a_second_sigterm_ends_the_server_at_once(echo_model: Path, tmp_path: Path) -> None:
    """The request in flight would take 40 s, and the grace is longer."""
    with echo_server(echo_model, tmp_path, ["--grace-s", "300"]) as served:
        body = BODY | {"prompt": [echo_engine.SLOW], "max_tokens": 4000, "stream": True}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=20, trust_env=False) as stream:
            lines = stream.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            until(lambda: not is_open(served.url))
            assert served.process.poll() is None
            served.process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        assert served.process.wait(10) == 0
        assert not Path(f"/proc/{served.engine_pid}").exists()


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_sentence(echo_model: Path, tmp_path: Path) -> None:
    command = echo_command(echo_model, ["--engine=--load-error", "--engine=input"])
    done = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path), timeout=30)
    assert done.returncode == 2
    assert "says the echo engine" in json.loads(done.stdout)["error"]
    assert "Traceback" not in done.stderr


def test_a_killed_server_leaves_no_engine_and_no_file(
    echo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "t"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with echo_server(echo_model, tmp_path) as served:
        served.process.kill()
        served.process.wait()
        until(lambda: not psutil.pid_exists(served.engine_pid) or psutil.Process(served.engine_pid).status() == "zombie")
    assert list(temporary.iterdir()) == []


def test_requests_while_loading_get_503_and_the_port_answers(echo_model: Path, tmp_path: Path) -> None:
    # The ready line comes only when loaded, so the port is found by asking the kernel which one the child listens on.
    command = echo_command(echo_model, ["--engine=--load-s", "--engine=6"])
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(tmp_path))
    try:

        def port() -> int | None:
            listening = [c for c in psutil.Process(process.pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
            return listening[0].laddr.port if listening else None

        until(port)
        url = f"http://127.0.0.1:{port()}"
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
        assert httpx.get(f"{url}/ready", trust_env=False).status_code == 503
        refused = httpx.post(f"{url}/v1/completions", json=BODY, trust_env=False)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_not_ready")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_the_http_process_does_not_import_torch() -> None:
    program = "import sys, twostroke.server.run; assert 'torch' not in sys.modules, 'torch'; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"PYTHONPATH": str(SOURCE)})


def test_many_streams_at_once_all_end_whole(web: httpx.Client, echo: Served) -> None:
    async def scenario() -> None:
        async with httpx.AsyncClient(base_url=echo.url, timeout=30, trust_env=False) as client:

            async def one(n: int) -> None:
                body = BODY | {"prompt": [40 + n % 20], "max_tokens": 20, "stream": True}
                response = await client.post("/v1/completions", json=body)
                assert response.status_code == 200
                assert response.text.endswith("data: [DONE]\n\n")

            await asyncio.gather(*(one(n) for n in range(60)))

    asyncio.run(scenario())
    until(lambda: metric(web, "twostroke_http_requests_active") == 0)


def test_every_response_has_an_id_and_keeps_the_callers_where_it_is_sane(web: httpx.Client) -> None:
    ids = set()
    for method, path in (("GET", "/health"), ("GET", "/nowhere"), ("POST", "/v1/completions"), ("PUT", "/v1/models")):
        ids.add(web.request(method, path).headers["x-request-id"])
    assert len(ids) == 4
    assert web.post("/v1/completions", json=BODY, headers={"x-request-id": "job-7:a"}).headers["x-request-id"] == "job-7:a"
    for insane in ("x" * 65, "a b", "<script>", "é".encode().decode("latin-1"), ""):
        given = insane.encode("latin-1")
        assert web.get("/health", headers={b"x-request-id": given}).headers["x-request-id"].startswith("req-")
