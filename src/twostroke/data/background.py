"""Prefetching: a thread or worker processes prepare batches, in the order and with the state of the loader itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.core.errors import TwostrokeError
from twostroke.data.loader import Batch, ShuffledLoader, batch_of
from twostroke.data.rows import Int64Array, RowBuilder, Rows

PREFETCHED_BATCHES = 2
"""Fewest batches that are prepared beyond the one in use."""

_RESTARTS = 3


class BackgroundLoader:
    """Prepares the next batches of ``loader`` while the last one is in use.

    With ``workers`` = 0 a thread of this process prepares them, else that many processes of about 60 MB each. The loader fixes
    the order before it gives out the work, and ``state`` is that of the newest batch handed out. So neither depends on
    ``workers`` or on the number of prepared batches. A worker that dies is replaced, and its batch is prepared again.
    """

    def __init__(self, loader: ShuffledLoader, workers: int = 0, ahead: int = PREFETCHED_BATCHES) -> None:
        self._loader, self._workers, self._ahead = loader, workers, max(ahead, 2 * workers)
        self._state = loader.state()
        self._prefetcher: _Prefetcher | None = None
        self._finalizer: Any = None
        self.batch_size, self.seed = loader.batch_size, loader.seed
        self.windows_per_epoch = loader.windows_per_epoch

    @property
    def epoch(self) -> float:
        """Epochs handed out so far."""
        return self._state["next_window"] / self.windows_per_epoch

    @property
    def source_epochs(self) -> tuple[float, ...]:
        return self._loader.source_epochs_at(self._state)

    def next_batch(self) -> Batch:
        if self._prefetcher is None:
            self._prefetcher = _Prefetcher(self._loader, self._workers, self._ahead)
            self._finalizer = weakref.finalize(self, self._prefetcher.stop)
        batch, self._state = self._prefetcher.next()
        return batch

    def state(self) -> dict[str, int]:
        """The place in the data that a resumed run continues from, and the settings that it must share."""
        return dict(self._state)

    def restore(self, state: dict[str, int]) -> None:
        """Continue where ``state`` was taken, and drop the prepared batches. Raises InputError if the loader refuses the
        state."""
        self.close()
        try:
            self._loader.restore(state)
        except BaseException:
            self._loader.restore(self._state)
            raise
        self._state = self._loader.state()

    def close(self) -> None:
        """Stop prefetching. The next call of ``next_batch`` starts it again, after the last batch that was handed out."""
        if self._prefetcher is None:
            return
        self._finalizer()
        self._prefetcher = None
        self._loader.restore(self._state)


class _Prefetcher:
    """The threads that prepare batches: one that builds them itself, or one for each worker process. It does not refer to the
    ``BackgroundLoader``, so that dropping that one without closing it stops the threads."""

    def __init__(self, loader: ShuffledLoader, workers: int, ahead: int) -> None:
        self._loader, self._ahead = loader, ahead
        self._changed = threading.Condition()
        self._n_started = self._n_handed_out = 0
        self._ready: dict[int, tuple[Batch, dict[str, int]] | BaseException] = {}
        self._stopped = False
        self._processes = [_Worker(loader.builder) for _ in range(workers)]
        builders: list[RowBuilder | _Worker] = [*self._processes] or [loader.builder]
        self._threads = [
            threading.Thread(target=self._work, args=(builder,), name=f"batches-{i}", daemon=True)
            for i, builder in enumerate(builders)
        ]
        for thread in self._threads:
            thread.start()

    def next(self) -> tuple[Batch, dict[str, int]]:
        with self._changed:
            while self._n_handed_out not in self._ready:
                self._changed.wait()
            found = self._ready.pop(self._n_handed_out)
            if isinstance(found, BaseException):
                self._ready[self._n_handed_out] = found  # the next call raises the same error instead of waiting for ever
                raise found
            self._n_handed_out += 1
            self._changed.notify_all()
            return found

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for process in self._processes:
            process.end()
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            process.close()

    def _work(self, builder: RowBuilder | _Worker) -> None:
        n_rows = self._loader.batch_size
        while True:
            with self._changed:
                while self._n_started - self._n_handed_out >= self._ahead and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
                number = self._n_started
                self._n_started += 1
                found: tuple[Batch, dict[str, int]] | BaseException
                try:
                    request, state = self._loader.next_own_request(), self._loader.state()
                except BaseException as error:  # ``next`` raises it in the training thread
                    self._ready[number] = error
                    self._changed.notify_all()
                    return
            try:
                found = (batch_of(builder.build(request, n_rows)), state)
            except BaseException as error:
                found = error
            with self._changed:
                self._ready[number] = found
                self._changed.notify_all()
                if isinstance(found, BaseException):
                    return


class _Worker:
    """A row builder in a process of its own, which its first request starts."""

    def __init__(self, builder: RowBuilder) -> None:
        self._description = builder.description()
        self._process: subprocess.Popen[bytes] | None = None
        self._guard = threading.Lock()
        self._ended = False

    def build(self, request: Int64Array, n_rows: int) -> Rows:
        code: int | None = None
        for _ in range(_RESTARTS + 1):
            process = self._running()
            try:
                return self._ask(process, request, n_rows)
            except (BrokenPipeError, EOFError):
                code = process.wait()
                _close(process)
                self._process = None
            if self._ended:
                break
        raise TwostrokeError(
            f"a process that prepares batches ended {_RESTARTS + 1} times, at last with code {code}. "
            "Check whether the system ended it for lack of memory, or train with data.workers=0."
        )

    def _running(self) -> subprocess.Popen[bytes]:
        with self._guard:
            if self._ended:
                raise EOFError("the loader was closed.")
            if self._process is None:
                package = str(Path(__file__).parents[2])
                path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
                process = subprocess.Popen(
                    [sys.executable, "-m", "twostroke.data.batch_worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                    start_new_session=True,  # Ctrl-C must reach the training process alone, which ends its workers
                )
                self._process = process
                assert process.stdin is not None
                process.stdin.write(json.dumps(self._description).encode() + b"\n")
            return self._process

    def _ask(self, process: subprocess.Popen[bytes], request: Int64Array, n_rows: int) -> Rows:
        assert process.stdin is not None
        header = np.array([n_rows, *request.shape], dtype=np.int64)
        process.stdin.write(header.tobytes() + np.ascontiguousarray(request).tobytes())
        process.stdin.flush()
        (n_valid,) = _read(process, (1,), np.int64).tolist()
        if n_valid < 0:
            (length,) = _read(process, (1,), np.int64).tolist()
            sentence = _read(process, (length,), np.uint8).tobytes().decode()
            raise TwostrokeError(
                f"a batch could not be read from the prepared data: {sentence}. If it is damaged, delete it and prepare it "
                "again."
            )
        shape = (n_rows, int(self._description["sequence_length"]))
        tokens, targets, positions = (_read(process, shape, np.int64) for _ in range(3))
        return Rows(tokens, targets, positions, _read(process, shape, np.int32), n_valid)

    def end(self) -> None:
        with self._guard:
            self._ended = True
            process = self._process
        if process is not None:
            process.kill()  # a worker has no state and writes no files
            process.wait()

    def close(self) -> None:
        """Close the pipes. The threads that read from them must have ended."""
        if self._process is not None:
            _close(self._process)


def _read(process: subprocess.Popen[bytes], shape: tuple[int, ...], dtype: Any) -> Any:
    assert process.stdout is not None
    array: npt.NDArray[Any] = np.empty(shape, dtype=dtype)
    view = array.data.cast("B")
    if process.stdout.readinto(view) != len(view):  # type: ignore[attr-defined]
        raise EOFError("the process ended.")
    return array


def _close(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        try:
            if stream is not None:
                stream.close()
        except OSError:
            pass  # the request that was not sent is sent again to the next process
