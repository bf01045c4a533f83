"""Which page holds which prefix: full pages found again by the chained hash of every token up to their end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

ROOT = b""
"""Key of the empty prefix."""


def root_of(client: str) -> bytes:
    """Key of the empty prefix of one client's own tree: what others have sent is not found from there."""
    return blake2b(client.encode(errors="surrogatepass"), digest_size=16, person=b"twostroke-client").digest()


def chain_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of the prefix that extends ``parent`` by one page: BLAKE2b-128(parent ‖ tokens as 64-bit integers).

    A cryptographic hash, because prompts come from strangers: with Python's own ``hash`` two prefixes could be made to collide,
    and one client would then read another's keys and values.
    """
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class PrefixTree:
    """A radix tree with one page an edge, stored as a flat map: a key stands for the whole path from the root."""

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._entry_of: dict[int, tuple[bytes, list[int]]] = {}  # page → its key and its own tokens

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, page: int) -> bool:
        return page in self._entry_of

    def match(self, keys: Sequence[bytes], tokens: Sequence[int], page_tokens: int, max_pages: int) -> list[int]:
        """Pages that hold the longest known prefix of ``tokens``, at most ``max_pages``, each verified against its tokens."""
        pages: list[int] = []
        for i, key in enumerate(keys[:max_pages]):
            page = self._page_of.get(key)
            if page is None or self._entry_of[page][1] != tokens[i * page_tokens : (i + 1) * page_tokens]:
                break
            pages.append(page)
        return pages

    def insert(self, key: bytes, tokens: list[int], page: int) -> bool:
        """Offer ``page`` as the holder of ``key``. False where another page already holds it: the first one stays."""
        if key in self._page_of or page in self._entry_of:
            return False
        self._page_of[key] = page
        self._entry_of[page] = (key, tokens)
        return True

    def forget(self, page: int) -> None:
        """The page's content is about to be overwritten, or proved bad."""
        entry = self._entry_of.pop(page, None)
        if entry is not None:
            del self._page_of[entry[0]]
