"""Tokenizer and template of a served model."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.core.errors import CorruptFileError
from twostroke.data.tokenizer import load_tokenizer, train_tokenizer
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


@pytest.mark.parametrize("length", [500, 5_000, 50_000])
def test_texts_of_any_length_give_the_librarys_tokens(model_text: ModelText, length: int) -> None:
    texts = [("the lazy dog é日 " * length)[:length], "fox"]
    expected = [model_text.tokenizer.encode(text).ids for text in texts]
    assert asyncio.run(model_text.encode(texts, "prompt", special=True)) == expected


@pytest.mark.alone
def test_the_event_loop_goes_on_while_a_long_text_is_tokenised(model_text: ModelText) -> None:
    async def scenario() -> tuple[float, float]:
        encoding = asyncio.ensure_future(model_text.encode(["the quick brown fox " * 90_000], "prompt", special=True))
        begun = last = time.perf_counter()
        longest = 0.0
        while not encoding.done():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        await encoding
        return longest, last - begun

    longest, whole = asyncio.run(scenario())
    # Tokenizer.encode keeps the interpreter: then the one wait is the whole time, a second or two. Here it is some 30 ms, for
    # handing over 900,000 ids.
    assert longest < 0.5 * whole


def test_short_texts_do_not_wait_for_long_ones(model_text: ModelText) -> None:
    async def scenario() -> list[int]:
        ended: list[int] = []

        async def encode(length: int) -> None:
            await model_text.encode(["fox " * length], "prompt", special=True)
            ended.append(length)

        await asyncio.gather(encode(100_000), encode(2_000), encode(10))
        return ended

    assert asyncio.run(scenario()) == [10, 2_000, 100_000]


def test_a_tokenizer_that_fails_at_a_text_is_a_sentence_of_500(model_text: ModelText) -> None:
    class PanicException(BaseException):
        pass

    def panic(*_: object, **__: object) -> None:
        raise PanicException("called `Option::unwrap()`")

    broken = copy.copy(model_text)
    broken.tokenizer = SimpleNamespace(encode_batch_fast=panic)
    with pytest.raises(ApiError, match="tokenizer failed on this text") as caught:
        asyncio.run(broken.encode(["a"], "prompt", special=True))
    assert (caught.value.status, caught.value.code) == (500, "tokenizer_error")


@pytest.mark.parametrize("text", ["", "half a pair \ud800"])
def test_text_without_tokens_or_characters_is_a_400(model_text: ModelText, text: str) -> None:
    with pytest.raises(ApiError) as caught:
        asyncio.run(model_text.encode([text], "prompt", special=True))
    assert (caught.value.status, caught.value.param) == (400, "prompt")


def chat_ids(model: ModelText, content: str) -> list[int]:
    async def scenario() -> list[int]:
        text = await model.render([{"role": "user", "content": content}])
        (ids,) = await model.encode([text], "messages", model.adds_special(None))
        return ids

    return asyncio.run(scenario())


def decode(model_text: ModelText, ids: list[int]) -> str:
    return b"".join(map(model_text.token_bytes, ids)).decode()


def test_messages_go_through_the_models_template(model_text: ModelText) -> None:
    assert decode(model_text, chat_ids(model_text, "the dog")) == "<user>the dog<assistant>"


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
    assert chat_ids(model, "a")[0] == 0


def test_a_template_file_wins_over_the_one_in_the_config(tmp_path: Path) -> None:
    directory_with(tmp_path, chat_template="config")
    (tmp_path / "chat_template.jinja").write_text("file")
    model = ModelText(tmp_path)
    assert decode(model, chat_ids(model, "x")) == "file"


def test_a_template_that_refuses_the_messages_is_a_400(tmp_path: Path) -> None:
    model = ModelText(directory_with(tmp_path, chat_template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(ApiError, match="alternate") as caught:
        chat_ids(model, "a")
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
def test_a_broken_tokenizer_config_is_named(tmp_path: Path, content: str) -> None:
    directory_with(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(CorruptFileError, match=r"tokenizer_config\.json"):
        ModelText(tmp_path)


def test_loading_does_not_write_the_vocabulary_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's ``to_str`` lists every id that is missing: 8 GB for one of 2**31."""
    directory_with(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    fake = mock.MagicMock(wraps=tokenizer)
    fake.decoder, fake.normalizer, fake.pre_tokenizer = tokenizer.decoder, tokenizer.normalizer, tokenizer.pre_tokenizer
    fake.model = tokenizer.model
    monkeypatch.setattr("twostroke.server.text.load_tokenizer", lambda _: fake)
    ModelText(tmp_path)
    fake.to_str.assert_not_called()


def test_a_model_without_a_template_says_so(model_text: ModelText, echo_model: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((echo_model / name).read_bytes())
    assert (model_text.has_template, ModelText(tmp_path).has_template) == (True, False)
