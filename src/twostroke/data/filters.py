"""Quality filters for any language: length, repetition, symbols and word length, counted in Unicode characters.

A document is measured in the pieces of 64 kB that it is read in, and its shares are those of all pieces together. That keeps
memory constant. A line counts as repeated if the same piece held it before.
"""

from __future__ import annotations

import functools
import unicodedata

import numpy as np
import numpy.typing as npt

from twostroke.core.data_recipe import DataRecipe
from twostroke.data.shingles import shingle_hashes

NGRAM_BYTES = 12
"""Length of the n-gram whose repetition is measured, in bytes of UTF-8: about two words in Latin script, four characters in
Chinese. It is counted in bytes because some scripts do not separate words."""

OTHER, WORD, SPACE = 0, 1, 2

REASONS = ("too_short", "too_long", "repeated_lines", "repeated_ngram", "symbols", "short_words", "long_words")
"""Reasons for which a filter leaves a document out, in order. A document is counted under its first reason."""


class TextMeasure:
    """Measures of one document, which ``add`` takes piece by piece.

    - ``n_chars``: characters (code points).
    - ``repeated_lines``: characters in lines that equal an earlier line ÷ characters in lines. Blank lines do not count.
    - ``top_ngram``: bytes that the most frequent ``NGRAM_BYTES``-gram covers ÷ bytes; 0 if no n-gram occurs twice.
    - ``symbols``: characters other than letters, marks, digits and white space ÷ characters other than white space.
    - ``mean_word``: letters, marks and digits ÷ runs of them.

    Checked against one character at a time by tests/data/test_filters.py.
    """

    def __init__(self) -> None:
        self.n_chars = 0
        self._n_line_chars = self._n_repeated_chars = 0
        self._n_bytes = self._n_ngram_bytes = 0
        self._n_words = self._n_word_chars = self._n_symbols = 0

    def add(self, text: str) -> None:
        self.n_chars += len(text)
        self._add_lines(text)
        raw = np.frombuffer(text.encode(), dtype=np.uint8)
        self._n_bytes += len(raw)
        if len(raw) > NGRAM_BYTES:
            hashes = np.sort(shingle_hashes(raw, NGRAM_BYTES))
            begins = np.flatnonzero(np.concatenate(([True], hashes[1:] != hashes[:-1], [True])))
            most = int(np.diff(begins).max())
            self._n_ngram_bytes += min(len(raw), most * NGRAM_BYTES) if most > 1 else 0
        kinds = _kinds()[np.frombuffer(text.encode("utf-32-le"), dtype="<u4")]
        is_word = kinds == WORD
        self._n_word_chars += int(np.count_nonzero(is_word))
        self._n_symbols += int(np.count_nonzero(kinds == OTHER))
        self._n_words += int(np.count_nonzero(is_word[1:] & ~is_word[:-1])) + int(bool(is_word[:1].any()))

    def _add_lines(self, text: str) -> None:
        seen: set[str] = set()
        for line in text.split("\n"):
            line = line.strip()
            self._n_line_chars += len(line)
            if line in seen:
                self._n_repeated_chars += len(line)
            seen.add(line)

    @property
    def repeated_lines(self) -> float:
        return self._n_repeated_chars / max(1, self._n_line_chars)

    @property
    def top_ngram(self) -> float:
        return self._n_ngram_bytes / max(1, self._n_bytes)

    @property
    def symbols(self) -> float:
        return self._n_symbols / max(1, self._n_symbols + self._n_word_chars)

    @property
    def mean_word(self) -> float:
        return self._n_word_chars / max(1, self._n_words)

    def rejection(self, recipe: DataRecipe) -> str | None:
        """The first of ``REASONS`` for which ``recipe``'s filters leave the document out, or None."""
        rules = (
            self.n_chars < recipe.min_chars,
            recipe.max_chars > 0 and self.n_chars > recipe.max_chars,
            self.repeated_lines > recipe.max_repeated_lines,
            self.top_ngram > recipe.max_top_ngram,
            self.symbols > recipe.max_symbols,
            self.mean_word < recipe.min_mean_word,
            recipe.max_mean_word > 0 and self.mean_word > recipe.max_mean_word,
        )
        return next((reason for reason, broken in zip(REASONS, rules, strict=True) if broken), None)


@functools.lru_cache(maxsize=1)
def _kinds() -> npt.NDArray[np.uint8]:
    """The kind of every code point: WORD for letters, marks and digits, SPACE for white space and control characters, else
    OTHER."""
    kinds = np.zeros(0x110000, dtype=np.uint8)
    for code in range(0x110000):
        first = unicodedata.category(chr(code))[0]
        if first in "LMN":
            kinds[code] = WORD
        elif first in "ZC" and (first == "Z" or code < 0xA0):
            kinds[code] = SPACE
    return kinds
