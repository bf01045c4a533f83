"""What Twostroke's two engines run: the one list that recipes and engines refuse by, and that plans say "planned only" by.

Families and their parts stand with the model (``ModelSpec.unbuilt_features``); here is what a run adds to them.
"""

from __future__ import annotations

from typing import Literal, get_args

from twostroke.core.optimizers import TRAINED
from twostroke.core.schemes import CACHE_TYPES, WEIGHTS, scheme_of
from twostroke.core.spec import ModelSpec

Method = Literal["pretrain", "full", "lora", "qlora"]
TrainingType = Literal["bf16", "fp32", "fp16", "pure_bf16"]
Recomputation = Literal["none", "selective", "full"]
Offload = Literal["none", "disk"]
"""Where a step keeps what memory would hold otherwise."""

METHODS: tuple[str, ...] = get_args(Method)
TRAINING_TYPES: tuple[str, ...] = get_args(TrainingType)
RECOMPUTATIONS: tuple[str, ...] = get_args(Recomputation)

WEIGHT_CHOICES, CACHE_CHOICES = (f"auto, {', '.join(names[:-1])} or {names[-1]}" for names in (WEIGHTS, CACHE_TYPES))
"""For help texts."""

TRAINS_ON = ("NVIDIA", "AMD")
"""Makers of the accelerators that ``torch.cuda`` drives, which train beside the CPU. Inference runs on the CPU alone."""


def not_trained(
    spec: ModelSpec,
    *,
    method: str = "full",
    dtype: str = "bf16",
    optimizer: str = "adamw",
    recomputation: str = "none",
    logits: str = "chunked",
    devices: int = 1,
    accelerator: str | None = None,
) -> tuple[str, ...]:
    """What of such a run ``twostroke train`` does not do, in words; empty where it does all of it. ``accelerator``: maker and
    name, None on a CPU."""
    named = {
        f"method {method}": method not in METHODS,
        f"training in {dtype}": dtype not in TRAINING_TYPES,
        f"optimizer {optimizer}": optimizer not in TRAINED,
        f"recomputation {recomputation}": recomputation not in RECOMPUTATIONS,
        f"{logits} logits": logits != "chunked",
        f"training over {devices:,} devices": devices > 1,
        f"training on {accelerator}": accelerator is not None and accelerator.split()[0] not in TRAINS_ON,
    }
    return spec.unbuilt_features + tuple(name for name, absent in named.items() if absent)


def not_served(
    spec: ModelSpec,
    *,
    weights: str = "bf16",
    cache: str = "bf16",
    devices: int = 1,
    accelerator: str | None = None,
    engine: str | None = None,
) -> tuple[str, ...]:
    """What of such a server ``twostroke serve`` and ``generate`` do not run, in words; empty where they run all of it.
    ``weights`` may name a group, as int4-g64; ``engine`` is another's."""
    named = {
        f"{weights} weights": weights.partition("-")[0] not in WEIGHTS or scheme_of(weights).experts_only,
        f"a KV cache in {cache}": cache not in CACHE_TYPES,
        f"one copy over {devices:,} devices": devices > 1,
        f"inference on {accelerator}": accelerator is not None,
        f"{engine}'s kernels": engine is not None,
    }
    return spec.unbuilt_features + tuple(name for name, absent in named.items() if absent)


def weights_text(weights: str, runner: str) -> str:
    """How ``runner`` computes with ``weights``: "int4 expanded to bf16", or their name where it multiplies them as they are."""
    multiplied = scheme_of(weights).multiplied(runner)
    return weights if multiplied == weights else f"{weights} expanded to {multiplied}"


def planned_only_text(reasons: tuple[str, ...]) -> str:
    """The sentence of plans that cannot run here."""
    return f"planned only: Twostroke's engines do not run {', '.join(reasons)}."
