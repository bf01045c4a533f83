"""Prompts have the wanted length and come out the same for the same seed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from twostroke.bench.prompts import WORDS, PromptMaker
from twostroke.core.errors import DataError
from twostroke.data.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    rng = random.Random(0)
    text = (" ".join(rng.choices(WORDS, k=2000)) for _ in range(3))
    return train_tokenizer(text, 500, tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.mark.parametrize("n_tokens", [1, 2, 17, 64, 500])
def test_a_tokenizer_makes_lengths_exact_to_a_token(tokenizer: Tokenizer, n_tokens: int) -> None:
    maker = PromptMaker(tokenizer)
    rng = random.Random(1)
    for _ in range(10):
        found = len(tokenizer.encode(maker.make(n_tokens, rng)).ids)
        assert abs(found - n_tokens) <= 1  # a merge across the cut can join two tokens


def test_without_a_tokenizer_words_stand_for_tokens() -> None:
    assert len(PromptMaker().make(400, random.Random(0)).split()) == 300


def test_text_of_a_file_is_cut_at_words(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    words = [f"w{i}" for i in range(500)]
    file.write_text(" ".join(words))
    maker = PromptMaker(text_file=file)
    rng = random.Random(0)
    for n_tokens in (8, 400, 2000):
        prompt = maker.make(n_tokens, rng).split()
        assert len(prompt) == n_tokens * 3 // 4
        assert set(prompt) <= set(words)


def test_prompts_are_a_function_of_the_random_state(tokenizer: Tokenizer) -> None:
    assert PromptMaker(tokenizer).make(50, random.Random(5)) == PromptMaker(tokenizer).make(50, random.Random(5))


def test_prompts_differ_from_their_first_words_on() -> None:
    rng = random.Random(0)
    beginnings = {tuple(PromptMaker().make(64, rng).split()[:8]) for _ in range(200)}
    assert len(beginnings) == 200


@pytest.mark.parametrize("content", [None, "too short"])
def test_a_text_that_cannot_be_cut_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match=r"text\.txt"):
        PromptMaker(text_file=file)
