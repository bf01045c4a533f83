"""The processes of a sweep: one ``twostroke train`` a point, several at once, and how each of them ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from twostroke.cli.console import Advance, log
from twostroke.cli.launch import counted_stops
from twostroke.core.errors import Interrupted
from twostroke.report.growing_files import GrowingRecords

LOOK_S = 0.2
"""Between two looks at the processes."""


@dataclass(frozen=True)
class Job:
    """A point to train in ``steps``: the ``words`` behind ``twostroke``, and where its run goes."""

    name: str
    directory: Path
    words: Sequence[str]
    steps: int

    @property
    def output(self) -> Path:
        """What the process says."""
        return self.directory.with_name(f"{self.directory.name}.log")


@dataclass(frozen=True)
class Outcome:
    """How a point ended: "waiting" if it was not started, "failed" with the ``error`` that it told. ``summary``: what
    ``twostroke train --json`` printed."""

    status: Literal["finished", "stopped", "failed", "waiting"] = "waiting"
    summary: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


class _Running:
    """The process of a point."""

    def __init__(self, job: Job, environment: Mapping[str, str]) -> None:
        self.job = job
        self._steps = GrowingRecords(job.directory / "log.jsonl")
        self._last = 0
        # Until it has ended. A pipe would hold up a process whose summary it cannot take.
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115
        job.output.parent.mkdir(parents=True, exist_ok=True)
        with job.output.open("ab") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "twostroke", *job.words, "--json"],
                stdout=self._printed,
                stderr=said,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C in a terminal comes to the sweep alone, which hands it on
            )

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._printed.close()

    def share(self) -> float:
        """Of its steps, done."""
        for record in self._steps.fresh()[1]:
            self._last = record.get("step", self._last)
        return min(1.0, self._last / max(1, self.job.steps))

    def ended(self, is_asked: bool) -> Outcome | None:
        """How it ended, where it ``is_asked`` to stop or is not; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        self._printed.seek(0)
        with self._printed as printed:
            document = _object(printed.read())
        if code == 0 and document:
            return Outcome("finished", document)
        by_signal = is_asked and code not in (1, 2)  # before its first step, when there is nothing to save
        if code == Interrupted.exit_code or by_signal:
            return Outcome("stopped")
        how = f"it was ended by signal {-code}" if code < 0 else f"it ended with {code}"
        return Outcome("failed", error=str(document.get("error") or f"{how}. {self.job.output} has what it said."))


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def run_points(jobs: Sequence[Job], places: Sequence[Mapping[str, str]], advance: Advance) -> tuple[dict[str, Outcome], bool]:
    """Run all of ``jobs``, one in each of ``places`` at a time, which are environments. Says how each ended, by name, and
    whether a signal stopped them: each signal is handed on to those that run, which write their checkpoints at the first."""
    outcomes = {job.name: Outcome() for job in jobs}
    waiting, running, handed = list(jobs), dict[int, _Running](), 0
    with counted_stops() as stops:
        try:
            while running or (waiting and not stops.n):
                for place, environment in enumerate(places):
                    if place not in running and waiting and not stops.n:
                        running[place] = _Running(waiting.pop(0), environment)
                for _ in range(stops.n - handed):
                    for point in running.values():
                        point.stop()
                handed = stops.n
                for place, point in list(running.items()):
                    if (outcome := point.ended(stops.n > 0)) is not None:
                        outcomes[point.job.name] = outcome
                        del running[place]
                        if outcome.error:
                            log(f"{point.job.name} failed: {outcome.error}")
                done = len(jobs) - len(waiting) - len(running)
                advance(done + sum(point.share() for point in running.values()), f"{done} of {len(jobs)} points")
                time.sleep(LOOK_S)
        finally:
            for point in running.values():
                point.kill()
    return outcomes, stops.n > 0
