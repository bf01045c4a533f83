"""Attributes the error of a total to its parts.

A total T is predicted and measured, and so are some of its parts, T = Σ cᵢ·partᵢ + rest. The residual then splits exactly:

    T_predicted − T_measured = Σ cᵢ·(partᵢ_predicted − partᵢ_measured) + (rest_predicted − rest_measured),

A term is positive if it was predicted too high. The rest holds every part that was not both predicted and measured, and its
name lists them. This shows when two parts miss in opposite directions and the total only looks right.

Measured parts are medians, and a sum of medians is not the median of sums. The difference is in the rest and is about as large
as the parts scatter. Proved by tests/ledger/test_attribution.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from twostroke.ledger.scoring import WHOLE_RUN, is_whole, number_of, quantile

if TYPE_CHECKING:
    from twostroke.ledger.store import Run

Coefficient = Callable[[Mapping[str, Any]], float | None]
"""Computes from the run's inputs how often a part is in the total; None if the inputs do not say."""


def _once(inputs: Mapping[str, Any]) -> float | None:
    return 1.0


def _steps(inputs: Mapping[str, Any]) -> float | None:
    return number_of(inputs.get("steps"))


def _tokens_after_the_first(inputs: Mapping[str, Any]) -> float | None:
    """Mean output length − 1. A load has two bounds for the length, a batch one number."""
    length = inputs.get("output_tokens", (inputs.get("shape") or {}).get("output_tokens"))
    if isinstance(length, list | tuple) and length:
        bounds = [number_of(bound) for bound in length]
        return None if None in bounds else sum(b for b in bounds if b is not None) / len(bounds) - 1
    number = number_of(length)
    return None if number is None else number - 1


@dataclass(frozen=True)
class Identity:
    """``total`` = Σ coefficient·part + the rest. ``rest`` names what the rest is if every part was measured."""

    total: str
    parts: tuple[tuple[str, Coefficient], ...]
    rest: str


IDENTITIES = (
    Identity(
        "step_time_s",
        (("forward_s", _once), ("backward_s", _once), ("optimizer_s", _once), ("data_s", _once)),
        "between the passes",
    ),
    Identity(
        "peak_memory_bytes",
        (
            ("weights_bytes", _once),
            ("gradients_bytes", _once),
            ("optimizer_bytes", _once),
            ("activations_bytes", _once),
            ("kv_cache_bytes", _once),
        ),
        "process, loss, allocator",
    ),
    Identity("train_time_s", (("step_time_s", _steps), ("startup_s", _once)), "checkpoints, start-up outside the clock"),
    Identity("ttft_s", (("prefill_s", _once),), "waiting and HTTP"),
    Identity("tpot_s", (("decode_step_s", _once),), "others' prefills and HTTP"),
    Identity("e2e_s", (("ttft_s", _once), ("tpot_s", _tokens_after_the_first)), "medians of different requests"),
)


OF_RANKS = Identity(
    "step_time_s", (("computing_s", _once), ("wire_s", _once), ("waiting_s", _once)), "medians of different steps"
)
"""A step over several ranks once more, by what they do."""


@dataclass(frozen=True)
class Share:
    """One part's contribution to the total's residual, in the total's unit and in percent of the measured total."""

    part: str
    predicted: float
    measured: float
    residual: float
    percent: float
    coefficient: float = 1.0


@dataclass(frozen=True)
class Attribution:
    """The residual of one total of one run. ``shares`` sum to ``residual``, and the last share is the rest."""

    DOCUMENT = "total predicted measured residual error_percent shares"

    total: str
    predicted: float
    measured: float
    shares: tuple[Share, ...]

    @property
    def residual(self) -> Annotated[float, "predicted − measured"]:
        """Predicted − measured, which is positive if the prediction was too high."""
        return self.predicted - self.measured

    @property
    def error_percent(self) -> Annotated[float, "%", "of the measured total"]:
        return 100.0 * self.residual / self.measured

    @property
    def worst(self) -> Share:
        """The share with the largest residual in either direction."""
        return max(self.shares, key=lambda share: abs(share.residual))


@dataclass(frozen=True)
class PooledShare:
    """One part's contribution to one total over ``n_runs`` runs, in percent of the measured total; ``worst_in`` counts the runs
    in which it missed more than any other part."""

    total: str
    part: str
    n_runs: int
    median_abs_percent: float
    median_percent: float
    worst_in: int


def attribute(run: Run) -> list[Attribution]:
    """The attribution of every total of ``run`` that was predicted and measured, with at least one part that was as well."""
    found = []
    measurement = run.measurement
    for identity in (*IDENTITIES, OF_RANKS):
        predicted, measured = number_of(run.prediction.get(identity.total)), number_of(measurement.get(identity.total))
        if predicted is None or not measured or (identity.total in WHOLE_RUN and not is_whole(run)):
            continue
        shares, missing = [], []
        for part, coefficient in identity.parts:
            p, m, c = number_of(run.prediction.get(part)), number_of(measurement.get(part)), coefficient(run.inputs)
            if p is not None and m is not None and c is not None:
                shares.append(Share(part, c * p, c * m, c * (p - m), 100.0 * c * (p - m) / measured, c))
            elif p is not None or m is not None:
                missing.append(part)
        if not shares:
            continue
        name = identity.rest + (f"; {', '.join(missing)} not measured apart" if missing else "")
        rest_predicted = predicted - sum(s.predicted for s in shares)
        rest_measured = measured - sum(s.measured for s in shares)
        residual = rest_predicted - rest_measured
        shares.append(Share(name, rest_predicted, rest_measured, residual, 100.0 * residual / measured))
        found.append(Attribution(identity.total, predicted, measured, tuple(shares)))
    return found


def pool(runs: Iterable[Run]) -> list[PooledShare]:
    """The shares of every total over ``runs``. Totals come in the order of ``IDENTITIES``, each with its worst part first."""
    percents: dict[tuple[str, str], list[float]] = {}
    worst: dict[tuple[str, str], int] = {}
    for run in runs:
        for one in attribute(run):
            for share in one.shares:
                # The name of a run's rest may list parts that it did not measure. All rests of a total are pooled as one.
                key = one.total, share.part.partition(";")[0]
                percents.setdefault(key, []).append(share.percent)
                worst[key] = worst.get(key, 0) + (share is one.worst)
    pooled = [
        PooledShare(
            total,
            part,
            len(found),
            quantile(map(abs, found), 0.5),
            quantile(found, 0.5),
            worst[total, part],
        )
        for (total, part), found in percents.items()
    ]
    order = {identity.total: place for place, identity in enumerate(IDENTITIES)}
    return sorted(pooled, key=lambda share: (order[share.total], -share.median_abs_percent))
