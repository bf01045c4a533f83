"""Reads and verifies the newest intact checkpoint while the model is being built."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from twostroke.training.checkpoint import Checkpoint, list_checkpoints, load_newest

Log = Callable[[str], None]


class CheckpointReader:
    """Runs ``load_newest`` in a thread, from construction on. Hashing does not hold the interpreter lock, and imports and the
    building of the model need little else, so on two cores verification adds no time to the start."""

    def __init__(self, directory: Path, log: Log) -> None:
        self.will_find = bool(list_checkpoints(directory))
        """Whether a checkpoint exists. If so, ``get`` returns one or raises."""
        self._directory, self._log = directory, log
        self._lines: list[str] = []
        self._found: Checkpoint | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, name="checkpoint reader", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            self._found = load_newest(self._directory, self._lines.append)
        except BaseException as error:  # ``get`` raises it
            self._error = error

    def get(self) -> Checkpoint | None:
        """Wait for the checkpoint and return it. Damaged ones are logged here. Raises the errors of ``load_newest``."""
        self._thread.join()
        for line in self._lines:
            self._log(line)
        self._lines.clear()
        if self._error is not None:
            raise self._error
        return self._found
