"""How often to write a checkpoint, and what failures cost a run: Young's and Daly's intervals, Daly's expected wall time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from twostroke.core.errors import ConfigError
from twostroke.core.named import exponential, exponential_less_1, letter, named, square_root

LLAMA_3_MTBF_DEVICE_HOURS = 16_384 * 54 * 24 / 419
"""Device-hours between interruptions: 419 unexpected ones in 54 days on 16,384 H100 (the Llama 3 report, arXiv 2407.21783,
table 5): 50,676 h, so one in about three hours for the whole job."""

ASSUMED_RESTART_S = 600.0
"""Seconds from a failure to the first new step beside reading the checkpoint: noticing, rescheduling, starting again."""


@dataclass(frozen=True)
class Resilience:
    """What failures cost a job of ``n_devices``."""

    n_devices: Annotated[int, "devices that may fail"]
    mtbf_device_hours: Annotated[float, "h between failures of one device"]
    mtbf_kind: Annotated[str, "assumed or given"]
    checkpoint_s: Annotated[float, "s", "to write one"]
    restart_s: Annotated[float, "s", "from a failure to the next step"]
    young_s: Annotated[float, "s", "between checkpoints after Young"]
    interval_s: Annotated[float, "s", "between checkpoints after Daly"]
    lost_share: Annotated[
        float, "expected wall time beyond the work's, as a share of it: checkpoints, work done again, restarts"
    ]

    @property
    def mtbf_s(self) -> Annotated[float, "s", "between failures of the whole job"]:
        """Seconds between failures of the whole job: any device's stops it."""
        return self.mtbf_device_hours * 3600 / self.n_devices


def young_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """√(2·δ·M) seconds of work between checkpoints (Young 1974)."""
    return _named("young_s", square_root(2 * checkpoint_s * mtbf_s), "Young 1974")


def daly_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """√(2δM)·[1 + ⅓·√(δ/2M) + ⅑·δ/2M] − δ seconds of work between checkpoints for δ < 2M, else M (Daly 2006, equation 37).

    Within 0.2% of the wall time at the best interval that a numeric search finds (tests/planner/test_checkpointing.py).
    """
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = checkpoint_s / (2 * mtbf_s)
    seconds = young_interval_s(checkpoint_s, mtbf_s) * (1 + square_root(ratio) / 3 + ratio / 9) - checkpoint_s
    return _named("interval_s", seconds, "work between checkpoints; Daly 2006, equation 37")


def _named(symbol: str, seconds: float, source: str) -> float:
    return named(symbol, seconds, "s", source, section="storage")


def lost_share(interval_s: float, checkpoint_s: float, mtbf_s: float, restart_s: float) -> float:
    """Expected wall time per second of work, less 1: M·e^(R/M)·(e^((τ+δ)/M) − 1)/τ − 1 with exponential times between failures
    (Daly 2006, equation 20). To first order δ/τ + (τ + δ)/2M + R/M. Held against a simulated run in the tests."""
    exponent = (interval_s + checkpoint_s) / mtbf_s
    if exponent + restart_s / mtbf_s > 700:
        return math.inf  # the run never ends
    lost = mtbf_s * exponential(restart_s / mtbf_s) * exponential_less_1(exponent) / interval_s - 1
    return named("lost_share", lost, "share", "wall time beyond the work's; Daly 2006, equation 20", section="storage")


def resilience(
    checkpoint_bytes: float,
    write_bytes_per_s: float,
    n_devices: int,
    mtbf_device_hours: float | None = None,
    restart_s: float = ASSUMED_RESTART_S,
) -> Resilience:
    """The best interval for a job of ``n_devices`` that writes ``checkpoint_bytes`` at ``write_bytes_per_s`` in all, and reads
    them back as fast. Raises ConfigError for an MTBF that is not above 0."""
    hours = LLAMA_3_MTBF_DEVICE_HOURS if mtbf_device_hours is None else mtbf_device_hours
    if not 0 < hours < math.inf:
        raise ConfigError(f"mtbf_hours={hours:g} must be above 0 and finite: hours between failures of one device.")
    seconds, mtbf_s = checkpoint_bytes / write_bytes_per_s, letter("device_hours", hours) * 3600 / n_devices
    seconds = _named("writing_s", seconds, "writing a checkpoint, and reading it back")
    mtbf_s = _named("mtbf_s", mtbf_s, "any device's failure stops the job")
    restarting_s = _named("restarting_s", letter("noticing", restart_s) + seconds, "from a failure to the next step")
    interval = daly_interval_s(seconds, mtbf_s)
    return Resilience(
        n_devices=n_devices,
        mtbf_device_hours=hours,
        mtbf_kind="assumed" if mtbf_device_hours is None else "given",
        checkpoint_s=seconds,
        restart_s=restarting_s,
        young_s=young_interval_s(seconds, mtbf_s),
        interval_s=interval,
        lost_share=lost_share(interval, seconds, mtbf_s, restarting_s),
    )
