"""Low-rank adapters (LoRA, arXiv 2106.09685): how many parameters they add to which matrices."""

from __future__ import annotations

from functools import lru_cache

from twostroke.core.errors import ConfigError, did_you_mean
from twostroke.core.spec import ModelSpec
from twostroke.planner.params import LayerKind, Product, layer_kinds

ALL_LINEAR = "all-linear"
"""The target that stands for every matrix of the blocks, routers apart."""

_MODULES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q": ("self_attn.q_proj",),
    "q_a": ("self_attn.q_a_proj",),
    "q_b": ("self_attn.q_b_proj",),
    "kv_a": ("self_attn.kv_a_proj_with_mqa",),
    "kv_b": ("self_attn.kv_b_proj",),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "up": ("mlp.up_proj",),
    "down": ("mlp.down_proj",),
}
"""Modules, by their names on disk below the layer, that each of our products packs together; an expert's as the dense ones."""

_FUSED = {
    "gpt2": {"qkv": ("attn.c_attn",), "out": ("attn.c_proj",), "up": ("mlp.c_fc",), "down": ("mlp.c_proj",)},
    "phi3": {"qkv": ("self_attn.qkv_proj",), "gate_up": ("mlp.gate_up_proj",)},
    "phi": {"out": ("self_attn.dense",), "up": ("mlp.fc1",), "down": ("mlp.fc2",)},
}
"""Families that name or pack them otherwise."""


def modules_of(product: Product, kind: LayerKind, family: str = "llama") -> tuple[tuple[str, int], ...]:
    """(name on disk below the layer, outputs) of the modules that ``product`` packs together; none for a router."""
    name = product.name.removeprefix("expert_").removeprefix("shared_")
    names = _FUSED.get(family, {}).get(name) or _MODULES.get(name, ())
    if name == "qkv" and len(names) == 3:
        queries, keys = kind.n_heads * kind.qk_dim, kind.n_kv_heads * kind.qk_dim
        found = zip(names, (queries, keys, product.n - queries - keys), strict=True)
        return tuple((module, outputs) for module, outputs in found if outputs)
    return tuple((module, product.n // len(names)) for module in names)


def matches(module: str, target: str) -> bool:
    """As PEFT matches: the whole name, or its end behind a dot. A full name, of one layer, counts for every layer here."""
    return target == ALL_LINEAR or module == target or module.endswith(f".{target}") or target.endswith(f".{module}")


def targeted(product: Product, kind: LayerKind, targets: tuple[str, ...], family: str = "llama") -> tuple[int, ...]:
    """Outputs of each module of ``product`` that gets an adapter."""
    modules = modules_of(product, kind, family)
    return tuple(outputs for module, outputs in modules if any(matches(module, target) for target in targets))


@lru_cache(maxsize=256)
def check_targets(spec: ModelSpec, targets: tuple[str, ...]) -> None:
    """Raise ConfigError for a target that no layer of ``spec`` has."""
    modules = {m for kind, _ in layer_kinds(spec) for p in kind.products for m, _ in modules_of(p, kind, spec.family)}
    known = {ALL_LINEAR} | {module.rpartition(".")[2] for module in modules}
    for target in targets:
        if not any(matches(module, target) for module in modules):
            raise ConfigError(f"lora_targets={target!r} is not a matrix of this model. {did_you_mean(target, known)}")


def adapter_parameters(spec: ModelSpec, rank: int, targets: tuple[str, ...]) -> int:
    """Σ rank·(inputs + outputs) over the targeted matrices of all layers, every expert's included.

    Held against peft's own count in tests/planner/test_adapters.py.
    """
    return sum(
        count * product.copies * rank * (product.k + outputs)
        for kind, count in layer_kinds(spec)
        for product in kind.products
        for outputs in targeted(product, kind, targets, spec.family)
    )
