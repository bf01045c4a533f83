"""The newest intact checkpoint, read and verified while the model that takes it is being built."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from twostroke.training.checkpoint import Checkpoint, list_checkpoints, load_newest

Log = Callable[[str], None]


class CheckpointReader:
    """``load_newest`` in a thread of its own, begun when this is made. Hashing needs no interpreter lock, and importing and
    building need nothing else, so on two cores verification takes no time of its own."""

    def __init__(self, directory: Path, log: Log) -> None:
        self.will_find = bool(list_checkpoints(directory))
        """Whether there is any: ``get`` then returns one or raises."""
        self._directory, self._log = directory, log
        self._lines: list[str] = []
        self._found: Checkpoint | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, name="checkpoint reader", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            self._found = load_newest(self._directory, self._lines.append)
        except BaseException as error:  # raised where it is asked for
            self._error = error

    def get(self) -> Checkpoint | None:
        """The checkpoint, once it is read; damaged ones are named through ``log`` here. Errors: ``load_newest``."""
        self._thread.join()
        for line in self._lines:
            self._log(line)
        self._lines.clear()
        if self._error is not None:
            raise self._error
        return self._found
