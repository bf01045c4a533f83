"""The pool of KV-cache pages: reference counts, free lists, and eviction of free pages that still hold a cached prefix."""

from __future__ import annotations

from collections.abc import Iterable

from twostroke.core.errors import ConfigError
from twostroke.scheduling.prefix_tree import PrefixTree


class PagePool:
    """Pages have the numbers 0 … n_pages−1. A page is *used* (reference count above 0), *blank* (free, and its content is not
    needed) or *cached* (free, and the prefix tree can still find it). Blank pages are allocated first, then cached ones, the
    least recently used first.
    """

    def __init__(self, n_pages: int) -> None:
        if n_pages < 1:
            raise ConfigError(f"n_pages={n_pages} must be at least 1.")
        self.n_pages = n_pages
        self.tree = PrefixTree()
        self.references = [0] * n_pages
        # Dictionaries as ordered sets. Blank pages leave last in, first out, so that page 0 goes first and neighbours stay
        # together; cached pages leave first in, first out.
        self._blank: dict[int, None] = dict.fromkeys(range(n_pages - 1, -1, -1))
        self._cached: dict[int, None] = {}
        self.n_released = 0
        """Calls of ``release``. If it has not changed, no page has become free since."""

    @property
    def n_free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def n_cached(self) -> int:
        """Free pages that the prefix tree can still find."""
        return len(self._cached)

    @property
    def n_used(self) -> int:
        return self.n_pages - self.n_free

    def is_free(self, page: int) -> bool:
        return self.references[page] == 0

    def allocate(self, n: int, after: int = -1) -> list[int] | None:
        """``n`` pages with one reference each, or None, and nothing allocated, if fewer are free.

        They come in ascending order. Page ``after`` + 1 is preferred for the first, because attention reads a run of
        neighbouring pages without copying them.
        """
        if n > self.n_free:
            return None
        pages: list[int] = []
        blank, cached = self._blank, self._cached
        while len(pages) < n:
            if after + 1 in blank and after >= 0:  # −1 stands for no page, and page 0 is not its neighbour
                page = after + 1
                del blank[page]
            elif blank:
                page, _ = blank.popitem()
            else:
                page = next(iter(cached))
                del cached[page]
                self.tree.remove(page)
            self.references[page] = 1
            pages.append(page)
            after = page
        if n > 1:
            pages.sort()
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add one reference to each page. A cached page becomes used."""
        for page in pages:
            if self.references[page] == 0:
                del self._cached[page]
            self.references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove one reference from each page, the last page first: the end of a prefix is then evicted before its start, which
        more requests share."""
        self.n_released += 1
        for page in reversed(list(pages)):
            left = self.references[page] - 1
            if left < 0:
                raise RuntimeError(f"page {page} released more often than it was taken")
            self.references[page] = left
            if left == 0:
                if page in self.tree:
                    self._cached[page] = None
                else:
                    self._blank[page] = None

    def unshared(self, pages: Iterable[int]) -> list[int]:
        """Those of ``pages`` that have exactly one reference. −1 (a released page) is left out."""
        return [page for page in pages if page >= 0 and self.references[page] == 1]

    def discard_content(self, pages: Iterable[int]) -> None:
        """Remove these pages from the prefix tree, because a request whose logits were not finite wrote them."""
        for page in pages:  # −1 (a released page) is neither in the tree nor cached
            self.tree.remove(page)
            if page in self._cached:
                del self._cached[page]
                self._blank[page] = None
