"""Measures whole steps of the native engine on small random models, and prices everything in them that is not a product."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from twostroke.calibration.serving_steps import Engines, Prompts, decode_step_s, prefill_step_s
from twostroke.calibration.timing import Clock
from twostroke.core.profile import MachineProfile
from twostroke.core.rates import CachePrice, NativeStep, StepPrices
from twostroke.core.schemes import NATIVE_STEPS
from twostroke.engine.core import EngineCore
from twostroke.planner.hardware.anchors import ANCHORS, CACHE_ANCHORS, UNITS, NativeAnchor
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.tables import hardware_from_profile
from twostroke.planner.serving.native import anchored
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.work.component import total_seconds

PLAIN = "bf16"
"""Of weights and of the cache, where nothing else is said."""


def measure_native_steps(clock: Clock, engines: Engines, prompts: Prompts) -> Iterator[NativeStep]:
    """Seconds of each anchor of ``planner.hardware.anchors`` in each of ``NATIVE_STEPS``, and of those over other caches."""
    cached = ((PLAIN, anchor) for anchor in CACHE_ANCHORS)
    for scheme, anchor in (*itertools.product(NATIVE_STEPS, itertools.chain(*ANCHORS.values())), *cached):
        yield anchor.taking(scheme, _seconds(clock, engines.get(anchor.spec, scheme, anchor.cache), prompts, anchor))


def _seconds(clock: Clock, engine: EngineCore, prompts: Prompts, anchor: NativeAnchor) -> float:
    if anchor.phase == "prefill":
        return prefill_step_s(clock, engine, prompts, anchor.rows)
    return decode_step_s(clock, engine, prompts, anchor.rows, anchor.context)


@dataclass(frozen=True)
class Equation:
    """A measured step: its ``whole_s``, the ``rest_s`` of it outside of products, and how many of each unit it has."""

    whole_s: float
    rest_s: float
    units: Mapping[str, float]

    def error(self, prices: Mapping[str, float]) -> float:
        """Share of the whole by which units at ``prices`` miss it."""
        return abs(sum(self.units.get(name, 0.0) * price for name, price in prices.items()) - self.rest_s) / self.whole_s


def with_fitted_prices(profile: MachineProfile) -> MachineProfile:
    """``profile`` with a price in seconds for each unit, and with the crowding of the cache, of ``CROWDINGS``. Products at the
    profile's own rates and units at these prices together explain the measured native steps best.

    A unit costs the same under every scheme: waiting, norms, attention and sampling compute alike in all. Priced by scheme, a
    wait at a barrier took 1, 3 and 18 µs, which noise decides, and a small int4 step was planned 80% too long."""
    if profile.native is None:
        return profile
    tried = [replace(profile.native, crowding=crowding) for crowding in (CROWDINGS if profile.native.passes else (1.0,))]
    fitted = [_priced(replace(profile, native=rates)) for rates in tried]
    return _with_priced_caches(min(fitted, key=lambda found: found[0])[1])


def _with_priced_caches(profile: MachineProfile) -> MachineProfile:
    """``profile``, whose units are priced, with what attention over each type of cache takes more: what is left of a step over
    it when the plan's error of the same step over bf16 is taken off."""
    rates, found = profile.native, list[CachePrice]()
    assert rates is not None
    hardware, like = hardware_from_profile(replace(profile, native=replace(rates, caches=()))), ServingShape(scheme=PLAIN)
    for anchor in CACHE_ANCHORS:
        steps = [(one, one.measured_s(rates, PLAIN)) for one in (anchor, replace(anchor, cache=PLAIN))]
        engines = [anchored(one, like, hardware) for one, _ in steps]
        planned_s, plain_s = (total_seconds(engine.as_planned(anchor.phase)) for engine in engines)
        measured_s, measured_plain_s = (seconds for _, seconds in steps)
        if measured_s is not None and measured_plain_s is not None:
            more_s = measured_s * plain_s / measured_plain_s - planned_s
            found.append(CachePrice(anchor.phase, anchor.cache, more_s / engines[0].units(anchor.phase)["cached"]))
    return replace(profile, native=replace(rates, caches=tuple(found)))


