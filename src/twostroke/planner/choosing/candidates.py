"""Choosing among candidates: limits that reject, an objective that ranks, and the reason why each loser lost.

A candidate is rejected by the first limit it misses, memory before anything else. One that keeps every limit and still loses is
behind the winner by a factor, and that factor is a product: price (or power) an hour × communication × pipeline bubble × how
much slower its arithmetic or memory is, each for one device. The largest of them is its reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from twostroke.core.described import As
from twostroke.core.errors import ConfigError

Phase = Literal["train", "serve"]

Objective = Literal["cost", "time", "throughput", "energy"]
OBJECTIVES: tuple[Objective, ...] = ("cost", "time", "throughput", "energy")

MOST_IDLE_SHARE = 0.999
"""Largest share of time that counts as lost to communication or bubble, so that 1/(1 − share) stays finite."""

CUTS = {"data": "dp", "tensor": "tp", "pipeline": "pp", "expert": "ep", "replicas": "×"}


def cuts_text(n_devices: int, layout: Mapping[str, Any]) -> str:
    """``8: dp2 tp4 z1``: devices, the ways they are cut that are more than one, and the ZeRO stage."""
    cuts = [f"{short}{layout[name]}" for name, short in CUTS.items() if layout.get(name, 1) > 1]
    if layout.get("zero"):
        cuts.append(f"z{layout['zero']}")
    return f"{n_devices}: {' '.join(cuts)}" if cuts else str(n_devices)


@dataclass(frozen=True, slots=True)
class Miss:
    """A limit that a candidate does not keep."""

    DOCUMENT = "limit needed allowed unit ratio largest_term"

    limit: Annotated[str, "which"]
    needed: Annotated[float, "in its unit"]
    allowed: Annotated[float, "in its unit"]
    unit: Annotated[str, "its unit"]
    term: Annotated[str, "the largest part of what is needed, for memory", As("largest_term")] = ""

    @property
    def ratio(self) -> Annotated[float, float | None, "needed ÷ allowed; null where nothing is allowed"]:
        """needed ÷ allowed, above 1; infinite where nothing is allowed."""
        return self.needed / self.allowed if self.allowed > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to do the work, with what it takes."""

    phase: Phase
    device: Annotated[str, "name"]
    label: Annotated[str, "for people"]
    n_devices: Annotated[int, "devices"]
    layout: Annotated[dict[str, int], "data, zero, tensor, pipeline, expert, replicas: those above 1"]
    precision: Annotated[str, "of weights (serving) or products (training)"]
    batch: Annotated[int, "requests, or sequences of a pass"]
    settings: Annotated[dict[str, Any], "the phase's own knobs, as checkpointing and micro-batch"]
    memory_bytes: Annotated[dict[str, float], "bytes", "of a device by term"]
    allowed_bytes: Annotated[float, "bytes", "that may be used"]
    usd_per_hour: Annotated[float, "$", "of all devices"]
    watts: Annotated[float, "W", "of all devices, on average; 0 where memory already said no"] = 0.0
    values: Annotated[
        dict[str, float], "predictions by their ledger names; empty where memory already said no", As("prediction")
    ] = field(default_factory=dict)
    communication_share: Annotated[float, "share of a step in which devices only talk"] = 0.0
    bubble_share: Annotated[float, "share of a step in which stages wait"] = 0.0
    link_use: Annotated[float, "share of the device's link that the work keeps busy"] = 0.0
    bound: Annotated[str, "arithmetic, memory or launch"] = ""
    misses: Annotated[tuple[Miss, ...], "limits it does not keep"] = ()

    @property
    def layout_text(self) -> str:
        return cuts_text(self.n_devices, self.layout)

    def score(self, objective: Objective) -> float:
        """What ``objective`` makes small: $ (a run or a million tokens), s (a run or an answer), kWh, or minus tokens/s."""
        if self.phase == "serve":
            names = {"cost": "cost_per_mtok_usd", "time": "e2e_s", "energy": "energy_per_mtok_kwh"}
            rate = "output_tok_per_s"
        else:
            names = {"cost": "cost_usd", "time": "train_time_s", "energy": "energy_kwh"}
            rate = "train_tok_per_s"
        return -self.values[rate] if objective == "throughput" else self.values[names[objective]]

    def order(self, objective: Objective) -> tuple[Any, ...]:
        """Sorting key: the score, then fewer dollars an hour, fewer devices, and the names, so that ties always fall alike."""
        ways = tuple(self.layout.get(name, 1) for name in ("tensor", "pipeline", "expert", "zero"))
        knobs = tuple(sorted((name, str(value)) for name, value in self.settings.items()))
        return (self.score(objective), self.usd_per_hour, self.n_devices, self.device, ways, self.precision, self.batch, knobs)

    @property
    def nearness(self) -> float:
        """The largest factor by which a limit is missed; 1 where all are kept."""
        return max((miss.ratio for miss in self.misses), default=1.0)


