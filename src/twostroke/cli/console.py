"""Prints for commands: results on stdout (text or one JSON document), progress and logs on stderr."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from twostroke.core.data_recipe import REUSED
from twostroke.core.described import plain
from twostroke.core.units import format_seconds

JSON_HELP = "Print one JSON document on stdout; progress and logs go to stderr."

_GAPS = re.compile(r"(?<=\S)  +(?=\S)")
"""The gaps between columns of a table."""

LINE_EVERY_S = 10.0
"""If stderr is a file or a pipe, long work prints a line at most this often: a log is read afterwards."""

Advance = Callable[..., None]
"""``advance(done, note)``: how many units are done in all, and a few words shown beside the bar."""


def terminal_width() -> int:
    """Columns for a wide table: the terminal's, from 80 to 120; 120 into a file or a pipe."""
    return min(120, max(80, shutil.get_terminal_size().columns)) if sys.stdout.isatty() else 120


def emit(document: object, text: str, as_json: bool, verbatim: bool = False) -> None:
    """Print the result of a command: ``document``, plain data or objects, as JSON, or ``text`` for people. On a terminal
    lines that are longer than it are folded, unless ``text`` is ``verbatim``."""
    if as_json:
        text = json.dumps(plain(document), indent=1, default=str)
    elif not verbatim:
        text = _fitted(text, sys.stdout)
    print(text, flush=True)


def _fitted(text: str, stream: TextIO) -> str:
    return folded(text, shutil.get_terminal_size().columns) if stream.isatty() else text


def folded(text: str, width: int) -> str:
    """``text`` with no line of over ``width`` columns that has a space to break at. A line goes on below its last column of
    a table, if that is wide enough to read (24), else two columns further in than it began."""
    return "\n".join(part for line in text.split("\n") for part in _parts(line, width))


def _parts(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    began = len(line) - len(line.lstrip())
    columns = [gap.end() for gap in _GAPS.finditer(line) if gap.end() <= width - 24]
    indent = columns[-1] if columns else began + 2
    if " " not in line[max(columns, default=began) :].strip():
        return [line]  # one long path: on a line of its own it would be as long
    fold = textwrap.TextWrapper(width, initial_indent=line[:began], subsequent_indent=" " * indent, break_on_hyphens=False,
                                break_long_words=False, replace_whitespace=False)  # fmt: skip
    return fold.wrap(line[began:])


def emit_error(sentence: str, as_json: bool, is_told: bool = False) -> None:
    """Print an error on stderr, unless it ``is_told`` there already, and as a JSON document if that is asked for."""
    if as_json:
        print(json.dumps({"error": sentence}), flush=True)
    if not is_told:
        print(_fitted(f"error: {sentence}", sys.stderr), file=sys.stderr, flush=True)


def log(line: str) -> None:
    """Print one plain line on stderr, folded on a terminal that is narrower."""
    print(_fitted(line, sys.stderr), file=sys.stderr, flush=True)


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
