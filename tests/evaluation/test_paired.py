"""Paired differences against simulation, exact counting and scipy-free references."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from twostroke.core.described import plain
from twostroke.core.errors import InputError
from twostroke.evaluation.paired import mcnemar_p, normal_difference, paired_means, paired_ratio, paired_shares, paired_tasks
from twostroke.evaluation.results import TaskResult


def test_mcnemar_is_the_exact_binomial_test() -> None:
    """By counting every sequence of tosses; 8 and 2 of ten is the textbook's 0.109375."""

    def counted(gained: int, lost: int) -> Fraction:
        n, least = gained + lost, min(gained, lost)
        tail = sum(Fraction(math.comb(n, k), 2**n) for k in range(least + 1))
        return min(Fraction(1), 2 * tail)

    assert mcnemar_p(8, 2) == pytest.approx(0.109375)
    for gained in range(12):
        for lost in range(12):
            assert mcnemar_p(gained, lost) == pytest.approx(float(counted(gained, lost)))
    assert mcnemar_p(5000, 4000) < 1e-20


def test_intervals_of_shares_hold_the_truth_as_often_as_they_say() -> None:
    """1,000 pairs of models of known accuracies that mostly agree: 95% of intervals hold the difference, small samples too."""
    rng = np.random.default_rng(0)
    for n, only_a, only_b in ((30, 0.05, 0.05), (100, 0.02, 0.08), (1000, 0.03, 0.05)):
        held = 0
        for _ in range(1000):
            draw = rng.random(n)
            a = (draw < only_a) | (draw > 0.6)
            b = ((draw >= only_a) & (draw < only_a + only_b)) | (draw > 0.6)
            found = paired_shares(a.astype(float), b.astype(float))
            held += found.low <= only_b - only_a <= found.high
        assert 0.93 < held / 1000 <= 0.995, (n, held)  # 1,000 draws of 95% have an error of 0.7 points


def test_pairing_removes_what_both_find_hard() -> None:
    """Difficulty of spread 5 in both, a difference of 0.1 with spread 0.2: the paired error is the difference's alone."""
    rng = np.random.default_rng(1)
    hard = 5 * rng.standard_normal(400)
    a, b = hard, hard + 0.1 + 0.2 * rng.standard_normal(400)
    found = paired_means(a, b)
    assert found.standard_error == pytest.approx(0.2 / math.sqrt(400), rel=0.1)
    assert found.low < 0.1 < found.high
    assert found.p_value < 1e-6
    assert found.value == pytest.approx(float(b.mean() - a.mean()))


def test_the_normal_p_and_interval_are_the_tables() -> None:
    found = normal_difference(1.959963984540054, 1.0, 10)
    assert found.p_value == pytest.approx(0.05)
    assert found.low == pytest.approx(0.0)
    assert (normal_difference(0.0, 0.0, 3).p_value, normal_difference(1.0, 0.0, 3).p_value) == (1.0, 0.0)
    lonely = paired_means(np.ones(1), np.zeros(1))
    assert (lonely.standard_error, lonely.p_value, plain(lonely)["low"]) == (math.inf, 1.0, None)


def test_a_model_beside_itself_differs_by_nothing() -> None:
    a = np.array([0.0, 1, 1, 0, 1])
    found = paired_shares(a, a)
    assert (found.value, found.standard_error, found.p_value) == (0, 0, 1)
    assert found.low < 0 < found.high, "five questions that agree do not prove that the next ones will"
    ratio = paired_ratio(a, a, np.ones(5))
    assert (ratio.value, ratio.low, ratio.high) == (0, 0, 0)


def test_units_of_unequal_size_count_by_their_size() -> None:
    found = paired_ratio(np.zeros(3), np.array([1.0, 2, 6]), np.array([1.0, 2, 3]))
    assert found.value == pytest.approx(9 / 6)
    # d − r·w = (−0.5, −1, 1.5): √(3/2 · 3.5) / 6.
    assert found.standard_error == pytest.approx(math.sqrt(1.5 * 3.5) / 6)


def test_results_of_other_questions_are_not_paired() -> None:
    def result(key: str, values: list[float]) -> TaskResult:
        return TaskResult("copa", "choice", key, {"acc": np.array(values)}, 0, 1)

    assert paired_tasks(result("x", [0, 1]), result("x", [1, 1]))["acc"].value == 0.5
    with pytest.raises(InputError, match="different examples"):
        paired_tasks(result("x", [0, 1]), result("y", [1, 1]))
