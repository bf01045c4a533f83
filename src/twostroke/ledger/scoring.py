"""Scores predictions against measurements: the error of each number, and its distribution over many runs."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    from twostroke.ledger.store import Run  # for its type alone: a plan shows intervals and has no time to import sqlite3


@dataclass(frozen=True)
class Row:
    """One name of one run. ``error_percent`` = 100·(predicted − measured) / measured. It is None if either is missing, or if
    the measured value is 0, for which a relative error is undefined. ``low`` and ``high`` are the interval that was frozen with
    the prediction, or None."""

    name: str
    predicted: float | None
    measured: float | None
    error_percent: float | None
    low: float | None = None
    high: float | None = None

    @property
    def inside(self) -> Annotated[bool | None, "whether the measurement fell into the interval"]:
        """Whether the measurement lies in the interval; None if either is missing."""
        if self.measured is None or self.low is None or self.high is None:
            return None
        return self.low <= self.measured <= self.high


@dataclass(frozen=True)
class Score:
    """The errors of one name over ``n_runs`` runs: median, 90th percentile and largest |error| in percent, and the median of
    the signed error, which shows a bias. ``n_intervals`` predictions had an interval, and ``n_inside`` of their measurements
    lie in it."""

    name: str
    n_runs: int
    median_abs_error_percent: float
    p90_abs_error_percent: float
    worst_abs_error_percent: float
    median_error_percent: float
    n_intervals: int = 0
    n_inside: int = 0


def number_of(value: Any) -> float | None:
    """The number of a ledger value, which is a number or a dictionary with "value"; None for anything else."""
    if isinstance(value, Mapping):
        value = value.get("value")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def interval_of(value: Any) -> tuple[float | None, float | None]:
    """("low", "high") of a ledger value that is a dictionary with both; (None, None) for anything else."""
    if not isinstance(value, Mapping):
        return None, None
    low, high = number_of(value.get("low")), number_of(value.get("high"))
    return (None, None) if low is None or high is None else (low, high)


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """The names with a number, and that number without its interval."""
    return {name: number for name, value in values.items() if (number := number_of(value)) is not None}


def error_percent(predicted: float | None, measured: float | None) -> float | None:
    """100·(predicted − measured) / measured, in percent. It is positive if the prediction was too high."""
    if predicted is None or measured is None or measured == 0:
        return None
    return 100.0 * (predicted - measured) / measured


WHOLE_RUN = frozenset({"train_time_s", "elapsed_s", "energy_kwh", "cost_usd"})
"""Names that are predicted for a whole run. If a run was interrupted or failed, they are shown and not scored."""


def is_whole(run: Run) -> bool:
    """False if the run stopped before its end."""
    return run.status not in ("interrupted", "failed")


def compare(run: Run) -> list[Row]:
    """A row for every name that was predicted, in the prediction's order, then for names that were only measured."""
    measurement = run.measurement
    rows = []
    for name in [*run.prediction, *(n for n in measurement if n not in run.prediction)]:
        predicted, measured = number_of(run.prediction.get(name)), number_of(measurement.get(name))
        if predicted is not None or measured is not None:
            if name in WHOLE_RUN and not is_whole(run):
                rows.append(Row(name, predicted, measured, None))
                continue
            low, high = interval_of(run.prediction.get(name))
            rows.append(Row(name, predicted, measured, error_percent(predicted, measured), low, high))
    return rows


FOLLOWS = {
    "energy_per_mtok_kwh": "no counter of energy was read.",
    "energy_kwh": "no counter of energy was read.",
    "cost_per_mtok_usd": "it follows from the measured rate, which is missing.",
    "cost_usd": "it follows from the measured time, which is missing.",
    "model_bytes": "no model was written; the prediction is of files in the scheme that is served.",
}
"""Why some predictions are never measured, by name."""


def unmeasured(prediction: Mapping[str, Any], measured: Container[str], reasons: Mapping[str, str]) -> dict[str, str]:
    """A reason for each number of ``prediction`` that is not among ``measured``, from ``reasons`` or else ``FOLLOWS``."""
    missing = (name for name in numbers_of(prediction) if name not in measured)
    return {name: reasons.get(name) or FOLLOWS.get(name, "the run ended before it could be measured.") for name in missing}


def quantile(values: Iterable[float], q: float) -> float:
    """Quantile ``q`` in [0, 1] by linear interpolation between order statistics (numpy's default); NaN without values."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarise(runs: Iterable[Run]) -> list[Score]:
    """One ``Score`` for each name that was both predicted and measured, in order of first appearance."""
    errors: dict[str, list[float]] = {}
    inside: dict[str, list[bool]] = {}
    for run in runs:
        for row in compare(run):
            if row.error_percent is not None:
                errors.setdefault(row.name, []).append(row.error_percent)
                if row.inside is not None:
                    inside.setdefault(row.name, []).append(row.inside)
    return [
        Score(
            name,
            len(found),
            quantile(map(abs, found), 0.5),
            quantile(map(abs, found), 0.9),
            max(map(abs, found)),
            quantile(found, 0.5),
            len(inside.get(name, ())),
            sum(inside.get(name, ())),
        )
        for name, found in errors.items()
    ]
