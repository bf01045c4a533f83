"""Checkpoints written while training goes on: the step pays for a copy in memory, a thread does the rest."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from twostroke.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    checkpoint_name,
    list_checkpoints,
    save_checkpoint,
)
from twostroke.training.retention import Retention

Log = Callable[[str], None]

REMIND_S = 60.0
"""Seconds after which checkpoints that still cannot be written, or not in time, are spoken of again."""

NICENESS = 5
"""Of the writing thread: hashing and writing take the idle moments of the cores that compute first, and at least a quarter of
one that is busy, so that a stop never waits long for it."""


class Snapshot:
    """Host copies of a checkpoint's tensors. Their memory is allocated by the first and used again by those after it: fresh
    pages cost more than the copy. It holds as many bytes as a checkpoint (``planner.memory.snapshot_bytes``)."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    @torch.no_grad()
    def take(self, checkpoint: Checkpoint) -> Checkpoint:
        weights, optimizer = self._copied("weights", checkpoint.weights), self._copied("optimizer", checkpoint.optimizer)
        if any(tensor.is_cuda for tensor in (*checkpoint.weights.values(), *checkpoint.optimizer.values())):
            torch.cuda.synchronize()  # the copies were queued
        return Checkpoint(weights, optimizer, checkpoint.state)

    def _copied(self, part: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        copies = {}
        for name, tensor in tensors.items():
            buffer = self._buffers.get((part, name))
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                # Pinned for a GPU's tensors: copies from there into ordinary memory are several times slower.
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._buffers[part, name] = buffer
            copies[name] = buffer.copy_(tensor, non_blocking=True)
        return copies


class CheckpointSaver:
    """Writes the checkpoints of one run: ``begin`` in the background, ``save`` at once. One is in flight at most.

    What goes wrong in the background is said through ``log`` at the next call: the first time, again each minute while it
    lasts, and when it is over. ``sync_log`` brings the log's lines to the disk; no checkpoint is newer than its log.
    """

    def __init__(
        self,
        directory: Path,
        retention: Retention,
        log: Log,
        flush_log: Callable[[], None],
        sync_log: Callable[[], None],
        in_background: bool,
    ) -> None:
        self._directory, self._retention, self._log = directory, retention, log
        self._flush_log, self._sync_log, self._in_background = flush_log, sync_log, in_background
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._step = 0  # of the checkpoint in flight
        self._failure: BaseException | None = None
        self._n_failed, self._left_out = 0, 0
        self._said_at = -math.inf

    def begin(self, capture: Callable[[], Checkpoint], wait: bool) -> None:
        """A checkpoint of this moment, written while training goes on. Never raises for a disk: it is said.

        Where the one before is still being written, ``wait`` for it, or leave this one out and say so.
        """
        if wait:
            self.settle()
        self.poll()
        if self._thread is not None:
            self._left_out += 1
            if self._is_time_to_speak():
                self._log(
                    f"checkpoint {checkpoint_name(self._step)} is still being written, so this step has none "
                    f"({self._left_out} left out so far). Raise train.checkpoint_every."
                )
            return
        try:
            self._flush(checkpoint := capture())
            if not self._in_background:
                self._write(checkpoint)
                self._succeeded()
                return
        except CheckpointError as error:
            self._failed(error)
            return
        copy = self._snapshot.take(checkpoint)
        self._step = int(copy.state["step"])
        self._thread = threading.Thread(target=self._write_in_background, args=(copy,), name="checkpoint", daemon=True)
        self._thread.start()

    def save(self, checkpoint: Checkpoint) -> Path:
        """A checkpoint of this moment, on the disk when this returns. Raises CheckpointError; older ones are untouched."""
        self.settle()
        self._flush(checkpoint)
        return self._write(checkpoint)

    def poll(self) -> None:
        """Say what became of the checkpoint in flight, if it has ended."""
        if self._thread is not None and not self._thread.is_alive():
            self.settle()

    def settle(self) -> None:
        """Wait for the checkpoint in flight and say what became of it."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is None:
            self._succeeded()
        elif isinstance(failure, CheckpointError):
            self._failed(failure)
        else:
            raise failure

    def close(self) -> None:
        """Wait for the checkpoint in flight, whatever becomes of it: nothing may write to a directory whose lock is free."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def what_is_kept(self) -> str:
        kept = list_checkpoints(self._directory)
        return f"Checkpoint {kept[-1][1].name} is kept." if kept else "There is no earlier checkpoint."

    def _flush(self, checkpoint: Checkpoint) -> None:
        try:
            self._flush_log()
        except OSError as error:
            name = checkpoint_name(int(checkpoint.state["step"]))
            reason = error.strerror or str(error)
            raise CheckpointError(f"checkpoint {name} was not written: its log lines cannot be ({reason}).") from error

    def _write(self, checkpoint: Checkpoint) -> Path:
        return save_checkpoint(self._directory, checkpoint, self._retention, before_rename=self._sync_log)

    def _write_in_background(self, checkpoint: Checkpoint) -> None:
        if sys.platform == "linux":  # where a priority is a thread's
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self._write(checkpoint)
        except BaseException as error:  # raised, or said, by the thread that trains
            self._failure = error

    def _failed(self, error: CheckpointError) -> None:
        self._n_failed += 1
        if not self._is_time_to_speak() and self._n_failed > 1:
            return
        before = f" ({self._n_failed - 1} before it were not written either.)" if self._n_failed > 1 else ""
        self._log(f"{error}{before} {self.what_is_kept()} Training continues.")

    def _is_time_to_speak(self) -> bool:
        now = time.monotonic()
        if now - self._said_at < REMIND_S:
            return False
        self._said_at = now
        return True

    def _succeeded(self) -> None:
        if self._n_failed:
            self._log(f"checkpoints are written again, after {self._n_failed} that were not.")
        self._n_failed = 0
