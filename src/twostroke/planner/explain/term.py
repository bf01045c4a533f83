"""One explained number, and a whole explanation of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from twostroke.core.errors import ConfigError
from twostroke.core.named import Mark


@dataclass(frozen=True)
class Term:
    """``symbol = formula``: one number of a plan.

    ``value`` is the plan's own number, ``substituted`` the formula with its numbers. ``section`` groups terms for reading.
    """

    section: Annotated[str, "group of terms"]
    symbol: Annotated[str, "its name in other formulas"]
    value: Annotated[float, "the plan's own number"]
    unit: Annotated[str, "its unit"]
    formula: Annotated[str, "arithmetic in the letters of docs/notation.md"]
    substituted: str
    substitutions: Annotated[Mapping[str, float], "each name in the formula with its number"]
    source: Annotated[str, "paper, datasheet, calibration or reason"]
    mark: Annotated[Mark, "predicted, measured, datasheet, assumed or given"] = "predicted"

    @property
    def used(self) -> tuple[str, ...]:
        """Names in the formula."""
        return tuple(self.substitutions)


@dataclass
class Explanation:
    """Terms in the order they are read. A formula may use the symbol of another term."""

    terms: list[Term] = field(default_factory=list)

    def __iter__(self) -> Iterator[Term]:
        return iter(self.terms)

    def __getitem__(self, symbol: str) -> Term:
        """The last term of that symbol. Raises ConfigError where there is none."""
        for term in reversed(self.terms):
            if term.symbol == symbol:
                return term
        raise ConfigError(f"no term explains {symbol!r}. There are: {', '.join(t.symbol for t in self.terms) or 'none'}.")

    def extend(self, terms: Explanation, phase: str) -> None:
        """Appends the terms of one phase, their sections named for it; a model's parameters only once."""
        shared = {term.symbol for term in self.terms if term.section == "parameters"}
        for term in terms:
            if term.section != "parameters":
                self.terms.append(replace(term, section=f"{phase}: {term.section}"))
            elif term.symbol not in shared:
                self.terms.append(term)