@dataclass(frozen=True)
class Behind:
    """By what factor a candidate is behind the winner."""

    ratio: Annotated[float, "of the objective"]
    factors: Annotated[dict[str, float], "whose product it is"]
    cause: Annotated[str, "the largest of them"]


@dataclass(frozen=True)
class DeviceResult:
    """What became of one device: its best candidate and why that is behind, or the nearest miss where none kept the limits.

    ``rejected`` counts the candidates that missed a limit by that limit; ``outranked`` those that kept all, by ``lost_by``.
    """

    device: Annotated[str, "name"]
    label: Annotated[str, "for people"]
    enumerated: Annotated[int, "candidates"]
    rejected: Annotated[dict[str, int], "candidates by the limit they missed"]
    outranked: Annotated[dict[str, int], "candidates that kept all limits, by what they lost by"]
    best: Annotated[Candidate | None, "its best"]
    behind: Annotated[Behind | None, "why that is behind the winner"]
    nearest: Annotated[Candidate | None, "where none kept the limits", As("nearest_miss")]


def work_rate(candidate: Candidate, objective: Objective) -> float:
    """Work a second, in the sense of ``objective``: tokens/s, or 1/s where the time of one answer or run is what counts."""
    if objective == "time":
        return 1 / candidate.score("time")
    return -candidate.score("throughput")


def behind(candidate: Candidate, winner: Candidate, objective: Objective) -> Behind:
    """The factor between two scores and its parts, which multiply to it.

    cost: $/h ratio × time ratio; energy: W ratio × time ratio; both of one device. time and throughput: the ratio of device
    counts × the time ratio of one. The time ratio is 1/(1 − c) for the share c lost to communication against the winner's, the
    same for the pipeline's bubble, and the rest, named after what bounds the candidate: slower memory, arithmetic or launches.
    """
    fewer = winner.n_devices / candidate.n_devices
    slower = work_rate(winner, objective) / work_rate(candidate, objective) / fewer
    factors: dict[str, float] = {}
    if objective == "cost":
        factors["price"] = candidate.usd_per_hour / winner.usd_per_hour * fewer
    elif objective == "energy":
        factors["power"] = candidate.watts / winner.watts * fewer
    else:
        factors["devices"] = fewer
    communication = _lost(candidate.communication_share) / _lost(winner.communication_share)
    bubble = _lost(candidate.bubble_share) / _lost(winner.bubble_share)
    factors["communication"], factors["bubble"] = communication, bubble
    factors[candidate.bound or "arithmetic"] = slower / (communication * bubble)
    cause = max(factors, key=lambda name: factors[name])
    return Behind(math.prod(factors.values()), factors, cause)


def lost_by(candidate: Candidate, own: Candidate, winner: Candidate, objective: Objective) -> str:
    """The one word for why ``candidate`` lost, ``own`` being the best of its device: the device itself where that is the larger
    factor, else what the candidate does differently on it (communication, bubble, batch, precision, or its other choices)."""
    device, choice = behind(own, winner, objective), behind(candidate, own, objective)
    if candidate is own or device.ratio > choice.ratio:
        return device.cause
    if choice.cause in ("communication", "bubble"):
        return choice.cause
    if 2 * candidate.batch <= own.batch:
        return "batch"
    return "precision" if candidate.precision != own.precision else "choice"


