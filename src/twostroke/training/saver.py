"""Writes checkpoints while training goes on. A step waits for a copy in memory, and a thread writes the copy."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
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
"""Seconds after which the log repeats that checkpoints cannot be written, or not in time."""

NICENESS = 5
"""Niceness of the writing thread. Hashing and writing use idle moments of the cores, and at least a quarter of a busy core, so
that a stop does not wait long for them."""


class Snapshot:
    """Host copies of a checkpoint's tensors. The first allocates their memory and later ones reuse it, because new pages cost
    more than the copy. It takes as many bytes as a checkpoint (``planner.training.memory.snapshot_bytes``)."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    @torch.no_grad()
    def take(self, checkpoint: Checkpoint) -> Checkpoint:
        weights, optimizer = self._copied("weights", checkpoint.weights), self._copied("optimizer", checkpoint.optimizer)
        if any(buffer.is_pinned() for buffer in self._buffers.values()):
            torch.cuda.synchronize()  # copies from a GPU are asynchronous
        return Checkpoint(weights, optimizer, checkpoint.state)

    def _copied(self, part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        copies = {}
        for name, tensor in tensors.items():
            buffer = self._buffers.get((part, name))
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                # Pinned for a GPU's tensors, because copies into ordinary memory are several times slower.
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._buffers[part, name] = buffer
            copies[name] = buffer.copy_(tensor, non_blocking=True)
        return copies


class CheckpointSaver:
    """Writes the checkpoints of one run: ``begin`` in the background, ``save`` at once. At most one is in flight.

    The next call logs errors of the background: the first one, then one a minute while they last, and their end. ``sync_log``
    flushes the run's log to the disk, so that no checkpoint is newer than its log.
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
        self._step = 0  # step of the checkpoint in flight
        self._failure: BaseException | None = None
        self._n_failed, self._left_out = 0, 0
        self._said_at = -math.inf
        self.waited_s = 0.0  # of the steps, for ``begin``

    def begin(self, capture: Callable[[], Checkpoint], wait: bool) -> None:
        """Write a checkpoint of the current state while training goes on. Errors of the disk are logged and not raised.

        Where the one before is still being written, ``wait`` for it, or leave this one out and say so.
        """
        began = time.perf_counter()
        try:
            self._begin(capture, wait)
        finally:
            self.waited_s += time.perf_counter() - began

    def _begin(self, capture: Callable[[], Checkpoint], wait: bool) -> None:
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
        """Write a checkpoint of the current state, and return when it is on the disk. Raises CheckpointError; older checkpoints
        are not touched."""
        self.settle()
        self._flush(checkpoint)
        return self._write(checkpoint)

    def poll(self) -> None:
        """Log the result of the checkpoint in flight if it has ended."""
        if self._thread is not None and not self._thread.is_alive():
            self.settle()

    def settle(self) -> None:
        """Wait for the checkpoint in flight and log its result."""
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
        """Wait for the checkpoint in flight, because nothing may write to the directory after its lock is released."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def what_is_kept(self) -> str:
        kept = list_checkpoints(self._directory)
        return f"Checkpoint {kept[-1][1].name} is kept." if kept else "No earlier checkpoint exists."

    def _flush(self, checkpoint: Checkpoint) -> None:
        try:
            self._flush_log()
        except OSError as error:
            name = checkpoint_name(int(checkpoint.state["step"]))
            reason = error.strerror or str(error)
            raise CheckpointError(
                f"checkpoint {name} was not written, because its log cannot be written ({reason})."
            ) from error

    def _write(self, checkpoint: Checkpoint) -> Path:
        return save_checkpoint(self._directory, checkpoint, self._retention, before_rename=self._sync_log)

    def _write_in_background(self, checkpoint: Checkpoint) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
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
