"""The points of a sweep: every combination of the values that ``--vary key=a,b,c`` gives to recipe keys."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.core.errors import ConfigError

MOST_POINTS = 1000
"""More are a slip of the keyboard: three keys of ten values each are as many."""

LONGEST_NAME = 120
"""Characters of a point's directory. File systems take 255 bytes."""


@dataclass(frozen=True)
class Point:
    """One recipe of a sweep: the values of the varied keys, by key, as they were typed."""

    values: dict[str, str]

    @property
    def settings(self) -> list[str]:
        """As ``--set`` takes them."""
        return [f"{key}={value}" for key, value in self.values.items()]

    @property
    def name(self) -> str:
        """Of its directory: the last word of each key, and its value. It does not depend on the other points."""
        plain = ",".join(f"{key.split('.')[-1]}={re.sub(r'[^A-Za-z0-9._+-]+', '-', text)}" for key, text in self.values.items())
        if len(plain) <= LONGEST_NAME:
            return plain
        return f"{plain[: LONGEST_NAME - 9]}-{hashlib.sha256(repr(self.settings).encode()).hexdigest()[:8]}"


def points_of(varied: Sequence[str]) -> tuple[Point, ...]:
    """All combinations of ``varied``, each "section.key=value,value"; the last key changes fastest.

    Commas inside brackets and quotes part nothing. Raises ConfigError for what is no such list, a key or value that comes
    twice, and more than ``MOST_POINTS``.
    """
    axes: dict[str, list[str]] = {}
    for words in varied:
        key, separator, text = words.partition("=")
        key, values = key.strip(), _parted(text)
        if not separator or not key or not all(values):
            raise ConfigError(f"--vary {words!r} must look like section.key=value,value.")
        if key == "output":
            raise ConfigError("--vary output: each point has a directory of its own in the recipe's output. Leave it out.")
        if key in axes:
            raise ConfigError(f"--vary names {key} twice. Give all its values in one, as {key}=value,value.")
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise ConfigError(f"--vary {words!r} has the value {twice} twice.")
        axes[key] = values
    if not axes:
        raise ConfigError("a sweep varies something. Add --vary section.key=value,value, as train.learning_rate=1e-3,3e-4.")
    if (n := math.prod(len(values) for values in axes.values())) > MOST_POINTS:
        raise ConfigError(f"--vary makes {n:,} points, and a sweep has at most {MOST_POINTS:,}. Give fewer values.")
    points = tuple(Point(dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values()))
    names = [point.name for point in points]
    if same := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two points of --vary would share the directory {same}. Their values differ in spelling alone.")
    return points


def _parted(text: str) -> list[str]:
    """``text`` at its commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if letter == "," and not depth and not quote:
            parts.append("")
            continue
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        parts[-1] += letter
    return [part.strip() for part in parts]


def makespan(seconds: Sequence[float], at_once: int) -> float:
    """When the last of jobs of ``seconds`` ends that start in this order, each as soon as one of ``at_once`` places is free."""
    ends = [0.0] * at_once
    for each in seconds:
        first = min(range(at_once), key=ends.__getitem__)
        ends[first] += each
    return max(ends)
