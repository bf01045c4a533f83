"""With --log-json each line of the log is a JSON object, one for each request, and none holds a prompt or a key."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import httpx
from serving import echo_server

from twostroke.server.json_logs import JsonLines


def test_each_request_is_a_line_without_prompt_or_key(echo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("hush-hush\n")
    asked = {"model": "echo", "prompt": "the private fox", "max_tokens": 2}
    with echo_server(echo_model, tmp_path, ["--log-json", "--api-key-file", str(tmp_path / "keys")]) as served:
        with httpx.Client(base_url=served.url, timeout=30, trust_env=False) as web:
            key = {"authorization": "Bearer hush-hush"}
            named = key | {"x-request-id": "mine-1"}
            assert web.post("/v1/completions", json=asked, headers=named).status_code == 200
            assert web.post("/v1/completions", json=asked | {"n": -1}, headers=key).status_code == 400
            assert web.post("/v1/completions", json=asked).status_code == 401
            assert web.get("/a/private/fox", headers=key).status_code == 404
        assert served.stop() == 0
    text = served.stderr.read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    requests = [line for line in lines if line["message"] == "request"]
    assert [(line["route"], line["status"]) for line in requests] == [
        ("/v1/completions", 200), ("/v1/completions", 400), ("/v1/completions", 401), ("other", 404),
    ]  # fmt: skip
    assert requests[0]["request_id"] == "mine-1"
    assert all(line["level"] == "info" and line["seconds"] >= 0 and line["time"].endswith("Z") for line in requests)
    assert "fox" not in text
    assert "hush" not in text


def test_an_exception_is_named_without_its_text() -> None:
    try:
        raise ValueError("the private fox")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "", 0, "it %s\nfailed", ("has",), sys.exc_info())
    line = JsonLines().format(record)
    assert "\n" not in line
    assert {"level": "error", "logger": "a", "message": "it has\nfailed", "exception": "ValueError"}.items() <= json.loads(
        line
    ).items()
