"""A run's measurements, under the names of its prediction."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from twostroke.core.described import As
from twostroke.core.policy import BURST_WINDOWS_MS

PARTS = ("forward_s", "backward_s", "optimizer_s", "data_s")

OVER_RANKS = ("computing_s", "wire_s", "waiting_s")
"""The parts of a step over several ranks (``training.stragglers``)."""

PEAKS = tuple(f"peak_sent_{ms}ms_bytes" for ms in BURST_WINDOWS_MS)


@dataclass(frozen=True)
class StepRecord:
    """One line of ``log.jsonl``. Seconds are of this step, and ``step_time_s`` includes its parts and the time between them.

    - ``loss``: nats per token with a target. ``grad_norm``: before clipping. ``learning_rate``: that of the first optimizer.
    - ``tok_per_s`` = tokens of this step / step_time_s. ``mfu``: by ``RunInputs.mfu``, None without a machine profile.
    - ``tokens``: seen since the run began. ``warm_up``: the step may have compiled, so medians leave it out.
    - ``elapsed_s``: of all sessions until the end of this step, with checkpoints and scores between steps.
    - ``sent_bytes``: of gradients and weights, that the first of several ranks sent to others in this step.
    - ``block_grad_norms``: gradient norm of each part of the model. The line also has ``data_wait_share`` = data_s /
      step_time_s.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tok_per_s: float
    mfu: float | None
    memory_bytes: int
    peak_memory_bytes: int
    step_time_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    data_s: float
    tokens: int
    epoch: float
    warm_up: bool = False
    skipped: str | None = None
    elapsed_s: float = 0.0
    sent_bytes: int = 0
    block_grad_norms: dict[str, float] = field(default_factory=dict)

    @property
    def data_wait_share(self) -> Annotated[float, "share of the step that waits for its batch"]:
        return rounded(self.data_s / self.step_time_s) if self.step_time_s > 0 else 0.0

    @property
    def rounded_norms(self) -> Annotated[dict[str, float], "norm of each part's gradient", As("block_grad_norms")]:
        return {part: rounded(norm) for part, norm in self.block_grad_norms.items()}


def rounded(value: float) -> float:
    """``value`` with six significant digits, because people read log lines and pages receive them."""
    return float(f"{value:.6g}")


def medians(records: Sequence[dict[str, Any]], names: Sequence[str] = ("step_time_s", *PARTS)) -> dict[str, float]:
    """Medians of ``names``, by default ``step_time_s`` and its parts, over the logged steps that have them, without warm-up and
    skipped steps unless there are no others."""
    steady = [r for r in records if not r.get("warm_up") and not r.get("skipped")] or list(records)
    found = {name: [float(r[name]) for r in steady if name in r] for name in names}
    return {name: statistics.median(values) for name, values in found.items() if values}


def directory_bytes(directory: Path, pattern: str = "*") -> int:
    """Total size of the files in ``directory`` that match ``pattern``."""
    return sum(file.stat().st_size for file in directory.glob(pattern) if file.is_file())
