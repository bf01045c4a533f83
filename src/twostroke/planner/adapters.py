"""Low-rank adapters (LoRA, arXiv 2106.09685): how many parameters they add to which matrices."""

from __future__ import annotations

from functools import lru_cache

from twostroke.core.errors import ConfigError, did_you_mean
from twostroke.core.spec import ModelSpec
from twostroke.planner.params import LayerKind, Product, layer_kinds

ALL_LINEAR = "all-linear"
"""The target that stands for every matrix of the blocks, routers apart."""

_MODULES = {
    "q": ("q_proj",),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "up": ("up_proj",),
    "down": ("down_proj",),
    "q_a": ("q_a_proj",),
    "q_b": ("q_b_proj",),
    "kv_a": ("kv_a_proj_with_mqa",),
    "kv_b": ("kv_b_proj",),
}
"""Modules, by their names on disk, that each of our products is made of; ``qkv`` and experts are taken apart below."""


def modules_of(product: Product, kind: LayerKind) -> tuple[tuple[str, int], ...]:
    """(name on disk, outputs) of the modules that ``product`` packs together."""
    name = product.name.removeprefix("expert_").removeprefix("shared_")
    if name == "qkv":
        keys = kind.n_kv_heads * kind.qk_dim
        values = product.n - kind.n_heads * kind.qk_dim - keys
        found = (("q_proj", kind.n_heads * kind.qk_dim), ("k_proj", keys), ("v_proj", values))
        return tuple((module, outputs) for module, outputs in found if outputs)
    names = _MODULES.get(name, ())
    return tuple((module, product.n // len(names)) for module in names)


def targeted(product: Product, kind: LayerKind, targets: tuple[str, ...]) -> tuple[int, ...]:
    """Outputs of each module of ``product`` that gets an adapter."""
    modules = modules_of(product, kind)
    return tuple(outputs for module, outputs in modules if ALL_LINEAR in targets or module in targets)


@lru_cache(maxsize=256)
def check_targets(spec: ModelSpec, targets: tuple[str, ...]) -> None:
    """Raise ConfigError for a target that no layer of ``spec`` has."""
    known = {ALL_LINEAR} | {m for kind, _ in layer_kinds(spec) for p in kind.products for m, _ in modules_of(p, kind)}
    for target in targets:
        if target not in known:
            raise ConfigError(f"lora_targets={target!r} is not a matrix of this model. {did_you_mean(target, known)}")


def adapter_parameters(spec: ModelSpec, rank: int, targets: tuple[str, ...]) -> int:
    """Σ rank·(inputs + outputs) over the targeted matrices of all layers, every expert's included.

    Held against peft's own count in tests/planner/test_adapters.py.
    """
    return sum(
        count * product.copies * rank * (product.k + outputs)
        for kind, count in layer_kinds(spec)
        for product in kind.products
        for outputs in targeted(product, kind, targets)
    )
