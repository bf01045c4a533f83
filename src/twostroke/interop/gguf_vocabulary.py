"""``tokenizer.ggml.*`` of a ``tokenizer.json``: the inverse of ``gguf_tokenizer``.

Byte-level BPE becomes the model ``gpt2``, SentencePiece-like BPE the model ``llama``. How a text is cut into words must be a
row of ``tokenizer_tables``; anything else is refused by name, because near words give plausible but wrong tokens. Tables are
read back before anything is written, and must encode a mixed text to the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from twostroke.core.documents import Allowance, read_object
from twostroke.core.errors import ConfigError
from twostroke.core.spec import ModelSpec
from twostroke.data.fewest_tokens import steps_of
from twostroke.data.tokenizer import load_tokenizer, tokenizer_file
from twostroke.interop.gguf_write import Value
from twostroke.interop.tokenizer_tables import (
    BYTE,
    CONTROL,
    GPT2_PATTERN,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    WORDS,
    Words,
    byte_level_bpe,
    sentencepiece_bpe,
)

MIXED_TEXTS = (
    "Hello, world! It's 1234567 o'clock; we'LL see...  two  spaces\n\n",
    "\tif (x != y) { return x[10]; }\r\n",
    "naïve café — 日本語 と 中文 한국어 Привет ☃ 🙂🙂 x²+½ ٣٤ \u00a0a\u200bb",
    "", " ", "  two",
)  # fmt: skip
"""What is encoded before and after."""


@dataclass(frozen=True)
class Vocabulary:
    """Metadata of a tokenizer, and what is said about it."""

    metadata: dict[str, Value]
    notes: tuple[str, ...] = ()


def no_vocabulary() -> Vocabulary:
    """Of a model without a tokenizer."""
    return Vocabulary({"tokenizer.ggml.model": "none"}, ("the model has no tokenizer, so the file has none.",))


def vocabulary(directory: Path, spec: ModelSpec) -> Vocabulary:
    """The tables of the tokenizer in ``directory``, a model's. Raises ConfigError for one that GGUF has no form for, and the
    errors of ``load_tokenizer``."""
    file = tokenizer_file(directory)
    tokenizer = load_tokenizer(file)
    document = json.loads(tokenizer.to_str())
    model = document["model"]
    if model.get("type") != "BPE":
        raise ConfigError(f"{file} is {model.get('type')}, and only BPE is written as GGUF.")
    beside = directory / "tokenizer_config.json"
    config = read_object(beside) if beside.is_file() else {}
    pieces, kinds = _pieces(document, spec.vocab_size, file)
    plain, whole = tokenizer.encode("a", add_special_tokens=False).ids, tokenizer.encode("a").ids
    begins = bool(whole) and whole[0] == spec.bos_token_id and whole != plain
    bos = spec.bos_token_id if begins else None
    found: dict[str, Value] = {"tokenizer.ggml.tokens": pieces, "tokenizer.ggml.add_bos_token": begins}
    if len(whole) > len(plain) + begins:
        if whole[-1] not in spec.eos_token_ids:
            raise ConfigError(f"{file} adds tokens around a text that are not those of its begin and end; GGUF has no place.")
        found["tokenizer.ggml.add_eos_token"] = True
    notes: list[str] = []
    allowance = Allowance(file, 4 * file.stat().st_size + 2**24)
    cuts = steps_of(tokenizer.pre_tokenizer, "pretokenizers")
    changes = steps_of(tokenizer.normalizer, "normalizers")
    if any(step["type"] == "ByteLevel" for step in cuts):
        words, notes = _words(changes, cuts, bool(model.get("ignore_merges")), file)
        merges = [" ".join(pair) for pair in _merges(model)]
        found |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": words.names[0],
            "tokenizer.ggml.merges": merges,
        }
        again = byte_level_bpe(pieces, merges, kinds.tolist(), words, bos, allowance)
    else:
        if not model.get("byte_fallback"):
            raise _refused(file, "BPE that is neither byte-level nor falls back to bytes")
        prefix = _space_before(changes, cuts, file)
        kinds = _sentencepiece_kinds(model, pieces, kinds)
        scores = _scores(_merges(model), pieces)
        found |= {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.add_space_prefix": prefix,
        }
        again = sentencepiece_bpe(pieces, scores.tolist(), kinds.tolist(), bos, allowance, prefix)
    found["tokenizer.ggml.token_type"] = kinds
    _require_same_tokens(tokenizer, again, document, file)
    found |= _named_ids(config, tokenizer, spec)
    template = _chat_template(directory, config)
    if template:
        found["tokenizer.chat_template"] = template
    stripping = [t["content"] for t in document.get("added_tokens") or [] if t.get("lstrip") or t.get("rstrip")]
    if stripping:
        notes.append(f"{stripping[0]!r} takes the spaces beside it, which GGUF does not say.")
    return Vocabulary(found, tuple(notes))


def _pieces(document: dict[str, Any], vocab_size: int, file: Path) -> tuple[list[str], np.ndarray]:
    """Texts and types by id; ids without a text are unused ones, as converters fill them."""
    pieces: list[str | None] = [None] * vocab_size
    kinds = np.full(vocab_size, UNUSED, dtype=np.int32)
    added = {token["id"]: token for token in document.get("added_tokens") or []}
    for text, number in (*document["model"]["vocab"].items(), *((token["content"], i) for i, token in added.items())):
        if number >= vocab_size:
            raise ConfigError(f"{file} has token {text!r:.40} with id {number}, beyond the model's {vocab_size} embeddings.")
        pieces[number] = text
        kinds[number] = NORMAL
    for i, token in added.items():
        kinds[i] = CONTROL if token.get("special") else USER_DEFINED
    taken = {piece for piece in pieces if piece is not None}
    for i, piece in enumerate(pieces):
        if piece is None:
            name = f"[PAD{i}]"
            while name in taken:
                name = f"[{name}]"
            pieces[i] = name
    return [piece for piece in pieces if piece is not None], kinds


def _merges(model: dict[str, Any]) -> list[tuple[str, str]]:
    found = []
    for merge in model.get("merges") or []:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        found.append((left, right))
    return found


def _refused(file: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{file}: {what} has no name in GGUF. A file with the nearest rule would give plausible but wrong tokens, so none is "
        "written. Export the model without its tokenizer, or to another format."
    )


def _words(changes: list[dict[str, Any]], cuts: list[dict[str, Any]], whole: bool, file: Path) -> tuple[Words, list[str]]:
    """The row that cuts words as the tokenizer does."""
    notes = []
    for step in changes:
        if step["type"] != "NFC":
            raise _refused(file, f"the normalizer {step['type']}")
        notes.append("NFC, which the tokenizer applies to a text first, is left out: llama.cpp does not apply it.")
    patterns: list[str] = []
    for step in cuts:
        pattern = _pattern(step)
        if pattern is None:
            raise _refused(file, f"the pre-tokenizer {_shown(step)}")
        patterns += pattern
    for words in dict.fromkeys(WORDS.values()):
        if words.patterns == tuple(patterns) and words.whole == whole:
            return words, notes
    cut = " then ".join(map(repr, patterns))
    raise _refused(file, f"cutting a text into words by {cut[:200]}{' with whole words first' if whole else ''}")


def _pattern(step: dict[str, Any]) -> list[str] | None:
    """The expressions of a pre-tokenizer whose matches are words of their own; None for another kind."""
    kind = step["type"]
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return [GPT2_PATTERN] if step.get("use_regex", True) else []
    if kind == "Split" and step["behavior"] == "Isolated" and not step.get("invert"):
        return [step["pattern"]["Regex"]] if "Regex" in step["pattern"] else None
    if kind == "Digits":
        return [r"\p{N}" if step["individual_digits"] else r"\p{N}+"]
    return None


def _shown(step: dict[str, Any]) -> str:
    return json.dumps(step, ensure_ascii=False)[:160]


_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_WORDS_BY_SPACE = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
"""Gemma's, which cuts nothing: its normalizer has left no space."""


