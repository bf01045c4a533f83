"""A calibrated machine corrected by its own runs: what `twostroke ledger fit` does.

Calibration measures a machine's constants one by one; whole runs say what they are worth there. Of each quantity in
``restated.QUANTITIES`` a run teaches the residual

    r = ln(measured time / time planned by calibration alone).

What was planned under earlier corrections is divided by them first, so that no correction is counted twice. Runs of whose
phase the same was planned are one configuration; it counts once, with the mean of its runs. Then

    factor = exp(Σ w·r / (Σ w + k)),    w = 2^(−age / HALF_LIFE_RUNS)·(1 − waited),    k = max(1, σ² / τ²).

``age`` is the number of newer runs, ``waited`` the share of the run that its threads waited for a processor, σ² the variance of
r between configurations, and τ the spread of calibrated predictions: half the 90% range of ``intervals.toml`` ÷ 1.645, wider
after a busy calibration. This is the mean of a normal posterior around what calibration said, which weighs at least one run.

A factor is adopted only if it helps on runs that it has not seen. Fitted to the oldest 70% of the runs, it must lower the
error of the newest 30%, of its own quantity and of each total (step, TTFT, TPOT, answer) that the quantity is part of. The
error is exp(median |r|) − 1. What is stored is then fitted to all of them.

Only finished runs of this machine, of this version of the code, and since the last calibration count: the others were planned
from other constants. Proved by tests/planner/test_learning.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from twostroke.core.errors import ConfigError, InputError
from twostroke.core.profile import ENGINES, MachineProfile, load_profile, read_fingerprint
from twostroke.core.rates import Correction, Corrections, Engine
from twostroke.ledger.code_version import code_version
from twostroke.ledger.scoring import number_of, numbers_of, quantile
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.tables import hardware_from_profile
from twostroke.planner.truth.intervals import Pair, Range, basis_of, low_by_of, range_of, widened
from twostroke.planner.truth.restated import QUANTITIES, TOTALS, WAITED, Quantity, phase_of, restated

if TYPE_CHECKING:
    from twostroke.ledger.store import Ledger, Run

HELD_OUT_SHARE = 0.3
"""Share of the runs, the newest, that a correction is judged by."""

LEAST_CONFIGURATIONS = 5
"""Fewest configurations among the older runs of a quantity that a factor is fitted to."""

LEAST_HELD_OUT = 2
"""Fewest newer runs that may judge it."""

HALF_LIFE_RUNS = 32
"""After so many newer runs of the same quantity, a run weighs half."""

NEWEST_RUNS = 256
"""Runs of the ledger that are looked at. With the half life, those beyond would weigh less than 1/256."""

NORMAL_90 = 1.645
"""Standard deviations on either side of the middle that hold 90% of a normal distribution."""


@dataclass(frozen=True)
class Lesson:
    """What one run says of one quantity."""

    residual: float
    weight: float
    configuration: str


@dataclass(frozen=True)
class Judged:
    """One quantity and what its runs say. ``factor``, on its time and fitted to all runs, is None if there were too few;
    ``before_percent`` is the error of the ``n_held_out`` newest runs as calibration plans them, ``after_percent`` the same
    corrected by the older runs. ``why``: the reason if it was not adopted."""

    quantity: str
    what: str
    phase: Engine
    n_runs: int
    n_configurations: int
    n_held_out: int
    factor: float | None
    before_percent: float | None
    after_percent: float | None
    is_adopted: bool
    why: str = ""


@dataclass(frozen=True)
class Total:
    """A number that people read, on the held-out runs, before and after all adopted corrections."""

    name: str
    n_held_out: int
    before_percent: float
    after_percent: float


@dataclass(frozen=True)
class Fit:
    """The corrections of one profile. ``left_out`` counts the runs that do not count, by reason."""

    profile: MachineProfile
    quantities: tuple[Judged, ...]
    totals: tuple[Total, ...]
    left_out: Mapping[str, int]

    @property
    def is_judged(self) -> bool:
        return any(one.factor is not None for one in self.quantities)

    @property
    def corrected(self) -> MachineProfile:
        """The profile with the adopted factors. A quantity that had too few runs to be judged keeps the one it had."""
        unjudged = {one.quantity for one in self.quantities if one.factor is None}
        had = hardware_from_profile(self.profile).corrections.learned
        kept = [one for one in had if one.quantity in unjudged]
        learned = (*kept, *(_stored(one) for one in self.quantities if one.is_adopted))
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        return replace(self.profile, corrections=Corrections(learned, now, code_version()) if learned else Corrections())


def _stored(one: Judged) -> Correction:
    assert one.factor is not None
    assert one.before_percent is not None
    assert one.after_percent is not None
    return Correction(
        one.quantity, one.factor, one.n_runs, one.n_configurations, one.n_held_out, one.before_percent, one.after_percent
    )


# -- which runs count -----------------------------------------------------------------------------------------------------


def phases_of(profile: MachineProfile) -> tuple[Engine, ...]:
    """The phases that plans of this machine take from ``profile``: training's may be the GPU's."""
    return tuple(phase for phase in profile.engines if (of := load_profile(phase)) is not None and of.device == profile.device)


def counting(runs: Iterable[Run], profile: MachineProfile) -> tuple[list[Run], dict[str, int]]:
    """(the runs that teach ``profile``, oldest first; how many others there are by reason)."""
    label, here, phases = hardware_from_profile(profile).label, profile.fingerprint.key, phases_of(profile)
    found: list[Run] = []
    others: Counter[str] = Counter()
    for run in runs:
        if run.fingerprint != here or run.inputs.get("device", label) != label or phase_of(run) not in phases:
            others["of another machine or device"] += 1
        elif run.code_version != code_version():
            others["of another version of the code"] += 1
        elif _second(run.frozen_at) < _second(profile.measured_at):
            others["from before the calibration"] += 1
        elif run.status != "finished":
            others["not finished"] += 1
        else:
            found.append(run)
    return sorted(found, key=lambda run: run.frozen_at), dict(others)


def _second(at: str) -> str:
    """An ISO 8601 time in UTC without fractions of a second, which compares as text."""
    return at[: len("2026-01-01T00:00:00")]


# -- what they say --------------------------------------------------------------------------------------------------------


def residuals_of(runs: Iterable[Run], name: str, factors: Mapping[str, float]) -> list[tuple[Run, float]]:
    """ln(measured / predicted) of the time of the ledger's ``name``, as plans with ``factors`` have it, of each run with
    both."""
    found = []
    for run in runs:
        measured, predicted = numbers_of(run.measurement).get(name), restated(run, factors).get(name)
        if measured is not None and predicted is not None:
            residual = Pair(name, predicted, measured, phase=phase_of(run)).residual
            if residual is not None:
                found.append((run, residual))
    return found


def lessons_of(runs: Sequence[Run], quantity: Quantity) -> list[Lesson]:
    """Of ``runs``, oldest first."""
    name = quantity.ledger_names[0]
    found = residuals_of((run for run in runs if phase_of(run) == quantity.phase), name, {})
    lessons = []
    for age, (run, residual) in zip(range(len(found) - 1, -1, -1), found, strict=True):
        quiet = 1.0 - min(1.0, max(0.0, number_of(run.measurement.get(WAITED)) or 0.0))
        lessons.append(Lesson(residual, 2.0 ** (-age / HALF_LIFE_RUNS) * quiet, _configuration(run)))
    return lessons


def _configuration(run: Run) -> str:
    """What calibration alone plans of every quantity: the same for two runs of the same work, however long they are."""
    planned = restated(run, {})
    return " ".join(
        f"{planned.get(name, 0.0):.6g}"
        for quantity in QUANTITIES
        if quantity.phase == phase_of(run)
        for name in quantity.ledger_names
    )


def factor_of(lessons: Iterable[Lesson], prior: Range) -> float:
    """The module's formula."""
    by_configuration: dict[str, list[Lesson]] = {}
    for lesson in lessons:
        if lesson.weight > 0:
            by_configuration.setdefault(lesson.configuration, []).append(lesson)
    means = [
        (max(one.weight for one in alike), sum(one.weight * one.residual for one in alike) / sum(one.weight for one in alike))
        for alike in by_configuration.values()
    ]
    whole = sum(weight for weight, _ in means)
    if not whole:
        return 1.0
    mean = sum(weight * residual for weight, residual in means) / whole
    variance = sum(weight * (residual - mean) ** 2 for weight, residual in means) / whole
    spread = (prior.high - prior.low) / 2 / NORMAL_90
    prior_weight = max(1.0, variance / spread**2) if spread > 0 else math.inf
    return math.exp(whole * mean / (whole + prior_weight))


