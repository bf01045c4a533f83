"""The ``[train]`` keys of a recipe; rules and defaults of those that decide what an update does."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from twostroke.core.engines import Offload, Recomputation, TrainingType
from twostroke.core.errors import ConfigError
from twostroke.core.optimizers import OPTIMIZERS, Optimizer


@dataclass(frozen=True)
class TrainSettings:
    """One optimizer step reads ``batch_size · sequence_length · grad_accumulation`` tokens.

    Exactly one of ``steps`` and ``budget_s`` is given: a budget is turned into steps by the planner's predicted step time
    before the run starts, so that the schedule is fixed and a resume is exact.

    ``dtype``: "bf16" and "fp16" compute in 16 bits beside fp32 master weights, fp16 with a dynamic loss scale; "pure_bf16"
    keeps nothing in fp32 and rounds updates stochastically: 8 bytes a parameter with AdamW instead of 20. A processor without
    products of bf16 computes "bf16" in fp32 (``policy.computed_type``). ``optimizer``: "muon" updates the blocks' matrices,
    with ``muon_learning_rate``, and AdamW the rest; "lamb" moves each matrix by a share of its length. Weight decay is
    decoupled in "adamw" and "muon", a part of the direction in "lamb", added to the gradient in "adam" and "sgd", and spares
    embeddings, norms and biases unless told otherwise.
    ``schedule``: "wsd" stays at the full rate until the last ``decay_fraction`` of the steps. ``ema_decay`` keeps a running
    average of the weights, scored beside them and written to ``model-ema``. ``activation_checkpointing`` computes again in the
    backward pass: "full" whole blocks, "selective" all but products and flash attention. ``offload_optimizer`` = "disk" keeps
    the optimizer's state, and ``offload_activations`` = "disk" what blocks keep for the backward pass, in files of the run's
    directory that have no name and go with the process; results are the same bits.

    Of mixtures of experts: ``balance_weight`` and ``router_z_weight`` are those of two losses added to the router's gradient
    (``model.experts``); where a family's routers have a correction bias, it moves by ``balance_bias_rate`` a step.

    Of early exit (``training.early_exit``): rows pass by a layer at a probability that grows with depth to ``layer_dropout``;
    the loss of ``exits_per_step`` earlier layers, all in turn, is trained beside the last layer's, weighed by ``exit_loss``.
    """

    steps: int = 0
    budget_s: float = 0.0
    batch_size: int = 16
    sequence_length: int = 512
    grad_accumulation: int = 1
    dtype: TrainingType = "bf16"
    optimizer: Optimizer = "adamw"
    learning_rate: float = 0.0  # 0: by method and optimizer, as the run's recipe.json then says
    muon_learning_rate: float = 0.0
    momentum: float = 0.9  # of sgd
    nesterov: bool = False
    weight_decay: float = 0.1
    decay_embeddings: bool = False
    decay_norms: bool = False  # biases with them
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_fraction: float = 0.05
    decay_fraction: float = 0.2  # of wsd
    min_lr_ratio: float = 0.02
    clip_norm: float = 1.0
    ema_decay: float = 0.0  # 0: no running average of the weights
    activation_checkpointing: Recomputation = "none"
    offload_optimizer: Offload = "none"
    offload_activations: Offload = "none"
    compile: bool = True
    anomaly_policy: Literal["skip", "rollback", "stop"] = "skip"
    spike_factor: float = 0.0  # times the running median that make a spike; 0: only what is not finite is an anomaly
    anomaly_limit: int = 10  # anomalies in a row after which the run gives up
    checkpoint_every: int = 0  # steps; 0: only at the end and on a signal
    checkpoint_in_background: bool = True  # the step pays for a copy in memory, not for the disk
    keep_checkpoints: int = 2
    keep_every: int = 0  # steps whose checkpoints are never removed; 0: none
    evaluate_every: int = 0  # steps; 0: only at the end
    diagnostics_every: int = 0  # steps between looks at activations and update sizes; 0: never
    tensorboard: bool = False  # scalars into <output>/tensorboard
    sample_every: int = 0  # steps between texts that continue sample_prompts; 0: never
    sample_prompts: tuple[str, ...] = ()
    balance_weight: float = 0.01
    router_z_weight: float = 0.001
    balance_bias_rate: float = 0.001
    layer_dropout: float = 0.0  # of the last layer
    exit_loss: float = 0.0  # 0: the head reads the last layer alone
    exits_per_step: int = 1

    @property
    def compute_dtype(self) -> str:
        """The type of forward and backward, and of the model that is written."""
        return "bf16" if self.dtype == "pure_bf16" else self.dtype


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
    for name in ("balance_weight", "router_z_weight", "balance_bias_rate", "exit_loss"):
        if not 0 <= getattr(t, name) < float("inf"):
            raise ConfigError(f"train.{name}={getattr(t, name)} must be at least 0 and finite.")
    for name in ("beta1", "beta2", "momentum", "ema_decay", "warmup_fraction", "min_lr_ratio", "layer_dropout"):
        if not 0 <= getattr(t, name) < 1:
            raise ConfigError(f"train.{name}={getattr(t, name)} must be at least 0 and less than 1.")
    if not 0 < t.decay_fraction <= 1:
        raise ConfigError(f"train.decay_fraction={t.decay_fraction} must be above 0 and at most 1.")
    if t.schedule == "wsd" and t.warmup_fraction + t.decay_fraction > 1:
        raise ConfigError(
            f"train.warmup_fraction={t.warmup_fraction:g} and train.decay_fraction={t.decay_fraction:g} are shares of one run: "
            "together they must be at most 1."
        )
    if t.exits_per_step != 1 and not (t.exit_loss > 0 and t.exits_per_step > 1):
        raise ConfigError(
            f"train.exits_per_step={t.exits_per_step} must be at least 1, and above it needs train.exit_loss above 0: it says "
            "how many earlier layers have a loss in a step."
        )
    if t.nesterov and t.momentum == 0:
        raise ConfigError(
            "train.nesterov=true looks ahead along the momentum, and train.momentum=0 has none. Give one above 0."
        )
    _check_offload(t)
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


def _check_offload(t: TrainSettings) -> None:
    if t.offload_optimizer != "none" and t.optimizer == "sgd" and t.momentum == 0:
        raise ConfigError(
            f'train.offload_optimizer="{t.offload_optimizer}" has nothing to keep: train.optimizer="sgd" with train.momentum=0 '
            "has no state. Leave it out."
        )
    if t.offload_optimizer != "none" and t.checkpoint_every and t.checkpoint_in_background:
        raise ConfigError(
            f'train.offload_optimizer="{t.offload_optimizer}" keeps the optimizer\'s state out of memory, and '
            "train.checkpoint_in_background=true copies it there before it is written. Set "
            "train.checkpoint_in_background=false."
        )
    if t.offload_activations != "none" and t.activation_checkpointing == "selective":
        raise ConfigError(
            f'train.offload_activations="{t.offload_activations}" does not see what '
            'train.activation_checkpointing="selective" keeps. Use "none" or "full".'
        )
