"""A lower bound for the number of tokens of a text. It refuses a prompt that cannot fit without tokenising it, which takes 0.6
to 1.2 s for two megabytes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

_SHRINKS = {"NFC": 9, "NFD": 3, "NFKC": 12, "NFKD": 4}
"""The largest factor by which each of Unicode's normal forms can shorten a text in UTF-8: a canonical decomposition takes at
most 3 bytes to 1 (U+1FEF), a compatibility decomposition 4 to 1 (U+1D400), and a composition 3 to 1. The test tries every code
point."""


class FewestTokens:
    """``of(text)`` is a lower bound for the number of tokens of ``text``. It is 0 for tokenizers that allow no bound.

    The bound is the text's bytes over the bytes of the longest token. It holds if no part of a text is dropped or replaced by
    fewer bytes. That is so for BPE over bytes (GPT-2, Llama 3, Qwen) and for BPE with a token for every byte to fall back on
    (Llama 2, Mistral, Gemma), where an unknown character takes several tokens. It is not so if unknown words become one token
    (WordPiece, Unigram), if a normalizer or a splitter removes characters, or if the text holds a special token that swallows
    the white space beside it. Unicode's normal forms shorten a text by a known factor at most.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._longest = 0
        self._shrink = 1
        self._greedy: tuple[str, ...] = ()
        normalizers, splitters = (
            steps_of(tokenizer.normalizer, "normalizers"),
            steps_of(tokenizer.pre_tokenizer, "pretokenizers"),
        )
        kinds = {step["type"] for step in (*normalizers, *splitters)}
        model = tokenizer.model
        if type(model).__name__ != "BPE" or any(map(_removes, splitters)):
            return
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        length: Callable[[str], int]
        if "ByteLevel" in kinds:
            whole = kinds <= {"ByteLevel", "Split", "Digits", "Punctuation", *_SHRINKS}
            alphabet, length = pre_tokenizers.ByteLevel.alphabet(), len
        else:
            known = {"Prepend", "Replace", "Metaspace", "Split", "Digits", "Punctuation", *_SHRINKS}
            whole = model.byte_fallback and kinds <= known and not any(map(_shortens, normalizers))
            alphabet, length = [f"<0x{i:02X}>" for i in range(256)], _n_bytes
        if not whole or not all(c in vocabulary for c in alphabet):
            return
        added = tokenizer.get_added_tokens_decoder().values()
        self._shrink = math.prod(_SHRINKS.get(step["type"], 1) for step in normalizers)
        self._greedy = tuple(token.content for token in added if token.lstrip or token.rstrip)
        self._longest = max(max(map(length, vocabulary)), *(_n_bytes(token.content) for token in added), 1)

    def of(self, text: str) -> int:
        if not self._longest:
            return 0
        # Normal forms leave ASCII as it is.
        shrink = 1 if text.isascii() else self._shrink
        if self._greedy and (shrink > 1 or any(token in text for token in self._greedy)):
            return 0
        return -(-len(text.encode("utf-8", "surrogatepass")) // (self._longest * shrink))


def _n_bytes(token: str) -> int:
    return len(token.encode("utf-8", "surrogatepass"))


def steps_of(component: Any, name: str) -> list[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder in order, as ``tokenizer.json`` writes them. ``name`` is the key of
    the list in a ``Sequence``."""
    if component is None:
        return []
    waiting, found = [json.loads(component.__getstate__())], []
    while waiting:
        step = waiting.pop(0)
        if step["type"] == "Sequence":
            waiting = step[name] + waiting
        else:
            found.append(step)
    return found


def _removes(splitter: dict[str, Any]) -> bool:
    return splitter.get("behavior") == "Removed"


def _shortens(normalizer: dict[str, Any]) -> bool:
    """Whether a ``Replace`` step can make a text shorter. A regular expression can."""
    if normalizer["type"] != "Replace":
        return False
    pattern = normalizer["pattern"].get("String")
    return pattern is None or _n_bytes(normalizer["content"]) < _n_bytes(pattern)
