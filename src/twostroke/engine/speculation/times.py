"""Seconds of a step by its rows before any was measured while serving: planned where the machine was calibrated, else timed."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from twostroke.core.engine_settings import EngineSettings
from twostroke.core.spec import ModelSpec
from twostroke.engine.planned import planned
from twostroke.planner.serving.strategy import Chunk
from twostroke.planner.work.component import total_seconds
from twostroke.scheduling.request import Request
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.scheduling.scheduler import Scheduler
from twostroke.scheduling.step import ScheduledStep

_TIMED = (1, 4, 16, 64)
_REPEATS = 3


def planned_step_s(directory: Path, spec: ModelSpec, settings: EngineSettings) -> Callable[[int], float] | None:
    """Planned seconds of a decode step by its rows; None on a machine that was not calibrated."""
    strategy = planned(directory, spec, settings)
    return None if strategy is None else lambda rows: total_seconds(strategy.decode(rows))


def planned_prompt_s(directory: Path, spec: ModelSpec, settings: EngineSettings) -> Callable[[int], float] | None:
    """Planned seconds of a step by its rows, all of them of one prompt; None on a machine that was not calibrated."""
    strategy = planned(directory, spec, settings)
    return None if strategy is None else lambda rows: strategy.step_seconds(0, 0.0, (Chunk(0, rows),))


def timed_step_s(
    scheduler: Scheduler, compute: Callable[[ScheduledStep, Tensor], object], most_rows: int
) -> Callable[[int], float]:
    """Seconds by rows, timed on an idle engine: the shortest of ``_REPEATS`` steps at each of ``_TIMED`` rows, lines between.

    It takes about 20 steps of one row."""
    config, pool = scheduler.config, scheduler.pool
    fits = min(config.token_budget, config.max_model_len, config.n_pages * config.page_tokens)
    rows = [n for n in _TIMED if n <= min(most_rows, fits)]
    request = Request("times", [0] * rows[-1], SamplingParams(max_tokens=1))
    pages = pool.allocate(-(-rows[-1] // config.page_tokens))
    assert pages is not None, "an engine that has just been made has its pages"
    request.pages, request.slot = pages, 0
    seconds = []
    try:
        for n in rows:
            step, taken = ScheduledStep(0, [request], [n], [0], 0, [request], []), []
            for _ in range(_REPEATS):
                began = time.perf_counter()
                compute(step, torch.arange(n))
                taken.append(time.perf_counter() - began)
            seconds.append(min(taken))
    finally:
        pool.release(pages)

    def between(n: int) -> float:
        i = min(max(1, bisect_left(rows, n)), len(rows) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (rows[i] - rows[i - 1])
        return max(seconds[0], seconds[i] + (n - rows[i]) * slope)

    return between if len(rows) > 1 else lambda n: seconds[0] * n
