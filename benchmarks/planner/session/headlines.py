"""Which predicted numbers of a run are its headlines, and their errors and coverage as a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twostroke.ledger.store import Run

HEADLINES: dict[str, tuple[str, ...]] = {
    "train": ("step_time_s",),
    "generate": ("tpot_s",),
    "bench": ("tpot_s", "decode_step_s", "ttft_s", "output_tok_per_s"),
    "evaluate": ("decode_tok_per_s", "scored_tok_per_s"),
    "prepare": ("prepare_s",),
    "quantize": ("quantize_s",),
}
"""Kind of run → the predicted numbers that a person reads first."""

AIM_ERROR_PERCENT, AIM_INSIDE = 12.0, 0.85
"""Median headline error at most, and share of headlines inside their intervals at least."""


@dataclass(frozen=True)
class Found:
    """One number of one run: predicted with its interval, and measured."""

    command: str
    run_id: str
    subject: str
    name: str
    predicted: float
    low: float | None
    high: float | None
    measured: float
    is_headline: bool

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted / self.measured - 1)

    @property
    def inside(self) -> bool | None:
        return None if self.low is None or self.high is None else self.low <= self.measured <= self.high


def found_in(command: str, run: Run) -> list[Found]:
    """Every number that ``run`` predicted and measured."""
    from twostroke.ledger.scoring import compare

    shown = HEADLINES.get(run.kind, ())
    return [
        Found(command, run.run_id, run.subject, row.name, row.predicted, row.low, row.high, row.measured, row.name in shown)
        for row in compare(run)
        if row.predicted is not None and row.measured and row.error_percent is not None
    ]


def summary(rounds: Sequence[Sequence[Found]], disturbed: str) -> str:
    """The headlines as a table, then all other numbers; medians and shares beside the aims, and what two rounds differ by."""
    rows = [row for found in rounds for row in found]
    shown, others = [r for r in rows if r.is_headline], [r for r in rows if not r.is_headline]
    lines = [
        f"README's session and the demo, another program on one core: {disturbed}. Predictions were frozen before each run.",
        "",
    ]
    if not shown:
        return "\n".join([*lines, "No headline was both predicted and measured.", ""])
    median, share = _median_error(shown), _share_inside(shown)
    is_near = _met(median <= AIM_ERROR_PERCENT)
    lines += [
        f"Median headline error: {median:.1f}% of {len(shown)} (aim {AIM_ERROR_PERCENT:g}%: {is_near}).",
        f"Inside their intervals: {100 * share:.0f}% (aim {100 * AIM_INSIDE:g}%: {_met(share >= AIM_INSIDE)}).",
        f"All numbers: median error {_median_error(rows):.1f}% of {len(rows)}, inside {100 * _share_inside(rows):.0f}%.",
        *_repeated(rounds),
        "",
        *_table(shown),
        "",
        "## Other numbers",
        "",
        *_table(others),
    ]
    return "\n".join(lines) + "\n"


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"


def _median_error(rows: Sequence[Found]) -> float:
    return statistics.median(abs(row.error_percent) for row in rows)


def _share_inside(rows: Sequence[Found]) -> float:
    """NaN without intervals."""
    known = [row.inside for row in rows if row.inside is not None]
    return statistics.mean(known) if known else math.nan


def _table(rows: Sequence[Found]) -> list[str]:
    from twostroke.ledger.text import format_error, format_inside, format_interval, format_value

    lines = ["| command | run of | number | predicted [90%] | measured | error | |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        cells = (
            f"`{row.command.removeprefix('twostroke ')}`", row.subject, row.name,
            format_interval(row.name, row.predicted, row.low, row.high), format_value(row.name, row.measured),
            format_error(row.error_percent), format_inside(row.inside),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _repeated(rounds: Sequence[Sequence[Found]]) -> list[str]:
    """What the headlines of later rounds differ by from the first: no prediction can be nearer than about half of that."""
    differences = []
    for other in rounds[1:]:
        for first, again in zip(_headlines(rounds[0]), _headlines(other), strict=False):
            if (first.command, first.name) == (again.command, again.name):
                differences.append(abs(100 * (again.measured / first.measured - 1)))
    if not differences:
        return []
    return [f"Two rounds' headlines differ by {statistics.median(differences):.1f}% (median), {max(differences):.1f}% at most."]


def _headlines(found: Sequence[Found]) -> list[Found]:
    return [row for row in found if row.is_headline]
