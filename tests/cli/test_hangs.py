"""Which of the ranks that sleep or compute hang."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from twostroke.cli.hangs import HangFinder
from twostroke.training.progress import Marks, Phase

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="hangs are found by what Linux tells of threads")

SLEEPS, COMPUTES = "import time; time.sleep(60)", "while True: pass"


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[dict[int, int]]:
    """The process of each rank, of which each runs one of the programs."""
    started = [subprocess.Popen([sys.executable, "-c", program]) for program in request.param]
    time.sleep(0.5)  # in which Python starts
    yield {local: process.pid for local, process in enumerate(started)}
    for process in started:
        process.kill()
        process.wait()


def marks(phase: Phase) -> Marks:
    return Marks(1, phase, busy_limit_s=0.6, idle_limit_s=0.3)


def found(ranks: dict[int, int], phase: Phase, finder: HangFinder | None = None, within_s: float = 1.0) -> str | None:
    """What is found of rank 0 within so long."""
    finder = finder or HangFinder(ranks, first_rank=0)
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if (said := finder.look(0, marks(phase))) is not None:
            return said
        time.sleep(0.05)
    return None


@pytest.mark.parametrize("ranks", [(SLEEPS, COMPUTES)], indirect=True)
def test_a_rank_may_wait_for_what_another_compiles_in_its_first_steps_alone(ranks: dict[int, int]) -> None:
    assert found(ranks, Phase.FIRST_STEPS) is None
    assert "has slept" in str(found(ranks, Phase.STEPS))


@pytest.mark.parametrize("ranks", [(SLEEPS, SLEEPS)], indirect=True)
def test_if_all_sleep_nobody_compiles(ranks: dict[int, int]) -> None:
    assert "has slept" in str(found(ranks, Phase.FIRST_STEPS))


@pytest.mark.parametrize(("ranks", "words"), [((SLEEPS,), "has slept"), ((COMPUTES,), "has computed")], indirect=["ranks"])
def test_time_in_which_the_launcher_stood_still_too_is_no_hang(ranks: dict[int, int], words: str) -> None:
    finder = HangFinder(ranks, first_rank=0)
    finder.look(0, marks(Phase.STEPS))
    time.sleep(0.8)  # the machine stands still for longer than the limits
    assert finder.look(0, marks(Phase.STEPS)) is None
    assert words in str(found(ranks, Phase.STEPS, finder, within_s=20.0))  # others may take most of the processor
