"""A file that grows during a run, and whose disk may fill up without stopping the run."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twostroke.core.aside import write_text


class PatientFile:
    """Bytes are added to ``path``; what cannot be written is kept and tried again with the next, and said once.

    No record is left half written: what a full disk still took of one is cut off again.
    """

    def __init__(self, path: Path, log: Callable[[str], None]) -> None:
        self.path, self._log = path, log
        self._pending = bytearray()
        self._failed = False

    def keep_lines(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Of the file's JSON lines keep those that are ``wanted``: a resumed run writes the later ones again."""
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return
        kept = []
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a line cut by a kill
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
                    f"{self.path} cannot be written ({error.strerror or error}); what belongs there is kept until it can."
                )
            self._failed = True

    def flush(self) -> None:
        """Hand everything to the system. Raises OSError where it does not take it; it is kept for the next time."""
        if not self._pending:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        size = self.path.stat().st_size if self.path.is_file() else 0
        try:
            with self.path.open("ab") as stream:
                stream.write(self._pending)
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self.path, size)  # what a full disk still took of it
            raise
        self._pending.clear()
        self._failed = False
