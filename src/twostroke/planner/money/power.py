"""Watts of a device: what it draws idle, and beside it what reading, computing and exchanging add while they last.

    W = min(limit, idle + reading · (share of time that memory is read) + (limit − idle) · (share that products are computed)
                 + reading · 3·link/bandwidth · (share that links carry data))

The limit is what the vendor lets a board or socket draw. Products at the rate that engines reach draw all of it: it is what
holds their clock. Host, power supplies and cooling are excluded. Held against watts of H100s in benchmarks/planner/energy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from twostroke.core.named import named
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.work.component import Work

READ_J_PER_BYTE = 1.28e-10
"""16 pJ a bit from an accelerator's memory into its registers. The memory itself takes 6.0 (HBM2E), 7.25 (GDDR6X) or 7.5
(GDDR6; averages of devices as Micron publishes them), the rest is the way over the chip. The sum is the one constant that was
taken from measured watts, of H100s that serve: 15.2 to 15.6 pJ without a model in turn (benchmarks/planner/energy).

Other devices are planned with it too. By what memories take alone GDDR is 1.5 pJ higher. Newer stacks are lower: at 16 pJ some
boards could not read at their full rate within their limit (the benchmark lists them), so for those it is an upper end."""

WAITING_SHARE = 0.8
"""Of what a processor's cores draw when they compute, what they draw when they wait for memory (assumed; its modules' own power
is no part of a socket's limit). Cores never rest inside a step, so all other time counts as computing."""

ACCESSES_PER_EXCHANGED_BYTE = 3.0
"""A ring's rank reads what it has, adds what came and writes the sum."""


class Busy(NamedTuple):
    """Seconds of some work on one device, and in how many of them it reads memory, computes products and exchanges data."""

    seconds: float
    reading_s: float
    computing_s: float
    exchanging_s: float = 0.0

    def times(self, n: float) -> Busy:
        """The same ``n`` times over."""
        return Busy(*(n * part for part in self))


def busy_of(works: Iterable[Work]) -> Busy:
    """What ``works`` keep busy, one after another: each limit for as long as it would take alone."""
    parts = [(work.seconds, min(work.memory_s, work.seconds), min(work.arithmetic_s, work.seconds)) for work in works]
    return Busy(*map(sum, zip(*parts, strict=True))) if parts else Busy(0.0, 0.0, 0.0)


def reading_watts(hardware: Hardware) -> float:
    """W beside idle while memory is read at its full rate."""
    above = hardware.watts.value - hardware.idle_watts.value
    if hardware.kind == "cpu":
        return WAITING_SHARE * above
    return min(above, READ_J_PER_BYTE * hardware.read_bandwidth[-1].bytes_per_s)


def joules(busy: Busy, hardware: Hardware) -> float:
    """J of one device over ``busy``: the module's formula times its seconds."""
    idle, limit = hardware.idle_watts.value, hardware.watts.value
    if hardware.kind == "cpu":
        busy = busy._replace(computing_s=busy.seconds - busy.reading_s)
    exchanging = ACCESSES_PER_EXCHANGED_BYTE * hardware.link.effective_bytes_per_s / hardware.read_bandwidth[-1].bytes_per_s
    reading_s = busy.reading_s + min(1.0, exchanging) * busy.exchanging_s
    added = reading_watts(hardware) * reading_s + (limit - idle) * busy.computing_s
    return min(limit * busy.seconds, idle * busy.seconds + added)


def mean_watts(parts: Iterable[Busy], hardware: Hardware) -> float:
    """Mean W of one device over ``parts``, one after another; idle over no time at all."""
    parts = tuple(parts)
    seconds = sum(part.seconds for part in parts)
    watts = sum(joules(part, hardware) for part in parts) / seconds if seconds else hardware.idle_watts.value
    return named("mean_watts", watts, "W", "idle, and what reading, computing and exchanging add; at most the limit")
