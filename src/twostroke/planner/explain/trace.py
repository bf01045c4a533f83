"""Numbers that remember how they came about, and the record of those that a plan named.

A ``Traced`` computes as its value does, to the bit: int stays int, comparisons and tables see the value. Beside it stands the
expression, of inputs by their letters, of constants, and of numbers that ``core.named`` named before.
"""

from __future__ import annotations

import copy
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

from twostroke.core.named import Mark
from twostroke.planner.explain.glossary import LETTERS
from twostroke.planner.explain.term import Explanation, Term

SUM, PRODUCT, POWER, ATOM = range(4)
"""How tightly an expression binds: one that binds less than its place asks for stands in parentheses."""

Part = TypeVar("Part")


class Traced:
    """``value`` and the expression that gave it: ``how`` of ``parts``, a letter or a named number."""

    __slots__ = ("how", "parts", "value")
    records = 0
    """How many records there were: what was cached for one is not taken for another."""

    def __init__(self, value: float, how: str, parts: tuple[Any, ...] = ()) -> None:
        self.value, self.how, self.parts = value, how, parts

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The value's, so that checks of inputs hold for it: ``isinstance(batch, int)``."""
        return type(self.value)

    def __hash__(self) -> int:
        """Unlike the value's own: what was cached of plain numbers is not taken for traced ones, nor the other way round."""
        return hash((Traced.records, self.value))

    def __deepcopy__(self, memo: dict[int, Any]) -> Traced:
        return self

    def __eq__(self, other: object) -> bool:
        return self.value == _value(other)

    def __lt__(self, other: float) -> bool:
        return self.value < _value(other)

    def __le__(self, other: float) -> bool:
        return self.value <= _value(other)

    def __gt__(self, other: float) -> bool:
        return self.value > _value(other)

    def __ge__(self, other: float) -> bool:
        return self.value >= _value(other)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __index__(self) -> int:
        return operator.index(self.value)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return repr(self.value)

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __add__(self, other: float) -> Traced:
        return _sum(self, other)

    def __radd__(self, other: float) -> Traced:
        return _sum(other, self)

    def __sub__(self, other: float) -> Traced:
        return _difference(self, other)

    def __rsub__(self, other: float) -> Traced:
        return _difference(other, self)

    def __mul__(self, other: float) -> Traced:
        return _product(self, other)

    def __rmul__(self, other: float) -> Traced:
        return _product(other, self)

    def __truediv__(self, other: float) -> Traced:
        return _quotient(self, other)

    def __rtruediv__(self, other: float) -> Traced:
        return _quotient(other, self)

    def __floordiv__(self, other: float) -> Traced:
        return _floored(self, other)

    def __rfloordiv__(self, other: float) -> Traced:
        return _floored(other, self)

    def __mod__(self, other: float) -> Traced:
        return Traced(self.value % _value(other), "mod", (self, _of(other)))

    def __rmod__(self, other: float) -> Traced:
        return Traced(_value(other) % self.value, "mod", (_of(other), self))

    def __pow__(self, other: float) -> Traced:
        return Traced(self.value ** _value(other), "^", (self, _of(other)))

    def __rpow__(self, other: float) -> Traced:
        return Traced(_value(other) ** self.value, "^", (_of(other), self))

    def __neg__(self) -> Traced:
        """−⌊−a/b⌋, as whole pages are counted, is ⌈a/b⌉."""
        if self.how == "neg":
            return _same(-self.value, self.parts[0])
        if self.how == "floor" and self.parts[0].how == "/" and self.parts[0].parts[0].how == "neg":
            above, below = self.parts[0].parts
            return Traced(-self.value, "ceil", (Traced(above.parts[0].value / below.value, "/", (above.parts[0], below)),))
        return Traced(-self.value, "neg", (self,))

    def __ceil__(self) -> Traced:
        if self.how in ("letter", "named", "·", "constant") and self.value == int(self.value):
            return _same(int(self.value), self)
        return Traced(math.ceil(self.value), "ceil", (self,))

    def __floor__(self) -> Traced:
        return Traced(math.floor(self.value), "floor", (self,))

    def __round__(self, digits: int | None = None) -> Traced:
        if self.value == int(self.value):
            return _same(round(self.value, digits), self)
        return Traced(round(self.value, digits), "round", (self,))


def _value(number: Any) -> Any:
    return number.value if type(number) is Traced else number


def _of(number: Any) -> Traced:
    """``number`` as an expression; a plain one is a constant."""
    return number if type(number) is Traced else Traced(number, "constant")


def _is(number: Any, constant: float) -> bool:
    """Whether ``number`` is that constant, and not a letter that happens to have its value."""
    return _of(number).how == "constant" and bool(_value(number) == constant)


def _known(value: float, how: str, left: Any, right: Any) -> Traced:
    """``left`` ``how`` ``right``; of two constants a constant."""
    parts = (_of(left), _of(right))
    return Traced(value, "constant") if all(part.how == "constant" for part in parts) else Traced(value, how, parts)


