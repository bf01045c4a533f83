"""What is drawn by chance in a load: lengths of prompts and answers, and gaps between requests. Each is written as a text.

Lengths: ``N``, ``LEAST:MOST`` (each equally often), ``lognormal:MEDIAN,SIGMA``, ``exponential:MEAN``, ``pareto:LEAST,ALPHA``,
each of the last three with ``,MOST`` behind it where it is bounded, and sums with weights:
``0.9*lognormal:300,0.8+0.1*pareto:1000,1.5,8000``.
Gaps: ``poisson``, ``constant``, ``gamma:SHAPE``, ``weibull:SHAPE``; a shape below 1 comes in bursts. Production traffic has
inputs of a log-normal body with a Pareto tail, exponential outputs, and gaps of Gamma or Weibull form, by client (ServeGen,
arXiv 2505.09999).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from twostroke.core.checks import check_amount, check_count, check_positive
from twostroke.core.errors import ConfigError, did_you_mean

MOST_TOKENS = 2**20
"""Longest drawn length where none is given."""


class Lengths(Protocol):
    """How many tokens prompts or answers have."""

    def draw(self, rng: random.Random) -> int: ...


class Gaps(Protocol):
    """Seconds between requests at one request a second."""

    def draw(self, rng: random.Random) -> float: ...


@dataclass(frozen=True)
class Uniform:
    """Every length from ``least`` to ``most`` equally often. Raises ConfigError."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"lengths {self.least}:{self.most} must be two numbers of at least 1 token, the smaller first.")
        check_amount("length", self.most)

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.least, self.most)


@dataclass(frozen=True)
class Lognormal:
    """exp(N(ln ``median``, ``sigma``²)), rounded, from 1 to ``most``: many short ones, a few long ones. Raises ConfigError."""

    median: float
    sigma: float
    most: int = MOST_TOKENS

    def __post_init__(self) -> None:
        check_positive("median", self.median)
        check_amount("sigma", self.sigma)
        check_count("most", self.most)

    def draw(self, rng: random.Random) -> int:
        drawn = rng.normalvariate(math.log(self.median), self.sigma)
        return self.most if drawn > math.log(self.most) else max(1, round(math.exp(drawn)))


@dataclass(frozen=True)
class Exponential:
    """Of ``mean``, rounded, from 1 to ``most``. Raises ConfigError."""

    mean: float
    most: int = MOST_TOKENS

    def __post_init__(self) -> None:
        check_positive("mean", self.mean)
        check_count("most", self.most)

    def draw(self, rng: random.Random) -> int:
        return max(1, min(self.most, round(rng.expovariate(1 / self.mean))))


@dataclass(frozen=True)
class Pareto:
    """P(length > x) = (``least`` ÷ x)^``alpha``, rounded, from ``least`` to ``most``: the fewer, the longer, without a typical
    one. Raises ConfigError."""

    least: float
    alpha: float
    most: int = MOST_TOKENS

    def __post_init__(self) -> None:
        check_positive("least", self.least)
        check_positive("alpha", self.alpha)
        check_count("most", self.most)

    def draw(self, rng: random.Random) -> int:
        share = max(1.0 - rng.random(), (self.least / self.most) ** self.alpha if self.most > self.least else 1.0)
        return max(1, min(self.most, round(self.least * share ** (-1 / self.alpha))))


@dataclass(frozen=True)
class Mixture:
    """Each of ``parts`` in proportion to its weight. Raises ConfigError."""

    parts: tuple[tuple[float, Lengths], ...]

    def __post_init__(self) -> None:
        for weight, _ in self.parts:
            check_positive("weight", weight)

    def draw(self, rng: random.Random) -> int:
        weights, parts = zip(*self.parts, strict=True)
        (part,) = rng.choices(parts, weights)
        return int(part.draw(rng))


_LENGTHS: dict[str, tuple[Any, str]] = {
    "lognormal": (Lognormal, "MEDIAN,SIGMA"),
    "exponential": (Exponential, "MEAN"),
    "pareto": (Pareto, "LEAST,ALPHA"),
}
LENGTH_FORMS = "N, LEAST:MOST, " + ", ".join(f"{name}:{form}[,MOST]" for name, (_, form) in _LENGTHS.items())


