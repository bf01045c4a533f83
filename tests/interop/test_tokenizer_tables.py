"""Tokenizers made from tables, against published vectors and against SentencePiece's rule written out."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.core.documents import Allowance
from twostroke.core.errors import ConfigError, CorruptFileError
from twostroke.interop.gguf import GgufFile
from twostroke.interop.tokenizer_tables import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    _splits,
    byte_level_bpe,
    byte_level_words,
    sentencepiece_bpe,
    words_of,
)

PLENTY = Allowance(Path("a large file"), 10**9)


def vectors(inputs: Path, outputs: Path) -> list[tuple[str, list[int]]]:
    """llama.cpp's vectors: texts between lines of ``__ggml_vocab_test__``, and a line of ids for each."""
    texts = inputs.read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    ids = [[int(i) for i in line.split()] for line in outputs.read_text().split("\n")]
    return list(zip(texts, ids, strict=False))


def test_starcoder_tables_of_a_gguf_give_the_published_ids(assets: Path) -> None:
    folder = assets / "tokenizers"
    metadata = GgufFile(folder / "ggml-vocab-starcoder.gguf").metadata
    tokenizer = byte_level_bpe(
        metadata["tokenizer.ggml.tokens"],
        metadata["tokenizer.ggml.merges"],
        metadata["tokenizer.ggml.token_type"].tolist(),
        words_of(metadata["tokenizer.ggml.pre"]),
        bos_id=None,
        allowance=PLENTY,
    )
    cases = vectors(folder / "ggml-vocab-starcoder.gguf.inp", folder / "ggml-vocab-starcoder.gguf.out")
    assert len(cases) > 40
    for text, ids in cases:
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, repr(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_gpt2_tables_give_the_published_ids(assets: Path) -> None:
    folder = assets / "tokenizers" / "gpt2"
    vocabulary = json.loads((folder / "encoder.json").read_text())
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = (folder / "vocab.bpe").read_text(encoding="utf-8").strip("\n").split("\n")[1:]
    kinds = [CONTROL if piece == "<|endoftext|>" else NORMAL for piece in pieces]
    tokenizer = byte_level_bpe(pieces, merges, kinds, words_of("gpt-2"), bos_id=None, allowance=PLENTY)
    cases = vectors(folder / "ggml-vocab-gpt-2.gguf.inp", folder / "ggml-vocab-gpt-2.gguf.out")
    assert len(cases) > 40
    for text, ids in cases:
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, repr(text)


def test_text_is_cut_as_the_named_models_cut_it() -> None:
    def cut(name: str, text: str) -> list[str]:
        return [
            piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in byte_level_words(words_of(name)).pre_tokenize_str(text)
        ]

    assert cut("gpt-2", "It's 12345 ok") == ["It", "'s", " 12345", " ok"]
    assert cut("starcoder", "It's 12345") == ["It", "'s", " ", "1", "2", "3", "4", "5"]
    assert cut("llama-bpe", "IT'S 12345\n\nok") == ["IT", "'S", " ", "123", "45", "\n\n", "ok"]
    assert cut("qwen2", "It's 123") == ["It", "'s", " ", "1", "2", "3"]
    with pytest.raises(ConfigError, match=r"'gpt2' is not supported. Did you mean 'gpt-2'"):
        words_of("gpt2")


def test_a_text_begins_with_the_begin_token_where_there_is_one() -> None:
    pieces, merges = ["<s>", "a", "b", "ab"], ["a b"]
    with_bos = byte_level_bpe(pieces, merges, [CONTROL, 1, 1, 1], words_of("gpt-2"), bos_id=0, allowance=PLENTY)
    without = byte_level_bpe(pieces, merges, [CONTROL, 1, 1, 1], words_of("gpt-2"), bos_id=None, allowance=PLENTY)
    assert with_bos.encode("ab").ids == [0, 3]
    assert without.encode("ab").ids == [3]
    assert with_bos.encode("ab", add_special_tokens=False).ids == [3]
    assert with_bos.decode([0, 3]) == "ab"


PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{i:02X}>" for i in range(256)),
    "▁",
    "a",
    "b",
    "c",
    "ab",
    "bc",
    "abc",
    "▁a",
    "▁ab",
    "ca",
    "cab",
    "▁▁",
]
KINDS = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 12]
SCORES = [0.0] * 259 + [-20.0, -21.0, -22.0, -23.0, -3.0, -2.0, -5.0, -4.0, -6.0, -1.0, -7.0, -8.0]


