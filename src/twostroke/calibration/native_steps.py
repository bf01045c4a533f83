"""Measures whole steps of the native engine on small random models, and prices everything in them that is not a product."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from twostroke.calibration.serving_steps import Engines, Prompts, decode_step_s, prefill_step_s
from twostroke.calibration.timing import Clock
from twostroke.core.profile import MachineProfile
from twostroke.core.rates import NativeStep, StepPrices
from twostroke.core.schemes import NATIVE_STEPS
from twostroke.planner.hardware.anchors import ANCHORS, UNITS, NativeAnchor
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.tables import hardware_from_profile
from twostroke.planner.serving.native import anchored
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.work.component import total_seconds


def measure_native_steps(
    clock: Clock, tell: Callable[[float, str], None], schemes: Sequence[str] = NATIVE_STEPS
) -> Iterator[NativeStep]:
    """Seconds of each anchor of ``planner.serving.native_anchors``, in each of ``schemes``."""
    with tempfile.TemporaryDirectory(prefix="twostroke-anchors-") as folder:
        prompts = Prompts()
        for i, scheme in enumerate(schemes):
            tell(i / len(schemes), f"{scheme} steps of the engine")
            engines = Engines(Path(folder))
            for anchor in itertools.chain(*ANCHORS.values()):
                engine = engines.get(anchor.spec, scheme)
                if anchor.phase == "prefill":
                    seconds = prefill_step_s(clock, engine, prompts, anchor.rows)
                else:
                    seconds = decode_step_s(clock, engine, prompts, anchor.rows, anchor.context)
                yield anchor.taking(scheme, seconds)


@dataclass(frozen=True)
class Equation:
    """A measured step: its ``whole_s``, the ``rest_s`` of it outside of products, and how many of each unit it has."""

    whole_s: float
    rest_s: float
    units: Mapping[str, float]


def with_fitted_prices(profile: MachineProfile) -> MachineProfile:
    """``profile`` with a price in seconds for each unit. Products at the profile's own rates and units at these prices together
    explain the measured native steps best."""
    if profile.native is None:
        return profile
    hardware, rates = hardware_from_profile(profile), profile.native
    rows = []
    for scheme in NATIVE_STEPS:
        shape = ServingShape(scheme=scheme)
        for phase, anchors in ANCHORS.items():
            measured = ((anchor, anchor.measured_s(rates, scheme)) for anchor in anchors)
            equations = [_equation(anchor, shape, whole_s, hardware) for anchor, whole_s in measured if whole_s is not None]
            if equations:
                prices = least_squares_above_zero(equations, UNITS[phase])
                rows.append(StepPrices(phase, scheme, **{f"{unit}_s": seconds for unit, seconds in prices.items()}))
    return replace(profile, native=replace(rates, prices=tuple(rows)))


def _equation(anchor: NativeAnchor, like: ServingShape, whole_s: float, hardware: Hardware) -> Equation:
    engine = anchored(anchor, like, hardware)
    return Equation(whole_s, whole_s - total_seconds(engine.products(anchor.phase)), engine.units(anchor.phase))


def least_squares_above_zero(equations: Sequence[Equation], names: Sequence[str]) -> dict[str, float]:
    """Prices ≥ 0 of ``names`` that minimise Σ ((Σ units·price − rest)/whole)².

    It solves for every subset of the units without restriction, and takes the best solution that has no negative price. There
    are few enough units to try all subsets.
    """
    weights = torch.tensor([1.0 / e.whole_s for e in equations], dtype=torch.float64)
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
