"""Formulas are evaluated as they are read, and nothing but arithmetic is."""

from __future__ import annotations

import math

import pytest

from twostroke.core.errors import ConfigError
from twostroke.planner.explain.formula import evaluate, substituted, symbols
from twostroke.planner.explain.term import Explanation


def test_signs_of_the_notation_mean_what_they_say() -> None:
    assert evaluate("2·L·K·D·w", {"L": 32, "K": 8, "D": 128, "w": 2}) == 131_072
    assert evaluate("⌈(a + 1)/16⌉·16 − ⌊7 ÷ 2⌋", {"a": 16}) == 29
    assert evaluate("√(2·δ·M)", {"δ": 2, "M": 9}) == 6
    assert evaluate("(1 − α^3)/(1 − α)", {"α": 0.5}) == 1.75
    assert evaluate("max(a², b³, min(1e3, 4))", {"a": 2, "b": 2}) == 8
    assert evaluate("−π × 1.5", {"π": 2}) == -3


def test_a_product_binds_more_than_a_sum_and_a_power_more_than_a_product() -> None:
    assert evaluate("a + b·c^2", {"a": 1, "b": 2, "c": 3}) == 19


def test_the_reading_shows_numbers_in_place_of_names() -> None:
    assert substituted("2·L·w_kv/4.5", {"L": 32, "w_kv": 0.1, "w": 7}) == "2·32·0.1/4.5"
    assert substituted("max(F/π, M/β)", {"F": 1e12, "π": 1.5e12, "M": 3, "β": 1 / 3}) == (
        "max(1000000000000/1500000000000, 3/0.333333)"
    )


def test_names_are_found_in_the_order_they_are_read() -> None:
    assert symbols("max(b, a)·b + ⌈c⌉") == ("b", "a", "c")


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


def test_a_term_takes_earlier_terms_by_their_symbol_and_refuses_unknown_ones() -> None:
    terms = Explanation()
    terms.add("memory", "N", 10, "parameters", "2·V", "config.json", V=5)
    terms.add("memory", "bytes", 20, "bytes", "w·N", "every parameter", w=2)
    assert terms["bytes"].substitutions["N"] == 10
    with pytest.raises(ConfigError, match="no term explains 'M'"):
        terms.add("memory", "x", 1, "", "M + 1", "nowhere")


def test_evaluation_agrees_with_python_on_ordinary_arithmetic() -> None:
    numbers = {"a": 3.5, "b": -2.0, "c": 7.0}
    for formula in ("a·b − c/2", "(a + b)^2·√(c)", "−a^2", "max(a, b·c)/min(a, c)", "⌈a⌉ + ⌊b·a⌋"):
        text = formula.replace("·", "*").replace("−", "-").replace("^", "**").replace("√", "math.sqrt")
        text = text.replace("⌈", "math.ceil(").replace("⌉", ")").replace("⌊", "math.floor(").replace("⌋", ")")
        assert evaluate(formula, numbers) == eval(text, {"math": math, "max": max, "min": min}, numbers)
