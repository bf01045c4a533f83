"""Ways to find the codes of groups: one row each. No torch, so that help texts read it at once."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.core.errors import ConfigError


@dataclass(frozen=True)
class Rounding:
    """``scaled``: inputs are scaled by their size beforehand (``quantization.awq``). ``compensated``: a column's error is made
    up for by the columns after it (``quantization.gptq``). With neither, every weight goes to its nearest code."""

    name: str
    scaled: bool
    compensated: bool

    @property
    def fitted(self) -> bool:
        """Whether it needs text."""
        return self.scaled or self.compensated


ROUNDINGS: dict[str, Rounding] = {
    row.name: row
    for row in (
        Rounding("nearest", scaled=False, compensated=False),
        Rounding("gptq", scaled=False, compensated=True),
        Rounding("awq", scaled=True, compensated=False),
        Rounding("awq-gptq", scaled=True, compensated=True),
    )
}

TRIED_SCALES = 11
"""Exponents α from 0 to 1 by which inputs are scaled by their size, to find the best (``quantization.awq``)."""

NEAREST = ROUNDINGS["nearest"]
DEFAULT_ROUNDING = "gptq"


def rounding_of(name: str) -> Rounding:
    """The row called ``name``; ConfigError for another name."""
    if name not in ROUNDINGS:
        raise ConfigError(f"rounding={name!r} is not a way to round. Use one of {', '.join(ROUNDINGS)}.")
    return ROUNDINGS[name]