def _priced(profile: MachineProfile) -> tuple[float, MachineProfile]:
    """(sum of the errors that are left, ``profile`` with prices)."""
    hardware, rates = hardware_from_profile(profile), profile.native
    assert rates is not None
    rows, left = [], 0.0
    for phase, anchors in ANCHORS.items():
        equations = [
            _equation(anchor, ServingShape(scheme=scheme), whole_s, hardware)
            for scheme, anchor in itertools.product(NATIVE_STEPS, anchors)
            if (whole_s := anchor.measured_s(rates, scheme)) is not None
        ]
        if equations:
            prices = least_squares_above_zero(equations, UNITS[phase])
            left += sum(min(e.error(prices), MOST_ERROR) for e in equations)
            rows.append(StepPrices(phase, **{f"{unit}_s": seconds for unit, seconds in prices.items()}))
    return left, replace(profile, native=replace(rates, prices=tuple(rows)))


def _equation(anchor: NativeAnchor, like: ServingShape, whole_s: float, hardware: Hardware) -> Equation:
    engine = anchored(anchor, like, hardware)
    return Equation(whole_s, whole_s - total_seconds(engine.products(anchor.phase)), engine.units(anchor.phase))


CROWDINGS = (1.0, 1.5, 2.0, 3.0, 4.0)
"""Tried in turn: how many times its own bytes a working set counts against the cache."""

MOST_ERROR = 0.5
"""Share by which one step may count against a crowding: a step that was disturbed must not choose it."""

TRUSTED_ERROR = 0.1
"""Share of a step within which its error is noise: one step, measured twice, differs by as much."""

REWEIGHTINGS = 6
"""Solutions in turn, each weighted by the errors of the one before."""


def least_squares_above_zero(equations: Sequence[Equation], names: Sequence[str]) -> dict[str, float]:
    """Prices ≥ 0 of ``names`` that minimise Σ ρ((Σ units·price − rest)/whole), with Huber's ρ: squares up to
    ``TRUSTED_ERROR``, beyond it proportional, so that a step which was disturbed does not bend the prices of the others.

    It solves weighted squares a few times, with the weights that the last solution's errors call for.
    """
    trust = [1.0] * len(equations)
    prices = dict.fromkeys(names, 0.0)
    for _ in range(REWEIGHTINGS):
        prices = _least_squares(equations, names, trust)
        trust = [min(1.0, TRUSTED_ERROR / max(e.error(prices), 1e-9)) for e in equations]
    return prices


def _least_squares(equations: Sequence[Equation], names: Sequence[str], trust: Sequence[float]) -> dict[str, float]:
    """Prices ≥ 0 that minimise Σ trust·((Σ units·price − rest)/whole)².

    It solves for every subset of the units without restriction, and takes the best solution that has no negative price. There
    are few enough units to try all subsets.
    """
    weights = torch.tensor([t**0.5 / e.whole_s for t, e in zip(trust, equations, strict=True)], dtype=torch.float64)
    target = torch.tensor([e.rest_s for e in equations], dtype=torch.float64) * weights
    columns = {n: torch.tensor([e.units.get(n, 0.0) for e in equations], dtype=torch.float64) * weights for n in names}
    best, found = float(target.square().sum()), dict.fromkeys(names, 0.0)
    for chosen in range(1, 2 ** len(names)):
        used = [n for i, n in enumerate(names) if chosen >> i & 1]
        # Columns of equal length: a step counts as one and its elements by the million, and the solver sees both alike.
        scales = [float(columns[n].norm()) for n in used]
        if not all(scales):  # no measured step has this unit
            continue
        matrix = torch.stack([columns[n] / s for n, s in zip(used, scales, strict=True)], dim=1)
        prices = torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution[:, 0]
        left = float((matrix @ prices - target).square().sum())
        if bool((prices >= 0).all()) and left < best:
            best = left
            found = dict.fromkeys(names, 0.0) | {n: float(p) / s for n, p, s in zip(used, prices, scales, strict=True)}
    return found
