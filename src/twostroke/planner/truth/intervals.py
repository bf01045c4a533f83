"""How far a prediction may be off: an interval with a stated level around every predicted number.

Errors of a planner are factors, not amounts, so an interval is multiplicative. With the residual r = ln(measured /
predicted) of earlier predictions of the same kind, and [a, b] the range that holds ``LEVEL`` of them,

    low = predicted · eᵃ,    high = predicted · eᵇ.

[a, b] comes from ``intervals.toml``, per quantity, basis of the prediction (a calibrated machine, its rates alone, or a
datasheet) and phase. Where at least ``LEAST_RUNS`` runs of this machine's own ledger have residuals of that kind, the range is
then corrected by them as in split-conformal quantile regression (Romano, Patterson, Candès 2019, "Conformalized Quantile
Regression"):

    s_i = max(a − r_i, r_i − b),    q = the ⌈(n + 1)·LEVEL⌉-th smallest s_i,    [a − q, b + q],

which widens a range that missed too often (q > 0) and narrows one that was too generous (q < 0), with a finite-sample
guarantee of ``LEVEL`` on average, *if* the next run is exchangeable with those before. A change of model, load or code ends
that: a machine that only ever trained tiny models learns their interval. A rate (tokens per second) shares its
range with the time it is the inverse of. Prices are inputs; what they may be off by is in no interval.

Proved by tests/planner/test_intervals.py.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from twostroke.core.described import LeftOut
from twostroke.core.errors import ConfigError, TwostrokeError
from twostroke.planner.hardware.present import unsure_factor

if TYPE_CHECKING:
    from twostroke.ledger.store import Ledger, Run
    from twostroke.planner.hardware.device import Hardware

LEVEL = 0.90
"""Share of measurements that an interval is meant to hold."""

LEAST_RUNS = 9
"""Fewest runs a range is corrected by: below, ⌈(n + 1)·0.9⌉ exceeds n, and no finite correction has the level."""

NEWEST_RUNS = 64
"""Runs of the ledger that are looked at: older ones were predicted by older code."""

NARROWEST = 0.001
"""Half width, as a logarithm, that no fitted range goes below: 0.1%. Only what is exact by definition has none."""

MOST_LOW_BY = 0.9
"""A calibration on a busy machine widens no interval by more than a factor of ten."""

FILE = Path(__file__).with_name("intervals.toml")

RATES = "rates"
"""Basis of predictions from a calibrated machine's rates where no whole step of the engine was measured. What is not listed for
it in the file has the range of a measured one: memory does not hang on rates."""

SERVED, EXPERTS = "served", "experts"
"""Bases of serving predictions on devices whose engines were measured publicly, of dense models and of those with experts, of
which less is known. What is not listed for them has a datasheet's range."""

LOCAL = "local"
"""Basis of llama.cpp on NVIDIA's and Apple's devices, of which there are public rows."""

FALLS_TO = {RATES: "measured", SERVED: "datasheet", EXPERTS: "datasheet", LOCAL: "datasheet"}
"""Basis → the one whose ranges hold for what is not listed."""

EXACT = frozenset({"parameters", "steps", "batch", "users", "devices"})
"""Counts that are what they are by definition: no width."""

