"""Numbers that remember how they came about.

A ``Traced`` computes as its value does, to the bit: int stays int, comparisons and tables see the value. Beside it stands the
expression, of inputs by their letters, of constants, and of numbers that ``core.named`` named before.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

SUM, PRODUCT, POWER, ATOM = range(4)
"""How tightly an expression binds: one that binds less than its place asks for stands in parentheses."""


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
        return self.value == value_of(other)

    def __lt__(self, other: float) -> bool:
        return self.value < value_of(other)

    def __le__(self, other: float) -> bool:
        return self.value <= value_of(other)

    def __gt__(self, other: float) -> bool:
        return self.value > value_of(other)

    def __ge__(self, other: float) -> bool:
        return self.value >= value_of(other)

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
        return Traced(self.value % value_of(other), "mod", (self, expression_of(other)))

    def __rmod__(self, other: float) -> Traced:
        return Traced(value_of(other) % self.value, "mod", (expression_of(other), self))

    def __pow__(self, other: float) -> Traced:
        return Traced(self.value ** value_of(other), "^", (self, expression_of(other)))

    def __rpow__(self, other: float) -> Traced:
        return Traced(value_of(other) ** self.value, "^", (expression_of(other), self))

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


def value_of(number: Any) -> Any:
    return number.value if type(number) is Traced else number


def expression_of(number: Any) -> Traced:
    """``number`` as an expression; a plain one is a constant."""
    return number if type(number) is Traced else Traced(number, "constant")


def is_constant(number: Any, constant: float) -> bool:
    """Whether ``number`` is that constant, and not a letter that happens to have its value."""
    return expression_of(number).how == "constant" and bool(value_of(number) == constant)


def _known(value: float, how: str, left: Any, right: Any) -> Traced:
    """``left`` ``how`` ``right``; of two constants a constant."""
    parts = (expression_of(left), expression_of(right))
    return Traced(value, "constant") if all(part.how == "constant" for part in parts) else Traced(value, how, parts)


def _same(value: float, of: Any) -> Traced:
    """``of`` with nothing added, in the type that adding it gives."""
    return Traced(value, expression_of(of).how, expression_of(of).parts)


def _alike(left: Any, right: Any) -> bool:
    """Whether both are the same expression of the same numbers."""
    return (
        bool(value_of(left) == value_of(right))
        and spell(expression_of(left), leaf_key)[0] == spell(expression_of(right), leaf_key)[0]
    )


def _sum(left: Any, right: Any) -> Traced:
    value = value_of(left) + value_of(right)
    if is_constant(left, 0):
        return _same(value, right)
    if is_constant(right, 0):
        return _same(value, left)
    if expression_of(right).how == "neg":
        return _known(value, "−", left, right.parts[0])
    if expression_of(right).how == "−" and _alike(right.parts[1], left):
        return _same(value, right.parts[0])
    return _known(value, "+", left, right)


def _difference(left: Any, right: Any) -> Traced:
    value = value_of(left) - value_of(right)
    if is_constant(right, 0):
        return _same(value, left)
    rest = list(_addends(expression_of(left)))
    for i, part in enumerate(rest):
        if part.how != "constant" and _alike(part, right):
            del rest[i]
            left_over = sum(rest, start=Traced(0, "constant"))
            return Traced(value, left_over.how, left_over.parts)
    return _known(value, "−", left, right)


def _product(left: Any, right: Any) -> Traced:
    value = value_of(left) * value_of(right)
    if is_constant(left, 0) or is_constant(right, 0):
        return Traced(value, "constant")
    if is_constant(left, 1):
        return _same(value, right)
    if is_constant(right, 1):
        return _same(value, left)
    for one, other in ((expression_of(left), expression_of(right)), (expression_of(right), expression_of(left))):
        if one.how == "/" and (rest := _without(other, one.parts[1])) is not None:
            return _same(value, _product(one.parts[0], rest))
    if expression_of(right).how == "/" and is_constant(right.parts[0], 1):
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
    value = value_of(left) / value_of(right)
    if is_constant(left, 0) or _alike(left, right):
        return Traced(value, "constant")
    if (rest := _without(expression_of(left), expression_of(right))) is not None:
        return _same(value, rest)
    return _same(value, left) if is_constant(right, 1) else _known(value, "/", left, right)


def _floored(left: Any, right: Any) -> Traced:
    value = value_of(left) // value_of(right)
    if is_constant(right, 1):
        return _same(value, left)
    if _alike(left, right):
        return Traced(value, "constant")
    if value_of(left) % value_of(right) == 0 and expression_of(left).how != "neg":
        rest = _without(expression_of(left), expression_of(right))
        return _known(value, "/", left, right) if rest is None else _same(value, rest)
    return Traced(value, "floor", (_known(value_of(left) / value_of(right), "/", left, right),))


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


def spell(expression: Traced, leaf: Callable[[Traced], str]) -> tuple[str, int]:
    """(text, how tightly it binds), every letter, named number and constant as ``leaf`` spells it."""

    def at_least(part: Traced, binding: int) -> str:
        text, own = spell(part, leaf)
        return text if own >= binding else f"({text})"

    match expression.how:
        case "+":
            alike: dict[str, list[Traced]] = {}
            for part in _addends(expression):
                alike.setdefault(spell(part, leaf_key)[0], []).append(part)
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
            inside = spell(expression.parts[0], leaf)[0]
            return (f"⌊{inside}⌋" if side == "floor" else f"⌈{inside}⌉"), ATOM
        case "letter" | "named" | "constant":
            text = leaf(expression)
            return text, SUM if text.startswith("-") else ATOM
    inside = ", ".join(spell(part, leaf)[0] for part in expression.parts)
    return f"{'√' if expression.how == 'sqrt' else expression.how}({inside})", ATOM


def leaves_of(expression: Traced) -> Iterator[Traced]:
    """Letters and named numbers in the order they are read."""
    if expression.how in ("letter", "named"):
        yield expression
    elif expression.how != "constant":
        for part in _addends(expression) if expression.how == "+" else expression.parts:
            yield from leaves_of(part)


def leaf_key(leaf: Traced) -> str:
    """A leaf by what it is, for comparing expressions."""
    name = leaf.parts[0] if leaf.how == "letter" else id(leaf.parts[0]) if leaf.how == "named" else ""
    return f"{name}:{format_number(leaf.value, 17)}"