def _space_before(changes: list[dict[str, Any]], cuts: list[dict[str, Any]], file: Path) -> bool:
    """Whether a space is put before a text. Raises ConfigError for other forms than SentencePiece's."""
    before = False
    for step in changes:
        if step["type"] == "Prepend" and step["prepend"] == "▁":
            before = True
        elif step != _SPACES:
            raise _refused(file, f"the normalizer {_shown(step)}")
    for step in cuts:
        if step["type"] == "Metaspace" and step.get("replacement") == "▁":
            before = before or step.get("prepend_scheme", "always") != "never"
        elif step != _WORDS_BY_SPACE:
            raise _refused(file, f"the pre-tokenizer {_shown(step)}")
    return before


def _sentencepiece_kinds(model: dict[str, Any], pieces: Sequence[str], kinds: np.ndarray) -> np.ndarray:
    result = kinds.copy()
    for i, piece in enumerate(pieces):
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            result[i] = BYTE
        elif piece == model.get("unk_token"):
            result[i] = UNKNOWN
    return result


def _scores(merges: Sequence[tuple[str, str]], pieces: Sequence[str]) -> np.ndarray:
    """A score for each piece, by which its merges come in the order that they have. Pieces whose merges lie between each other
    have one score, as they had where the merges were made of scores."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, (left, right) in enumerate(merges):
        first.setdefault(left + right, i)
        last[left + right] = i
    scores = np.full(len(pieces), -float(len(merges)), dtype=np.float32)
    numbers = {piece: i for i, piece in enumerate(pieces)}
    rank, reach = -1, -1
    for piece, start in first.items():  # in the order of their first merge
        rank += start > reach
        reach = max(reach, last[piece])
        scores[numbers[piece]] = -float(rank)
    return scores


def _require_same_tokens(ours: Tokenizer, again: Tokenizer, document: dict[str, Any], file: Path) -> None:
    special = [t["content"] for t in document.get("added_tokens") or [] if not (t.get("lstrip") or t.get("rstrip"))][:4]
    for text in (*MIXED_TEXTS, " ".join(f"a{token}b" for token in special)):
        if ours.encode(text).ids != again.encode(text).ids:
            raise _refused(file, f"a tokenizer that reads {text!r:.60} otherwise than the tables that GGUF has for it")


_NAMED = {"unk_token": "unknown", "pad_token": "padding"}


def _named_ids(config: dict[str, Any], tokenizer: Tokenizer, spec: ModelSpec) -> dict[str, Value]:
    """Ids of tokens that ``tokenizer_config.json`` names beside begin and end."""
    found: dict[str, Value] = {}
    for key, name in _NAMED.items():
        named = config.get(key)
        text = named.get("content") if isinstance(named, dict) else named
        number = tokenizer.token_to_id(text) if isinstance(text, str) else None
        if number is not None and number < spec.vocab_size:
            found[f"tokenizer.ggml.{name}_token_id"] = number
    return found


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    """Of ``tokenizer_config.json`` or of the file beside it; of several the one named default."""
    given = config.get("chat_template")
    if isinstance(given, list):
        given = next((t.get("template") for t in given if isinstance(t, dict) and t.get("name") == "default"), None)
    if isinstance(given, str):
        return given
    file = directory / "chat_template.jinja"
    return file.read_text(encoding="utf-8") if file.is_file() else None
