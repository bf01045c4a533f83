"""Measures up to which size a step of the native engine is no faster on all threads than on one."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from twostroke.calibration.serving_steps import Engines, Prompts, decode_step_s
from twostroke.calibration.timing import Clock
from twostroke.core.crossovers import Crossovers
from twostroke.engine.core import EngineCore
from twostroke.planner.hardware.anchors import CONTEXT, NARROW, SMALLEST, WIDE, NativeAnchor
from twostroke.planner.work.flops import row_flop

ROWS = (1, 2, 4, 8, 16, 32)
ROUNDS = 3
NO_FASTER = 1.4
"""In a server all threads count as no faster until they are by so much, because one leaves the other processors to HTTP and
its clients. On two cores a 1.4M model's steps are 1.2 to 1.4 times as fast on both, but 8 users got 10,400 tok/s over HTTP, not
15,900. For the same reason the limit in FLOP is never below the default, half a millisecond of one thread with AVX-512; on two
cores of a Zen 3, where that is 1.4 ms, 8 users got 6,200 tok/s on both and 8,800 on one."""

ALONE_NO_FASTER = 1.2
"""The same of an engine that no server surrounds: a second core for less draws its power, and keeps it from others."""


def measure_thread_limits(clock: Clock, crossovers: Crossovers) -> Crossovers:
    """``crossovers`` with the limits in FLOP from steps of two small models by their rows, and those in bytes from steps of one
    row by the model. As they are on one thread."""
    n_threads = torch.get_num_threads()
    if n_threads == 1:
        return crossovers
    with tempfile.TemporaryDirectory(prefix="twostroke-threads-") as folder:
        engines, prompts = Engines(Path(folder)), Prompts()
        by_flop: dict[float, float] = {}
        by_bytes: dict[float, float] = {}
        for model in (SMALLEST, NARROW, WIDE):
            engine = engines.get(NativeAnchor("decode", *model, 1, CONTEXT).spec, "bf16")
            engine.plan = replace(engine.plan, crossovers=Crossovers(alone_max_flop=0.0))  # as many as ``n_threads`` says
            for rows in ROWS if model != WIDE else ROWS[:1]:
                faster = _gain(clock, engine, prompts, rows, n_threads)
                if model != WIDE:
                    by_flop[float(rows * row_flop(engine.spec))] = faster
                if rows == 1:
                    by_bytes[float(engine.plan.step_bytes)] = faster
    return replace(
        crossovers,
        one_thread_max_flop=max(last_no_faster(by_flop.items(), NO_FASTER), Crossovers().one_thread_max_flop),
        one_thread_max_bytes=last_no_faster(by_bytes.items(), NO_FASTER),
        alone_max_flop=last_no_faster(by_flop.items(), ALONE_NO_FASTER),
        alone_max_bytes=last_no_faster(by_bytes.items(), ALONE_NO_FASTER),
    )


def _gain(clock: Clock, engine: EngineCore, prompts: Prompts, rows: int, n_threads: int) -> float:
    """How many times as fast a step of ``rows`` is on ``n_threads`` as on one, the best of each over rounds in turns."""
    best = dict.fromkeys((1, n_threads), math.inf)
    for _ in range(ROUNDS):
        for count in best:
            engine.n_threads = count
            torch.set_num_threads(count)
            best[count] = min(best[count], decode_step_s(clock, engine, prompts, rows, CONTEXT))
    return best[1] / best[n_threads]


def last_no_faster(gains: Iterable[tuple[float, float]], no_faster: float) -> float:
    """Between the last size before all threads are more than ``no_faster`` times as fast and the next, in the middle of their
    logarithms; the largest if they never are, 0 if they always are. ``gains``: (size, how many times as fast)."""
    last = 0.0
    for size, gain in sorted(gains):
        if gain > no_faster:
            return math.sqrt(last * size)
        last = size
    return last
