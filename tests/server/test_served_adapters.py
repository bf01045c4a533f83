"""Adapters over HTTP: loaded and unloaded while the server runs, listed, asked for as models, guarded by its keys."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serving import Served, echo_server

from twostroke.core.adapter_names import adapters_of
from twostroke.core.errors import ConfigError
from twostroke.server.gate import ADAPTER_ROUTES

LOAD, UNLOAD = sorted(ADAPTER_ROUTES)


@pytest.fixture
def web(echo: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=echo.url, timeout=30) as client:
        yield client


def answer(web: httpx.Client, model: str) -> httpx.Response:
    return web.post("/v1/completions", json={"model": model, "prompt": [5], "max_tokens": 1, "logprobs": 0})


def error(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["message"]


def test_an_adapter_is_loaded_listed_asked_for_and_unloaded(web: httpx.Client, tmp_path: Path) -> None:
    plain = answer(web, "echo").json()["choices"][0]["text"]
    loaded = web.post(LOAD, json={"lora_name": "poet", "lora_path": str(tmp_path)})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'poet' added successfully.")
    listed = web.get("/v1/models").json()["data"]
    assert [(model["id"], model.get("parent")) for model in listed] == [("echo", None), ("poet", "echo")]
    assert web.get("/v1/models/poet").json() == listed[1]
    adapted = answer(web, "poet").json()
    assert adapted["model"] == "poet"
    assert adapted["choices"][0]["text"] != plain
    chat = {"model": "poet", "messages": [{"role": "user", "content": "fox"}], "max_tokens": 2}
    assert web.post("/v1/chat/completions", json=chat).status_code == 200
    unloaded = web.post(UNLOAD, json={"lora_name": "poet"})
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'poet' removed successfully.")
    assert error(answer(web, "poet")) == (404, "model 'poet' is not served here. Served: echo.")
    assert answer(web, "echo").json()["choices"][0]["text"] == plain


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (UNLOAD, {"lora_name": "nobody"}, 404, "adapter 'nobody' is not served here."),
        (UNLOAD, {"lora_name": "echo"}, 404, "adapter 'echo' is not served here."),
        (LOAD, {"lora_name": "echo", "lora_path": "/"}, 400, "'echo' is served already."),
        (LOAD, {"lora_name": "a", "lora_path": "/nowhere"}, 400, "/nowhere has no adapter_config.json."),
        (LOAD, {"lora_name": "", "lora_path": "/"}, 400, "must have 1 to 200 printable characters"),
        (LOAD, {"lora_name": "a\nb", "lora_path": "/"}, 400, "must have 1 to 200 printable characters"),
        (LOAD, {"lora_name": "a"}, 400, "lora_path is missing"),
        (LOAD, {"lora_name": "a", "lora_path": 3}, 400, "lora_path is not valid"),
        (LOAD, {"lora_name": "a", "lora_path": "/", "rank": 3}, 400, "rank is not a known field"),
        (LOAD, [], 400, "not valid"),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(
    path: str, body: object, status: int, says: str, web: httpx.Client
) -> None:
    found, message = error(web.post(path, json=body))
    assert (found, says in message) == (status, True), message
    assert [model["id"] for model in web.get("/v1/models").json()["data"]] == ["echo"]


def test_a_new_engine_gets_the_adapters_of_the_last_one(echo_model: Path, tmp_path: Path) -> None:
    with echo_server(echo_model, tmp_path) as served, httpx.Client(base_url=served.url, timeout=30) as web:
        kept, gone = tmp_path / "kept", tmp_path / "gone"
        for directory in (kept, gone):
            directory.mkdir()
            assert web.post(LOAD, json={"lora_name": directory.name, "lora_path": str(directory)}).status_code == 200
        before = answer(web, "kept").json()["choices"][0]["text"]
        gone.rmdir()
        os.kill(served.engine_pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while answer(web, "kept").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert answer(web, "kept").json()["choices"][0]["text"] == before
        assert [model["id"] for model in web.get("/v1/models").json()["data"]] == ["echo", "kept"]
    assert "adapter 'gone' is not served any more" in served.stderr.read_text()


def test_adapters_are_changed_by_holders_of_a_key_alone(echo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    body = {"lora_name": "a", "lora_path": str(tmp_path)}
    with echo_server(echo_model, tmp_path, ["--api-key-file", str(tmp_path / "keys")]) as served:
        with httpx.Client(base_url=served.url, timeout=30) as web:
            assert web.post(LOAD, json=body).status_code == 401
            assert web.post(LOAD, json=body, headers={"authorization": "Bearer secret"}).status_code == 200


def test_a_server_without_keys_that_others_reach_changes_none(echo_model: Path, tmp_path: Path) -> None:
    with echo_server(echo_model, tmp_path, ["--host", "0.0.0.0"]) as served:
        with httpx.Client(base_url=served.url, timeout=30) as web:
            for path in (LOAD, UNLOAD):
                status, message = error(web.post(path, json={"lora_name": "a", "lora_path": str(tmp_path)}))
                assert status == 403
                assert "with an API key" in message
            assert answer(web, "echo").status_code == 200


def test_options_name_adapters_once_each_with_their_directories(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert adapters_of([f"a={tmp_path}"]) == {"a": tmp_path}
    for options, says in (
        (["a"], "must be NAME=DIR"),
        (["a="], "must be NAME=DIR"),
        ([f"={tmp_path}"], "printable"),
        ([f"a={tmp_path}", f"a={tmp_path}"], "names 'a' twice"),
        (["a=/nowhere"], "/nowhere has no adapter_config.json"),
    ):
        with pytest.raises(Exception, match=says) as raised:
            adapters_of(options)
        assert raised.value.exit_code == ConfigError.exit_code