_TIME, _RATE = 1, -1
_QUANTITIES: dict[str, tuple[str, str | None, int]] = {
    # ledger name: quantity of intervals.toml, phase where it is not the run's, sense (a rate is the inverse of a time)
    "weights_bytes": ("state", None, _TIME),
    "gradients_bytes": ("state", None, _TIME),
    "optimizer_bytes": ("state", None, _TIME),
    "model_bytes": ("state", None, _TIME),
    "checkpoint_bytes": ("state", None, _TIME),
    "activations_bytes": ("activations", None, _TIME),
    "kv_cache_bytes": ("kv_cache", None, _TIME),
    "peak_memory_bytes": ("peak_memory", None, _TIME),
    "step_time_s": ("step", "train", _TIME),
    "train_tok_per_s": ("step", "train", _RATE),
    "mfu": ("step", "train", _RATE),
    "forward_s": ("pass", "train", _TIME),
    "backward_s": ("pass", "train", _TIME),
    "optimizer_s": ("pass", "train", _TIME),
    "data_s": ("data", "train", _TIME),
    "startup_s": ("startup", None, _TIME),
    "warm_startup_s": ("startup", None, _TIME),
    "train_time_s": ("run_time", "train", _TIME),
    "sweep_s": ("run_time", "train", _TIME),
    "energy_kwh": ("energy", "train", _TIME),
    "cost_usd": ("run_time", "train", _TIME),
    "ttft_s": ("ttft", "serve", _TIME),
    "prefill_s": ("prefill", "prefill", _TIME),
    "prefill_tok_per_s": ("prefill", "prefill", _RATE),
    "tpot_s": ("decode", "decode", _TIME),
    "decode_step_s": ("decode", "decode", _TIME),
    "decode_tok_per_s": ("decode", "decode", _RATE),
    "output_tok_per_s": ("output", "serve", _RATE),
    "energy_per_mtok_kwh": ("energy", "serve", _TIME),
    "cost_per_mtok_usd": ("output", "serve", _TIME),
    "e2e_s": ("output", "serve", _TIME),
    "concurrency": ("concurrency", "serve", _TIME),
    "prepare_s": ("prepare", None, _TIME),
    "quantize_s": ("quantize", None, _TIME),
    "import_s": ("moving", None, _TIME),
    "export_s": ("moving", None, _TIME),
    "scored_tok_per_s": ("scoring", None, _RATE),
    "requests_per_s": ("output", "serve", _RATE),
    "elapsed_s": ("output", "serve", _TIME),
}
_QUANTITIES |= {
    f"{latency}_{percentile}_s": _QUANTITIES[of]
    for latency, of in (("ttft", "ttft_s"), ("tpot", "tpot_s"), ("itl", "tpot_s"), ("e2e", "e2e_s"))
    for percentile in ("median", "p90", "p95", "p99")
}
_QUANTITIES |= {
    f"{of}_{percentile}_s": ("decode_tail", "serve", _TIME) for of in ("tpot", "itl") for percentile in ("p90", "p95", "p99")
}


class Interval:
    """A prediction with the range that holds it."""

    value: Annotated[float | None, "the prediction; null for a predicted word, which has no range"]
    low: Annotated[float, "lower end", LeftOut]
    high: Annotated[float, "upper end", LeftOut]
    level: Annotated[float, "share of measurements that the range is to hold", LeftOut]
    basis: Annotated[
        str,
        "measured, rates (of a calibrated machine, no whole steps), datasheet; served, experts, local: of measured engines",
        LeftOut,
    ]
    width: Annotated[str, "where the range's width comes from", LeftOut]


@dataclass(frozen=True)
class Range:
    """[low, high] of ln(measured / predicted). ``kind``: "assumed", or "measured" from ``n`` residuals."""

    low: float
    high: float
    kind: str
    n: int
    source: str


@dataclass(frozen=True)
class Pair:
    """One prediction and its measurement. ``phase`` is that of the run, "train" or "serve"; ``basis`` what the prediction was
    made from (``basis_of``)."""

    name: str
    predicted: float
    measured: float
    basis: str = "measured"
    phase: str = "train"
    run: str = ""  # pairs of one run are not independent; "" stands for a run of its own

    @property
    def key(self) -> tuple[str, str, str]:
        quantity, phase, _ = _quantity(self.name, self.phase)
        return quantity, self.basis, phase

    @property
    def residual(self) -> float | None:
        """ln(measured / predicted) of a time or a size, its negative of a rate; None where either is not above 0."""
        if not (self.predicted > 0 and self.measured > 0):
            return None
        return _quantity(self.name, self.phase)[2] * math.log(self.measured / self.predicted)