def lengths_of(given: int | str | Sequence[int] | Lengths) -> Lengths:
    """Lengths from a number (all alike), two bounds, or the module's texts. Raises ConfigError."""
    if isinstance(given, int):
        return Uniform(given, given)
    if isinstance(given, str):
        parts = given.split("+")
        if len(parts) == 1 and "*" not in given:
            return _length(given, given)
        return Mixture(tuple((_weight(part, given), _length(part.rpartition("*")[2], given)) for part in parts))
    return Uniform(*given) if isinstance(given, Sequence) else given


def _weight(part: str, whole: str) -> float:
    weight, star, _ = part.rpartition("*")
    return _numbers(weight, whole)[0] if star else 1.0


def _length(part: str, whole: str) -> Lengths:
    name, colon, rest = part.strip().partition(":")
    if name in _LENGTHS and colon:
        kind, form = _LENGTHS[name]
        n, values = form.count(",") + 1, _numbers(rest, whole)
        if len(values) not in (n, n + 1) or (len(values) > n and not values[-1].is_integer()):
            raise ConfigError(f"lengths {whole!r:.200}: {name} needs {form}, and the most tokens behind it if it has a bound.")
        lengths: Lengths = kind(*values[:n], *map(int, values[n:]))
        return lengths
    try:
        return Uniform(int(name), int(rest if colon else name))
    except ValueError:
        known = did_you_mean(name, tuple(_LENGTHS)) if name.isalpha() else ""
        raise ConfigError(f"lengths {whole!r:.200} must be one of {LENGTH_FORMS}, in tokens. {known}".rstrip()) from None


def _numbers(text: str, whole: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [math.nan]
    if not all(map(math.isfinite, found)):
        raise ConfigError(f"{whole!r:.200}: {text!r:.80} must be finite numbers, with commas between them.")
    return found


def mean_length(lengths: int | str | Sequence[int] | Lengths) -> float:
    """The mean of ``MEAN_DRAWS`` draws: bounds and mixtures have no short formula."""
    found, rng = lengths_of(lengths), random.Random(0)
    if isinstance(found, Uniform):
        return (found.least + found.most) / 2
    return sum(found.draw(rng) for _ in range(MEAN_DRAWS)) / MEAN_DRAWS


MEAN_DRAWS = 2000


@dataclass(frozen=True)
class Gamma:
    """Gamma-distributed: a ``shape`` of 1 is Poisson, less comes in bursts (variance 1/shape). Raises ConfigError."""

    shape: float = 1.0

    def __post_init__(self) -> None:
        _check_shape("gamma", self.shape)

    def draw(self, rng: random.Random) -> float:
        return rng.gammavariate(self.shape, 1 / self.shape)


@dataclass(frozen=True)
class Weibull:
    """Weibull-distributed: a ``shape`` of 1 is Poisson, less has a longer tail. Raises ConfigError."""

    shape: float

    def __post_init__(self) -> None:
        _check_shape("weibull", self.shape)

    def draw(self, rng: random.Random) -> float:
        return rng.weibullvariate(1 / math.gamma(1 + 1 / self.shape), self.shape)


@dataclass(frozen=True)
class Constant:
    """Like a clock."""

    def draw(self, rng: random.Random) -> float:
        return 1.0


LEAST_SHAPE, MOST_SHAPE = 0.02, 1e6
"""Below, nearly all gaps are 0 and the rest are longer than any run; a Weibull's mean leaves the range of a float."""


def _check_shape(name: str, shape: float) -> None:
    if not LEAST_SHAPE <= shape <= MOST_SHAPE:
        raise ConfigError(f"the shape of {name}:{shape:g} must be from {LEAST_SHAPE:g} to {MOST_SHAPE:g}; 1 is Poisson.")


GAP_FORMS = "poisson, constant, gamma:SHAPE or weibull:SHAPE"


def gaps_of(given: str | Gaps) -> Gaps:
    """Gaps from a text of the module. Raises ConfigError."""
    if not isinstance(given, str):
        return given
    name, colon, rest = given.strip().partition(":")
    if name in ("poisson", "constant") and not colon:
        return Gamma() if name == "poisson" else Constant()
    if name in ("gamma", "weibull") and colon:
        values = _numbers(rest, given)
        if len(values) == 1:
            return Gamma(values[0]) if name == "gamma" else Weibull(values[0])
    raise ConfigError(f"arrivals={given!r:.200} must be {GAP_FORMS}.")
