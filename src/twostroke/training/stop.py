"""Handles SIGTERM and Ctrl-C, so that a run stops without losing steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

Log = Callable[[str], None]


class StopSignals:
    """A context in which the first SIGTERM or Ctrl-C sets ``requested``, so that the step can end and a checkpoint be written.

    The second signal only logs again, because people press twice while a checkpoint takes seconds. The third raises
    KeyboardInterrupt at once; a partial checkpoint then stays under its temporary name, as after a kill. While
    ``nothing_to_save`` is set, because this process has not finished a step, the first signal raises it: a compilation may take
    a minute. ``answer`` is logged at the first signal. Handlers are restored on exit. Outside the main thread Python delivers
    no signals, so no handlers are installed.
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
            self._log("still stopping. Press Ctrl-C once more to stop at once, without a checkpoint.")
        else:
            raise KeyboardInterrupt
