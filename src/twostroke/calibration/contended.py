"""Measures both engines beside a program that takes one processor."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from twostroke.calibration.first_uses import measure_first_uses
from twostroke.calibration.http_rates import measure_http
from twostroke.calibration.timing import Clock
from twostroke.calibration.training_steps import WARM_UP_STEPS, AnchorSteps, Kind, Repeated, kinds_on
from twostroke.core.contention import LOOK_S
from twostroke.core.rates import Contended

_COMPILED, _EAGER = kinds_on("cpu")
KINDS: dict[str, Kind] = {"compiled": _COMPILED[0], "adapters": _COMPILED[-1], "eager": _EAGER[0]}
LEAST_STEPS, SECONDS = 4, 1.0
ROUNDS = 1
"""Of what starts processes: a program that never pauses disturbs each round alike."""


@contextlib.contextmanager
def one_processor_taken() -> Iterator[None]:
    """Another program that computes without a pause."""
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(LOOK_S)  # until it runs
        yield
    finally:
        program.kill()
        program.wait()


def measure_contended(clock: Clock, steps: AnchorSteps | None, serves: bool) -> Contended:
    """Steps of the shallow anchors as multiples of the same steps right before; first uses and HTTP. A kind that cannot be
    compiled is left out."""
    found = {name: steps.get(kind, kind.anchor.shallow) for name, kind in KINDS.items()} if steps is not None else {}
    usable = {name: step for name, step in found.items() if step is not None}
    alone = {name: _usual_s(step, clock.effort) for name, step in usable.items()}
    with one_processor_taken():
        factors = {name: max(1.0, _usual_s(step, clock.effort) / alone[name]) for name, step in usable.items()}
        first_uses = measure_first_uses(ROUNDS) if serves else None
        http = measure_http(Clock(clock.device, clock.effort), ROUNDS) if serves else None
    return Contended(factors, first_uses, http)


def _usual_s(step: Repeated, effort: float) -> float:
    """The median of its steps."""
    for _ in range(WARM_UP_STEPS):
        step.once()
    found: list[float] = []
    begin = time.perf_counter()
    while len(found) < LEAST_STEPS or time.perf_counter() - begin < SECONDS * effort:
        found.append(step.once()["whole"])
    return statistics.median(found)
