"""Says which stage of a long export runs, and since when, while another program's compiler has the thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from twostroke.core.units import format_seconds

EVERY_S = 1.0
"""Between two words on a stage that lasts."""

Progress = Callable[[float, str], None]


class Stages:
    """The parts of an export's bar: reading the model, then each of ``names``, alike long. ``progress(share, note)`` is told
    the stage's name and the seconds since it began, also from a thread of its own."""

    def __init__(self, names: Sequence[str], progress: Progress | None) -> None:
        self._names, self._progress = tuple(names), progress

    def _tell(self, n_done: float, note: str) -> None:
        if self._progress is not None:
            self._progress(min(1.0, n_done / (1 + len(self._names))), note)

    def read(self, share: float, note: str) -> None:
        """``share`` of the model has been read."""
        self._tell(share, note)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """The stage ``name`` runs inside. Raises ValueError for one that was not named."""
        n_done, began, over = 1 + self._names.index(name), time.monotonic(), threading.Event()

        def tick() -> None:
            while not over.wait(EVERY_S):
                self._tell(n_done, f"{name}, {format_seconds(time.monotonic() - began)}")

        ticker = threading.Thread(target=tick, name=f"export: {name}", daemon=True)
        self._tell(n_done, name)
        ticker.start()
        try:
            yield
        finally:
            over.set()
            ticker.join()
        self._tell(n_done + 1, name)
