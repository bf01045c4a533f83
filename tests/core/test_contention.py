"""What other programs take is counted: the time that this process waits for them, and the processors that they use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from twostroke.core import contention
from twostroke.core.contention import LOOK_S, OtherPrograms, _own_s, low_by, processors, waited_s, whole

counts = pytest.mark.skipif(waited_s() is None, reason="the system does not count waiting")


def _spin(seconds: float) -> float:
    before = waited_s()
    assert before is not None
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    after = waited_s()
    assert after is not None
    return after - before


@counts
def test_a_shared_core_shows_as_waiting() -> None:
    """Two busy loops on one core get half of it each, so that a second of one holds about half a second of waiting; a quarter
    is asked for, since the scheduler need not be fair over so short a time."""
    core = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    rival = subprocess.Popen(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"], stdout=subprocess.DEVNULL
    )
    try:
        os.sched_setaffinity(0, {core})
        time.sleep(0.3)  # until the rival runs
        assert _spin(1.0) > 0.25
    finally:
        rival.kill()
        rival.wait()
        os.sched_setaffinity(0, before)


@counts
def test_waiting_never_runs_backwards() -> None:
    assert _spin(0.05) >= 0.0


def test_what_waiting_took_from_a_rate() -> None:
    assert low_by(0.0, 1.0, 2) == 0.0
    assert low_by(0.5, 1.0, 1) == pytest.approx(0.5)  # one thread that ran half of the time
    assert low_by(1.0, 1.0, 2) == pytest.approx(0.75)  # two such: both ran at once a quarter of it
    assert low_by(0.01, 1.0, 2) == pytest.approx(0.01, abs=1e-4)  # little waiting costs what it took, however many share it
    assert low_by(9.0, 1.0, 2) == 1.0  # steal of the whole machine counts processors that we do not use


def test_what_waiting_took_rises_with_the_waiting() -> None:
    found = [low_by(0.1 * i, 1.0, 2) for i in range(21)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (0.0, 1.0)


class System:
    """A clock, and the seconds that processors were busy, with this process and with others."""

    def __init__(self, busy: bool = True) -> None:
        self.now = self.own = 0.0
        self.busy: float | None = 0.0 if busy else None

    def passes(self, seconds: float, own: float, others: float) -> None:
        self.now, self.own = self.now + seconds, self.own + own * seconds
        if self.busy is not None:
            self.busy += (own + others) * seconds

    def others(self) -> OtherPrograms:
        return OtherPrograms(lambda which: self.busy, lambda: self.own, lambda: self.now)


def test_other_programs_use_what_is_busy_without_us() -> None:
    system = System()
    others = system.others()
    assert others.used == 0.0
    system.passes(1.0, own=1.5, others=0.25)
    assert others.used == pytest.approx(0.25)
    system.passes(LOOK_S / 2, own=0.0, others=2.0)
    assert others.used == pytest.approx(0.25)  # too soon to look again
    system.passes(LOOK_S / 2, own=0.0, others=2.0)
    assert others.used == pytest.approx(2.0)
    system.passes(1.0, own=1.0, others=-0.1)  # ticks are counted in hundredths of a second, ours exactly
    assert others.used == 0.0


def test_a_look_at_the_last_moments_waits_only_for_its_own_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    system, slept = System(), []
    others = system.others()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        system.passes(seconds, own=0.0, others=1.0)

    monkeypatch.setattr(contention, "looking", lambda: others)
    monkeypatch.setattr(contention.time, "sleep", sleep)
    system.passes(LOOK_S / 4, own=1.0, others=1.0)
    assert contention.recently().used == pytest.approx(1.0)
    assert slept == [pytest.approx(LOOK_S * 3 / 4)]
    system.passes(1.0, own=1.0, others=0.0)
    assert contention.recently().used == 0.0
    assert len(slept) == 1
    system.passes(contention.LONGEST_LOOK_S + 1.0, own=1.0, others=0.0)
    assert contention.recently().used == pytest.approx(1.0)  # of now, not of the seconds before
    assert slept[1:] == [LOOK_S]


def test_a_system_that_does_not_count_has_no_other_programs() -> None:
    system = System(busy=False)
    others = system.others()
    system.passes(1.0, own=1.0, others=1.0)
    assert others.used == 0.0
    assert others.left(3) == 3


def test_processors_are_left_to_programs_that_take_most_of_them() -> None:
    assert [whole(used) for used in (0.0, 0.5, 0.8, 1.0, 1.5, 1.8)] == [0, 0, 1, 1, 1, 2]
    system, n = System(), len(processors())
    others = system.others()
    assert others.left(n + 5) == n + 5  # as many as its owner asked for
    system.passes(1.0, own=0.0, others=1.0)
    assert others.left(n) == max(1, n - 1)
    assert others.left(1) == 1
    system.passes(1.0, own=0.0, others=100.0)
    assert others.left(n) == 1


SPIN = f"{sys.executable} -c 'while True: pass' >/dev/null 2>&1"


@counts
def test_a_program_that_never_pauses_is_seen() -> None:
    others = OtherPrograms()
    # The shell ends at once, so that the program is no child of ours.
    number = int(subprocess.run(["sh", "-c", f"{SPIN} & echo $!"], capture_output=True, check=True).stdout)
    try:
        time.sleep(0.2)
        assert others.used >= 0.0  # a first look, at its start
        deadline = time.monotonic() + 30
        time.sleep(0.5)
        while others.used <= 0.5 and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        assert others.used > 0.5
    finally:
        os.kill(number, signal.SIGKILL)


@counts
def test_what_this_process_started_is_its_own() -> None:
    """A shell that waits for the program: a child's child, which counts while it runs and when it has ended."""
    before = _own_s()
    shell = subprocess.Popen(["sh", "-c", f"{SPIN} & echo $!; wait"], stdout=subprocess.PIPE)
    assert shell.stdout is not None
    number = int(shell.stdout.readline())
    try:
        deadline = time.monotonic() + 30  # on a busy machine it waits for a processor
        while _own_s() - before < 0.2 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert _own_s() - before > 0.2
    finally:
        os.kill(number, signal.SIGKILL)
        shell.communicate()
    assert _own_s() - before > 0.2
