"""Checkpoint intervals: the best that a search finds, and the wall time that a simulated run with failures takes."""

from __future__ import annotations

import math
import random

import pytest

from twostroke.core.errors import ConfigError
from twostroke.planner.training.checkpointing import (
    LLAMA_3_MTBF_DEVICE_HOURS,
    daly_interval_s,
    lost_share,
    resilience,
    young_interval_s,
)


def simulated_wall_s(
    work_s: float, interval_s: float, checkpoint_s: float, mtbf_s: float, restart_s: float, seed: int
) -> float:
    """Walk one run: segments of work and checkpoint, undone by failures that also strike while it restarts."""
    dice = random.Random(seed)
    clock, done, failure = 0.0, 0.0, dice.expovariate(1 / mtbf_s)
    while done < work_s:
        segment = interval_s + checkpoint_s
        if clock + segment <= failure:
            clock, done = clock + segment, done + interval_s
            continue
        clock = failure
        failure = clock + dice.expovariate(1 / mtbf_s)
        while clock + restart_s > failure:
            clock = failure
            failure = clock + dice.expovariate(1 / mtbf_s)
        clock += restart_s
    return clock


@pytest.mark.parametrize(("checkpoint_s", "mtbf_s"), [(60, 10_000), (300, 10_000), (600, 3_000)])
def test_expected_wall_time_is_what_simulated_runs_take(checkpoint_s: float, mtbf_s: float) -> None:
    interval, restart = daly_interval_s(checkpoint_s, mtbf_s), 120.0
    work = 2000 * interval
    runs = [simulated_wall_s(work, interval, checkpoint_s, mtbf_s, restart, seed) for seed in range(8)]
    expected = 1 + lost_share(interval, checkpoint_s, mtbf_s, restart)
    # 16,000 segments whose time varies by at most about itself: a standard error under 1%, three of them allowed
    assert sum(runs) / len(runs) / work == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("ratio", [1e-4, 1e-2, 0.1, 0.5])
def test_daly_is_the_best_interval_and_young_close_to_it_where_checkpoints_are_short(ratio: float) -> None:
    mtbf = 10_000.0
    delta = ratio * mtbf
    best = min(lost_share(delta * 1.02**i / 10, delta, mtbf, 0) for i in range(900))
    assert 1 + lost_share(daly_interval_s(delta, mtbf), delta, mtbf, 0) == pytest.approx(1 + best, rel=2e-3)
    if ratio < 1e-3:
        assert young_interval_s(delta, mtbf) == pytest.approx(daly_interval_s(delta, mtbf), rel=0.02)


def test_first_order_waste_is_the_textbooks() -> None:
    delta, mtbf = 10.0, 1e6
    tau = daly_interval_s(delta, mtbf)
    assert lost_share(tau, delta, mtbf, 0) == pytest.approx(delta / tau + tau / (2 * mtbf), rel=0.01)


def test_llama_3_was_interrupted_every_three_hours() -> None:
    """419 in 54 days: one in 3.09 h (arXiv 2407.21783, table 5)."""
    assert pytest.approx(50_676, rel=1e-3) == LLAMA_3_MTBF_DEVICE_HOURS
    job = resilience(4e12, 2e12, 16_384)
    assert job.mtbf_s / 3600 == pytest.approx(3.093, rel=1e-3)
    assert job.mtbf_kind == "assumed"
    assert job.checkpoint_s == 2.0


def test_a_checkpoint_longer_than_the_time_between_failures_never_finishes() -> None:
    assert daly_interval_s(30, 10) == 10
    assert lost_share(10, 1e5, 10, 0) == math.inf


@pytest.mark.parametrize("hours", [0, -3, float("nan"), float("inf")])
def test_impossible_failure_rates_are_refused(hours: float) -> None:
    with pytest.raises(ConfigError, match="mtbf_hours"):
        resilience(1e9, 1e9, 8, hours)
