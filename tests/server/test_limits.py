"""Limits of keys, of the queue and of the time that clients wait, over HTTP in front of the echo engine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import echo_engine
import httpx
import pytest
from serving import Served, echo_server, metric, until

from machines import profile
from twostroke.core.profile import read_fingerprint, save_profile
from twostroke.server.wait import TRUSTED

BODY: dict[str, Any] = {"model": "echo", "prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
LONG = BODY | {"max_tokens": 4000, "stream": True}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@contextlib.contextmanager
def served(model: Path, home: Path, *options: str) -> Iterator[tuple[Served, httpx.Client]]:
    with echo_server(model, home, options) as server, httpx.Client(base_url=server.url, timeout=30, trust_env=False) as web:
        yield server, web


@pytest.fixture(scope="module")
def keyed(echo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Path]]:
    home = tmp_path_factory.mktemp("keyed")
    (home / "keys").write_text(
        "sesame-rate name=rate requests_per_minute=3\nsesame-once name=once concurrent=1\nsesame-few tokens_per_minute=20\n"
        "sesame-free name=free\n"
    )
    options = ("--api-key-file", str(home / "keys"), "--usage-log", str(home / "usage.jsonl"))
    with served(echo_model, home, *options) as (_, web):
        yield web, home


def series(web: httpx.Client, name: str) -> dict[str, float]:
    """Values of a metric by the text of its labels."""
    lines = web.get("/metrics", headers=bearer("sesame-free")).text.splitlines()
    found = [line.removeprefix(name).rpartition(" ") for line in lines if line.startswith(name + "{")]
    return {labels: float(value) for labels, _, value in found}


def test_a_key_s_requests_of_a_minute_are_counted_before_their_bodies_are_read(keyed: tuple[httpx.Client, Path]) -> None:
    web, _ = keyed
    for content in (json.dumps(BODY), "{", json.dumps(BODY)):  # one of them is no request, and counts
        web.post("/v1/completions", content=content, headers=bearer("sesame-rate") | {"content-type": "application/json"})
    for route in ("/v1/chat/completions", "/tokenize"):
        refused = web.post(route, content="{", headers=bearer("sesame-rate"))
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert 0 < int(refused.headers["retry-after-ms"]) <= 60_000
    assert web.get("/v1/models", headers=bearer("sesame-rate")).status_code == 200
    assert web.post("/v1/completions", json=BODY, headers=bearer("sesame-free")).status_code == 200


def test_a_key_has_no_more_places_than_its_own(keyed: tuple[httpx.Client, Path]) -> None:
    web, _ = keyed
    headers = bearer("sesame-once")
    assert web.post("/v1/completions", json=BODY | {"n": 2}, headers=headers).status_code == 400
    with web.stream("POST", "/v1/completions", json=LONG, headers=headers) as stream:
        lines = stream.iter_lines()  # which ends the stream when it goes
        next(lines)
        assert web.post("/v1/completions", json=BODY, headers=headers).status_code == 429
        assert web.post("/v1/completions", json=BODY, headers=bearer("sesame-free")).status_code == 200
    until(lambda: web.post("/v1/completions", json=BODY, headers=headers).status_code == 200)


def test_a_key_s_tokens_of_a_minute_are_those_of_its_prompts_and_answers(keyed: tuple[httpx.Client, Path]) -> None:
    web, _ = keyed
    headers = bearer("sesame-few")
    too_long = web.post("/v1/completions", json=BODY | {"prompt": [5] * 21}, headers=headers)
    assert too_long.status_code == 400
    assert too_long.json()["error"]["param"] == "prompt"
    assert web.post("/v1/completions", json=BODY | {"max_tokens": 10}, headers=headers).status_code == 200  # 13 tokens
    refused = web.post("/v1/completions", json=BODY | {"prompt": [5] * 8}, headers=headers)
    assert refused.status_code == 429
    assert web.post("/v1/completions", json=BODY | {"max_tokens": 9}, headers=headers).status_code == 200  # 25
    assert web.post("/v1/completions", content="{", headers=headers).status_code == 429


def test_use_is_shown_and_logged_by_the_names_of_keys(keyed: tuple[httpx.Client, Path]) -> None:
    web, home = keyed
    before = series(web, "twostroke_key_output_tokens").get('{key="free"}', 0.0)
    answer = web.post("/v1/completions", json=BODY, headers=bearer("sesame-free")).json()
    found = series(web, "twostroke_key_output_tokens")
    assert found['{key="free"}'] == before + 3
    assert {labels[:10] for labels in found} == {'{key="rate', '{key="once', '{key="free', '{key="key-'}
    until(lambda: answer["id"] in (home / "usage.jsonl").read_text())
    lines = [json.loads(line) for line in (home / "usage.jsonl").read_text().splitlines()]
    (mine,) = [line for line in lines if line["id"] == answer["id"]]
    assert (mine["key"], mine["prompt_tokens"], mine["completion_tokens"], mine["outcome"]) == ("free", 3, 3, "complete")
    assert mine["finish_reasons"] == {"length": 1}
    assert 0 < mine["ttft_s"] <= mine["e2e_s"]
    metrics = web.get("/metrics", headers=bearer("sesame-free")).text
    assert "sesame" not in metrics + (home / "usage.jsonl").read_text() + (home / "stderr.txt").read_text()


def test_a_request_that_was_refused_is_in_no_usage_log(keyed: tuple[httpx.Client, Path]) -> None:
    web, home = keyed
    before = (home / "usage.jsonl").read_text().count("\n")
    bad = web.post("/v1/completions", json=BODY | {"prompt": [echo_engine.VOCAB]}, headers=bearer("sesame-free"))
    assert bad.status_code == 400
    last = web.post("/v1/completions", json=BODY, headers=bearer("sesame-free")).json()["id"]
    until(lambda: last in (home / "usage.jsonl").read_text())
    assert (home / "usage.jsonl").read_text().count("\n") == before + 1


def test_tokens_that_wait_are_bounded(echo_model: Path, tmp_path: Path) -> None:
    with (
        served(echo_model, tmp_path, "--max-queued-tokens", "50", "--max-running", "1") as (_, web),
        ThreadPoolExecutor(1) as pool,
    ):
        with web.stream("POST", "/v1/completions", json=LONG) as running:
            lines = running.iter_lines()  # which ends the stream when it goes
            next(lines)
            waits = pool.submit(web.post, "/v1/completions", json=BODY | {"prompt": [5] * 60})  # alone it is never too long
            until(lambda: metric(web, "twostroke_waiting_tokens") == 60)
            refused = web.post("/v1/completions", content="{")
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "too_many_tokens"
            assert int(refused.headers["retry-after-ms"]) >= 250
        assert waits.result().status_code == 200
        assert metric(web, "twostroke_waiting_tokens") == 0
        assert metric(web, 'twostroke_requests_refused_total{why="queue"}') == 1


@pytest.fixture
def planned_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home in which this machine was calibrated, with steps of the echo model planned at some milliseconds."""
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path))
    save_profile(dataclasses.replace(profile(op_launch_s=2e-4, linear_launch_s=2e-4), fingerprint=read_fingerprint()))
    return tmp_path


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_client_would_not_wait_is_refused_before_any_work(
    echo_model: Path, planned_home: Path, stream: bool
) -> None:
    def seconds(text: str) -> dict[str, str]:
        return {"x-stainless-read-timeout": text}

    with served(echo_model, planned_home, "--max-running", "1", "--engine=--step-s=0.02") as (_, web):
        body = BODY | {"stream": stream}
        assert web.post("/v1/completions", json=body, headers=seconds("0.000001")).status_code == 200, "nothing was measured"
        for _ in range(TRUSTED + 4):
            assert web.post("/v1/completions", json=body, headers=seconds("600")).status_code == 200
        with web.stream("POST", "/v1/completions", json=LONG) as running:
            lines = running.iter_lines()  # which ends the stream when it goes
            next(lines)
            computed = metric(web, "twostroke_prompt_tokens_total")
            for content in ("{", json.dumps(body)):  # by its headers alone
                refused = web.post("/v1/completions", content=content, headers=seconds("2.0"))
                assert refused.status_code == 429
                assert refused.json()["error"]["code"] == "deadline_not_met"
                assert int(refused.headers["retry-after-ms"]) >= 250
            late = web.post("/v1/completions", json=body | {"timeout_s": 2.0})
            assert (late.status_code, late.json()["error"]["code"]) == (429, "deadline_not_met")
            assert metric(web, "twostroke_prompt_tokens_total") == computed
            assert metric(web, "twostroke_predicted_wait_seconds") > 2.0
        until(lambda: metric(web, "twostroke_requests_running") == 0)
        for text in ("30", "600", "soon", "-1", "nan", "", "1e9"):
            assert web.post("/v1/completions", json=body, headers=seconds(text)).status_code == 200, text


