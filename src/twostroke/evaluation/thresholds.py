"""Decides pass or fail: it compares the measured difference of b and a with thresholds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from twostroke.core.errors import ConfigError
from twostroke.evaluation.paired import LOWER_IS_BETTER


@dataclass(frozen=True)
class Check:
    """One threshold: ``value`` must be at most ``limit`` (``at_most``), or at least ``limit``."""

    name: str
    value: float
    limit: float
    at_most: bool

    @property
    def passed(self) -> Annotated[bool, "whether it holds"]:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def text(self) -> str:
        relation = "at most" if self.at_most else "at least"
        return f"{'pass' if self.passed else 'FAIL'}  {self.name:34} {self.value:10.5g}  {relation} {self.limit:g}"


@dataclass(frozen=True)
class Thresholds:
    """Thresholds; None is not checked. With ``strict``, a measured difference passes only if its whole 95% interval does.

    Raises ConfigError for a threshold that is not a number, which no measurement could pass."""

    max_perplexity_ratio: float | None = None
    min_accuracy_difference: float | None = None
    max_slowdown: float | None = None
    max_size_ratio: float | None = None
    max_cost_ratio: float | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        for name in ("max_perplexity_ratio", "max_slowdown", "max_size_ratio", "max_cost_ratio"):
            limit = getattr(self, name)
            if limit is not None and not 0 < limit < math.inf:
                raise ConfigError(f"{name}={limit:g} must be above 0 and finite. Leave it out to check nothing.")
        if self.min_accuracy_difference is not None and not -1 <= self.min_accuracy_difference <= 1:
            raise ConfigError(f"min_accuracy_difference={self.min_accuracy_difference:g} must be from -1 to 1.")

    def require(self, text: bool, tasks: bool, speed: bool, price: bool) -> None:
        """Raise ConfigError if a threshold is given whose value will not be measured."""
        for option, limit, there, what in (
            ("--max-perplexity-ratio", self.max_perplexity_ratio, text, "a text: --data, --prepared or a training run"),
            ("--min-accuracy-difference", self.min_accuracy_difference, tasks, "a --task"),
            ("--max-slowdown", self.max_slowdown, speed, "speed to be measured: leave --no-speed out"),
            ("--max-cost-ratio", self.max_cost_ratio, price, "a price: name a --hardware, or calibrate this machine"),
        ):
            if limit is not None and not there:
                raise ConfigError(f"{option} needs {what}.")

    def checks(self, result: Mapping[str, Any]) -> list[Check]:
        """The check of each given threshold against a comparison (the document of ``twostroke compare``)."""
        found: list[Check] = []
        if self.max_perplexity_ratio is not None:
            value = result["perplexity_ratio_interval"][1] if self.strict else result["perplexity_ratio"]
            found.append(Check("perplexity ratio", value, self.max_perplexity_ratio, True))
        if self.min_accuracy_difference is not None:
            for task in result["tasks"]:
                for name, metric in task["metrics"].items():
                    if name not in LOWER_IS_BETTER:
                        value = metric["low" if self.strict else "value"]
                        found.append(Check(f"{task['task']} {name}, B − A", value, self.min_accuracy_difference, False))
        if self.max_slowdown is not None:
            for point in result["speed"]:
                for phase in ("prefill", "decode"):
                    slowdown = 1 / point[f"{phase}_ratio"]
                    found.append(Check(f"{phase} time, batch {point['batch']}, B ÷ A", slowdown, self.max_slowdown, True))
        if self.max_size_ratio is not None:
            found.append(Check("bytes on disk, B ÷ A", result["size_ratio"], self.max_size_ratio, True))
        if self.max_cost_ratio is not None:
            found.append(Check("predicted cost a token, B ÷ A", result["cost"]["ratio"], self.max_cost_ratio, True))
        return found
