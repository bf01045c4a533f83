"""Rules and defaults of the ``[train]`` keys that decide what an update does: its precision, optimizer, rates and schedule."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from twostroke.core.errors import ConfigError
from twostroke.core.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from twostroke.core.recipe import TrainSettings

MUON_LEARNING_RATES = {"pretrain": 0.02, "full": 1e-3, "lora": 2e-3}
"""Of the matrices that Muon updates, where a recipe gives none. 0.02 is Jordan's (2024), the other two are assumed."""


def with_default_rates(settings: TrainSettings, method: str) -> TrainSettings:
    """``settings`` with each learning rate of 0 replaced by the default of ``method`` and the optimizer."""
    kind = "lora" if method == "qlora" else method
    return dataclasses.replace(
        settings,
        learning_rate=settings.learning_rate or OPTIMIZERS[settings.optimizer].rates[kind],
        muon_learning_rate=settings.muon_learning_rate or MUON_LEARNING_RATES[kind],
    )


def check_update(settings: TrainSettings) -> None:
    """Raise ConfigError for a value that is impossible, and for one that nothing would read."""
    t = settings
    for name in ("learning_rate", "muon_learning_rate"):
        if not 0 <= getattr(t, name) < float("inf"):
            raise ConfigError(f"train.{name}={getattr(t, name)} must be above 0 and finite; 0 is the default of the method.")
    for name in ("clip_norm", "eps"):
        if not 0 < getattr(t, name) < float("inf"):
            raise ConfigError(f"train.{name}={getattr(t, name)} must be above 0 and finite.")
    if not 0 <= t.weight_decay < float("inf"):
        raise ConfigError(f"train.weight_decay={t.weight_decay} must be at least 0 and finite.")
    for name in ("beta1", "beta2", "momentum", "ema_decay", "warmup_fraction", "min_lr_ratio"):
        if not 0 <= getattr(t, name) < 1:
            raise ConfigError(f"train.{name}={getattr(t, name)} must be at least 0 and less than 1.")
    if not 0 < t.decay_fraction <= 1:
        raise ConfigError(f"train.decay_fraction={t.decay_fraction} must be above 0 and at most 1.")
    if t.schedule == "wsd" and t.warmup_fraction + t.decay_fraction > 1:
        raise ConfigError(
            f"train.warmup_fraction={t.warmup_fraction:g} and train.decay_fraction={t.decay_fraction:g} are shares of one run: "
            "together they must be at most 1."
        )
    if t.nesterov and t.momentum == 0:
        raise ConfigError(
            "train.nesterov=true looks ahead along the momentum, and train.momentum=0 has none. Give one above 0."
        )
    fields = {field.name: field.default for field in dataclasses.fields(t)}
    for name, key, reader in (
        ("momentum", "optimizer", "sgd"),
        ("nesterov", "optimizer", "sgd"),
        ("decay_fraction", "schedule", "wsd"),
    ):
        if getattr(t, name) != fields[name] and getattr(t, key) != reader:
            raise ConfigError(
                f'train.{name}={getattr(t, name)!r} is read by train.{key}="{reader}" only, and it is "{getattr(t, key)}". '
                "Leave one of the two out."
            )
