"""The processes of one machine's ranks, from their start until all have ended, and why they did."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.cli.console import log
from twostroke.cli.hangs import HangFinder
from twostroke.training.progress import PAGE_BYTES, PAGES, STACK_SIGNAL, STACKS, Marks, read_marks

LAUNCHED = "TWOSTROKE_LAUNCHED"
"""Set for ranks that `--ranks` started, which leave it to the launcher to say which of them was lost."""

LOST_CODE = 76
"""Exit code of a launched rank that was well and lost another one, or did not find the others."""

LOOK_S = 0.05
"""Between two looks at the ranks."""

GRACE_S = 0.8
"""How long the others may take to notice by themselves that a rank was lost. Then they are killed: a checkpoint that one of
them was writing would be of use, and the last whole one is enough."""

ENDING_S = 30.0
"""How long ranks may take to end after one of them ended by itself, with its reason told."""


@dataclass(frozen=True)
class Placement:
    """``n_local`` of a run's ``n`` ranks on this machine, from ``first``; rank 0 listens at ``address``:``port``."""

    n: int
    n_local: int
    first: int
    host: int
    address: str
    port: int


@dataclass(frozen=True)
class Ended:
    """How the ranks of a machine ended: by themselves with ``code``, or because one was ``lost``, which says how."""

    code: int = 0
    lost: str | None = None
    stepped: bool = False  # at least one step was done
    is_cause: bool = True  # False: ranks here lost others, and did not see why
    at: float = 0.0  # when it was noticed