def _lost(share: float) -> float:
    """1/(1 − share): by how much a step is longer for what it loses."""
    return 1 / (1 - min(share, MOST_IDLE_SHARE))


def choose(candidates: Iterable[Candidate], objective: Objective) -> tuple[list[DeviceResult], list[Candidate]]:
    """Every device's result, best device first, and all candidates that keep the limits, best first.

    Devices without any come last, the nearest miss first. Raises ConfigError for an unknown objective.
    """
    if objective not in OBJECTIVES:
        raise ConfigError(f"objective={objective!r} is not known. Use one of {', '.join(OBJECTIVES)}.")
    by_device: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_device.setdefault(candidate.device, []).append(candidate)
    feasible = sorted((c for cs in by_device.values() for c in cs if not c.misses), key=lambda c: c.order(objective))
    winner = feasible[0] if feasible else None
    best: dict[str, Candidate] = {}
    outranked: dict[str, Counter[str]] = {device: Counter() for device in by_device}
    for candidate in feasible:
        first = best.setdefault(candidate.device, candidate)
        if winner is not None and candidate is not winner:
            outranked[candidate.device][lost_by(candidate, first, winner, objective)] += 1
    results = []
    for device, those in by_device.items():
        own = best.get(device)
        missed = [c for c in those if c.misses]
        rejected = dict(Counter(c.misses[0].limit for c in missed).most_common())
        outdone = behind(own, winner, objective) if own is not None and winner is not None else None
        nearest = min(missed, key=_miss_order) if missed and own is None else None
        counts = len(those), rejected, dict(outranked[device].most_common())
        results.append(DeviceResult(device, those[0].label, *counts, own, outdone, nearest))
    place = {id(c): i for i, c in enumerate(feasible)}
    results.sort(key=lambda r: (0, place[id(r.best)]) if r.best else (1, *_miss_order(r.nearest)) if r.nearest else (2,))
    return results, feasible


MOST_ROUNDS = 3
"""Times that further candidates are simulated because those before turned out to miss a limit."""


def with_simulated_best(
    candidates: Sequence[Candidate], objective: Objective, n: int, simulated: Callable[[Candidate], Candidate]
) -> list[Candidate]:
    """``candidates`` with the ``n`` best as ``simulated`` finds them. Where the best one left was not among them, the next
    ``n`` are simulated too."""
    left, done = list(candidates), set[int]()
    for _ in range(MOST_ROUNDS):
        ranked = sorted((i for i, c in enumerate(left) if not c.misses), key=lambda i: left[i].order(objective))
        if not ranked or ranked[0] in done:
            break
        for i in [i for i in ranked[:n] if i not in done]:
            left[i] = simulated(left[i])
            done.add(i)
    return left


def reliefs(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """For each limit, the candidate that misses nothing but it and misses it by least: what raising that one limit would admit.
    Nearest first."""
    found: dict[str, Candidate] = {}
    for candidate in candidates:
        if len(candidate.misses) == 1 and math.isfinite(candidate.nearness):
            known = found.get(candidate.misses[0].limit)
            if known is None or (candidate.nearness, candidate.usd_per_hour) < (known.nearness, known.usd_per_hour):
                found[candidate.misses[0].limit] = candidate
    return tuple(sorted(found.values(), key=lambda c: (c.nearness, c.usd_per_hour, c.device)))


def nearest_miss(results: Sequence[DeviceResult]) -> Candidate | None:
    """Of all that missed a limit, the one that misses by the smallest factor: of those that fit the memory, where any does."""
    return min((r.nearest for r in results if r.nearest is not None), key=_miss_order, default=None)


def _miss_order(candidate: Candidate) -> tuple[bool, float, float, str]:
    """Those that fit the memory first, since of the others nothing more is known; then by how little they miss."""
    return (not candidate.values, candidate.nearness, candidate.usd_per_hour, candidate.device)
