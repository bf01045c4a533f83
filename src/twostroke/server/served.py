"""Keeps lengths and latencies of a server's finished requests, and reads the most memory that a process has held."""

from __future__ import annotations

import bisect
import resource
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

KEPT = 10_000
"""Newest answers of which medians are taken. They take 400 kB, however many a server has served."""


class Answer(NamedTuple):
    """One complete answer. Seconds count from the request's headers. ``first_s`` is None for an answer without tokens.
    ``ended_s`` is of a clock that all answers share."""

    prompt_tokens: int
    output_tokens: int
    first_s: float | None
    whole_s: float
    ended_s: float = 0.0


@dataclass
class Served:
    """The newest answers."""

    answers: deque[Answer] = field(default_factory=lambda: deque(maxlen=KEPT))

    def medians(self) -> dict[str, float]:
        """Medians of ``prompt_tokens``, ``output_tokens``, ``ttft_s``, ``tpot_s`` = (E2E − TTFT)/(tokens − 1) and ``e2e_s``, as
        far as answers have them; empty before the first answer."""
        values: dict[str, list[float]] = {}
        for prompt, output, first_s, whole_s, _ in self.answers:
            if first_s is None:
                continue
            row = {"prompt_tokens": float(prompt), "output_tokens": float(output), "ttft_s": first_s, "e2e_s": whole_s}
            if output > 1:
                row["tpot_s"] = (whole_s - first_s) / (output - 1)
            for name, value in row.items():
                values.setdefault(name, []).append(value)
        return {name: statistics.median(found) for name, found in values.items()}


def in_flight(answers: Sequence[Answer]) -> list[float]:
    """Of each answer, how many were in flight while it was, itself included, on average."""
    changes = sorted(change for a in answers for change in ((a.ended_s - a.whole_s, 1), (a.ended_s, -1)))
    times, sums, n, total = [], [], 0, 0.0
    for i, (at_s, change) in enumerate(changes):
        total += n * (at_s - changes[i - 1][0]) if i else 0.0
        n += change
        times.append(at_s)
        sums.append(total)

    def until(at_s: float) -> float:
        return sums[bisect.bisect_left(times, at_s)]  # each answer's ends are among the times

    return [(until(a.ended_s) - until(a.ended_s - a.whole_s)) / a.whole_s if a.whole_s > 0 else 1.0 for a in answers]


def peak_memory_bytes() -> float:
    """Most memory that this process has held. From VmHWM, which an exec resets, else from ``ru_maxrss``, which it does not."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
