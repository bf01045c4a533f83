"""Makes prompts of a given length from a seed: slices of a text file, or random words."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

from twostroke.core.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_TEXT_BYTES = 4 * 2**20
WORDS_PER_TOKEN = 0.75
"""Words per token of English prose under common byte-level BPEs, used if there is no tokenizer to count with."""

# Random common words give many different beginnings, so that a prefix cache finds nothing by accident.
WORDS = tuple(
    word
    for line in (
        "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not",
        "what all were we when your can said there use an each which she do how their if will up other about out many then",
        "them these so some her would make like him into time has look two more write go see number no way could people my",
        "than first water been call who oil its now find long down day did get come made may part over new sound take only",
        "little work know place year live me back give most very after thing our just name good sentence man think say great",
    )
    for word in line.split()
)


class PromptMaker:
    """Draws prompts. With a tokenizer, a prompt is trimmed until it encodes to the wanted number of tokens (merges across the
    cut can leave it one token off). Without one, n tokens count as ``0.75 · n`` words."""

    def __init__(self, tokenizer: Tokenizer | None = None, text_file: Path | None = None) -> None:
        self._tokenizer = tokenizer
        self._text: str | None = None
        if text_file is not None:
            try:
                with text_file.open("rb") as file:
                    self._text = file.read(MAX_TEXT_BYTES).decode("utf-8", errors="replace")
            except OSError as error:
                raise DataError(f"prompt text {text_file} cannot be read: {error.strerror}. Name another file.") from None
            if len(self._text.split()) < 100:
                raise DataError(f"prompt text {text_file} holds fewer than 100 words; prompts are cut from it.")

    def make(self, n_tokens: int, rng: random.Random) -> str:
        text = self._words(max(1, round(n_tokens * WORDS_PER_TOKEN)), rng)
        if self._tokenizer is None:
            return text
        ids = self._encode(text)
        while len(ids) < n_tokens + 8:
            text += " " + self._words(max(4, n_tokens // 2), rng)
            ids = self._encode(text)
        n_taken = n_tokens
        for _ in range(8):
            text = self._tokenizer.decode(ids[:n_taken], skip_special_tokens=True)
            found = len(self._tokenizer.encode(text).ids)
            if found == n_tokens:
                break
            n_taken = max(1, n_taken + n_tokens - found)
        return text

    def beginning(self, text: str, n_tokens: int) -> str:
        """The first ``n_tokens`` of ``text``, or as many words as they are taken for."""
        if self._tokenizer is None:
            return " ".join(text.split()[: max(1, round(n_tokens * WORDS_PER_TOKEN))])
        return str(self._tokenizer.decode(self._encode(text)[:n_tokens], skip_special_tokens=True))

    def _encode(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _words(self, n_words: int, rng: random.Random) -> str:
        if self._text is None:
            return " ".join(rng.choices(WORDS, k=n_words))
        start = rng.randrange(len(self._text))
        piece = self._text[start : start + 12 * n_words].split()
        while len(piece) < n_words + 1:  # after the end of the text, continue with its beginning
            piece += self._text[: 12 * n_words].split()
        return " ".join(piece[1 : n_words + 1])
