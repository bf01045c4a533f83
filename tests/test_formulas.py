"""Formulas are evaluated as they are read, and nothing but arithmetic is."""

from __future__ import annotations

import math

import pytest

from formulas import evaluate
from twostroke.core.errors import ConfigError


def test_signs_of_the_notation_mean_what_they_say() -> None:
    assert evaluate("2·L·K·D·w", {"L": 32, "K": 8, "D": 128, "w": 2}) == 131_072
    assert evaluate("⌈(a + 1)/16⌉·16 − ⌊7 ÷ 2⌋", {"a": 16}) == 29
    assert evaluate("√(2·δ·M)", {"δ": 2, "M": 9}) == 6
    assert evaluate("(1 − α^3)/(1 − α)", {"α": 0.5}) == 1.75
    assert evaluate("max(a², b³, min(1e3, 4))", {"a": 2, "b": 2}) == 8
    assert evaluate("−π × 1.5", {"π": 2}) == -3


def test_a_product_binds_more_than_a_sum_and_a_power_more_than_a_product() -> None:
    assert evaluate("a + b·c^2", {"a": 1, "b": 2, "c": 3}) == 19


@pytest.mark.parametrize(
    ("formula", "numbers", "complaint"),
    [
        ("2·L·K", {"L": 1.0}, "has no number for K"),
        ("__import__('os')", {}, "not arithmetic"),
        ("a.b", {"a": 1.0}, "not arithmetic"),
        ("[1, 2]", {}, "not arithmetic"),
        ("a if a else a", {"a": 1.0}, "not arithmetic"),
        ("exec(a)", {"a": 1.0}, "not arithmetic"),
        ("2··3·(", {}, "is not arithmetic"),
        ("1/a", {"a": 0.0}, "divides by zero"),
        ("True + 1", {}, "not arithmetic"),
    ],
)
def test_anything_else_is_refused_with_the_formula(formula: str, numbers: dict[str, float], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        evaluate(formula, numbers)


def test_evaluation_agrees_with_python_on_ordinary_arithmetic() -> None:
    numbers = {"a": 3.5, "b": -2.0, "c": 7.0}
    for formula in ("a·b − c/2", "(a + b)^2·√(c)", "−a^2", "max(a, b·c)/min(a, c)", "⌈a⌉ + ⌊b·a⌋"):
        text = formula.replace("·", "*").replace("−", "-").replace("^", "**").replace("√", "math.sqrt")
        text = text.replace("⌈", "math.ceil(").replace("⌉", ")").replace("⌊", "math.floor(").replace("⌋", ")")
        assert evaluate(formula, numbers) == eval(text, {"math": math, "max": max, "min": min}, numbers)
