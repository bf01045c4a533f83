"""Writes a run's numbers for TensorBoard.

Written by TensorBoard's own record format, in this thread: its ``EventFileWriter`` writes from another, where a full disk
ends in a traceback, and ``torch.utils.tensorboard`` takes ten times as long to import (0.9 s).
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from twostroke.core.errors import InputError
from twostroke.training.observers import Observer
from twostroke.training.retrying_file import RetryingFile

if TYPE_CHECKING:
    from twostroke.training.run import RunState

FOLDER = "tensorboard"
TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/gradient norm",
    "learning_rate": "train/learning rate",
    "tok_per_s": "speed/tokens per second",
    "mfu": "speed/MFU",
    "step_time_s": "speed/seconds a step",
    "data_wait_share": "speed/data wait share",
    "sent_bytes": "speed/bytes sent",
    "peak_sent_5ms_bytes": "speed/most bytes in 5 ms",
    "peak_sent_50ms_bytes": "speed/most bytes in 50 ms",
    "computing_s": "speed/seconds of computing",
    "wire_s": "speed/seconds of waiting for the wire",
    "waiting_s": "speed/seconds of waiting for others",
    "straggler_ratio": "speed/straggler ratio",
    "memory_bytes": "memory/bytes",
    "peak_memory_bytes": "memory/peak bytes",
    "epoch": "train/epoch",
}
"""TensorBoard's names of a log line's numbers. Other numbers, such as scores in the middle of the run, go under
"evaluation/"."""


def require_tensorboard() -> None:
    """Raise InputError if the ``tensorboard`` package is not installed."""
    try:
        import tensorboard.compat.proto.event_pb2
        import tensorboard.summary.writer.record_writer  # noqa: F401
    except ImportError as error:
        raise InputError(
            f'train.tensorboard=true needs the package tensorboard ({error}). Install it with pip install "twostroke[train]", '
            "or set train.tensorboard=false."
        ) from None


class TensorBoard(Observer):
    """Writes each step's log line as scalars into ``tensorboard/`` of the run's directory.

    A resumed run begins with a mark that makes TensorBoard forget the steps that it repeats.
    """

    name = "TensorBoard"

    def __init__(self, log: Callable[[str], None]) -> None:
        require_tensorboard()
        self._log = log

    def begin(self, run: RunState) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = run.inputs.directory.path / FOLDER
        self._file = RetryingFile(folder / f"events.out.tfevents.{time.time():.6f}.{os.getpid()}", self._log)
        self._buffer = io.BytesIO()
        self._records = RecordWriter(self._buffer)
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        start = SessionLog(status=SessionLog.START)
        self._add(Event(wall_time=time.time(), step=run.step + 1, session_log=start))
        self._write()

    def after_line(self, line: dict[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(line)]
        self._add(Event(wall_time=time.time(), step=line["step"], summary=Summary(value=values)))
        self._write()

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def _write(self) -> None:
        self._file.append(self._buffer.getvalue())
        self._buffer.seek(0)
        self._buffer.truncate()


_NOT_SHOWN = frozenset({"step", "tokens", "forward_s", "backward_s", "optimizer_s", "data_s", "elapsed_s"})


def scalars(line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """(tag, value) of the numbers in a log line. Each part and each block has a tag of its own."""
    for name, value in line.items():
        if name in _NOT_SHOWN or isinstance(value, bool):
            continue
        if isinstance(value, int | float):
            yield TAGS.get(name, f"evaluation/{name}"), float(value)
        elif name in ("block_grad_norms", "update_ratios"):
            folder = "gradient norm" if name == "block_grad_norms" else "update to weight"
            yield from ((f"{folder}/{part}", float(v)) for part, v in value.items() if v is not None)
        elif name in ("rank_compute_s", "rank_waiting_s"):
            folder = "seconds of computing" if name == "rank_compute_s" else "seconds of waiting"
            yield from ((f"{folder}/rank {rank}", float(seconds)) for rank, seconds in enumerate(value))
        elif name == "activations":
            for kind, by_block in value.items():
                yield from ((f"{kind.replace('_', ' ')}/blocks.{i}", float(v)) for i, v in enumerate(by_block))
