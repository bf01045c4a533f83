"""Prepared data of given tokens, for tests of loaders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from twostroke.data.conversations import BEGINS, LEARNED
from twostroke.data.shards import TokenStream

EOS = 0


@dataclass
class StubTokens:
    directory: Path
    tokens: np.ndarray
    dtype: str = "<u4"
    key: str = "0123456789abcdef0123"
    eos_id: int = EOS

    def train_tokens(self) -> TokenStream:
        path = self.directory / "tokens.bin"
        if not path.exists():
            self.tokens.astype(self.dtype).tofile(path)
        return TokenStream([path], self.dtype)

    def train_marks(self) -> TokenStream:
        """Conversations of 5 to 12 tokens, the latter half of each learned."""
        path = self.directory / "marks.bin"
        if not path.exists():
            rng, marks = np.random.default_rng(1), np.zeros(len(self.tokens), dtype=np.uint8)
            begin = 0
            while begin < len(marks):
                end = begin + int(rng.integers(5, 13))
                marks[begin + (end - begin) // 2 : end] = LEARNED
                marks[begin] |= BEGINS
                begin = end
            marks.tofile(path)
        return TokenStream([path], "<u1")
