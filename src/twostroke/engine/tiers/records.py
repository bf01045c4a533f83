"""The form in which a page leaves its pool: the page's tokens, then its keys and values, and sums that tell damage."""

from __future__ import annotations

import zlib

import numpy as np

from twostroke.engine.tiers.images import Bytes


class PageRecords:
    """Records of pages of ``page_tokens`` tokens and ``image_bytes`` bytes of keys and values; each has ``n_bytes``."""

    def __init__(self, page_tokens: int, image_bytes: int) -> None:
        self.page_tokens = page_tokens
        self._n_head = 8 * -(-4 * (1 + page_tokens) // 8)
        self._image = slice(self._n_head, self._n_head + image_bytes)
        self.n_bytes = 8 * -(-(self._n_head + image_bytes) // 8)

    def record(self) -> Bytes:
        """Room for a record."""
        return np.zeros(self.n_bytes, np.uint8)

    def image(self, record: Bytes) -> Bytes:
        """The part of a record that has the keys and values."""
        return record[self._image]

    def set_tokens(self, record: Bytes, tokens: list[int]) -> None:
        head = record[: self._n_head].view(np.int32)
        head[:] = 0
        head[0], head[1 : 1 + len(tokens)] = len(tokens), tokens

    def tokens(self, record: Bytes) -> list[int]:
        n, *tokens = record[: self._n_head].view(np.int32).tolist()
        return tokens[: max(0, min(n, self.page_tokens))]

    @staticmethod
    def sums(key: bytes, record: Bytes) -> tuple[int, int]:
        """The sum of a record's 64-bit words modulo 2⁶⁴, and its CRC-32 behind that of the key. Together they read 4 GB/s,
        where a cryptographic hash reads 1 or 2."""
        return int(record.view(np.uint64).sum(dtype=np.uint64)), zlib.crc32(record.data, zlib.crc32(key))
