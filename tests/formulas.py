"""Formulas of ``--explain`` as they are read (·, −, ⌈x⌉, √), evaluated: what is printed is held against its number."""

from __future__ import annotations

import ast
import math
import unicodedata
from collections.abc import Callable, Mapping
from functools import cache

from twostroke.core.errors import ConfigError

_SPELLINGS = {
    "·": "*",
    "×": "*",
    "÷": "/",
    "−": "-",
    "^": "**",
    "²": "**2",
    "³": "**3",
    "⌈": "ceil(",
    "⌉": ")",
    "⌊": "floor(",
    "⌋": ")",
    "√": "sqrt",
}
"""How each sign of ``docs/notation.md`` is spelt for Python's parser."""

_FUNCTIONS: dict[str, Callable[..., float]] = {
    "max": max,
    "min": min,
    "ceil": math.ceil,
    "floor": math.floor,
    "sqrt": math.sqrt,
    "log2": math.log2,
    "ln": math.log,
    "log1p": math.log1p,
    "exp": math.exp,
    "expm1": math.expm1,
}

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.Pow: lambda a, b: a**b,
}


@cache
def parse(formula: str) -> ast.expr:
    """The syntax tree of ``formula``. Raises ConfigError for text that is no formula."""
    text = formula
    for sign, spelling in _SPELLINGS.items():
        text = text.replace(sign, spelling)
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        raise ConfigError(f"formula {formula!r} is not arithmetic. Write numbers, names, + − · / ^ and functions.") from None


def evaluate(formula: str, substitutions: Mapping[str, float]) -> float:
    """The number that ``formula`` gives with each name replaced by its number.

    Nothing but numbers, names, + − · / ^ and the functions above is understood. Raises ConfigError, naming the formula,
    for a name without a number and for anything else (tests/test_formulas.py).
    """
    # Python reads identifiers in this normal form; keys are written by people.
    known = {unicodedata.normalize("NFKC", name): value for name, value in substitutions.items()}

    def value_of(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return number
            case ast.Name(id=name):
                if name not in known:
                    raise ConfigError(f"formula {formula!r} has no number for {name}. It has: {', '.join(known) or 'none'}.")
                return known[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value_of(operand)
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _BINARY:
                return _BINARY[type(operator)](value_of(left), value_of(right))
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
                return _FUNCTIONS[name](*map(value_of, arguments))
        raise ConfigError(f"formula {formula!r} holds {ast.unparse(node)!r}, which is not arithmetic.")

    try:
        return value_of(parse(formula))
    except ZeroDivisionError:
        raise ConfigError(f"formula {formula!r} divides by zero.") from None
