"""One claim with the planner's numbers beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["holds", "holds when", "breaks", "not judged"]
"""``holds when``: for some of the cases; ``not judged``: neither a plan nor a run decides it."""

Unit = Literal[
    "GB", "x", "share", "s", "ms", "tokens", "requests", "usd", "usd/Mtok", "days", "kB", "tok/s", "B/parameter", "count"
]


@dataclass(frozen=True)
class Case:
    """One number: of what, its value, and the arithmetic that made it or the run that measured it."""

    name: str
    what: str
    value: float
    unit: Unit
    how: str


@dataclass(frozen=True)
class Figure:
    """One stated figure and what judges it: it holds for a case whose value lies in [``low``, ``high``]. ``asked`` says in
    words what the cases are held against. Without cases it is not judged."""

    stated: str
    asked: str
    low: float
    high: float
    cases: tuple[Case, ...]

    @property
    def inside(self) -> tuple[bool, ...]:
        return tuple(self.low <= case.value <= self.high for case in self.cases)

    @property
    def verdict(self) -> Verdict:
        """Of its cases: all inside, some, or none."""
        if not self.cases:
            return "not judged"
        return "holds" if all(self.inside) else "holds when" if any(self.inside) else "breaks"


def verdict_of(figures: Sequence[Figure]) -> Verdict:
    """``holds`` if every figure that is judged holds, ``breaks`` if each breaks, else ``holds when``."""
    found = {figure.verdict for figure in figures} - {"not judged"}
    if not found:
        return "not judged"
    return next(iter(found)) if len(found) == 1 else "holds when"


def about(value: float, share: float = 0.1) -> tuple[float, float]:
    """The range that a figure "about ``value``" is held to."""
    return value * (1 - share), value * (1 + share)


@dataclass(frozen=True)
class Claim:
    """``cases`` are the planner's numbers, ``measured`` what committed runs found, ``figures`` the claim as it is repeated,
    each part with the cases that judge it; ``holds`` and ``breaks`` are sentences with the computed boundary; ``decided_by``
    the command that computes or measures it for another model and machine.
    """

    name: str
    title: str
    assumptions: tuple[str, ...]
    cases: tuple[Case, ...]
    figures: tuple[Figure, ...]
    holds: str
    breaks: str
    decided_by: str = ""
    measured: tuple[Case, ...] = ()

    @property
    def stated(self) -> tuple[str, ...]:
        return tuple(figure.stated for figure in self.figures)

    @property
    def verdict(self) -> Verdict:
        return verdict_of(self.figures)

    def __getitem__(self, name: str) -> float:
        """The number of a case."""
        return next(case.value for case in self.cases if case.name == name)


def pick(cases: Sequence[Case], *names: str) -> tuple[Case, ...]:
    """The cases of those names, in that order."""
    return tuple(next(case for case in cases if case.name == name) for name in names)


def quantity(value: float, unit: Unit) -> str:
    """A value with its unit, three significant digits."""
    if unit == "GB":
        return f"{value / 1000:.3g} TB" if value >= 1000 else f"{value:.3g} GB"
    if unit == "share":
        return f"{100 * value:.3g}%"
    if unit == "x":
        return f"{value:,.0f} ×" if value >= 1000 else f"{value:.3g} ×"
    if unit in ("usd", "usd/Mtok"):
        for bound, suffix in ((1e9, " G$"), (1e6, " M$"), (1e3, " k$")):
            if value >= bound:
                return f"{value / bound:.3g}{suffix}"
        return f"${value:.3g}" + (" per Mtok" if unit == "usd/Mtok" else "")
    if unit in ("tokens", "requests", "count", "tok/s"):
        name = "" if unit == "count" else f" {unit}"
        for bound, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
            if value >= bound:
                return f"{value / bound:.3g} {suffix}{name}"
        return f"{value:,.0f}{name}" if value >= 100 else f"{value:.3g}{name}"
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"
