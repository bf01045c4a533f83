"""What commands print: results on stdout (text or one JSON document), progress and logs on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

JSON_HELP = "Print one JSON document on stdout; progress and logs go to stderr."

Advance = Callable[..., None]
"""``advance(done, note)``: how many units are done in all, and a few words shown beside the bar."""


def emit(document: dict[str, Any], text: str, as_json: bool) -> None:
    """Print the result of a command: ``document`` as JSON, or ``text`` for people."""
    print(json.dumps(document, indent=1, default=str) if as_json else text, flush=True)


def emit_error(sentence: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"error": sentence}), flush=True)
    print(f"error: {sentence}", file=sys.stderr, flush=True)


def log(line: str) -> None:
    """One plain line for the person watching, on stderr."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def progress(title: str, total: float) -> Iterator[Advance]:
    """A progress bar on stderr when it is a terminal; otherwise a line each tenth of the way."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(),
                   TextColumn("ETA"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))  # fmt: skip
        with Progress(*columns, console=Console(stderr=True), transient=False) as bar:
            task = bar.add_task(title, total=total, note="")

            def show(done: float, note: str = "") -> None:
                bar.update(task, completed=done, note=note)

            yield show
        return
    shown = -1

    def advance(done: float, note: str = "") -> None:
        nonlocal shown
        tenth = int(10 * done / total) if total > 0 else 10
        if tenth > shown:
            shown = tenth
            log(f"{title}: {min(100, tenth * 10)}% {note}".rstrip())

    yield advance
