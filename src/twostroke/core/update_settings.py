"""Rules and defaults of the ``[train]`` keys that decide what an update does: its precision, optimizer, rates and schedule."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from twostroke.core.errors import ConfigError

if TYPE_CHECKING:
    from twostroke.core.recipe import TrainSettings

LEARNING_RATES: dict[str, dict[str, float]] = {
    "pretrain": {"adamw": 4e-3, "adam": 4e-3, "sgd": 0.1, "muon": 4e-3},
    "full": {"adamw": 2e-5, "adam": 2e-5, "sgd": 5e-3, "muon": 2e-5},
    "lora": {"adamw": 2e-4, "adam": 2e-4, "sgd": 5e-2, "muon": 2e-4},
}
"""Learning rate where a recipe gives none, by method and optimizer; "qlora" is as "lora". Where they come from: pretraining of
models of tens of millions of parameters with this package; 2e-5 for all weights (Llama 2, arXiv:2307.09288, section 3.1); 2e-4
for adapters (QLoRA, arXiv:2305.14314, appendix B.2). Larger models want smaller rates. SGD's
0.1 is the best of 0.1, 0.5 and 2 over 120 steps of 0.9M parameters; its other two are assumed."""

MUON_LEARNING_RATES = {"pretrain": 0.02, "full": 1e-3, "lora": 2e-3}
"""The same of the matrices that Muon updates; 0.02 is Jordan's (2024), the other two are assumed."""


def with_default_rates(settings: TrainSettings, method: str) -> TrainSettings:
    """``settings`` with each learning rate of 0 replaced by the default of ``method`` and the optimizer."""
    kind = "lora" if method == "qlora" else method
    return dataclasses.replace(
        settings,
        learning_rate=settings.learning_rate or LEARNING_RATES[kind][settings.optimizer],
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
