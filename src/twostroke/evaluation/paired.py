"""Paired differences of two models on the same examples, with intervals and significance."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twostroke.evaluation.results import TaskResult, Values, check_same_questions

Z = 1.959963984540054
"""Normal quantile of the two-sided 95% interval."""


@dataclass(frozen=True)
class Difference:
    """b − a with its 95% interval. ``p_value`` is the two-sided probability that two equal models differ at least as much."""

    value: float
    standard_error: float
    low: float
    high: float
    p_value: float
    n: int


def normal_difference(value: float, standard_error: float, n: int) -> Difference:
    """A difference with an interval of ±1.96 standard errors, and p from value / standard error in the normal distribution."""
    if standard_error == 0:
        return Difference(value, 0.0, value, value, 1.0 if value == 0 else 0.0, n)
    p_value = math.erfc(abs(value) / standard_error / math.sqrt(2)) if math.isfinite(standard_error) else 1.0
    return Difference(value, standard_error, value - Z * standard_error, value + Z * standard_error, p_value, n)


def paired_means(a: Values, b: Values) -> Difference:
    """The mean of bᵢ − aᵢ over examples, with its standard error s/√n. The difficulty that both models share cancels out."""
    difference = b - a
    n = len(difference)
    error = float(difference.std(ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    return normal_difference(float(difference.mean()), error, n)


def paired_shares(a: Values, b: Values) -> Difference:
    """The difference of shares of examples scored 0 or 1, with McNemar's exact test and the interval of Agresti & Min (2005).

    Only examples matter that one model alone got right: n₀₁ by b, n₁₀ by a. p = min(1, 2·P[X ≤ min(n₀₁, n₁₀)]) with X binomial
    of n₀₁ + n₁₀ tosses (McNemar 1947). The interval is Wald's with half an example added to each of the four counts (Statistics
    in Medicine 24:729), which keeps its level even if few examples differ. ``standard_error`` has nothing added.
    """
    n = len(a)
    gained, lost = int(((b == 1) & (a == 0)).sum()), int(((a == 1) & (b == 0)).sum())
    value = (gained - lost) / n
    error = math.sqrt(max(0.0, gained + lost - (gained - lost) ** 2 / n)) / n
    wide = n + 2
    middle = (gained - lost) / wide
    half = Z * math.sqrt(gained + lost + 1 - (gained - lost) ** 2 / wide) / wide
    return Difference(value, error, middle - half, middle + half, mcnemar_p(gained, lost), n)


def mcnemar_p(gained: int, lost: int) -> float:
    tosses = gained + lost
    tail = sum(math.exp(_log_choose(tosses, k) - tosses * math.log(2)) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def paired_ratio(a: Values, b: Values, weights: npt.NDArray[np.float64]) -> Difference:
    """The difference of ratios r = Σ(bᵢ − aᵢ) / Σwᵢ for units of unequal size: nats per token over conversations, or bits per
    byte over blocks of text. The standard error is the ratio estimator's, √(n/(n−1) · Σ(dᵢ − r·wᵢ)²) / Σwᵢ (Cochran 1977, ch.
    6). It is infinite for one unit, and it assumes that units are independent."""
    difference, total, n = b - a, float(weights.sum()), len(a)
    ratio = float(difference.sum()) / total
    if n < 2:
        return normal_difference(ratio, math.inf, n)
    spread = float(np.square(difference - ratio * weights).sum())
    return normal_difference(ratio, math.sqrt(n / (n - 1) * spread) / total, n)


def paired_tasks(a: TaskResult, b: TaskResult) -> dict[str, Difference]:
    """The difference of each metric of a task. Raises InputError if the models had different examples."""
    check_same_questions(a, b)
    return {name: _paired(a.scores[name], b.scores[name]) for name in a.scores}


def _paired(a: Values, b: Values) -> Difference:
    binary = np.isin(a, (0, 1)).all() and np.isin(b, (0, 1)).all()
    return paired_shares(a, b) if binary else paired_means(a, b)


LOWER_IS_BETTER = frozenset({"gold_nats", "target_nats", "perplexity"})
