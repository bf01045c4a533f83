"""A load at rising rates, to the knee: the rate at which a server's power, throughput ÷ response time, is greatest.

Below it more requests a second cost little waiting, beyond it waiting grows faster than throughput (Kleinrock, Power and
deterministic rules of thumb for probabilistic problems in computer communications, ICC 1979). With an SLO the rate to run at is
the greatest at which ``SLO_SHARE`` of the requests meet it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from twostroke.bench.definitions import LoadSummary
from twostroke.core.errors import ConfigError
from twostroke.core.units import format_count, format_seconds

SHARES = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15)
"""Rates of an automatic sweep as shares of the throughput at all requests at once."""

SATURATED_SHARE = 0.8
"""A server that completes less than this share of the rate is past its knee, and higher rates only queue."""

SLO_SHARE = 0.99


def rates_of(text: str) -> tuple[float, ...]:
    """``auto`` is none yet (``auto_rates``); ``1,2,4`` are requests/s. Raises ConfigError."""
    if text == "auto":
        return ()
    try:
        rates = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise ConfigError(f"--sweep {text!r:.100} must be auto or rates in requests/s above 0, such as 1,2,4.")
    return rates


def auto_rates(at_once_per_s: float) -> tuple[float, ...]:
    """Rates around what the server completed of requests that came all at once."""
    return tuple(share * at_once_per_s for share in SHARES)


@dataclass(frozen=True)
class SweepPoint:
    """A rate and what came of it."""

    rate_per_s: Annotated[float, "requests/s that were sent"]
    requests_per_s: Annotated[float, "requests/s that were completed"]
    output_tok_per_s: Annotated[float, "output tokens/s"]
    ttft_median_s: Annotated[float, "s", "median time to first token"]
    ttft_p99_s: Annotated[float, "s", "its p99"]
    itl_median_s: Annotated[float, "s", "median gap between tokens"]
    itl_p99_s: Annotated[float, "s", "its p99"]
    e2e_mean_s: Annotated[float, "s", "mean response time"]
    slo_share: Annotated[float | None, "share of requests that meet the SLO; null without one"]
    refusal: Annotated[str | None, "why the point does not count; null if it does"]

    @classmethod
    def of(cls, rate_per_s: float, s: LoadSummary, refusal: str | None) -> SweepPoint:
        share = None if s.slo_met is None else s.slo_met / max(1, s.n_requests)
        latencies = s.ttft_s.median, s.ttft_s.p99, s.itl_s.median, s.itl_s.p99, s.e2e_s.mean
        return cls(rate_per_s, s.requests_per_s, s.output_tok_per_s, *latencies, share, refusal)

    @property
    def power(self) -> Annotated[float, "completed requests/s ÷ mean response time"]:
        return self.requests_per_s / self.e2e_mean_s if self.e2e_mean_s > 0 else 0.0

    @property
    def saturated(self) -> bool:
        return self.requests_per_s < SATURATED_SHARE * self.rate_per_s


@dataclass(frozen=True)
class Sweep:
    points: Annotated[tuple[SweepPoint, ...], "by rising rate"]

    def _counted(self) -> Sequence[SweepPoint]:
        return [point for point in self.points if point.refusal is None and not math.isnan(point.e2e_mean_s)]

    @property
    def knee_per_s(self) -> Annotated[float | None, "requests/s at the greatest power; null if no point counts"]:
        counted = self._counted()
        return max(counted, key=lambda point: point.power).rate_per_s if counted else None

    @property
    def within_slo_per_s(self) -> Annotated[float | None, "the greatest rate at which the SLO is kept; null: none, or no SLO"]:
        return max(
            (p.rate_per_s for p in self._counted() if p.slo_share is not None and p.slo_share >= SLO_SHARE), default=None
        )

    def text(self) -> str:
        """A table for people, with the knee below it."""
        heads = ("rate/s", "done/s", "output tok/s", "TTFT median", "p99", "ITL median", "p99", "power", "in SLO")
        lines = ["".join(f"{head:>13}" for head in heads) + "   all measured"]
        for p in self.points:
            seconds = (p.ttft_median_s, p.ttft_p99_s, p.itl_median_s, p.itl_p99_s)
            shown = ["–" if math.isnan(value) else format_seconds(value) for value in seconds]
            share = "–" if p.slo_share is None else f"{100 * p.slo_share:.0f}%"
            cells = (
                f"{p.rate_per_s:.3g}",
                f"{p.requests_per_s:.3g}",
                f"{p.output_tok_per_s:.1f}",
                *shown,
                format_count(p.power),
                share,
            )
            lines.append("".join(f"{cell:>13}" for cell in cells) + ("" if p.refusal is None else "   refused: generator late"))
        knee = self.knee_per_s
        lines += [
            "",
            "knee: none, no point counts" if knee is None else f"knee: {knee:.3g} requests/s, where power is greatest",
        ]
        if any(p.slo_share is not None for p in self.points):
            within = self.within_slo_per_s
            rate = "none of these rates" if within is None else f"up to {within:.3g} requests/s"
            lines.append(f"{100 * SLO_SHARE:.0f}% of requests meet the SLO at: {rate}")
        lines.append("power = completed requests/s ÷ mean end to end")
        return "\n".join(lines)
