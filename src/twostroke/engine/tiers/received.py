"""Pages that another engine computed and that have arrived, until the request that asked for them loads them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from twostroke.engine.tiers.images import Bytes, PageImages
from twostroke.engine.tiers.records import PageRecords
from twostroke.scheduling.lower_tier import LowerTier
from twostroke.scheduling.request import Request

_SLICE_S = 0.01
"""Seconds of loading in a step in which other requests decode; the rest follows in the next steps."""


class Received(NamedTuple):
    """The record of a page. ``free`` is called once, when the record is not read any more."""

    record: Bytes
    free: Callable[[], None]


class ReceivedPages:
    """See ``scheduling.lower_tier``: loading a page that has arrived is a copy, so it always pays. What has not arrived is
    looked for in the tier ``below``. A page is loaded once and then forgotten, because the prefix tree finds it from then on.

    ``put`` and ``drop`` may be called from any thread.
    """

    def __init__(self, records: PageRecords, images: PageImages, below: LowerTier | None = None) -> None:
        self.below = below
        self.loaded_pages, self.load_s = 0, 0.0
        self._records, self._images = records, images
        self._lock = threading.Lock()
        self._pages: dict[bytes, Received] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def put(self, key: bytes, page: Received) -> bool:
        """Hold ``page``, which must not change from here on. Returns False if a page of this key is held already."""
        with self._lock:
            return self._pages.setdefault(key, page) is page

    def drop(self, key: bytes, page: Received) -> None:
        """Hold ``page`` no longer, if it still is held."""
        with self._lock:
            if self._pages.get(key) is not page:
                return
            del self._pages[key]
        page.free()

    def worth(self, request: Request, first: int, end: int) -> int:
        n = 0
        while first + n < end and request.page_keys[first + n] in self._pages:
            n += 1
        if n == 0 and self.below is not None:
            return self.below.worth(request, first, end)
        return n

    def load(self, request: Request, first: int, end: int, bounded: bool) -> int:
        if self.below is not None and request.page_keys[first] not in self._pages:
            return self.below.load(request, first, end, bounded)
        began, n, size = time.perf_counter(), 0, self._records.page_tokens
        while first + n < end and not (n and bounded and time.perf_counter() - began > _SLICE_S):
            place = first + n
            with self._lock:
                page = self._pages.pop(request.page_keys[place], None)
            if page is None:
                break
            fits = self._records.tokens(page.record) == request.tokens[place * size : (place + 1) * size]
            if fits:
                self._images.copy_in(request.pages[place], self._records.image(page.record))
            page.free()
            if not fits:
                break
            n += 1
        self.loaded_pages += n
        self.load_s += time.perf_counter() - began
        return n

    def keep(self, keys: Sequence[bytes]) -> None:
        if self.below is not None:
            self.below.keep(keys)

    def forget(self, keys: Sequence[bytes]) -> None:
        if self.below is not None:
            self.below.forget(keys)
