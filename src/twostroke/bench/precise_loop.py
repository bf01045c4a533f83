"""An event loop that wakes on time, for a client whose lateness counts as the server's."""

from __future__ import annotations

import asyncio
import gc
import select
import selectors
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

if hasattr(selectors, "EpollSelector"):

    class _FineSelector(selectors.EpollSelector):
        """``epoll_wait`` takes whole milliseconds, and asyncio rounds up: requests would be up to one late. ``select`` on the
        epoll's own descriptor takes microseconds."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is None or timeout <= 0:
                return super().select(timeout)
            select.select([self.fileno()], [], [], timeout)
            return super().select(0)

    FineSelector: type[selectors.BaseSelector] = _FineSelector
else:
    FineSelector = selectors.DefaultSelector


def run_precisely(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """``asyncio.run``, on a loop that wakes within tens of microseconds."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(FineSelector())) as runner:
        return runner.run(work())


@contextmanager
def without_collections() -> Iterator[None]:
    """No garbage collection meanwhile: one over a load's prompts takes tens of milliseconds, and nothing here forms cycles."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
