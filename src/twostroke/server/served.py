"""What a server's finished requests were: lengths and latencies, and the most memory that a process held."""

from __future__ import annotations

import resource
import statistics
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

KEPT = 10_000
"""Newest answers that medians are taken of: 400 kB, whatever a server has served."""


class Answer(NamedTuple):
    """One answer that was completed. Seconds count from the request's headers; ``first_s`` None: it has no tokens."""

    prompt_tokens: int
    output_tokens: int
    first_s: float | None
    whole_s: float


@dataclass
class Served:
    """The newest answers."""

    answers: deque[Answer] = field(default_factory=lambda: deque(maxlen=KEPT))

    def medians(self) -> dict[str, float]:
        """Of ``prompt_tokens``, ``output_tokens``, ``ttft_s``, ``tpot_s`` = (E2E − TTFT)/(tokens − 1) and ``e2e_s``, those that
        there are; nothing before the first answer."""
        values: dict[str, list[float]] = {}
        for prompt, output, first_s, whole_s in self.answers:
            if first_s is None:
                continue
            row = {"prompt_tokens": float(prompt), "output_tokens": float(output), "ttft_s": first_s, "e2e_s": whole_s}
            if output > 1:
                row["tpot_s"] = (whole_s - first_s) / (output - 1)
            for name, value in row.items():
                values.setdefault(name, []).append(value)
        return {name: statistics.median(found) for name, found in values.items()}


def peak_memory_bytes() -> float:
    """Most memory that this process has held: VmHWM, which an exec starts anew, else ``ru_maxrss``, which it does not."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