def error_percent(residuals: Iterable[float]) -> float:
    """100·(exp(median |r|) − 1): the factor by which the middle run is off, either way."""
    return 100.0 * math.expm1(quantile(map(abs, residuals), 0.5))


def prior_of(quantity: Quantity, hardware: Hardware) -> Range:
    """The range of calibrated predictions of ``quantity`` on ``hardware``."""
    key = Pair(quantity.ledger_names[0], 1.0, 1.0, basis_of(hardware, quantity.phase), quantity.phase).key
    return widened(range_of(*key), low_by_of(hardware, quantity.phase))


# -- judging --------------------------------------------------------------------------------------------------------------


def fit(runs: Iterable[Run], profile: MachineProfile) -> Fit:
    """What ``runs`` of the ledger say of ``profile``, phase by phase."""
    taught, left_out = counting(runs, profile)
    hardware = hardware_from_profile(profile)
    quantities: list[Judged] = []
    totals: list[Total] = []
    for phase in phases_of(profile):
        own = [run for run in taught if phase_of(run) == phase]
        n_older = math.ceil((1 - HELD_OUT_SHARE) * len(own) - 1e-9)
        judged, factors = _judge(own, n_older, phase, hardware)
        judged, factors = _without_harm(judged, factors, own[n_older:], phase)
        quantities += judged
        totals += _totals(own[n_older:], phase, factors)
    return Fit(profile, tuple(quantities), tuple(totals), left_out)


