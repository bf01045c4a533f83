"""The pages that a request holds: how many, under which keys the prefix tree finds them, and which are given back early."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.scheduling.pages import PagePool
from twostroke.scheduling.prefix_tree import ROOT, chain_key, root_beside, root_of, root_of_weights
from twostroke.scheduling.request import Request
from twostroke.scheduling.step import SchedulerConfig


class PageLists:
    """Of the requests of one scheduler, whose pages come from ``pool``."""

    def __init__(self, config: SchedulerConfig, pool: PagePool) -> None:
        self.config = config
        self.pool = pool
        self.weights = b""
        """The weights that compute what new requests read (``root_of_weights``)."""

    def pages_for(self, n_tokens: int) -> int:
        """Pages that hold ``n_tokens``."""
        return -(-n_tokens // self.config.page_tokens)

    def first_visible(self, position: int, window: int) -> int:
        """Index of the first page that the query at ``position`` attends to."""
        return max(0, position - window + 1) // self.config.page_tokens

    def free_before_window(self, request: Request, window: int) -> None:
        """Release the pages that no later query attends to. The next query is at ``n_computed`` and sees ``window`` tokens.

        With a window of 8 and pages of 4 tokens, a request of 56 tokens holds at most 3 pages after a step instead of 14."""
        first_seen = self.first_visible(request.n_computed, window)
        if first_seen > request.n_dropped:
            self.pool.release(request.pages[request.n_dropped : first_seen])
            request.pages[request.n_dropped : first_seen] = [-1] * (first_seen - request.n_dropped)
            request.n_dropped = first_seen

    def keys_of(self, tokens: Sequence[int], client: str = "") -> list[bytes]:
        """The key of the empty prefix of requests of ``client`` and no adapter, and behind it those of the pages of
        ``tokens``, of which the last may be filled in part."""
        keys = [root_of_weights(root_of(client) if self.config.separate_prefixes else ROOT, self.weights)]
        for i in range(0, len(tokens), self.config.page_tokens):
            keys.append(chain_key(keys[-1], tokens[i : i + self.config.page_tokens]))
        return keys

    def hash_full_pages(self, request: Request) -> None:
        """Hash the full pages that have no hash yet. A request that fails to be admitted many times is hashed once."""
        page_tokens, keys, tokens = self.config.page_tokens, request.page_keys, request.tokens
        n_pages = (len(tokens) if self.config.cached_outputs else request.n_prompt) // page_tokens
        if n_pages == len(keys) or not self.config.prefix_cache:
            return
        parent = keys[-1] if keys else self.root_of(request)
        for i in range(len(keys), n_pages):
            parent = chain_key(parent, tokens[i * page_tokens : (i + 1) * page_tokens])
            keys.append(parent)

    def root_of(self, request: Request) -> bytes:
        """The key of the empty prefix: with one's own prefixes a client's, of the request's weights, and an adapter's."""
        root = root_of_weights(root_of(request.client) if self.config.separate_prefixes else ROOT, request.weights)
        return root if request.adapter is None else root_beside(root, request.adapter.key)

    def register(self, request: Request, n_pages: int | None = None) -> None:
        """Offer the pages that this step filled to the prefix tree, or the first ``n_pages`` of them."""
        page_tokens, keys = self.config.page_tokens, request.page_keys
        n_pages = request.n_computed // page_tokens if n_pages is None else n_pages
        self.hash_full_pages(request)
        for i in range(request.n_registered, min(n_pages, len(keys))):
            tokens = request.tokens[i * page_tokens : (i + 1) * page_tokens]
            before, begins = (keys[i - 1], None) if i else (self.root_of(request), self._adapter_of(request))
            self.pool.tree.insert(keys[i], tokens, request.pages[i], before, begins)
        request.n_registered = n_pages

    def _adapter_of(self, request: Request) -> str:
        return "" if request.adapter is None else request.adapter.name

    def register_end(self, request: Request) -> None:
        """Offer the page that ``request`` has filled in part to the prefix tree, because nobody writes to it any more."""
        n, page_tokens, c = request.n_computed, self.config.page_tokens, self.config
        if not c.cached_outputs and n > request.n_prompt:
            return
        if n % page_tokens and c.prefix_cache and c.parts_of_pages and request.finish_reason != "error":
            tokens = request.tokens[n - n % page_tokens : n]
            before = request.page_keys[n // page_tokens - 1] if n >= page_tokens else self.root_of(request)
            self.pool.tree.insert(chain_key(before, tokens), tokens, request.pages[n // page_tokens], before)

    def drop(self, request: Request) -> None:
        """Give back all pages of ``request``."""
        self.pool.release(request.pages[request.n_dropped :])
        request.pages = []
        request.n_dropped = 0
        request.capacity = 0
        request.n_registered = 0
