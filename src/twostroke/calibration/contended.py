"""Measures both engines beside a program that takes one processor."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from twostroke.calibration.http_rates import measure_http
from twostroke.calibration.timing import Clock
from twostroke.calibration.training_steps import COMPILED, EAGER, Kind, Repeated
from twostroke.core.contention import LOOK_S
from twostroke.core.rates import Contended
from twostroke.training.processors import Processors

KINDS: dict[str, Kind] = {"compiled": COMPILED[0], "adapters": COMPILED[-1], "eager": EAGER[0]}
LEAST_STEPS, SECONDS = 4, 1.0
HTTP_ROUNDS = 1


@contextlib.contextmanager
def one_processor_taken() -> Iterator[None]:
    """Another program that computes without a pause."""
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(2 * LOOK_S)  # until it runs, and a look has seen nothing else
        yield
    finally:
        program.kill()
        program.wait()


def measure_contended(clock: Clock, trains: bool, serves: bool) -> Contended:
    """Steps of the shallow anchors as multiples of the same steps right before, and HTTP. A kind that cannot be compiled is
    left out."""
    steps = {name: Repeated(kind, kind.anchor.shallow, "cpu") for name, kind in KINDS.items()} if trains else {}
    usable = {name: step for name, step in steps.items() if step.is_usable}
    alone = {name: _usual_s(step, clock.effort) for name, step in usable.items()}
    with one_processor_taken():
        factors = {name: max(1.0, _usual_s(step, clock.effort) / alone[name]) for name, step in usable.items()}
        http = measure_http(Clock(clock.device, clock.effort), HTTP_ROUNDS) if serves else None
    return Contended(factors, http)


def _usual_s(step: Repeated, effort: float) -> float:
    """The median of steps that come after a look at what else runs."""
    found: list[float] = []
    with contextlib.closing(Processors()) as processors:
        begin = time.perf_counter()
        while len(found) < LEAST_STEPS or time.perf_counter() - begin < SECONDS * effort + 2 * LOOK_S:
            processors.choose()
            seconds = step.once()["whole"]
            if time.perf_counter() - begin > 2 * LOOK_S:
                found.append(seconds)
    return statistics.median(found)
