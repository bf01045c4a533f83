"""The record of the numbers that a plan named: what ``--explain`` shows of it."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, TypeVar

from twostroke.core.errors import ConfigError
from twostroke.core.named import Mark
from twostroke.planner.truth.glossary import LETTERS
from twostroke.planner.truth.traced import (
    Traced,
    expression_of,
    format_number,
    is_constant,
    leaf_key,
    leaves_of,
    spell,
    value_of,
)

Part = TypeVar("Part")

SECTIONS = ("parameters", "batch", "rank", "memory", "work", "communication", "time", "load", "storage", "money", "training",
            "demand", "serving", "api", "crossover")  # fmt: skip
"""Headings in the order they are read."""

_OF_UNIT = {"parameters": "parameters", "bytes": "memory", "FLOP": "work", "s": "time", "tok/s": "time", "usd": "money"}
"""The heading of a number that names none."""


@dataclass(eq=False)
class Line:
    """A named number, as it was recorded."""

    symbol: str
    expression: Traced | None  # None: taken as given
    value: float
    unit: str
    source: str
    mark: Mark
    section: str


class Recorded:
    """Every number that was named, in the order in which they were computed; see ``named.Record``."""

    def __init__(self) -> None:
        Traced.records += 1
        self.scope = ""
        self._lines: dict[tuple[object, ...], Line] = {}

    def letter(self, symbol: str, value: Any) -> Any:
        """``value`` as the letter ``symbol``. A 0 stays a plain 0, which adding and multiplying leave out of formulas."""
        plain = value_of(value)
        return Traced(plain, "letter", (symbol,)) if plain else plain

    def call(self, name: str, function: Callable[..., float], values: tuple[Any, ...]) -> Any:
        value = function(*map(value_of, values))
        if all(type(v) is not Traced or v.how == "constant" for v in values):
            return value
        if name == "min" and value == 1 and any(is_constant(v, 1) for v in values):
            return value  # what is counted is at least 1
        if name == "max" and value > 0:  # no time is negative
            values = tuple(v for v in values if not is_constant(v, 0))
        distinct = {spell(expression_of(v), leaf_key)[0]: expression_of(v) for v in values}
        if name in ("max", "min") and len(distinct) == 1:
            return next(iter(distinct.values()))
        return Traced(value, name, tuple(distinct.values()))

    def named(self, symbol: str, value: Any, unit: str, source: str, mark: Mark, section: str) -> Traced:
        """The same number named twice is one line."""
        section = section or _OF_UNIT.get(unit, "batch")
        if section == "time" and self.scope:
            symbol = f"{self.scope}_{symbol}"
        plain, expression = value_of(value), value if type(value) is Traced and value.how != "constant" else None
        if (expression is None and plain == 0) or not math.isfinite(plain):
            return value
        if expression is not None and expression.how == "named" and expression.parts[0].symbol == symbol:
            return expression
        text = "" if expression is None else spell(expression, leaf_key)[0]
        line = Line(symbol, expression, plain, unit, source, mark, section)
        return Traced(plain, "named", (self._lines.setdefault((symbol, plain, text), line),))

    def inputs(self, thing: Part) -> Part:
        """A copy of a specification, shape, layout or device with letters for its numbers, as ``glossary.LETTERS`` has them."""
        table = LETTERS.get(type(thing).__name__)
        if table is None:
            return thing
        lettered = copy.copy(thing)
        for each in fields(thing):  # type: ignore[arg-type]
            value, symbol = getattr(thing, each.name), table.get(each.name)
            if symbol is not None and value is not None and not (symbol.startswith("÷") and value == 1) and value != 0:
                object.__setattr__(lettered, each.name, self.letter(symbol.removeprefix("÷"), value))
            elif is_dataclass(value):
                object.__setattr__(lettered, each.name, self.inputs(value))
        return lettered

    def explanation(self, document: Any) -> Explanation:
        """The lines that the numbers of ``document`` came from, those first that others are computed from."""
        needed: set[int] = set()

        def need(expression: Traced) -> None:
            for leaf in leaves_of(expression):
                line = leaf.parts[0]
                if leaf.how == "named" and id(line) not in needed:
                    needed.add(id(line))
                    if line.expression is not None:
                        need(line.expression)

        for number in _traced(document):
            if number.how == "named":
                need(number)
        lines = [line for line in self._lines.values() if id(line) in needed]
        lines.sort(key=lambda line: SECTIONS.index(line.section))
        symbols = _told_apart([(id(line), line.symbol) for line in lines])
        return Explanation([_term(line, symbols) for line in lines])


def _traced(document: Any) -> Iterator[Traced]:
    """Every traced number of plain data."""
    if type(document) is Traced:
        yield document
    elif type(document) is dict:
        for value in document.values():
            yield from _traced(value)
    elif type(document) in (list, tuple):
        for value in document:
            yield from _traced(value)


def _told_apart(names: Iterable[tuple[Any, str]]) -> dict[Any, str]:
    """Key → name, several of one name with a number each."""
    found, seen = dict(names), Counter[str]()
    several = Counter(found.values())
    apart = {}
    for key, name in found.items():
        seen[name] += 1
        apart[key] = name if several[name] == 1 else f"{name}_{seen[name]}"
    return apart


def _term(line: Line, symbols: Mapping[int, str]) -> Term:
    symbol = symbols[id(line)]
    if line.expression is None:
        return Term(line.section, symbol, line.value, line.unit, "given", "", {"given": line.value}, line.source, line.mark)
    leaves = list(leaves_of(line.expression))
    letters = _told_apart([((leaf.parts[0], leaf.value), leaf.parts[0]) for leaf in leaves if leaf.how == "letter"])

    def name(leaf: Traced) -> str:
        if leaf.how == "letter":
            return letters[leaf.parts[0], leaf.value]
        return symbols[id(leaf.parts[0])] if leaf.how == "named" else format_number(leaf.value, 15)

    numbers = {name(leaf): leaf.value for leaf in leaves}
    return Term(
        line.section, symbol, line.value, line.unit, spell(line.expression, name)[0],
        spell(line.expression, lambda leaf: format_number(leaf.value))[0], numbers, line.source, line.mark,
    )  # fmt: skip


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
        """The last term of that symbol. Raises ConfigError if no term has it."""
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