def _judge(runs: Sequence[Run], n_older: int, phase: Engine, hardware: Hardware) -> tuple[list[Judged], dict[str, float]]:
    """Each quantity on its own, and the factors of the older runs that help the newer ones."""
    judged, factors = [], {}
    for quantity in (one for one in QUANTITIES if one.phase == phase):
        lessons, older = lessons_of(runs, quantity), lessons_of(runs[:n_older], quantity)
        newer = residuals_of(runs[n_older:], quantity.ledger_names[0], {})
        n, n_older_kinds, n_newer = len(lessons), len({one.configuration for one in older}), len(newer)
        row = Judged(
            quantity.name,
            quantity.what,
            phase,
            n,
            len({one.configuration for one in lessons}),
            n_newer,
            None,
            None,
            None,
            False,
        )
        if n_older_kinds < LEAST_CONFIGURATIONS or n_newer < LEAST_HELD_OUT:
            why = (
                f"too few runs: {n_older_kinds} configurations among the older ones ({LEAST_CONFIGURATIONS} are needed) and "
                f"{n_newer} newer ({LEAST_HELD_OUT} are needed)"
            )
            judged.append(replace(row, why=why))
            continue
        prior = prior_of(quantity, hardware)
        factor = factor_of(older, prior)
        before = error_percent(residual for _, residual in newer)
        after = error_percent(residual - math.log(factor) for _, residual in newer)
        helps = after < before
        if helps:
            factors[quantity.name] = factor
        judged.append(
            replace(
                row,
                factor=factor_of(lessons, prior),
                before_percent=before,
                after_percent=after,
                is_adopted=helps,
                why="" if helps else "it does not help the held-out runs",
            )
        )
    return judged, factors


def _without_harm(
    judged: list[Judged], factors: dict[str, float], newer: Sequence[Run], phase: Engine
) -> tuple[list[Judged], dict[str, float]]:
    """The same without the corrections of a total that they make worse: two parts that miss in opposite directions may add up
    to a total that is right."""
    for name, parts in TOTALS[phase].items():
        found = _total(name, newer, factors)
        if found is not None and found.after_percent > found.before_percent + 1e-9:
            factors = {part: factor for part, factor in factors.items() if part not in parts}
            why = f"it makes {name} of the held-out runs worse"
            judged = [
                replace(one, is_adopted=False, why=why) if one.is_adopted and one.quantity in parts else one for one in judged
            ]
    return judged, factors


def _total(name: str, newer: Sequence[Run], factors: Mapping[str, float]) -> Total | None:
    before = [residual for _, residual in residuals_of(newer, name, {})]
    after = [residual for _, residual in residuals_of(newer, name, factors)]
    return Total(name, len(before), error_percent(before), error_percent(after)) if before else None


def _totals(newer: Sequence[Run], phase: Engine, factors: Mapping[str, float]) -> list[Total]:
    return [found for name in TOTALS[phase] if (found := _total(name, newer, factors)) is not None]


# -- what the command does ------------------------------------------------------------------------------------------------


def fit_ledger(ledger: Ledger) -> list[Fit]:
    """The fit of each profile of this machine. Raises ConfigError without a profile, InputError if the ledger has no runs or
    too few for any quantity, CorruptFileError if it cannot be read."""
    profiles = profiles_in_use()
    runs = ledger.runs(limit=NEWEST_RUNS)
    if not runs:
        raise InputError(
            f"ledger {ledger.path} has no runs to learn from. Every `twostroke train`, `bench` and `generate` adds one."
        )
    fits = [fit(runs, profile) for profile in profiles]
    if not any(one.is_judged for one in fits):
        most = max(one.n_configurations for each in fits for one in each.quantities)
        out = "; ".join(f"{n} {why}" for why, n in fits[0].left_out.items())
        raise InputError(
            f"ledger {ledger.path} has too few runs to learn from: at most {most} configurations of a quantity. "
            f"{LEAST_CONFIGURATIONS} among the older 70% and {LEAST_HELD_OUT} newer runs are needed."
            + (f" Runs that do not count: {out}." if out else "")
        )
    return fits


def profiles_in_use() -> list[MachineProfile]:
    """The profiles that plans of this machine take their phases from. Raises ConfigError if nothing was calibrated."""
    found = {profile.device: profile for phase in ENGINES if (profile := load_profile(phase)) is not None}
    if not found:
        raise ConfigError(
            f"this machine ({read_fingerprint().cpu_model}) has no profile to correct. Run `twostroke calibrate` first."
        )
    return list(found.values())
