"""Which of the ranks that sleep hang."""

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


def found(ranks: dict[int, int], phase: Phase) -> str | None:
    """What is found of rank 0, which sleeps, within a second."""
    finder = HangFinder(ranks, first_rank=0)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        if (said := finder.look(0, Marks(1, phase, idle_limit_s=0.3))) is not None:
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
