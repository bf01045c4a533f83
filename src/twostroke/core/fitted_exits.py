"""Where rows may leave a model early, and how sure it must be there, as ``twostroke exits`` found it for one model."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from twostroke.core.aside import write_text
from twostroke.core.documents import read_object
from twostroke.core.errors import ConfigError, CorruptFileError
from twostroke.core.tables import build

FITTED_EXITS = "early_exit.json"
"""The file, beside ``config.json``."""

MIN_THRESHOLD, NEVER = 0.0, 1.0
"""Thresholds of the difference between a row's two largest probabilities: each row leaves at the first exit; none does."""


@dataclass(frozen=True)
class FittedExits:
    """A row leaves after the first of ``layers`` at which its two largest probabilities differ by ``threshold``.

    It was fitted to the model with weights ``weights`` (a digest), held as ``dtype``: with a probability of ``confidence`` at
    most ``most_changed`` of the greedy tokens of text like the calibration's differ from the whole model's. Measured on its
    ``n_tokens`` tokens: the share ``changed``, ``extra_nats`` a token, and ``shares`` of rows that left after each of the
    layers, those that passed all of them last. ``predicted_speed``: of one request's decoding, by the bytes that it reads.
    """

    layers: tuple[int, ...]
    threshold: float
    weights: str
    dtype: str
    most_changed: float
    confidence: float
    n_tokens: int
    changed: float
    extra_nats: float
    shares: tuple[float, ...]
    predicted_speed: float

    def __post_init__(self) -> None:
        if not MIN_THRESHOLD <= self.threshold <= NEVER:
            raise ConfigError(f"threshold={self.threshold!r} must be from {MIN_THRESHOLD:g} to {NEVER:g}.")

    def write(self, directory: Path) -> None:
        """Write it into the model's ``directory``, in the place of an earlier one. Raises OSError."""
        write_text(directory / FITTED_EXITS, json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def read_fitted_exits(directory: Path) -> FittedExits:
    """Raises ConfigError where ``directory`` has none, and CorruptFileError for a file that is not one."""
    file = directory / FITTED_EXITS
    if not file.is_file():
        raise ConfigError(
            f"{directory} has no {FITTED_EXITS}, so no threshold is known that bounds what early exit changes. Run "
            f"`twostroke exits {directory} --data TEXT` once, or give a threshold of your own: at:0.9."
        )
    try:
        return build(FittedExits, read_object(file), FITTED_EXITS)
    except (ConfigError, TypeError) as error:
        raise CorruptFileError(f"{file} is damaged: {error} Run `twostroke exits` again.") from None


def default_exits(n_layers: int) -> tuple[int, ...]:
    """A quarter, half and three quarters of the layers."""
    return tuple(sorted({round(n_layers * k / 4) for k in (1, 2, 3)} - {0, n_layers}))


def check_exits(layers: tuple[int, ...], n_layers: int) -> None:
    """Raises ConfigError unless ``layers`` ascend within the model's, before the last."""
    if not layers or list(layers) != sorted(set(layers)) or not 1 <= layers[0] <= layers[-1] < n_layers:
        raise ConfigError(
            f"exits after layers {', '.join(map(str, layers)) or '(none)'} are not possible: give ascending numbers from 1 to "
            f"{n_layers - 1}, before the last of {n_layers} layers."
        )
