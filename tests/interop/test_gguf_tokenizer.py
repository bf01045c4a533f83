"""Tokenizers in GGUF files against transformers' own of the same kind, on the same tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import CohereTokenizer, GemmaTokenizer, GPT2Tokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import generate_merges

from gguf_files import finish
from twostroke.core.errors import ConfigError
from twostroke.core.spec import ModelSpec
from twostroke.interop.gguf import GgufFile
from twostroke.interop.gguf_metadata import Metadata
from twostroke.interop.gguf_tokenizer import read_tokenizer
from twostroke.interop.tokenizer_tables import WORDS, byte_level_words, words_of

TEXT = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")[:20_000]
SAMPLES = (
    *(TEXT[i : i + 400] for i in range(0, 20_000, 4_000)), "", " ", "\n\n  \n", "IT'S 1234567 o'clock, we'LL see...", "  two  ",
    "日本語 と 中文 한국어", "naïve café ☃ 🙂🙂", "\tif (x != y) { return x[10]; }\r\n", "a<|end|>b", "123 456,789.0",
)  # fmt: skip


def tables(splits: pre_tokenizers.PreTokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary and merges of a small byte-level BPE, trained on words of ``splits``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splits
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<s>", "<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def read_back(path: Path, pieces: list[str], add: Callable[[gguf.GGUFWriter], None], **changes: Any) -> Tokenizer:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(pieces)
    add(writer)
    finish(writer)
    spec = ModelSpec("llama", len(pieces), 1, 8, 1, 1, 8, 8, 8, **changes)
    source = read_tokenizer(Metadata(GgufFile(path)), spec)
    assert source is not None
    return source.tokenizer


@pytest.mark.parametrize(
    ("pre", "reference"),
    [
        ("gpt-2", GPT2Tokenizer),
        ("olmo", GPT2Tokenizer),
        ("qwen2", Qwen2Tokenizer),
        ("command-r", CohereTokenizer),
        ("starcoder", CohereTokenizer),
        ("smollm", CohereTokenizer),
        ("refact", CohereTokenizer),
    ],
)
def test_byte_level_ids_are_those_of_transformers(pre: str, reference: Any, tmp_path: Path) -> None:
    vocabulary, merges = tables(byte_level_words(words_of(pre)))
    theirs = reference(vocab=vocabulary, merges=merges, unk_token="<s>", bos_token="<s>", eos_token="<|end|>", pad_token="<s>",
                       cls_token="<s>", sep_token="<s>", mask_token="<s>")  # fmt: skip
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(pair) for pair in merges])
        writer.add_token_types([3, 3] + [1] * (len(pieces) - 2))

    ours = read_back(tmp_path / "t.gguf", pieces, add, bos_token_id=0, eos_token_ids=(1,))
    for text in SAMPLES:
        ids = ours.encode(text).ids
        assert ids == theirs(text, add_special_tokens=False).input_ids, repr(text)
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_sentencepiece_ids_without_a_space_before_are_gemmas(tmp_path: Path) -> None:
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False)
    trained.train_from_iterator([TEXT], trainer)
    learned = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *(piece for piece in learned if piece not in special)]
    kinds = [3, 3, 3, 2, 3] + [6] * 256 + [1] * (len(pieces) - 261)
    scores = [0.0] * 261 + [-float(i) for i in range(len(pieces) - 261)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    theirs = GemmaTokenizer(vocab=vocabulary, merges=generate_merges(vocabulary, dict(zip(pieces, scores, strict=True))))

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(scores)
        writer.add_token_types(kinds)
        writer.add_add_space_prefix(False)

    ours = read_back(tmp_path / "t.gguf", pieces, add, bos_token_id=2, eos_token_ids=(1,))
    for text in SAMPLES:
        assert ours.encode(text).ids == [2, *theirs(text, add_special_tokens=False).input_ids], repr(text)
        assert ours.decode(ours.encode(text).ids) == text


CUTS = {
    "default": ["IT", "'", "S", " ", "123", "45", "+", "6", ".", "5", " one", "\n\n", " two"],
    "gpt-2": ["IT", "'", "S", " 12345", "+", "6", ".", "5", " one", "\n\n", " two"],
    "starcoder": ["IT", "'", "S", " ", "1", "2", "3", "4", "5", "+", "6", ".", "5", " one", "\n\n", " two"],
    "llama-bpe": ["IT", "'S", " ", "123", "45", "+", "6", ".", "5", " one", "\n\n", " two"],
    "glm4": ["IT", "'S", " ", "123", "45", "+", "6", ".", "5", " one", "\n\n", " two"],
    "qwen2": ["IT", "'S", " ", "1", "2", "3", "4", "5", "+", "6", ".", "5", " one", "\n\n", " two"],
    "seed-coder": ["IT", "'S", " ", "1", "2", "3", "4", "5", "+", "6", ".", "5", " one", "\n\n", " two"],
    "gpt-4o": ["IT'S", " ", "123", "45", "+", "6", ".", "5", " one", "\n\n", " two"],
    "kimi-k2": ["IT'S", " ", "123", "45", "+", "6", ".", "5", " one", "\n\n", " two"],
    "tekken": ["IT", "'S", " ", "1", "2", "3", "4", "5", "+", "6", ".", "5", " one", "\n\n", " two"],
    "deepseek-llm": ["IT", "'", "S", " ", "12345", "+", "6", ".", "5", " one", "\n", "\n", " two"],
    "deepseek-coder": ["IT", "'", "S", " ", "1", "2", "3", "4", "5", "+", "6", ".", "5", " one", "\n", "\n", " two"],
    "deepseek-v3": ["IT", "'S", " ", "123", "45", "+", "6", ".", "5", " one", "\n\n", " two"],
    "falcon": ["IT", "'", "S", " ", "123", "45", "+", "6", ".", "5", " one", "\n\n", " two"],
}
"""``IT'S 12345+6.5 one\\n\\n two`` as each rule cuts it, worked out by hand from llama.cpp's expressions."""


@pytest.mark.parametrize("name", CUTS)
def test_each_rule_cuts_as_its_expressions_say(name: str) -> None:
    cut = byte_level_words(words_of(name)).pre_tokenize_str("IT'S 12345+6.5 one\n\n two")
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in cut] == CUTS[name]


def test_every_rule_is_cut_here() -> None:
    assert {words_of(name).patterns for name in CUTS} == {words.patterns for words in WORDS.values()}


def test_kimi_cuts_chinese_characters_from_other_letters() -> None:
    text = "你好Hello世界 HelloWorld ひらがな漢字 x//\nx"
    cut = [text[start:end] for _, (start, end) in byte_level_words(words_of("kimi-k2")).pre_tokenize_str(text)]
    assert cut == ["你好", "Hello", "世界", " Hello", "World", " ひらがな", "漢字", " x", "//\n", "x"]


def test_deepseeks_letters_are_those_with_a_case() -> None:
    def cut(text: str) -> list[str]:
        return [text[start:end] for _, (start, end) in byte_level_words(words_of("deepseek-llm")).pre_tokenize_str(text)]

    assert cut("Ωλж Ц") == ["Ωλж", " Ц"]
    assert cut("日本語abc。de") == ["日本語", "abc", "。", "de"]
    assert cut("Ωաբ") == ["Ω", "աբ"]  # small Armenian letters are left out
    assert cut("Straße") == ["Stra", "ß", "e"]  # its punctuation runs from : to ~, Latin letters among them


def test_an_unknown_rule_is_named() -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.pre='gpt2' is not supported\. Did you mean 'gpt-2'"):
        words_of("gpt2")


@pytest.mark.parametrize(("pre", "begins"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), (None, False)])
def test_a_text_begins_as_llama_cpp_begins_it(pre: str | None, begins: bool, tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter, said: bool | None = None) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_merges(["a b"])
        writer.add_token_types([3, 1, 1, 1])
        if pre:
            writer.add_tokenizer_pre(pre)
        if said is not None:
            writer.add_add_bos_token(said)

    pieces = ["<s>", "a", "b", "ab"]
    assert read_back(tmp_path / "a.gguf", pieces, add, bos_token_id=0).encode("ab").ids == ([0, 3] if begins else [3])
    for said in (True, False):
        tokenizer = read_back(tmp_path / "b.gguf", pieces, lambda w, said=said: add(w, said), bos_token_id=0)
        assert tokenizer.encode("ab").ids == ([0, 3] if said else [3])
