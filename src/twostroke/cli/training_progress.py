"""How a training run shows itself on the console: two lines that stay on a terminal, spaced plain lines elsewhere."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from twostroke.cli.console import log
from twostroke.core.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from twostroke.training.measurement import StepRecord

Show = Callable[["StepRecord", float], None]
"""``show(record, eta_s)`` after a step."""

FIRST_LINE_AFTER_S, LONGEST_BETWEEN_LINES_S, WIDENING = 5.0, 60.0, 1.5
"""Where there is no terminal: a line at the first step, one after 5 s, then ever rarer up to one a minute; one at the end."""

ETA_STEPS, SPEED_STEPS = 200, 15


class Pace:
    """How fast a run goes: single steps jump about, on a machine that has other work most of all."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._recent: deque[tuple[int, float]] = deque(maxlen=ETA_STEPS)
        self._speeds: deque[float] = deque(maxlen=SPEED_STEPS)

    def typical(self, record: StepRecord) -> StepRecord:
        """``record`` with the median speed of the newest steps."""
        self._speeds.append(record.tok_per_s)
        speed = statistics.median(self._speeds)
        mfu = record.mfu * speed / record.tok_per_s if record.mfu is not None and record.tok_per_s else record.mfu
        return dataclasses.replace(record, tok_per_s=speed, mfu=mfu)

    def left_s(self, record: StepRecord, fallback_s: float) -> float:
        """Seconds left, from the time that the newest steps took with all that lies between them: checkpoints, scores, samples.

        ``fallback_s`` counts until five steps are there that neither compiled nor warmed up.
        """
        if record.warm_up:
            return fallback_s
        self._recent.append((record.step, record.elapsed_s))
        (first, began), (last, now) = self._recent[0], self._recent[-1]
        if last - first < 5:
            return fallback_s
        return (now - began) / (last - first) * (self._steps - record.step)


def numbers(record: StepRecord) -> str:
    """The step in 80 columns: loss, gradient norm, learning rate, speed, MFU, memory, and the share of the step that waited
    for data."""
    cells = [f"loss {record.loss:.3f}", f"grad {record.grad_norm:.2g}", f"lr {record.learning_rate:.2g}"]
    cells.append(f"{format_count(record.tok_per_s)} tok/s")
    if record.mfu is not None:
        cells.append(f"MFU {100 * record.mfu:.0f}%")
    cells.append(format_bytes(record.memory_bytes))
    cells.append(f"data {100 * record.data_wait_share:.1f}%")
    return "  ".join(cells)


@contextmanager
def training_progress(steps: int) -> Iterator[Show]:
    """Shows the steps of a run on stderr until the block ends."""
    pace = Pace(steps)
    if not sys.stderr.isatty():
        lines = _SpacedLines(steps)
        yield lambda record, eta_s: lines.show(pace.typical(record), pace.left_s(record, eta_s))
        return
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.text import Text

    columns = (TextColumn("step {task.completed:,.0f} of {task.total:,.0f}"), BarColumn(bar_width=None),
               TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(), TextColumn("{task.fields[eta]}"))  # fmt: skip
    bar = Progress(*columns, expand=True)
    task = bar.add_task("training", total=steps, eta="starting")
    text = Text("waiting for the first step", style="dim")
    # Twice a second: drawing takes about a millisecond of the cores that train.
    with Live(Group(bar, text), console=Console(stderr=True), refresh_per_second=2):

        def show(record: StepRecord, eta_s: float) -> None:
            bar.update(task, completed=record.step, eta=f"ETA {format_seconds(pace.left_s(record, eta_s))}")
            text.plain = numbers(pace.typical(record))
            text.style = ""

        yield show


class _SpacedLines:
    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._gap_s = FIRST_LINE_AFTER_S
        self._next = float("-inf")

    def show(self, record: StepRecord, eta_s: float) -> None:
        now = time.monotonic()
        if now < self._next and record.step < self._steps:
            return
        if self._next > 0:
            self._gap_s = min(LONGEST_BETWEEN_LINES_S, self._gap_s * WIDENING)
        self._next = now + self._gap_s
        done = f"step {record.step}/{self._steps} ({100 * record.step // self._steps}%)"
        left = f"  ETA {format_seconds(eta_s)}" if record.step < self._steps else ""
        log(f"{done}  {numbers(record)}{left}")