def _quantity(name: str, phase: str) -> tuple[str, str, int]:
    """(quantity, phase, sense) of a ledger name; names that are not listed fall to "other"."""
    quantity, own_phase, sense = _QUANTITIES.get(name, ("other", None, _TIME))
    return quantity, own_phase or phase, sense


@lru_cache(maxsize=4)
def read_ranges(path: Path = FILE) -> dict[tuple[str, str, str], Range]:
    """The ranges of ``intervals.toml`` by (quantity, basis, phase). Raises ConfigError for an entry that cannot be read."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    if table.get("level") != LEVEL:
        raise ConfigError(f"{path}: level = {table.get('level')!r} must be {LEVEL}, the level of the planner's intervals.")
    found = {}
    for entry in table.get("interval", ()):
        try:
            one = Range(float(entry["low"]), float(entry["high"]), entry["kind"], int(entry["n"]), entry["source"])
            found[entry["quantity"], entry["basis"], entry["phase"]] = one
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: interval {entry!r} is not readable ({error!r}).") from None
        if not one.low <= one.high:
            raise ConfigError(f"{path}: low = {one.low} of {entry['quantity']} must not exceed high = {one.high}.")
    return found


def joined(one: Range, other: Range) -> Range:
    """The range of a product of two predictions whose errors know nothing of each other: their ends' root of squares."""
    kind = "measured" if one.kind == other.kind == "measured" else "assumed"
    low, high = -math.hypot(one.low, other.low), math.hypot(one.high, other.high)
    return Range(low, high, kind, min(one.n, other.n), f"{one.source}; {other.source}")


_TIME_OF_ENERGY = {"train": "run_time", "serve": "output"}
"""The time that power is multiplied with."""


def range_of(quantity: str, basis: str, phase: str) -> Range:
    """The range of one kind of prediction: of its phase, of any phase, or the one for what is not listed. Energy has the range
    of its time joined with that of power."""
    if quantity == "energy":
        return joined(range_of(_TIME_OF_ENERGY[phase], basis, phase), range_of("power", basis, "any"))
    ranges = read_ranges()
    bases = (basis, FALLS_TO[basis]) if basis in FALLS_TO else (basis,)
    for key in (*((quantity, one, of) for one in bases for of in (phase, "any")), ("other", bases[-1], "any")):
        if key in ranges:
            return ranges[key]
    raise ConfigError(f"{FILE.name} has no interval for other predictions of basis {basis!r}.")


def residuals_by_kind(pairs: Iterable[Pair]) -> dict[tuple[str, str, str], list[float]]:
    """Residuals of each kind of prediction that at least ``LEAST_RUNS`` runs have. Names of one run that say the same twice,
    as a step's time and its tokens per second do, count once."""
    found: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for number, pair in enumerate(pairs):
        residual = pair.residual
        if residual is not None:
            of_run = found.setdefault(pair.key, {}).setdefault(pair.run or f"#{number}", [])
            if all(abs(residual - other) > 1e-6 for other in of_run):
                of_run.append(residual)
    return {
        key: [r for of_run in by_run.values() for r in of_run] for key, by_run in found.items() if len(by_run) >= LEAST_RUNS
    }


def rank(n: int, share: float) -> int:
    """⌈(n + 1)·share⌉, safe from the last bit of a product that is whole."""
    return math.ceil((n + 1) * share - 1e-9)


def corrected(prior: Range, residuals: Sequence[float]) -> Range:
    """``prior`` widened or narrowed by the residuals of one machine, as in the module's formula; itself below ``LEAST_RUNS``.
    A correction that would turn the range inside out leaves its middle, with ``NARROWEST`` around."""
    n = len(residuals)
    if n < LEAST_RUNS:
        return prior
    scores = sorted(max(prior.low - r, r - prior.high) for r in residuals)
    q = scores[rank(n, LEVEL) - 1]
    q = max(q, NARROWEST - (prior.high - prior.low) / 2)
    return replace(prior, low=prior.low - q, high=prior.high + q, kind="measured", n=n, source="this machine's own runs")


