"""A model directory for the echo server, and the server itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serving import Served, echo_server

from twostroke.core.families import config_from_spec
from twostroke.core.spec import ModelSpec
from twostroke.data.tokenizer import train_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def echo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough of a model directory for the HTTP process: config, tokenizer, chat template. No weights."""
    directory = tmp_path_factory.mktemp("echo-model")
    train_tokenizer(iter(["the quick brown fox jumps over the lazy dog " * 3]), 300, directory / "tokenizer.json")
    spec = ModelSpec("llama", 300, 1, 16, 2, 2, 8, 32, 4096, eos_token_ids=(0,))
    (directory / "config.json").write_text(json.dumps(config_from_spec(spec)))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}))
    return directory


@pytest.fixture(scope="module")
def echo(echo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One echo server for the tests of a module that leave it as they found it."""
    with echo_server(echo_model, tmp_path_factory.mktemp("echo")) as served:
        yield served


@pytest.fixture(scope="module")
def web(echo: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=echo.url, timeout=20, trust_env=False) as client:
        yield client
