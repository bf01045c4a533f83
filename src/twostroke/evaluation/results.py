"""Results of a task: one value an example for each metric, and the means, errors and pairings that are made from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt

from twostroke.core.errors import InputError

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Metric:
    """A mean over examples and its standard error, which says how far other examples of the same kind would move it."""

    value: float
    standard_error: float


def mean_of(values: Values) -> Metric:
    """Mean and s/√n, with s from n − 1 degrees of freedom as in lm-eval. One example has no error estimate, so NaN."""
    n = len(values)
    error = float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return Metric(float(values.mean()), error)


@dataclass(frozen=True)
class TaskResult:
    """``scores`` hold one value an example: 1 for right and 0 for wrong, or nats.

    ``n_cut`` prompts were longer than the model's context, and their beginning was cut off. ``key`` is a hash of task, examples
    and prompts. Results with the same key answered the same questions, with any tokenizer.
    """

    DOCUMENT = "task kind n_examples n_cut n_tokens chance metrics"

    task: Annotated[str, "its name"]
    kind: Annotated[str, "what is asked"]
    key: str
    scores: Mapping[str, Values]
    n_cut: Annotated[int, "prompts", "that were cut"]
    n_tokens: Annotated[int, "tokens", "that were scored, or of the prompts that were continued"]
    chance: Annotated[float | None, "share that guessing gets right"] = None

    @property
    def n_examples(self) -> Annotated[int, "questions"]:
        return len(next(iter(self.scores.values())))

    def metrics(self) -> Annotated[dict[str, Metric], "means with their errors"]:
        """Means of ``scores``. ``target_nats`` also gives perplexity = exp(mean), with its error by the delta method."""
        found = {name: mean_of(values) for name, values in self.scores.items()}
        if "target_nats" in found:
            nats = found["target_nats"]
            value = math.exp(min(nats.value, 700.0))
            found["perplexity"] = Metric(value, value * nats.standard_error)
        return found


def check_same_questions(a: TaskResult, b: TaskResult) -> None:
    if a.key != b.key:
        raise InputError(
            f"the two results of {a.task} are of different examples, so they cannot be paired. Run both on the same file and "
            "limit."
        )
