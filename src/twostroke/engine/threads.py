"""How many threads an engine computes with, and on which processors."""

from __future__ import annotations

import os

import numpy as np
import torch

from twostroke.core.engine_settings import OFF, EngineSettings
from twostroke.core.errors import ConfigError
from twostroke.core.topology import CORES, NODES, placed, processors_of
from twostroke.engine.ways import runs_natively
from twostroke.kernels.native_library import library, why_absent


def default_threads() -> int:
    """``OMP_NUM_THREADS`` if it is set (torch has read it), else the cores that this process may use."""
    if os.environ.get("OMP_NUM_THREADS", "").isdigit():
        return torch.get_num_threads()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def place_threads(settings: EngineSettings, n_threads: int) -> None:
    """Pin the native library's threads, before weights are packed by them, and say how it takes memory. Both are the process's,
    as its threads are; an engine that asks for neither leaves them as they are. Raises ConfigError where that is impossible."""
    loaded = library()
    for name, asked in (("pin_threads", settings.pin_threads != OFF), ("huge_pages", settings.huge_pages != "auto")):
        if asked and not runs_natively(settings):
            remedy = why_absent() or "Use runner='native' or 'auto'."
            raise ConfigError(f"{name}={getattr(settings, name)!r} is of the native library's threads and memory. {remedy}")
    if loaded is None:
        return
    if settings.huge_pages != "auto":
        loaded.ts_set_huge_pages(settings.huge_pages != OFF)
    if settings.pin_threads != OFF:
        if not hasattr(os, "sched_getaffinity"):
            raise ConfigError(f"pin_threads={settings.pin_threads!r} needs Linux. Use pin_threads='off'.")
        how = NODES if settings.pin_threads == NODES else CORES
        numbers = placed(processors_of(os.sched_getaffinity(0)), n_threads, how)
        loaded.ts_set_threads(n_threads)
        loaded.ts_pin_threads(np.asarray(numbers, np.int32).ctypes.data, len(numbers))
