"""What numbers must be. Each check raises ConfigError, which names the number, its value and the rule."""

from __future__ import annotations

import math
from typing import Any

from twostroke.core.errors import ConfigError


def check_whole(name: str, value: Any, least: int = 1) -> None:
    """A whole number of at least ``least``. True and False are refused, though Python counts them as 1 and 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}.")


def check_limit(name: str, value: float | None) -> None:
    """A limit: finite, above 0; None is no limit."""
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"{name}={value:g} must be above 0 and finite. Leave it out for no limit.")


def check_share(name: str, value: float) -> float:
    """A share of time that something works: above 0, at most 1."""
    if not 0 < value <= 1:
        raise ConfigError(f"{name}={value:g} must be a share above 0 and at most 1. Give 0.6 for 60%.")
    return value


def check_amount(name: str, value: float) -> float:
    """An amount of money, time or work: finite, not negative."""
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name}={value:g} must be a finite number that is not negative.")
    return value


def check_positive(name: str, value: float) -> float:
    """An amount that must be there: finite, above 0."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name}={value:g} must be a finite number above 0.")
    return value


def check_count(name: str, value: int) -> int:
    """How many of something that must be there: at least 1."""
    if value < 1:
        raise ConfigError(f"{name}={value} must be at least 1.")
    return value