_TIMED = frozenset(
    {
        "step",
        "pass",
        "data",
        "startup",
        "run_time",
        "ttft",
        "prefill",
        "decode",
        "output",
        "energy",
        "prepare",
        "quantize",
        "moving",
        "scoring",
    }
)
"""Quantities that stand on measured rates, which a busy machine makes low."""


def widened(prior: Range, low_by: float, longer: float = 1.0) -> Range:
    """``prior`` of a time that stands on rates which may read low by the share ``low_by``: the time may be shorter by as much,
    so the lower end falls by ln(1 − low_by). It may be ``longer`` by that factor, so the upper end rises by ln(longer)."""
    lower = math.log1p(-min(low_by, MOST_LOW_BY)) if low_by > 0 else 0.0
    return replace(prior, low=prior.low + lower, high=prior.high + math.log(longer)) if lower or longer > 1 else prior


def with_intervals(
    prediction: Mapping[str, Any],
    basis: str,
    phase: str,
    own: Iterable[Pair] = (),
    low_by: float = 0.0,
    longer: float = 1.0,
) -> dict[str, dict[str, Any]]:
    """Every predicted number with its interval: ``{"value", "low", "high", "level", "basis", "width"}``.

    ``basis`` is ``basis_of`` the hardware, ``phase`` "train" or "serve"; ``own`` are this machine's earlier pairs. ``width``
    says where the interval's width comes from, "assumed" or "measured". A word keeps its name and has the value None.
    ``low_by`` is the share by which calibration's rates may read low on average, because other programs had the
    processors meanwhile; ``longer`` the factor by which times may come out longer because of what runs now.
    """
    residuals = residuals_by_kind(own)
    result: dict[str, dict[str, Any]] = {}
    for name, given in prediction.items():
        value = given.get("value") if isinstance(given, Mapping) else given
        if isinstance(value, bool) or not isinstance(value, int | float):
            result[name] = {"value": None}
            continue
        quantity, own_phase, sense = _quantity(name, phase)
        prior = widened(range_of(quantity, basis, own_phase), *((low_by, longer) if quantity in _TIMED else (0.0,)))
        found = corrected(prior, residuals.get((quantity, basis, own_phase), ()))
        low, high = (found.low, found.high) if sense == _TIME else (-found.high, -found.low)
        if name in EXACT or name.startswith("n_"):
            low = high = 0.0
        ends = sorted((value * math.exp(low), value * math.exp(high)))  # sorted: a negative value turns them round
        result[name] = {
            "value": value, "low": ends[0], "high": ends[1], "level": LEVEL, "basis": basis, "width": found.kind,
        }  # fmt: skip
    return result | _whole_run(result)


_WHOLE_RUN = ("train_time_s", "energy_kwh", "cost_usd")