def encode_by_the_rule(text: str) -> list[str]:
    """SentencePiece BPE as llama2.c's ``run.c`` does it: again and again merge the best pair, leftmost first."""
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    score_of = dict(zip(PIECES, SCORES, strict=True))
    while True:
        pairs = [(score_of[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in score_of]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    bytes_of = ([f"<0x{byte:02X}>" for byte in symbol.encode()] if symbol not in score_of else [symbol] for symbol in symbols)
    return [piece for pieces in bytes_of for piece in pieces]


TOKENIZER = sentencepiece_bpe(PIECES, SCORES, KINDS, bos_id=1, allowance=PLENTY)


@given(st.text(alphabet="abc é", max_size=20))
@settings(max_examples=300, deadline=None)
def test_sentencepiece_tables_follow_the_rule_and_lose_nothing(text: str) -> None:
    encoded = TOKENIZER.encode(text)
    assert encoded.tokens == ["<s>", *encode_by_the_rule(text)]
    assert TOKENIZER.decode(encoded.ids) == text


def test_without_a_space_prefix_none_is_added_or_taken_away() -> None:
    tokenizer = sentencepiece_bpe(PIECES, SCORES, KINDS, bos_id=None, allowance=PLENTY, space_prefix=False)
    assert tokenizer.encode("ab").tokens == ["ab"]
    for text in (" ab", "ab", "  "):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


class TestTablesThatAreMadeToBeExpensive:
    def test_a_long_piece_is_refused_before_it_is_cut(self) -> None:
        """Half a million characters took 92 s and a file of 10 MB ten hours: each of n cuts copies n characters."""
        with pytest.raises(CorruptFileError, match="has 524288 characters; at most 256 are read"):
            sentencepiece_bpe(["<unk>", "a" * 2**19], [0.0, 0.0], [UNKNOWN, NORMAL], None, PLENTY)
        with pytest.raises(CorruptFileError, match="at most 256 are read"):
            byte_level_bpe(["a" * 257], [], [NORMAL], words_of("gpt-2"), None, PLENTY)

    def test_the_cuts_of_a_piece_are_as_many_as_its_characters(self) -> None:
        looked_up: list[str] = []

        class Counted(dict[str, int]):
            def get(self, key: str, default: int | None = None) -> int | None:  # type: ignore[override]
                looked_up.append(key)
                return super().get(key, default)

        vocabulary = Counted({"a" * n: n for n in range(1, 257)})
        assert len(list(_splits("a" * 256, vocabulary))) == 255
        assert len(looked_up) == 2 * 255

    def test_merges_beyond_the_allowance_are_refused(self) -> None:
        """All words over two letters: every cut of each is a merge, and the tables are fifty times the file."""
        pieces = ["".join(word) for n in range(1, 14) for word in itertools.product("ab", repeat=n)]
        with pytest.raises(CorruptFileError, match="the merges of its tokenizer would take"):
            sentencepiece_bpe(pieces, [0.0] * len(pieces), [NORMAL] * len(pieces), None, Allowance(Path("x"), 0))

    @pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
    def test_marked_tokens_beyond_the_allowance_are_refused(self, kind: int) -> None:
        """The library searches texts for all of them at once, by a table of a hundred bytes a character."""
        pieces = [f"{n:0>128}" for n in range(4000)]
        with pytest.raises(CorruptFileError, match="a tokenizer of 4000 tokens, 4000 of them marked, would take"):
            sentencepiece_bpe(pieces, [0.0] * 4000, [kind] * 4000, None, Allowance(Path("x"), 0))