def _same(value: float, of: Any) -> Traced:
    """``of`` with nothing added, in the type that adding it gives."""
    return Traced(value, _of(of).how, _of(of).parts)


def _alike(left: Any, right: Any) -> bool:
    """Whether both are the same expression of the same numbers."""
    return bool(_value(left) == _value(right)) and _read(_of(left), _leaf_key)[0] == _read(_of(right), _leaf_key)[0]


def _sum(left: Any, right: Any) -> Traced:
    value = _value(left) + _value(right)
    if _is(left, 0):
        return _same(value, right)
    if _is(right, 0):
        return _same(value, left)
    if _of(right).how == "neg":
        return _known(value, "−", left, right.parts[0])
    if _of(right).how == "−" and _alike(right.parts[1], left):
        return _same(value, right.parts[0])
    return _known(value, "+", left, right)


def _difference(left: Any, right: Any) -> Traced:
    value = _value(left) - _value(right)
    if _is(right, 0):
        return _same(value, left)
    rest = list(_addends(_of(left)))
    for i, part in enumerate(rest):
        if part.how != "constant" and _alike(part, right):
            del rest[i]
            left_over = sum(rest, start=Traced(0, "constant"))
            return Traced(value, left_over.how, left_over.parts)
    return _known(value, "−", left, right)


def _product(left: Any, right: Any) -> Traced:
    value = _value(left) * _value(right)
    if _is(left, 0) or _is(right, 0):
        return Traced(value, "constant")
    if _is(left, 1):
        return _same(value, right)
    if _is(right, 1):
        return _same(value, left)
    for one, other in ((_of(left), _of(right)), (_of(right), _of(left))):
        if one.how == "/" and (rest := _without(other, one.parts[1])) is not None:
            return _same(value, _product(one.parts[0], rest))
    if _of(right).how == "/" and _is(right.parts[0], 1):
        return _known(value, "/", left, right.parts[1])
    return _known(value, "·", left, right)


def _without(product: Traced, factor: Traced) -> Traced | None:
    """``product`` divided by one of its factors; None where ``factor`` is not one."""
    factors = list(_factors(product))
    for i, part in enumerate(factors):
        if _alike(part, factor):
            rest = Traced(1, "constant")
            for other in factors[:i] + factors[i + 1 :]:
                rest = _product(rest, other)
            return rest
    return None


def _quotient(left: Any, right: Any) -> Traced:
    value = _value(left) / _value(right)
    if _is(left, 0) or _alike(left, right):
        return Traced(value, "constant")
    if (rest := _without(_of(left), _of(right))) is not None:
        return _same(value, rest)
    return _same(value, left) if _is(right, 1) else _known(value, "/", left, right)


def _floored(left: Any, right: Any) -> Traced:
    value = _value(left) // _value(right)
    if _is(right, 1):
        return _same(value, left)
    if _alike(left, right):
        return Traced(value, "constant")
    if _value(left) % _value(right) == 0 and _of(left).how != "neg":
        rest = _without(_of(left), _of(right))
        return _known(value, "/", left, right) if rest is None else _same(value, rest)
    return Traced(value, "floor", (_known(_value(left) / _value(right), "/", left, right),))


# -- reading an expression ------------------------------------------------------------------------------------------------


def format_number(value: float, digits: int = 6) -> str:
    """A number inside a formula: whole ones in full, others with ``digits`` significant digits."""
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.{digits}g}"


def _addends(expression: Traced) -> Iterator[Traced]:
    """In the order they are read, without recursion: a sum over the matrices of all experts has hundreds."""
    left = [expression]
    while left:
        part = left.pop()
        if part.how == "+":
            left += reversed(part.parts)
        else:
            yield part


def _factors(expression: Traced) -> Iterator[Traced]:
    if expression.how == "·":
        for part in expression.parts:
            yield from _factors(part)
    else:
        yield expression


def _read(expression: Traced, leaf: Callable[[Traced], str]) -> tuple[str, int]:
    """(text, how tightly it binds), every letter, named number and constant as ``leaf`` spells it."""

    def at_least(part: Traced, binding: int) -> str:
        text, own = _read(part, leaf)
        return text if own >= binding else f"({text})"

    match expression.how:
        case "+":
            alike: dict[str, list[Traced]] = {}
            for part in _addends(expression):
                alike.setdefault(_read(part, _leaf_key)[0], []).append(part)
            found = [(len(parts), at_least(parts[0], SUM if len(parts) == 1 else PRODUCT)) for parts in alike.values()]
            text = " + ".join(text if n == 1 else f"{n}·{text}" for n, text in found)
            return text, PRODUCT if len(found) == 1 else SUM
        case "−":
            return f"{at_least(expression.parts[0], SUM)} − {at_least(expression.parts[1], PRODUCT)}", SUM
        case "neg":
            return f"−{at_least(expression.parts[0], PRODUCT)}", SUM
        case "·":
            return f"{at_least(expression.parts[0], PRODUCT)}·{at_least(expression.parts[1], PRODUCT)}", PRODUCT
        case "/":
            return f"{at_least(expression.parts[0], PRODUCT)}/{at_least(expression.parts[1], POWER)}", PRODUCT
        case "^":
            return f"{at_least(expression.parts[0], ATOM)}^{at_least(expression.parts[1], ATOM)}", POWER
        case "floor" | "ceil" as side:
            inside = _read(expression.parts[0], leaf)[0]
            return (f"⌊{inside}⌋" if side == "floor" else f"⌈{inside}⌉"), ATOM
        case "letter" | "named" | "constant":
            text = leaf(expression)
            return text, SUM if text.startswith("-") else ATOM
    inside = ", ".join(_read(part, leaf)[0] for part in expression.parts)
    return f"{'√' if expression.how == 'sqrt' else expression.how}({inside})", ATOM


