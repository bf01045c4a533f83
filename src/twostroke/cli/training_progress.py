"""Shows a training run on the console: a bar and two lines on a terminal, and spaced plain lines elsewhere."""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from twostroke.cli.console import LINE_EVERY_S, log
from twostroke.core.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from twostroke.training.measurement import StepRecord

Show = Callable[["StepRecord", float], None]
"""``show(record, eta_s)`` after a step."""

LONGEST_BETWEEN_LINES_S, WIDENING = 60.0, 1.5
"""Without a terminal: a line at the first step, after ``LINE_EVERY_S``, then ever rarer up to one a minute, and at the last."""

ETA_STEPS, SPEED_STEPS, LOSS_STEPS = 200, 15, 50
"""Newest steps from which the time left, the speed and the mean loss are taken."""


class Pace:
    """Speed, loss and time left of a run, from its newest steps: single steps vary, and the first ones compile."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._recent: deque[tuple[int, float]] = deque(maxlen=ETA_STEPS)
        self._speeds: deque[float] = deque(maxlen=SPEED_STEPS)
        self._losses: deque[float] = deque(maxlen=LOSS_STEPS)

    def typical(self, record: StepRecord) -> StepRecord:
        """``record`` with the median speed of the newest steps."""
        self._speeds.append(record.tok_per_s)
        speed = statistics.median(self._speeds)
        mfu = record.mfu * speed / record.tok_per_s if record.mfu is not None and record.tok_per_s else record.mfu
        return dataclasses.replace(record, tok_per_s=speed, mfu=mfu)

    def mean_loss(self, record: StepRecord) -> float:
        """Mean loss of the newest ``LOSS_STEPS`` steps whose loss is finite, ``record``'s included; nan without any."""
        if math.isfinite(record.loss):
            self._losses.append(record.loss)
        return statistics.fmean(self._losses) if self._losses else math.nan

    def left_s(self, record: StepRecord, steady_s: float) -> float | None:
        """Seconds left, from the time of the newest steps and all that lies between them: checkpoints, scores, samples.

        Until there are five steps that neither compiled nor warmed up, it is ``steady_s``, the time of the steps alone. None
        while steps still compile.
        """
        if record.warm_up:
            return None
        self._recent.append((record.step, record.elapsed_s))
        (first, began), (last, now) = self._recent[0], self._recent[-1]
        if last - first < 5:
            return steady_s if math.isfinite(steady_s) else None
        return (now - began) / (last - first) * (self._steps - record.step)


def quality_text(record: StepRecord, mean_loss: float) -> str:
    """How a step learned: its loss, the mean loss of the newest steps, gradient norm, learning rate."""
    mean = f" (mean {mean_loss:.3f})" if math.isfinite(mean_loss) else ""
    return f"loss {record.loss:.3f}{mean}  grad {record.grad_norm:.2g}  lr {record.learning_rate:.2g}"


def speed_text(record: StepRecord) -> str:
    """How a step used the machine: speed, MFU, memory, and the share of the step that waited for data."""
    cells = [f"{format_count(record.tok_per_s)} tok/s"]
    if record.mfu is not None:
        cells.append(f"MFU {100 * record.mfu:.0f}%")
    cells.append(format_bytes(record.memory_bytes))
    cells.append(f"data {100 * record.data_wait_share:.1f}%")
    return "  ".join(cells)


@contextmanager
def training_progress(steps: int) -> Iterator[Show]:
    """Show the steps of a run on stderr until the block ends."""
    pace = Pace(steps)
    if not sys.stderr.isatty():
        lines = _SpacedLines(steps)
        yield lambda record, eta_s: lines.show(pace.typical(record), pace.mean_loss(record), pace.left_s(record, eta_s))
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
            left_s = pace.left_s(record, eta_s)
            bar.update(task, completed=record.step, eta="warming up" if left_s is None else f"ETA {format_seconds(left_s)}")
            text.plain = f"{quality_text(record, pace.mean_loss(record))}\n{speed_text(pace.typical(record))}"
            text.style = ""

        yield show


class _SpacedLines:
    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._gap_s = LINE_EVERY_S
        self._next = float("-inf")

    def show(self, record: StepRecord, mean_loss: float, left_s: float | None) -> None:
        now = time.monotonic()
        if now < self._next and record.step < self._steps:
            return
        if self._next > 0:
            self._gap_s = min(LONGEST_BETWEEN_LINES_S, self._gap_s * WIDENING)
        self._next = now + self._gap_s
        done = f"step {record.step}/{self._steps} ({100 * record.step // self._steps}%)"
        left = "" if left_s is None or record.step >= self._steps else f"  ETA {format_seconds(left_s)}"
        log(f"{done}  {quality_text(record, mean_loss)}  {speed_text(record)}{left}")
