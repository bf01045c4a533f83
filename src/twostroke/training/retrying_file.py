"""A file that grows during a run. A full disk delays what is written to it and does not stop the run."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twostroke.core.aside import write_text


class RetryingFile:
    """Appends bytes to ``path``. Bytes that cannot be written are kept and written with later ones, and that is logged once.

    If a full disk takes only a part of a record, that part is removed again.
    """

    def __init__(self, path: Path, log: Callable[[str], None]) -> None:
        self.path, self._log = path, log
        self._pending = bytearray()
        self._failed = False

    def keep_lines(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Keep the JSON lines that are ``wanted``. A resumed run writes the later ones again."""
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return
        kept = []
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # an incomplete line of a killed run
                if wanted(json.loads(line)):
                    kept.append(line + "\n")
        write_text(self.path, "".join(kept))

    def append(self, data: bytes) -> None:
        self._pending += data
        try:
            self.flush()
        except OSError as error:
            if not self._failed:
                self._log(
                    f"{self.path} cannot be written ({error.strerror or error}); its lines are kept in memory until it can."
                )
            self._failed = True

    def flush(self) -> None:
        """Write everything to the file. Raises OSError if that fails; what was not written is kept for the next time."""
        if not self._pending:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        size = self.path.stat().st_size if self.path.is_file() else 0
        try:
            with self.path.open("ab") as stream:
                stream.write(self._pending)
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self.path, size)  # removes the part that a full disk took
            raise
        self._pending.clear()
        self._failed = False
