"""What the scheduler asks of a tier below the page pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from twostroke.scheduling.request import Request


class LowerTier(Protocol):
    """Holds pages of prefixes that requests no longer use, longer than the pool does. It may lose any at any time.

    Pages ``first`` to ``end`` of a request are those with ``page_keys[first:end]``.
    """

    def worth(self, request: Request, first: int, end: int) -> int:
        """How many of these pages, from the first on, are held and faster loaded than computed."""
        ...

    def load(self, request: Request, first: int, end: int, bounded: bool) -> int:
        """Fill these of the request's pages. Returns how many were, from the first on. ``bounded``: it may stop for now after
        at least one, because other requests wait for the step."""
        ...

    def keep(self, keys: Sequence[bytes]) -> None:
        """A request has ended that used the prefix whose pages have ``keys``. As long as the prefix tree finds a page, its
        content is whole."""
        ...

    def forget(self, keys: Sequence[bytes]) -> None:
        """The pages of ``keys`` are bad."""
        ...
