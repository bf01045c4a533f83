"""The prefix tree finds full pages again by the chained hash of every token up to their end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from itertools import islice

ROOT = b""
"""Key of the empty prefix."""


def root_of(client: str) -> bytes:
    """Key of the empty prefix of one client's own tree. Prefixes that other clients have sent are not found from there."""
    return blake2b(client.encode(errors="surrogatepass"), digest_size=16, person=b"twostroke-client").digest()


def root_beside(root: bytes, adapter: bytes) -> bytes:
    """Key of the empty prefix below ``root`` of requests whose adapter has the key ``adapter``."""
    return blake2b(root + adapter, digest_size=16, person=b"twostroke-lora").digest()


def chain_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of the prefix that extends ``parent`` by one page: BLAKE2b-128(parent ‖ tokens as 64-bit integers).

    The hash is cryptographic because prompts are untrusted. With Python's own ``hash`` a client could construct two prefixes
    that collide, and would then read the keys and values of another client.
    """
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


def root_of_weights(root: bytes, weights: bytes) -> bytes:
    """Key of the empty prefix below ``root`` of what the weights ``weights`` compute. Empty: those that the engine began with,
    whose tree is that below ``root`` itself."""
    return blake2b(root + weights, digest_size=16, person=b"twostroke-wghts").digest() if weights else root


_COMPARED = 8
"""Pages behind a prefix that are compared with what follows it in a prompt, the newest."""


class PrefixTree:
    """A radix tree with one page an edge, stored as a flat map: a key stands for the whole path from the root. A page may be
    filled in part; then nothing follows it."""

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._entry_of: dict[int, tuple[bytes, list[int], bytes]] = {}  # page → its key, its own tokens, the key before it
        self._behind: dict[bytes, dict[int, None]] = {}  # key → pages that follow it, the newest last
        self._changes: dict[bytes, bool] | None = None
        self._begins: dict[bytes, str] = {}  # keys that follow an empty prefix → the adapter's name, or "" for none

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, page: int) -> bool:
        return page in self._entry_of

    def match(self, keys: Sequence[bytes], tokens: Sequence[int], page_tokens: int, max_pages: int) -> list[int]:
        """Pages that hold the longest cached prefix of ``tokens``, at most ``max_pages``. Each is compared with its tokens."""
        pages: list[int] = []
        for i, key in enumerate(keys[:max_pages]):
            page = self._page_of.get(key)
            if page is None or self._entry_of[page][1] != tokens[i * page_tokens : (i + 1) * page_tokens]:
                break
            pages.append(page)
        return pages

    def watch(self) -> list[bytes]:
        """The keys that are known now. From here on `changes` returns what is stored and removed."""
        self._changes = {}
        return list(self._page_of)

    def changes(self) -> dict[bytes, bool]:
        """Keys that were stored (true) or removed since the last call, each with its last change. Empty if nobody watches."""
        if not self._changes:
            return {}
        found, self._changes = self._changes, {}
        return found

    def described(self, key: bytes) -> tuple[bytes, list[int], str | None] | None:
        """Of a key that is known: the key before it, its page's tokens, and if the page begins a prefix the name of its
        adapter, "" for none. Pages that were stored while nobody watched begin none."""
        page = self._page_of.get(key)
        if page is None:
            return None
        _, tokens, parent = self._entry_of[page]
        return parent, tokens, "" if parent == ROOT else self._begins.get(key)

    def held(self, key: bytes) -> tuple[int, list[int]] | None:
        """The page of ``key`` and its own tokens, the same list for as long as the page stays. Any thread may ask."""
        page = self._page_of.get(key)
        entry = None if page is None else self._entry_of.get(page)
        return None if page is None or entry is None or entry[0] != key else (page, entry[1])

    def begun(self, parent: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """Of the newest pages behind the prefix ``parent`` the one that begins most like ``tokens``, and how many tokens it
        shares with them; (−1, 0) if none does."""
        best, most = -1, 0
        for page in islice(reversed(self._behind.get(parent, {})), _COMPARED):
            n = 0
            for own, token in zip(self._entry_of[page][1], tokens, strict=False):
                if own != token:
                    break
                n += 1
            if n > most:
                best, most = page, n
        return best, most

    def insert(self, key: bytes, tokens: list[int], page: int, parent: bytes, begins: str | None = None) -> bool:
        """Record that ``page`` holds the prefix ``key``, which extends ``parent`` by ``tokens``. ``begins``: if ``parent`` is
        an empty prefix, the name of its adapter, "" for none. Returns False if another page already does; that one stays."""
        if key in self._page_of or page in self._entry_of:
            return False
        self._page_of[key] = page
        self._entry_of[page] = (key, tokens, parent)
        self._behind.setdefault(parent, {})[page] = None
        if self._changes is not None:
            self._changes[key] = True
            if begins is not None:
                self._begins[key] = begins
        return True

    def remove(self, page: int) -> None:
        """Stop finding ``page``, because its content is about to be overwritten or is bad. Unknown pages are ignored."""
        entry = self._entry_of.pop(page, None)
        if entry is not None:
            key, _, parent = entry
            del self._page_of[key]
            self._begins.pop(key, None)
            if self._changes is not None:
                self._changes[key] = False
            behind = self._behind[parent]
            del behind[page]
            if not behind:
                del self._behind[parent]