class RankProcesses:
    """Starts ranks that run ``twostroke`` with ``words``, and looks after them."""

    def __init__(self, words: Sequence[str], placement: Placement, environment: Mapping[str, str]) -> None:
        self._placement = placement
        self._local = range(placement.n_local)
        self._handed = 0
        with contextlib.ExitStack() as opened:
            pages = opened.enter_context(_nameless())
            os.truncate(pages, placement.n_local * PAGE_BYTES)
            self._pages = mmap.mmap(pages, 0)
            self._stacks = [_nameless_file() for _ in self._local]
            self._processes = [self._start(local, words, environment, pages) for local in self._local]
        self._hangs = HangFinder({local: self._processes[local].pid for local in self._local}, placement.first)

    def _start(self, local: int, words: Sequence[str], environment: Mapping[str, str], pages: int) -> subprocess.Popen[bytes]:
        placed, stacks = self._placement, self._stacks[local]
        own = {
            "RANK": placed.first + local, "WORLD_SIZE": placed.n, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": placed.n_local,
            "GROUP_RANK": placed.host, "MASTER_ADDR": placed.address, "MASTER_PORT": placed.port,
            PAGES: pages, STACKS: stacks.fileno(), LAUNCHED: 1,
        }  # fmt: skip
        return subprocess.Popen(
            [sys.executable, "-m", "twostroke", *words],
            env={**environment, **{name: str(value) for name, value in own.items()}},
            pass_fds=(pages, stacks.fileno()),
            start_new_session=True,  # Ctrl-C in a terminal comes to the launcher alone
        )

    def watch(self, stops: Callable[[], int], lost_at: float | None, lost_elsewhere: Callable[[], str | None]) -> Ended:
        """Wait until all have ended. ``stops()`` is how often a stop was asked for; each is handed on once. Say how soon
        they stood after ``lost_at``, when others were lost."""
        told_stood = told_stepped = lost_at is None
        began = lost_at or 0.0
        try:
            while True:
                self._hand_on(stops())
                codes = self._codes()
                if all(code == 0 for code in codes.values()):
                    return Ended()
                self._noticed_at = time.monotonic()
                if failed := {local: code for local, code in codes.items() if code}:
                    return self._ended(failed, stops)
                for local in self._local:
                    if codes[local] is None and (how := self._hangs.look(local, self.marks(local))):
                        return self._ended_hung(local, how)
                if where := lost_elsewhere():
                    self._let_end(GRACE_S, stops)
                    return Ended(lost=where, stepped=self._stepped, is_cause=False, at=self._noticed_at)
                marks = [self.marks(local) for local in self._local]
                if not told_stood and all(m.stood_at for m in marks):
                    told_stood = True
                    log(f"{self._placement.n} ranks stand again after {max(m.stood_at for m in marks) - began:.1f} s.")
                if not told_stepped and all(m.stepped_at for m in marks):
                    told_stepped = True
                    log(f"the first step after that was done after {max(m.stepped_at for m in marks) - began:.1f} s.")
                time.sleep(LOOK_S)
        finally:
            self._let_end(0, stops)
            for stacks in self._stacks:
                stacks.close()
            self._pages.close()

    def marks(self, local: int) -> Marks:
        return read_marks(self._pages, local)

    @property
    def _stepped(self) -> bool:
        return any(self.marks(local).stepped_at for local in self._local)

    def _codes(self) -> dict[int, int | None]:
        return {local: process.poll() for local, process in enumerate(self._processes)}

    def _hand_on(self, stops: int) -> None:
        for _ in range(stops - self._handed):
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
        self._handed = stops

    def _let_end(self, within_s: float, stops: Callable[[], int]) -> set[int]:
        """Wait for the ranks, kill those that are left then, and return these."""
        deadline = time.monotonic() + within_s
        while None in self._codes().values() and time.monotonic() < deadline:
            self._hand_on(stops())
            time.sleep(LOOK_S / 5)
        left = {local for local, code in self._codes().items() if code is None}
        for local in left:
            self._processes[local].kill()
        for local in left:
            self._processes[local].wait()
        return left

    def _ended(self, failed: dict[int, int], stops: Callable[[], int]) -> Ended:
        if any(0 < code != LOST_CODE for code in failed.values()):
            self._let_end(ENDING_S, stops)
            return Ended(next(code for code in self._codes().values() if code is not None and 0 < code != LOST_CODE))
        stood = {local: self.marks(local) for local in self._local}
        killed_here = self._let_end(GRACE_S, stops)
        codes = {local: code for local, code in self._codes().items() if code and local not in killed_here}
        deliberate = [code for code in codes.values() if 0 < code != LOST_CODE]
        signalled = {local: code for local, code in codes.items() if code < 0}
        if deliberate and not signalled:
            return Ended(deliberate[0])
        if signalled:
            # Of several the one that was seen first; the others are often torch's own end after it.
            local = next((local for local in failed if local in signalled), min(signalled))
            how = f"rank {self._rank(local)} was ended by {_signal_name(-signalled[local])} {stood[local].where}"
        else:
            local = min(codes)
            how = f"rank {self._rank(local)} lost the others {stood[local].where}"
        return Ended(lost=how, stepped=self._stepped, is_cause=bool(signalled), at=self._noticed_at)

    def _ended_hung(self, local: int, how: str) -> Ended:
        marks = self.marks(local)
        stacks = self._stacks_of(local, marks) if "stopped" not in how else ""
        self._processes[local].kill()
        self._let_end(GRACE_S, lambda: self._handed)
        if stacks:
            log(f"the Python stacks of rank {self._rank(local)} when it hung:\n{stacks}")
        return Ended(
            lost=f"rank {self._rank(local)} {how} {marks.where} and was ended", stepped=self._stepped, at=self._noticed_at
        )

    def _stacks_of(self, local: int, marks: Marks) -> str:
        if not marks.count:  # it does not answer the signal yet
            return ""
        self._processes[local].send_signal(STACK_SIGNAL)
        deadline = time.monotonic() + 0.3
        size = 0
        while time.monotonic() < deadline:
            time.sleep(0.03)
            before, size = size, os.fstat(self._stacks[local].fileno()).st_size
            if size and size == before:
                break
        self._stacks[local].seek(0)
        return self._stacks[local].read().decode(errors="replace").rstrip()

    def _rank(self, local: int) -> int:
        return self._placement.first + local


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def _nameless() -> Iterator[int]:
    with _nameless_file() as file:
        yield file.fileno()


def _nameless_file() -> Any:
    """A file in memory where the system has such, so that a full disk does not matter."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("twostroke"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)
