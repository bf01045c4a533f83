"""Batches prepared in the background, by a thread or by processes, in the order and with the state of the loader itself."""

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

AHEAD = 2
"""Batches that are prepared beyond the one in use, at least."""

_RESTARTS = 3


class BackgroundLoader:
    """``loader``'s batches, prepared while the last one is in use.

    With ``workers`` = 0 a thread of this process prepares them; else that many processes, each of which needs about 60 MB. The
    order is fixed before the work is given out, and ``state`` is that of the newest batch handed out, not of those prepared:
    neither depends on ``workers``, nor on how far the background is ahead. A process that dies is replaced, and its batch made
    again.
    """

    def __init__(self, loader: ShuffledLoader, workers: int = 0, ahead: int = AHEAD) -> None:
        self._loader, self._workers, self._ahead = loader, workers, max(ahead, 2 * workers)
        self._state = loader.state()
        self._lanes: _Lanes | None = None
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
        if self._lanes is None:
            self._lanes = _Lanes(self._loader, self._workers, self._ahead)
            self._finalizer = weakref.finalize(self, self._lanes.stop)
        batch, self._state = self._lanes.next()
        return batch

    def state(self) -> dict[str, int]:
        """All that a resumed run needs to continue with the very next window, and what it must agree on."""
        return dict(self._state)

    def restore(self, state: dict[str, int]) -> None:
        """Continue where ``state`` was taken; what was prepared is dropped. Raises InputError as the loader does."""
        self.close()
        try:
            self._loader.restore(state)
        except BaseException:
            self._loader.restore(self._state)
            raise
        self._state = self._loader.state()

    def close(self) -> None:
        """End the background work. The next batch begins it anew, where the last one was handed out."""
        if self._lanes is None:
            return
        self._finalizer()
        self._lanes = None
        self._loader.restore(self._state)


class _Lanes:
    """The threads that prepare batches: one that builds them itself, or one for each worker process. Holds no reference to the
    loader in front, so that this one may be forgotten without being closed."""

    def __init__(self, loader: ShuffledLoader, workers: int, ahead: int) -> None:
        self._loader, self._ahead = loader, ahead
        self._changed = threading.Condition()
        self._n_begun = self._n_taken = 0
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
            while self._n_taken not in self._ready:
                self._changed.wait()
            found = self._ready.pop(self._n_taken)
            if isinstance(found, BaseException):
                self._ready[self._n_taken] = found  # whoever asks again gets the same answer
                raise found
            self._n_taken += 1
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
                while self._n_begun - self._n_taken >= self._ahead and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
                number = self._n_begun
                self._n_begun += 1
                request, state = self._loader.next_request(), self._loader.state()
            found: tuple[Batch, dict[str, int]] | BaseException
            try:
                found = (batch_of(builder.build(request, n_rows)), state)
            except BaseException as error:  # handed to whoever takes the batch
                found = error
            with self._changed:
                self._ready[number] = found
                self._changed.notify_all()
                if isinstance(found, BaseException):
                    return


class _Worker:
    """A builder in a process of its own. Started by its first request."""

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
            "Look for what ends it (memory?), or train with data.workers=0."
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
                    start_new_session=True,  # Ctrl-C is the training process's to heed
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
            raise TwostrokeError(f"a batch could not be read from the prepared data: {sentence}.")
        shape = (n_rows, int(self._description["sequence_length"]))
        tokens, targets, positions = (_read(process, shape, np.int64) for _ in range(3))
        return Rows(tokens, targets, positions, _read(process, shape, np.int32), n_valid)

    def end(self) -> None:
        with self._guard:
            self._ended = True
            process = self._process
        if process is not None:
            process.kill()  # it has nothing to lose
            process.wait()

    def close(self) -> None:
        """Close the pipes, when nobody reads from them any more."""
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
            pass  # what was not sent is asked again
