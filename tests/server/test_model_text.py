"""Tokenizer and template of a served model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.core.errors import CorruptFileError
from twostroke.data.tokenizer import train_tokenizer
from twostroke.server import text as text_module
from twostroke.server.errors import ApiError
from twostroke.server.text import ModelText


@pytest.fixture(scope="module")
def model_text(echo_model: Path) -> ModelText:
    return ModelText(echo_model)


@given(st.text(max_size=30))
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(model_text: ModelText, text: str) -> None:
    ids = model_text.tokenizer.encode(text, add_special_tokens=False).ids
    if 0 not in ids:  # the special token stands for its own name
        assert b"".join(map(model_text.token_bytes, ids)) == text.encode(errors="replace")


def test_long_texts_give_the_same_tokens_as_short_ones(model_text: ModelText, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the lazy dog " * 50
    direct = asyncio.run(model_text.encode(text, "prompt", special=True))
    monkeypatch.setattr(text_module, "LONG_TEXT", 10)
    assert asyncio.run(model_text.encode(text, "prompt", special=True)) == direct


@pytest.mark.parametrize("text", ["", "half a pair \ud800"])
def test_text_without_tokens_or_characters_is_a_400(model_text: ModelText, text: str) -> None:
    with pytest.raises(ApiError) as caught:
        asyncio.run(model_text.encode(text, "prompt", special=True))
    assert (caught.value.status, caught.value.param) == (400, "prompt")


def decode(model_text: ModelText, ids: list[int]) -> str:
    return b"".join(map(model_text.token_bytes, ids)).decode()


def test_messages_go_through_the_models_template(model_text: ModelText) -> None:
    ids = asyncio.run(model_text.encode_chat([{"role": "user", "content": "the dog"}]))
    assert decode(model_text, ids) == "<user>the dog<assistant>"


def directory_with(path: Path, **config: object) -> Path:
    train_tokenizer(iter(["a b c " * 9]), 300, path / "tokenizer.json")
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_the_default_of_several_templates_and_the_special_tokens_are_used(tmp_path: Path) -> None:
    templates = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
    ]
    model = ModelText(directory_with(tmp_path, chat_template=templates, bos_token={"content": "<|endoftext|>"}))
    assert asyncio.run(model.encode_chat([{"role": "user", "content": "a"}]))[0] == 0


def test_a_template_file_wins_over_the_one_in_the_config(tmp_path: Path) -> None:
    directory_with(tmp_path, chat_template="config")
    (tmp_path / "chat_template.jinja").write_text("file")
    model = ModelText(tmp_path)
    assert decode(model, asyncio.run(model.encode_chat([{"role": "user", "content": "x"}]))) == "file"


def test_a_template_that_refuses_the_messages_is_a_400(tmp_path: Path) -> None:
    model = ModelText(directory_with(tmp_path, chat_template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(ApiError, match="alternate") as caught:
        asyncio.run(model.encode_chat([{"role": "user", "content": "a"}]))
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
def test_a_broken_tokenizer_config_is_named(tmp_path: Path, content: str) -> None:
    directory_with(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(CorruptFileError, match=r"tokenizer_config\.json"):
        ModelText(tmp_path)