def _whole_run(found: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The run's time from its parts, start-up and all steps, each at its own end; money goes with the time, and energy with it
    and the power.

    A run of seconds is as uncertain as its start-up, one of days as its step; one range for both would be wrong for either.
    Adding the ends takes the two errors to agree, which errs to the wide side. Empty where the parts are not there.
    """
    parts = [found.get(name, {}).get("value") for name in ("train_time_s", "startup_s", "step_time_s")]
    if any(part is None for part in parts):
        return {}
    whole, startup, step = (found[name] for name in ("train_time_s", "startup_s", "step_time_s"))
    n_steps = (whole["value"] - startup["value"]) / step["value"] if step["value"] else 0.0
    if n_steps <= 0:
        return {}
    stretch = {end: (startup[end] + n_steps * step[end]) / whole["value"] for end in ("low", "high")}
    width = "measured" if startup["width"] == step["width"] == "measured" else "assumed"
    whole_run = Range(math.log(stretch["low"]), math.log(stretch["high"]), width, 0, "")
    powered = joined(whole_run, range_of("power", whole["basis"], "any"))
    return {
        name: found[name] | _ends(found[name]["value"], powered if name == "energy_kwh" else whole_run)
        for name in _WHOLE_RUN
        if found.get(name, {}).get("value") is not None
    }


def _ends(value: float, within: Range) -> dict[str, Any]:
    return {"low": value * math.exp(within.low), "high": value * math.exp(within.high), "width": within.kind}


# -- this machine's own runs ----------------------------------------------------------------------------------------------


def pairs_of(run: Run, factors: Mapping[str, float]) -> list[Pair]:
    """What a run of the ledger has both predicted and measured, predicted as plans with the corrections ``factors`` are."""
    from twostroke.ledger.scoring import compare
    from twostroke.planner.truth.restated import phase_of, restated

    pairs, predicted = [], restated(run, factors)
    for row in compare(run):
        if row.predicted is not None and row.measured is not None and row.error_percent is not None:
            frozen = run.prediction[row.name]
            basis = frozen.get("basis", "measured") if isinstance(frozen, Mapping) else "measured"
            pairs.append(Pair(row.name, predicted[row.name], row.measured, basis, phase_of(run), run.run_id))
    return pairs


def own_pairs(
    ledger: Ledger | None = None, fingerprint: str | None = None, factors: Mapping[str, float] | None = None
) -> list[Pair]:
    """Pairs of this machine's newest runs. A ledger that cannot be read has none: the work goes on with the assumed intervals.

    A ledger is often carried from machine to machine: only runs with this machine's ``fingerprint`` count. A prediction that is
    corrected by ``factors`` is held against earlier ones corrected by the same, else what they missed would count twice.
    """
    from twostroke.core.profile import read_fingerprint
    from twostroke.ledger.store import Ledger  # only here: sqlite3 is not needed to import the planner

    here = fingerprint or read_fingerprint().key
    try:
        runs = (ledger or Ledger()).runs(limit=NEWEST_RUNS)
    except (TwostrokeError, OSError):
        return []
    return [pair for run in runs if run.fingerprint == here for pair in pairs_of(run, factors or {})]


def predict_with_intervals(
    prediction: Mapping[str, Any],
    hardware: Hardware | None,
    phase: str,
    ledger: Ledger | None = None,
    experts: bool = False,
    engine: str = "any",
) -> dict[str, dict[str, Any]]:
    """``with_intervals`` on ``hardware``, corrected by this machine's own runs where it is the machine that was calibrated.
    ``experts``: whether the model has any; ``engine``: the one that serves."""
    basis = basis_of(hardware, phase, experts, engine)
    factors = hardware.corrections.factors if hardware is not None else {}
    own = own_pairs(ledger, factors=factors) if prediction and FALLS_TO.get(basis, basis) != "datasheet" else ()
    longer = 1.0 if hardware is None else unsure_factor(hardware, phase)
    return with_intervals(prediction, basis, phase, own, low_by_of(hardware, phase), longer)


def basis_of(hardware: Hardware | None, phase: str, experts: bool = False, engine: str = "any") -> str:
    """What predictions of ``phase`` on ``hardware`` stand on: its basis, ``RATES`` where our engine serves by torch,
    ``SERVED`` or ``EXPERTS`` where public tables have engines on such a device, ``LOCAL`` where they have llama.cpp."""
    from twostroke.planner.serving.shape import LLAMA_CPP  # only here: training needs no serving
    from twostroke.planner.serving.step_time import is_fitted

    if hardware is None:
        return "measured"
    if phase == "serve" and engine == LLAMA_CPP and hardware.basis == "datasheet":
        return LOCAL if (hardware.accelerator or "").split()[:1] in (["NVIDIA"], ["Apple"]) else hardware.basis
    if phase == "serve" and is_fitted(hardware):
        return EXPERTS if experts else SERVED
    return RATES if phase == "serve" and hardware.serves_by_torch else hardware.basis


def low_by_of(hardware: Hardware | None, phase: str) -> float:
    """Share by which the rates of ``hardware`` that ``phase`` needs may read low: 0 of a datasheet or a quiet calibration."""
    return hardware.conditions.low_by_share.get(phase, 0.0) if hardware is not None else 0.0
