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
NO_FASTER = 1.2
"""All threads count as no faster until they are by so much: a second core for less draws power, and others lack it."""

HTTP_TOKEN_S = 8e-5
"""Of a core, what a server and its client take for a token. 16 users of a model whose steps leave them a core got 9,000 tok/s
on a Zen 3, 8 users 15,900 on a processor with AVX-512: 110 and 63 µs. Where all threads save less than that for each request,
one leaves the other processors to HTTP. ``Crossovers`` has what users got."""

SERVED = (NARROW, 8)
"""The model and the number of requests whose steps tell what all threads save."""

MOST_ROW_FLOP = 1e9
"""``server_row_flop`` where all threads save nothing."""


def measure_thread_limits(clock: Clock, crossovers: Crossovers) -> Crossovers:
    """``crossovers`` with ``one_thread_max_flop`` from steps of two small models by their rows, ``one_thread_max_bytes`` from
    steps of one row by the model, and ``server_row_flop``. As they are on one thread."""
    n_threads = torch.get_num_threads()
    if n_threads == 1:
        return crossovers
    with tempfile.TemporaryDirectory(prefix="twostroke-threads-") as folder:
        engines, prompts = Engines(Path(folder)), Prompts()
        by_flop: dict[float, float] = {}
        by_bytes: dict[float, float] = {}
        saved_s = 0.0  # a FLOP
        for model in (SMALLEST, NARROW, WIDE):
            engine = engines.get(NativeAnchor("decode", *model, 1, CONTEXT).spec, "bf16")
            engine.plan = replace(engine.plan, crossovers=Crossovers(one_thread_max_flop=0.0))  # as many as ``n_threads`` says
            for rows in ROWS if model != WIDE else ROWS[:1]:
                one_s, all_s = _steps(clock, engine, prompts, rows, n_threads)
                flop = float(rows * row_flop(engine.spec))
                if model != WIDE:
                    by_flop[flop] = one_s / all_s
                if rows == 1:
                    by_bytes[float(engine.plan.step_bytes)] = one_s / all_s
                if (model, rows) == SERVED:
                    saved_s = (one_s - all_s) / flop
    return replace(
        crossovers,
        one_thread_max_flop=last_no_faster(by_flop.items()),
        one_thread_max_bytes=last_no_faster(by_bytes.items()),
        server_row_flop=HTTP_TOKEN_S / max(saved_s, HTTP_TOKEN_S / MOST_ROW_FLOP),
    )


def _steps(clock: Clock, engine: EngineCore, prompts: Prompts, rows: int, n_threads: int) -> tuple[float, float]:
    """Seconds of a step of ``rows`` on one thread and on ``n_threads``, the best of each over rounds in turns."""
    best = dict.fromkeys((1, n_threads), math.inf)
    for _ in range(ROUNDS):
        for count in best:
            engine.n_threads = count
            torch.set_num_threads(count)
            best[count] = min(best[count], decode_step_s(clock, engine, prompts, rows, CONTEXT))
    return best[1], best[n_threads]


def last_no_faster(gains: Iterable[tuple[float, float]]) -> float:
    """Between the last size before all threads are faster and the next, in the middle of their logarithms; the largest if they
    never are, 0 if they always are. ``gains``: (size, how many times as fast)."""
    last = 0.0
    for size, gain in sorted(gains):
        if gain > NO_FASTER:
            return math.sqrt(last * size)
        last = size
    return last
