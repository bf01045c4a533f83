"""Names for a plan's numbers. The planner's functions are arithmetic on floats; ``--explain`` runs the same functions on
numbers that remember how they came about (``explain.traced``), and what is called here says which are shown, and as what.

While nothing records, each of these returns its value untouched: numbers and their bits are the same either way
(tests/planner/explain/test_explained_plans.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeVar

Mark = Literal["predicted", "measured", "datasheet", "assumed", "given"]
"""As in ``docs/notation.md``; "given" is an input of the plan: a batch size, a type, a shape."""

Number = TypeVar("Number", bound=float)


Thing = TypeVar("Thing")


class Record(Protocol):
    """What ``--explain`` keeps of a plan while it is computed."""

    scope: str

    def named(self, symbol: str, value: Any, unit: str, source: str, mark: Mark, section: str) -> Any: ...
    def letter(self, symbol: str, value: Any) -> Any: ...
    def inputs(self, thing: Any) -> Any: ...
    def call(self, name: str, function: Callable[..., float], values: tuple[Any, ...]) -> Any: ...


_record: Record | None = None


@contextmanager
def recording(record: Record) -> Iterator[None]:
    """Everything that is computed inside goes to ``record``."""
    global _record
    _record = record
    try:
        yield
    finally:
        _record = None


def records() -> bool:
    """Whether an explanation is being made: what only an explanation needs is not computed otherwise."""
    return _record is not None


@contextmanager
def within(scope: str) -> Iterator[None]:
    """Seconds that are named inside are those of ``scope``, a pass: their symbols begin with it."""
    if _record is None:
        yield
        return
    before, _record.scope = _record.scope, scope
    try:
        yield
    finally:
        _record.scope = before


def named(symbol: str, value: Number, unit: str, source: str, mark: Mark = "predicted", section: str = "") -> Number:
    """``value``, a line of the explanation: ``symbol`` = its formula = its numbers = value ``unit`` [``mark``: ``source``].

    Later formulas show ``symbol`` in its place. ``section`` is the heading, by default the unit's own (bytes: memory)."""
    return value if _record is None else _record.named(symbol, value, unit, source, mark, section)


def letter(symbol: str, value: Number) -> Number:
    """``value``, which formulas show as ``symbol`` and do not take apart; ``explain.glossary`` says what it stands for."""
    return value if _record is None else _record.letter(symbol, value)


def inputs(thing: Thing) -> Thing:
    """A specification, shape, layout or device with letters for its numbers, those of ``explain.glossary.LETTERS``."""
    return thing if _record is None else _record.inputs(thing)


def largest(*values: Number) -> Number:
    """``max``, which an explanation shows with all of ``values``."""
    return max(values) if _record is None else _record.call("max", max, values)


def smallest(*values: Number) -> Number:
    """``min`` likewise."""
    return min(values) if _record is None else _record.call("min", min, values)


def whole(value: float) -> int:
    """``int(value)``: ⌊value⌋ of what is not negative."""
    return int(value) if _record is None else _record.call("floor", int, (value,))


def square_root(value: float) -> float:
    """``math.sqrt``."""
    return math.sqrt(value) if _record is None else _record.call("sqrt", math.sqrt, (value,))


def exponential(value: float) -> float:
    """``math.exp``."""
    return math.exp(value) if _record is None else _record.call("exp", math.exp, (value,))


def logarithm_of_1_plus(value: float) -> float:
    """``math.log1p``."""
    return math.log1p(value) if _record is None else _record.call("log1p", math.log1p, (value,))


def exponential_less_1(value: float) -> float:
    """``math.expm1``."""
    return math.expm1(value) if _record is None else _record.call("expm1", math.expm1, (value,))
