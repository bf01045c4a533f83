"""One claim with the planner's numbers beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["holds", "holds when", "breaks", "measure"]
"""``holds when``: under the assumptions named; ``measure``: no plan decides it, and ``decided_by`` says what does."""

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
class Claim:
    """``stated`` are the short figures as they are repeated; ``cases`` the planner's numbers; ``holds`` and ``breaks``
    sentences with the computed boundary; ``decided_by`` the command that measures what a plan cannot say; ``measured`` what
    committed runs found."""

    name: str
    title: str
    stated: tuple[str, ...]
    assumptions: tuple[str, ...]
    cases: tuple[Case, ...]
    verdict: Verdict
    holds: str
    breaks: str
    decided_by: str = ""
    measured: tuple[Case, ...] = ()

    def __getitem__(self, name: str) -> float:
        """The number of a case."""
        return next(case.value for case in self.cases if case.name == name)


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
