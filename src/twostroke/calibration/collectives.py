"""Measures what ranks pay to talk to each other: start-up time and rate of a ring, from all-reduces of several sizes. On CPUs
these are the two exchanges that stand for one there (``training.exchanges``), without the sums between them.

It needs more than one rank. Under ``torchrun`` every rank calls ``calibrate``, and rank 0 measures everything else and keeps
the profile. Otherwise processes are started here, one for each GPU of this machine or as many as were asked for.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from twostroke.core.rates import Ring
from twostroke.training.exchanges import all_to_all, gather_into

SIZES_BYTES = tuple(2**n for n in (10, 14, 18, 20, 22, 24, 25))
LEAST_RUNS = 5
SECONDS = 0.15
TIMEOUT_S = 120.0


def fit_ring(points: Sequence[tuple[float, float]], n_ranks: int) -> tuple[float, float]:
    """(α in s, rate in bytes/s) of t = 2(n−1)·α + 2(n−1)/n·S/rate through the points (S bytes, t s).

    It takes least squares of relative errors, so that small messages count as much as large ones. Noise cannot make either
    number negative: α is at least a nanosecond, and the rate at most 10¹⁵ bytes/s.
    """
    a11 = sum(1 / t**2 for _, t in points)
    a12 = sum(s / t**2 for s, t in points)
    a22 = sum(s * s / t**2 for s, t in points)
    b1, b2 = sum(1 / t for _, t in points), sum(s / t for s, t in points)
    determinant = a11 * a22 - a12 * a12
    start, slope = (b1 * a22 - b2 * a12) / determinant, (a11 * b2 - a12 * b1) / determinant
    if start <= 0:  # noise: take the line through the origin instead
        start, slope = 0.0, b2 / a22
    steps = 2 * (n_ranks - 1)
    return max(start / steps, 1e-9), steps / n_ranks / max(slope, 1e-15)


def _exchange(values: Tensor) -> None:
    """What an all-reduce of ``values`` sends."""
    if values.device.type != "cpu":
        dist.all_reduce(values)
        return
    came = torch.empty_like(values)
    all_to_all(came, values, dist.group.WORLD).wait()
    gather_into(values, came[: len(values) // dist.get_world_size()], dist.group.WORLD, None).wait()


def measure_all_reduces(device: torch.device) -> list[tuple[float, float]]:
    """(bytes, best seconds) of all-reduces in the default group. Every rank calls it and gets the slowest rank's times."""
    points: list[tuple[float, float]] = []
    n = dist.get_world_size()
    for size in SIZES_BYTES:
        values = torch.zeros(size // 4 // n * n, device=device)
        _exchange(values)
        times = []
        begin = time.perf_counter()
        while True:
            dist.barrier()
            start = time.perf_counter()
            _exchange(values)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
            # Rank 0 decides for all whether to go on: a rank that stopped alone would leave the others waiting for ever.
            more = torch.tensor(float(len(times) < LEAST_RUNS or time.perf_counter() - begin < SECONDS), device=device)
            dist.broadcast(more, src=0)
            if not more.item():
                break
        slowest = torch.tensor(min(times), device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        points.append((4.0 * len(values), slowest.item()))
    return points


def is_launched() -> bool:
    """Whether a launcher such as torchrun started this process as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def measure_in_launched_group(device: str) -> tuple[Ring, bool]:
    """The ring of the ranks that a launcher started, and whether they are on several machines. Every rank must call this at the
    same point."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    place = torch.device("cuda", local) if device == "cuda" else torch.device("cpu")
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=30 * TIMEOUT_S))
    try:
        n_ranks = dist.get_world_size()
        between = int(os.environ.get("LOCAL_WORLD_SIZE", str(n_ranks))) < n_ranks
        return Ring(*fit_ring(measure_all_reduces(place), n_ranks), n_ranks), between
    finally:
        dist.destroy_process_group()


def measure_between_processes(n_ranks: int, device: str) -> Ring | None:
    """The ring of ``n_ranks`` processes that are started here, on this machine; None if they fail or take too long."""
    with tempfile.TemporaryDirectory(prefix="twostroke-ranks-") as folder:
        command = [sys.executable, "-m", __name__, str(Path(folder) / "meeting"), str(n_ranks), device]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        first, *others = (
            subprocess.Popen(
                [*command, str(rank)],
                stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
            for rank in range(n_ranks)
        )
        try:
            printed, _ = first.communicate(timeout=TIMEOUT_S)
            points = [(float(s), float(t)) for s, t in json.loads(printed)]
        except (ValueError, subprocess.TimeoutExpired):
            return None
        finally:
            for process in (first, *others):
                process.kill()
                process.wait()
            assert first.stdout is not None
            first.stdout.close()
    return Ring(*fit_ring(points, n_ranks), n_ranks) if all(math.isfinite(t) for _, t in points) else None


def _main(meeting: str, n_ranks: str, device: str, rank: str) -> None:
    place = torch.device("cuda", int(rank)) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{meeting}",
        world_size=int(n_ranks),
        rank=int(rank),
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    points = measure_all_reduces(place)
    if rank == "0":
        print(json.dumps(points), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
