"""What numbers must be. Each check raises ConfigError, which names the number, its value and the rule."""

from __future__ import annotations

import math
from typing import Any

from twostroke.core.errors import ConfigError

MOST_WHOLE = 10**15
MOST_AMOUNT = 1e18
"""Beyond these a count, a time or a sum of money is a slip of the hand: 10¹⁸ s are older than the universe."""


def check_whole(name: str, value: Any, least: int = 1, most: int = MOST_WHOLE) -> None:
    """A whole number of at least ``least`` and at most ``most``. True and False are refused, though Python counts them as 1
    and 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}.")
    if value > most:
        raise ConfigError(f"{name}={value!r} must be at most {most:,}.")


def _check_not_absurd(name: str, value: float) -> None:
    if value > MOST_AMOUNT:
        raise ConfigError(f"{name}={value:g} must be at most {MOST_AMOUNT:g}.")


def check_limit(name: str, value: float | None) -> None:
    """A limit: finite, above 0; None is no limit."""
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"{name}={value:g} must be above 0 and finite. Leave it out for no limit.")
    _check_not_absurd(name, value or 0)


def check_share(name: str, value: float) -> float:
    """A share of time that something works: above 0, at most 1."""
    if not 0 < value <= 1:
        raise ConfigError(f"{name}={value:g} must be a share above 0 and at most 1. Give 0.6 for 60%.")
    return value


def check_amount(name: str, value: float) -> float:
    """An amount of money, time or work: finite, not negative."""
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name}={value:g} must be a finite number that is not negative.")
    _check_not_absurd(name, value)
    return value


def check_positive(name: str, value: float) -> float:
    """An amount that must be there: finite, above 0."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name}={value:g} must be a finite number above 0.")
    _check_not_absurd(name, value)
    return value


def check_count(name: str, value: int) -> int:
    """How many of something that must be there: at least 1."""
    if value < 1:
        raise ConfigError(f"{name}={value} must be at least 1.")
    return value
