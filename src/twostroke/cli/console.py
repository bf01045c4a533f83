"""Prints for commands: results on stdout (text or one JSON document), progress and logs on stderr."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from twostroke.core.data_recipe import REUSED
from twostroke.core.described import plain
from twostroke.core.units import format_seconds

JSON_HELP = "Print one JSON document on stdout; progress and logs go to stderr."

LINE_EVERY_S = 10.0
"""If stderr is a file or a pipe, long work prints a line at most this often: a log is read afterwards."""

Advance = Callable[..., None]
"""``advance(done, note)``: how many units are done in all, and a few words shown beside the bar."""


def terminal_width() -> int:
    """Columns for a wide table: the terminal's, from 80 to 120; 120 into a file or a pipe."""
    return min(120, max(80, shutil.get_terminal_size((120, 24)).columns))


def emit(document: object, text: str, as_json: bool) -> None:
    """Print the result of a command: ``document``, plain data or objects, as JSON, or ``text`` for people."""
    print(json.dumps(plain(document), indent=1, default=str) if as_json else text, flush=True)


def emit_error(sentence: str, as_json: bool, is_told: bool = False) -> None:
    """Print an error on stderr, unless it ``is_told`` there already, and as a JSON document if that is asked for."""
    if as_json:
        print(json.dumps({"error": sentence}), flush=True)
    if not is_told:
        print(f"error: {sentence}", file=sys.stderr, flush=True)


def log(line: str) -> None:
    """Print one plain line on stderr."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def progress(title: str, total: float) -> Iterator[Advance]:
    """Show work of ``total`` units on stderr: a bar on a terminal, elsewhere a line at its start and one every
    ``LINE_EVERY_S`` while it lasts."""
    if not sys.stderr.isatty():
        yield from _lines(title, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(),
               TextColumn("ETA"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=False) as bar:
        task = bar.add_task(title, total=total, note="")

        def show(done: float, note: str = "") -> None:
            bar.update(task, completed=done, note=note)

        yield show


def _lines(title: str, total: float) -> Iterator[Advance]:
    """Plain lines: "title ...", then "title: 40% note, 12 s left" at most every ``LINE_EVERY_S``. If the work took as long as
    that, the last line says how long it took."""
    began = last = time.monotonic()
    ending = ""
    log(f"{title} ...")

    def advance(done: float, note: str = "") -> None:
        nonlocal last, ending
        now = time.monotonic()
        share = min(1.0, done / total) if total > 0 else 1.0
        if share == 1.0:
            ending = note  # the last line says that all is done, and how
            return
        if now - last < LINE_EVERY_S:
            return
        last = now
        left = f", {format_seconds((now - began) * (1 - share) / share)} left" if share > 0 else ""
        log(f"{title}: {100 * share:.0f}%{f' {note}' if note and note not in title else ''}{left}")

    yield advance
    if time.monotonic() - began >= LINE_EVERY_S or ending == REUSED:
        log(f"{title}: {REUSED if ending == REUSED else 'done'} in {format_seconds(time.monotonic() - began)}")