def _leaves(expression: Traced) -> Iterator[Traced]:
    """Letters and named numbers in the order they are read."""
    if expression.how in ("letter", "named"):
        yield expression
    elif expression.how != "constant":
        for part in _addends(expression) if expression.how == "+" else expression.parts:
            yield from _leaves(part)


# -- the record -----------------------------------------------------------------------------------------------------------

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
        """A 0 stays one: what is not there has no part in a formula."""
        plain = _value(value)
        return Traced(plain, "letter", (symbol,)) if plain else plain

    def call(self, name: str, function: Callable[..., float], values: tuple[Any, ...]) -> Any:
        value = function(*map(_value, values))
        if all(type(v) is not Traced or v.how == "constant" for v in values):
            return value
        if name == "min" and value == 1 and any(_is(v, 1) for v in values):
            return value  # what is counted is at least 1
        if name == "max" and value > 0:  # no time is negative
            values = tuple(v for v in values if not _is(v, 0))
        distinct = {_read(_of(v), _leaf_key)[0]: _of(v) for v in values}
        if name in ("max", "min") and len(distinct) == 1:
            return next(iter(distinct.values()))
        return Traced(value, name, tuple(distinct.values()))

    def named(self, symbol: str, value: Any, unit: str, source: str, mark: Mark, section: str) -> Traced:
        """The same number named twice is one line."""
        section = section or _OF_UNIT.get(unit, "batch")
        if section == "time" and self.scope:
            symbol = f"{self.scope}_{symbol}"
        plain, expression = _value(value), value if type(value) is Traced and value.how != "constant" else None
        if (expression is None and plain == 0) or not math.isfinite(plain):
            return value
        if expression is not None and expression.how == "named" and expression.parts[0].symbol == symbol:
            return expression
        text = "" if expression is None else _read(expression, _leaf_key)[0]
        line = Line(symbol, expression, plain, unit, source, mark, section)
        return Traced(plain, "named", (self._lines.setdefault((symbol, plain, text), line),))

    def inputs(self, thing: Part) -> Part:
        """A copy of a specification, shape, layout or device with letters for its numbers, as ``glossary.LETTERS`` has them."""
        table = LETTERS.get(type(thing).__name__)
        if table is None:
            return thing
        lettered = copy.copy(thing)
        for field in fields(thing):  # type: ignore[arg-type]
            value, symbol = getattr(thing, field.name), table.get(field.name)
            if symbol is not None and value is not None and not (symbol.startswith("÷") and value == 1) and value != 0:
                object.__setattr__(lettered, field.name, self.letter(symbol.removeprefix("÷"), value))
            elif is_dataclass(value):
                object.__setattr__(lettered, field.name, self.inputs(value))
        return lettered

    def explanation(self, document: Any) -> Explanation:
        """The lines that the numbers of ``document`` came from, those first that others are computed from."""
        needed: set[int] = set()

        def need(expression: Traced) -> None:
            for leaf in _leaves(expression):
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


def _leaf_key(leaf: Traced) -> str:
    """A leaf by what it is, for comparing expressions."""
    name = leaf.parts[0] if leaf.how == "letter" else id(leaf.parts[0]) if leaf.how == "named" else ""
    return f"{name}:{format_number(leaf.value, 17)}"


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
    leaves = list(_leaves(line.expression))
    letters = _told_apart([((leaf.parts[0], leaf.value), leaf.parts[0]) for leaf in leaves if leaf.how == "letter"])

    def name(leaf: Traced) -> str:
        if leaf.how == "letter":
            return letters[leaf.parts[0], leaf.value]
        return symbols[id(leaf.parts[0])] if leaf.how == "named" else format_number(leaf.value, 15)

    numbers = {name(leaf): leaf.value for leaf in leaves}
    return Term(
        line.section, symbol, line.value, line.unit, _read(line.expression, name)[0],
        _read(line.expression, lambda leaf: format_number(leaf.value))[0], numbers, line.source, line.mark,
    )  # fmt: skip
