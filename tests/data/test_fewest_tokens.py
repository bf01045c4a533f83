"""A lower bound of a text's tokens: never above what the library counts."""

from __future__ import annotations

import json
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from twostroke.data.fewest_tokens import _SHRINKS, FewestTokens

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPACE = ALPHABET[ALPHABET.index("Ġ")]


def byte_level(normalizer: Any = None, splitter: Any = None) -> Tokenizer:
    vocab = {c: i for i, c in enumerate(ALPHABET)} | {2 * SPACE: 256, 4 * SPACE: 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(SPACE, SPACE), (2 * SPACE, 2 * SPACE)]))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitter or pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def byte_fallback(normalizer: Any = None, n_bytes: int = 256) -> Tokenizer:
    vocab = {f"<0x{i:02X}>": i for i in range(n_bytes)} | {"▁": 256, "▁▁": 257, "a": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "▁")], byte_fallback=True))
    tokenizer.normalizer = normalizer or normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


SPLIT = pre_tokenizers.Split(" ", "isolated")
BOUNDED = {
    "byte level": byte_level(),
    "byte level, split": byte_level(splitter=pre_tokenizers.Sequence([SPLIT, pre_tokenizers.ByteLevel(False)])),
    "NFC": byte_level(normalizers.NFC()),
    "NFKC": byte_level(normalizers.NFKC()),
    "NFD, NFC": byte_level(normalizers.Sequence([normalizers.NFD(), normalizers.NFC()])),
    "byte fallback": byte_fallback(),
}


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(
        alphabet=st.sampled_from(" a▁é日\u0301\u1fef\ufdfa\U0001d400\u212a\n") | st.characters(codec="utf-8"), max_size=60
    )
)
def test_no_text_becomes_fewer(text: str) -> None:
    for name, tokenizer in BOUNDED.items():
        assert FewestTokens(tokenizer).of(text) <= len(tokenizer.encode(text).ids), name


def test_a_long_text_has_many() -> None:
    for name, tokenizer in BOUNDED.items():
        # The longest token has 6 bytes ("<0x00>", or "▁▁"), or 5 ("<end>").
        assert FewestTokens(tokenizer).of(" " * 6_000) >= 1_000, name
    assert FewestTokens(BOUNDED["NFC"]).of("é" * 3_000) == 6_000 / 5 // 9 + 1


def test_there_is_no_bound_if_characters_may_disappear() -> None:
    nothing = {
        "replaced by less": byte_fallback(normalizers.Replace("  ", "")),
        "stripped": byte_level(normalizers.Strip()),
        "lower case": byte_level(normalizers.Lowercase()),
        "removed": byte_level(
            splitter=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])
        ),
        "white space": byte_level(splitter=pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()])),
        "bytes without a token": byte_fallback(n_bytes=200),
        "one token for any word": Tokenizer(models.WordLevel({"[UNK]": 0}, "[UNK]")),
        "pieces": Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)),
    }
    for name, tokenizer in nothing.items():
        assert FewestTokens(tokenizer).of(" " * 10_000) == 0, name


def test_a_special_token_may_swallow_the_white_space_beside_it() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True, special=True)])
    text = "<|end|>" + " " * 10_000
    assert len(tokenizer.encode(text).ids) == 1
    assert FewestTokens(tokenizer).of(text) == 0
    assert FewestTokens(tokenizer).of(" " * 10_000) > 1_000


def test_normal_forms_shrink_texts_by_no_more_than_is_taken() -> None:
    """Every code point: a text is at most s times its decomposition, and that at most 3 times its composition."""

    def n_bytes(text: str) -> int:
        return len(text.encode())

    points = [chr(i) for i in range(sys.maxunicode + 1) if not 0xD800 <= i < 0xE000]
    for form, composed in (("NFD", "NFC"), ("NFKD", "NFKC")):
        assert max(n_bytes(c) / n_bytes(unicodedata.normalize(form, c)) for c in points) <= _SHRINKS[form]
        growth = max(n_bytes(unicodedata.normalize("NFD", c)) / n_bytes(c) for c in points)
        assert growth * _SHRINKS[form] <= _SHRINKS[composed]


@pytest.mark.parametrize("kind", ["NFC", "NFD", "NFKC", "NFKD"])
def test_the_library_names_its_normal_forms_as_the_table_does(kind: str) -> None:
    assert json.loads(getattr(normalizers, kind)().__getstate__())["type"] == kind


def test_tokenizers_on_disk_are_bounded(assets: Path) -> None:
    folder = assets / "tokenizers" / "gpt2"
    tokenizer = Tokenizer(models.BPE.from_file(str(folder / "encoder.json"), str(folder / "vocab.bpe")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert FewestTokens(tokenizer).of("x" * 1_900_000) == -(-1_900_000 // 128)  # its longest are 128 bytes
