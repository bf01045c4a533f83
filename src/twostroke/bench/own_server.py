"""Runs a server for one measurement. It is started by `twostroke serve`, as a person starts it, and ended with SIGTERM."""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from twostroke.core.errors import EngineError, InputError

STOP_S = 100.0


@dataclass(frozen=True)
class OwnServer:
    """The document that `twostroke serve --json` prints when it is ready."""

    url: str
    model: str
    dtype: str
    startup_s: float
    document: dict[str, Any]


@contextmanager
def own_server(model: Path, options: Sequence[str] = ()) -> Iterator[OwnServer]:
    """Serve ``model`` on a free port. Raises InputError or EngineError with the server's own sentence."""
    command = [sys.executable, "-P", "-m", "twostroke", "serve", str(model), "--port", "0", "--json", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=_end_with_parent) as process:
        assert process.stdout is not None
        try:
            document = _read_document(process.stdout)
            if "url" not in document:
                code = process.wait(timeout=STOP_S)
                message = document.get("error") or f"the server ended with exit code {code} before it was ready."
                error = InputError(message) if code == InputError.exit_code else EngineError(message)
                error.is_told = "error" in document
                raise error
            yield OwnServer(document["url"], document["model"], document["dtype"], document["startup_s"], document)
        finally:
            process.terminate()
            try:
                process.wait(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _end_with_parent() -> None:
    """Called in the child: ask Linux to send it SIGTERM when the parent ends, even if that is killed (PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)


def _read_document(lines: IO[str]) -> dict[str, Any]:
    """The first JSON object in ``lines``; empty if the lines end before it does."""
    text = ""
    for line in lines:
        text += line
        try:
            found = json.loads(text)
        except ValueError:
            continue
        return found if isinstance(found, dict) else {}
    return {}
