"""Stopping where nothing is lost when SIGTERM or Ctrl-C asks for it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

Log = Callable[[str], None]


class StopSignals:
    """``with StopSignals(log) as stop``: the first SIGTERM or Ctrl-C sets ``stop.requested``, so that the step can end and a
    checkpoint be written.

    The second only says so again, because people press twice and the save that is under way takes seconds. The third
    stops at once with KeyboardInterrupt; a half-written checkpoint is then left aside, as after a kill. While
    ``nothing_to_save``, because this process has not finished a step yet, the first does: a compilation may take a minute.
    ``answer`` is what the first is told. Handlers are restored on exit. Outside the main thread Python delivers no signals,
    and nothing is installed.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, log: Log) -> None:
        self._log = log
        self._received = 0
        self.nothing_to_save = False
        self.answer = "stopping after this step, then writing a checkpoint ..."
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return self._received > 0

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._receive) for number in self.SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received += 1
        if self.nothing_to_save:
            raise KeyboardInterrupt
        if self._received == 1:
            self._log(self.answer)
        elif self._received == 2:
            self._log("still stopping; once more stops at once, without a checkpoint.")
        else:
            raise KeyboardInterrupt
