"""Patterns of layers' names in configurations, which may come from strangers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable

from twostroke.core.errors import ConfigError

Pattern = Callable[[str], bool]

MAX_PATTERN = 512
MAX_REPEATS = 4
"""Unbounded repeats of a pattern: a name of 100 characters is then matched in milliseconds at worst."""

MAX_SECONDS = 5.0
"""Of matching all names by one pattern."""


def pattern(text: str) -> Pattern:
    """Whether a name begins as the regular expression says. Raises ConfigError for one that is broken or may take long."""
    bare = re.sub(r"\\.|\[[^\]]*\]", "x", text)
    repeats = len(re.findall(r"[*+]|\{\d*,\d*\}", bare))
    if len(text) > MAX_PATTERN or repeats > MAX_REPEATS or re.search(r"\)[*+{]|\{\d{4}", bare):
        raise ConfigError(
            f"config.json: the pattern {text!r:.100} of quantization_config must have at most {MAX_PATTERN} characters and "
            f"{MAX_REPEATS} repeats, none of a group."
        )
    try:
        compiled = re.compile(text)
    except (re.error, OverflowError, RecursionError):
        raise ConfigError(f"config.json: the pattern {text!r:.100} of quantization_config is broken.") from None
    spent = 0.0

    def fits(name: str) -> bool:
        nonlocal spent
        began = time.perf_counter()
        found = compiled.match(name) is not None
        spent += time.perf_counter() - began
        if spent > MAX_SECONDS:
            raise ConfigError(f"config.json: the pattern {text!r:.100} of quantization_config takes too long.")
        return found

    return fits


def named(names: Iterable[str]) -> Pattern:
    """Whether one of ``names`` is a run of the dotted parts of a layer's name: "mlp.gate" is not "mlp.gate_proj"."""
    parts = tuple(f".{name.strip('.')}." for name in names)
    return lambda module: any(part in f".{module}." for part in parts)


def listed(quantised: dict[str, object], *keys: str) -> tuple[str, ...]:
    """The names under the first of ``keys`` that holds some. Raises ConfigError for anything but a list of names."""
    for key in keys:
        names = quantised.get(key)
        if names is None:
            continue
        if not isinstance(names, list) or not all(isinstance(name, str) and name.strip(".") for name in names):
            raise ConfigError(f"config.json: quantization_config {key} must be a list of names.")
        return tuple(names)
    return ()
