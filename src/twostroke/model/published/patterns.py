"""Patterns of layers' names in configurations, which may come from strangers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from twostroke.core.errors import ConfigError

Pattern = Callable[[str], bool]

MAX_PATTERN = 512
MAX_REPEATS = 4
"""Unbounded repeats of a pattern: a name of 100 characters is then matched in milliseconds at worst."""

MAX_NAMES, MAX_STARS = 100_000, 64
"""Names of a list, and those among them with a "*"."""


@dataclass
class Budget:
    """Seconds that matching all names by all patterns of a configuration may still take."""

    left_s: float = 5.0

    def spend(self, seconds: float) -> None:
        self.left_s -= seconds
        if self.left_s < 0:
            raise ConfigError("config.json: the patterns of quantization_config take too long to match the layers' names.")


def pattern(text: str, budget: Budget) -> Pattern:
    """Whether a name begins as the regular expression says. Raises ConfigError for one that is broken or may take long."""
    bare = re.sub(r"\\.|\[[^\]]*\]", "x", text)
    repeats = len(re.findall(r"[*+]|\{\d*,\d*\}", bare))
    if len(text) > MAX_PATTERN or repeats > MAX_REPEATS or re.search(r"\)[*+{]|\{\d{4}", bare):
        raise ConfigError(
            f"config.json: the pattern {text!r:.100} of quantization_config must have at most {MAX_PATTERN} characters and "
            f"{MAX_REPEATS} repeats, none of a group."
        )
    began = time.perf_counter()
    try:
        compiled = re.compile(text)
    except (re.error, OverflowError, RecursionError):
        raise ConfigError(f"config.json: the pattern {text!r:.100} of quantization_config is broken.") from None
    budget.spend(time.perf_counter() - began)

    def fits(name: str) -> bool:
        began = time.perf_counter()
        found = compiled.match(name) is not None
        budget.spend(time.perf_counter() - began)
        return found

    return fits


def named(names: Iterable[str]) -> Pattern:
    """Whether one of ``names`` is a run of the dotted parts of a layer's name: "mlp.gate" is not "mlp.gate_proj". A "*" stands
    for one part. Raises ConfigError for too many names with one."""
    whole = [tuple(name.strip(".").split(".")) for name in names]
    exact, starred = {run for run in whole if "*" not in run}, [run for run in whole if "*" in run]
    if len(starred) > MAX_STARS:
        raise ConfigError(f"config.json: quantization_config has {len(starred)} names with '*'; at most {MAX_STARS} are read.")

    def fits(module: str) -> bool:
        parts = tuple(module.split("."))
        runs = [parts[i:j] for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)]
        return any(run in exact for run in runs) or any(
            len(run) == len(wanted) and all(w in ("*", part) for w, part in zip(wanted, run, strict=True))
            for wanted in starred
            for run in runs
        )

    return fits


def listed(quantised: dict[str, object], *keys: str) -> tuple[str, ...]:
    """The names under the first of ``keys`` that holds some. Raises ConfigError for anything but a list of names."""
    for key in keys:
        names = quantised.get(key)
        if names is None:
            continue
        if (
            not isinstance(names, list)
            or len(names) > MAX_NAMES
            or not all(isinstance(name, str) and name.strip(".") for name in names)
        ):
            raise ConfigError(f"config.json: quantization_config {key} must be a list of names, at most {MAX_NAMES}.")
        return tuple(names)
    return ()
