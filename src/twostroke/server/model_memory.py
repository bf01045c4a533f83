"""What a served model takes of memory: predicted from its shape, then corrected by what its process is seen to hold."""

from __future__ import annotations

from pathlib import Path

import psutil

from twostroke.core.engine_settings import EngineSettings
from twostroke.core.spec import ModelSpec
from twostroke.planner.serving.plan import ServingPlan
from twostroke.planner.work.weights import weights_bytes
from twostroke.quantization.held import held
from twostroke.server import wire

PROCESS_BYTES = 3e8
"""Of an engine process at rest, with torch, where the machine was not calibrated: 0.27 GB were *measured* with torch for CPUs
on Linux. Pages of libraries that several processes share count in each of them."""


class ModelMemory:
    """``fixed``: predicted bytes of weights and process; ``cache``: of the whole KV cache, which fills as the model is used;
    ``working``: of a step. Once it was loaded, ``bytes`` are what its process held then, a full cache and a step beside it, or
    what it was seen to hold later, if that is more. ``asleep`` is what its process takes without weights and cache."""

    def __init__(self, fixed: float, cache: float, working: float = 0.0) -> None:
        self.fixed, self.cache, self.working = fixed, cache, working
        self.predicted = self.bytes = fixed + cache + working
        self.asleep = min(PROCESS_BYTES, self.bytes)

    def loaded(self, ready: wire.Ready, resident: float | None) -> None:
        """It is loaded, its cache is empty, and its process holds ``resident`` bytes (None: that cannot be seen)."""
        self.cache = ready.kv_cache_bytes
        if resident is not None:
            self.fixed = resident
        self.bytes = max(self.fixed, ready.weights_bytes) + self.cache + self.working

    def slept(self, resident: float | None) -> None:
        """It has given weights and cache back, and its process holds so much still."""
        self.asleep = self.asleep if resident is None else resident

    def seen(self, resident: float | None) -> None:
        """Its process holds so much now."""
        self.bytes = max(self.bytes, resident or 0.0)


def memory_of(directory: Path, spec: ModelSpec, engine: EngineSettings, plan: ServingPlan | None) -> ModelMemory:
    """Of the model in ``directory`` under ``engine``, by its ``plan`` if there is one. Raises ConfigError for a quantisation
    that is not read."""
    if plan is None:
        return ModelMemory(fixed_bytes(directory, spec, engine), engine.kv_cache_bytes or 0)
    terms = plan.memory_bytes
    others = sum(terms.get(name, 0.0) for name in ("activations", "logits", "adapters"))
    return ModelMemory(terms["weights"] + terms["process"], plan.kv_cache_bytes, others)


def fixed_bytes(directory: Path, spec: ModelSpec, engine: EngineSettings) -> float:
    """Of weights and process. Raises ConfigError for a quantisation that is not read."""
    return weights_bytes(spec, held(directory, spec, engine.dtype).scheme) + PROCESS_BYTES


def resident_bytes(pid: int) -> float | None:
    """What the process holds in memory; None if it has ended."""
    try:
        return float(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None