def test_a_whole_answer_that_must_take_longer_than_its_client_waits_is_refused_for_good(
    echo_model: Path, planned_home: Path
) -> None:
    with served(echo_model, planned_home, "--engine=--step-s=0.02") as (_, web):
        for _ in range(TRUSTED):
            assert web.post("/v1/completions", json=BODY).status_code == 200
        headers = {"x-stainless-read-timeout": "5"}
        refused = web.post("/v1/completions", json=LONG | {"stream": False}, headers=headers)  # 80 s
        assert refused.status_code == 429
        assert refused.headers["x-should-retry"] == "false", "an empty server would take as long"
        with web.stream("POST", "/v1/completions", json=LONG, headers=headers) as stream:
            assert stream.status_code == 200, "of a stream something comes at once"
        chat = {"model": "echo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4000}
        with web.stream("POST", "/v1/chat/completions", json=chat | {"stream": True}, headers=headers) as stream:
            assert stream.status_code == 200


def test_answers_are_expected_to_be_as_short_as_those_before(echo_model: Path, planned_home: Path) -> None:
    with served(echo_model, planned_home, "--max-running", "1", "--engine=--step-s=0.02") as (_, web):
        text = web.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
        for _ in range(32):
            answer = web.post("/v1/completions", json=BODY | {"max_tokens": 100, "ignore_eos": False, "stop": text[-1]})
            assert answer.json()["usage"]["completion_tokens"] <= 3
        waits = {}
        for is_certain in (True, False):
            with web.stream("POST", "/v1/completions", json=LONG | {"ignore_eos": is_certain}) as running:
                lines = running.iter_lines()  # which ends the stream when it goes
                next(lines)
                waits[is_certain] = metric(web, "twostroke_predicted_wait_seconds")
            until(lambda: metric(web, "twostroke_requests_running") == 0)
    assert waits[False] < 0.4 * waits[True]


def test_a_machine_that_was_not_calibrated_predicts_nothing(echo_model: Path, tmp_path: Path) -> None:
    with served(echo_model, tmp_path) as (_, web):
        for _ in range(TRUSTED + 1):
            answer = web.post("/v1/completions", json=BODY, headers={"x-stainless-read-timeout": "0.000001"})
            assert answer.status_code == 200
