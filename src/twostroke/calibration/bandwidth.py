"""Read bandwidth by working-set size: how fast all threads together walk over the same bytes again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from twostroke.calibration.timing import Clock
from twostroke.core.profile import BandwidthPoint
from twostroke.core.units import MIB

WORKING_SETS_BYTES = tuple(n * MIB for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096))

MANY_BYTES = 256 * MIB
"""Beyond every cache, where all readers wait for memory alike."""


def readers(memory: torch.Tensor) -> list[Callable[[], object]]:
    """Operators that read every byte of ``memory`` (int32) once and write almost nothing. Which one is fastest depends on the
    processor, so each is tried. All are torch's, so the best of them is a lower bound of the true rate."""
    doubles, floats = memory.view(torch.float64), memory.view(torch.float32)
    half = floats.numel() // 2
    return [
        memory.amax,
        doubles.amax,
        memory.view(torch.int64).sum,
        lambda: torch.dot(floats[:half], floats[half : 2 * half]),
    ]


def measure_read_bandwidth(clock: Clock, sizes_bytes: Sequence[int]) -> Iterator[BandwidthPoint]:
    """One point for each size in rising order, in bytes/s. Up to ``MANY_BYTES`` it is the best of all readers, beyond it the
    one that was fastest before."""
    fastest = 0
    for size in sizes_bytes:
        # Ones, because pages that were never written are all the same page of zeros, which is read from cache.
        memory = torch.ones(size // 4, dtype=torch.int32, device=clock.device)
        reads = readers(memory)
        if size <= MANY_BYTES:
            times = [clock.best_s(read, seconds=0.08, least=4) for read in reads]
            fastest = times.index(min(times))
            best = times[fastest]
        else:
            best = clock.best_s(reads[fastest], seconds=0.3, least=4)
        yield BandwidthPoint(working_set_bytes=size, bytes_per_s=size / best)
        del memory, reads


def working_sets(ram_bytes: int, largest: int | None = None) -> list[int]:
    """The sizes to measure, up to an eighth of memory: calibrating must not make a machine swap."""
    limit = min(ram_bytes // 8, largest or WORKING_SETS_BYTES[-1])
    return [size for size in WORKING_SETS_BYTES if size <= limit] or [WORKING_SETS_BYTES[0]]
