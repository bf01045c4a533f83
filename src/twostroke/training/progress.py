"""What a rank's main thread does and since when, on a page of memory that its launcher reads to find a rank that hangs.

The page is one of a file without a name that the launcher makes and hands down, so neither a full disk nor a killed rank spoils
it. Without a launcher (torchrun, one process) there is no page, and only waiting is counted.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

PAGES, STACKS = "TWOSTROKE_PROGRESS_FD", "TWOSTROKE_STACKS_FD"
"""Descriptors that the launcher hands down: of the pages, and of the file into which this rank writes its stacks."""

STACK_SIGNAL = signal.SIGUSR1
"""Makes a rank write the Python stacks of its threads, also while it computes or hangs in a library."""

PAGE_BYTES = mmap.PAGESIZE

IDLE_S, IDLE_ON_GPU_S = 1.2, 60.0
"""A rank that has nothing to wait for sleeps no longer than this, while it waits for its GPU at most the second."""

BUSY_FLOOR_S = 1.2
"""Processor seconds without progress that are never called a hang."""

BUSY_FACTOR = 4.0
"""A main thread that computes is called hanging after this many times its longest stretch in the same phase."""


class Phase(IntEnum):
    STARTING = 0  # Python and torch are being imported
    JOINING = 1  # for other ranks
    PREPARING = 2  # data, which may be downloaded
    BUILDING = 3  # the model, and reading a checkpoint
    FIRST_STEPS = 4  # compiling, and filling caches
    STEPS = 5
    SAVING = 6
    SCORING = 7
    ENDING = 8
    OBSERVING = 9
    EVALUATING = 10  # a share of work whose length the next one has not


PHASE_WORDS = {
    Phase.STARTING: "while it started",
    Phase.JOINING: "while ranks joined",
    Phase.PREPARING: "while data were prepared",
    Phase.BUILDING: "while the model was built",
    Phase.SAVING: "while a checkpoint was written",
    Phase.SCORING: "while the model was scored",
    Phase.EVALUATING: "while the model was scored",
    Phase.OBSERVING: "while the model was looked into",
    Phase.ENDING: "at the end of the run",
}

LEARNED = (Phase.STEPS, Phase.SAVING, Phase.SCORING)
"""Phases that come again, so that a run knows how long a stretch of them computes."""

_LAYOUT = struct.Struct("=qqqqddddd")

_SLOT = struct.Struct(f"=q{_LAYOUT.size}sI")
"""The number of this write, the marks, and the checksum of both. A page has two slots, which are written in turn, and the
reader takes the newer one that is whole. With one slot a reader once saw a limit that was half written, took it for 0 s and
ended a rank that was well."""


@dataclass(frozen=True)
class Marks:
    """A page. ``count`` grows with each mark of the main thread. ``busy_limit_s`` is inf as long as nothing is known.

    ``cpu_s`` is the main thread's processor time at the last mark. ``stood_at`` is when the group of ranks stood, and
    ``stepped_at`` when this process had done a step, by ``time.monotonic``, which all processes of a machine share; else 0.
    """

    count: int = 0
    phase: int = Phase.STARTING
    step: int = 0
    waiting: int = 0
    cpu_s: float = 0.0
    busy_limit_s: float = float("inf")
    idle_limit_s: float = IDLE_S
    stood_at: float = 0.0
    stepped_at: float = 0.0

    @property
    def where(self) -> str:
        return PHASE_WORDS.get(Phase(self.phase), f"in step {self.step + 1}")


def read_marks(pages: mmap.mmap, local_rank: int) -> Marks:
    at = local_rank * PAGE_BYTES
    while True:
        page = pages[at : at + 2 * _SLOT.size]
        slots = [_SLOT.unpack_from(page, slot * _SLOT.size) for slot in range(2)]
        whole = {write: marks for write, marks, checksum in slots if write and checksum == _checksum(write, marks)}
        if whole:
            return Marks(*_LAYOUT.unpack(whole[max(whole)]))
        if not all(write for write, *_ in slots):
            return Marks()  # nothing was written yet; else both slots were written during the read, and it is tried again


def _checksum(write: int, marks: bytes) -> int:
    return zlib.crc32(marks + write.to_bytes(8, "little"))


class Progress:
    """Marks of this process. ``waited_s`` is the time that its collectives have blocked so far."""

    def __init__(self, pages: mmap.mmap | None = None, local_rank: int = 0, idle_limit_s: float = IDLE_S) -> None:
        self._pages, self._at, self._idle_limit_s = pages, local_rank * PAGE_BYTES, idle_limit_s
        self._first_step: int | None = None
        self._count = self._step = self._waiting = self._writes = 0
        self._phase = Phase.STARTING
        self._cpu_s = 0.0
        self._longest: dict[Phase, float] = {}
        self._stood_at = self._stepped_at = 0.0
        self.waited_s = 0.0

    @classmethod
    def of_this_process(cls, on_gpu: bool) -> Progress:
        """On the page that the launcher handed down, whose death then stops this rank; without a page if there is no
        launcher."""
        if PAGES not in os.environ:
            return cls()
        local_rank = int(os.environ["LOCAL_RANK"])
        faulthandler.register(STACK_SIGNAL, file=int(os.environ[STACKS]), all_threads=True)
        threading.Thread(target=_stop_without_launcher, args=(os.getppid(),), name="launcher", daemon=True).start()
        return cls(mmap.mmap(int(os.environ[PAGES]), 0), local_rank, IDLE_ON_GPU_S if on_gpu else IDLE_S)

    def mark(self, phase: Phase, step: int | None = None) -> None:
        """The main thread has come so far, and begins a stretch of ``phase``."""
        cpu_s = time.thread_time()
        if self._phase in LEARNED:
            self._longest[self._phase] = max(self._longest.get(self._phase, 0.0), cpu_s - self._cpu_s)
        self._cpu_s, self._phase = cpu_s, phase
        if step is not None:
            self._step = step
            if self._first_step is None:
                self._first_step = step
            elif step > self._first_step and not self._stepped_at:
                self._stepped_at = time.monotonic()
        self._count += 1
        self._write()

    def again(self) -> None:
        """Another stretch of the same phase begins."""
        self.mark(self._phase)

    @contextlib.contextmanager
    def doing(self, phase: Phase) -> Iterator[None]:
        before = self._phase
        self.mark(phase)
        try:
            yield
        finally:
            self.mark(before)

    def stood(self) -> None:
        """The group of ranks stands."""
        self._stood_at = time.monotonic()
        self.mark(Phase.PREPARING)

    @contextlib.contextmanager
    def counting_waits(self) -> Iterator[None]:
        """Count what collectives of the main thread wait: inside, ``Work.wait`` of torch.distributed, which each of them ends
        in, is timed.

        A collective on a GPU waits in the GPU's queue, which is not counted.
        """
        from torch.distributed import Work

        original = Work.wait

        def timed(work: Any, *arguments: Any, **named: Any) -> Any:
            in_background = threading.current_thread() is not threading.main_thread()
            with contextlib.nullcontext() if in_background else self.blocked():
                return original(work, *arguments, **named)

        Work.wait = timed  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            Work.wait = original  # type: ignore[method-assign]

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """A context in which the main thread waits for other ranks."""
        began = time.perf_counter()
        self._wait(1)
        try:
            yield
        finally:
            self._wait(-1)
            self.waited_s += time.perf_counter() - began

    def _wait(self, change: int) -> None:
        self._waiting += change
        self._write()

    def _write(self) -> None:
        if self._pages is None:
            return
        longest = self._longest.get(self._phase)
        limit_s = float("inf") if longest is None else max(BUSY_FLOOR_S, BUSY_FACTOR * longest)
        marks = _LAYOUT.pack(
            self._count, self._phase, self._step, self._waiting,
            self._cpu_s, limit_s, self._idle_limit_s, self._stood_at, self._stepped_at,
        )  # fmt: skip
        self._writes += 1
        slot = self._at + self._writes % 2 * _SLOT.size
        _SLOT.pack_into(self._pages, slot, self._writes, marks, _checksum(self._writes, marks))


def _stop_without_launcher(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
