"""Low-rank adapters (LoRA, arXiv 2106.09685): how many parameters they add to which matrices."""

from __future__ import annotations

from functools import lru_cache

from twostroke.core.errors import ConfigError, did_you_mean
from twostroke.core.families import weight_names
from twostroke.core.matrices import Matrix, layer_kinds
from twostroke.core.named import named
from twostroke.core.recipe import ALL_LINEAR
from twostroke.core.spec import ModelSpec


def modules_of(matrix: Matrix, family: str = "llama") -> tuple[tuple[str, int], ...]:
    """(name on disk below the layer, outputs) of the modules that ``matrix`` packs together; none for a router."""
    return weight_names(family).parts(matrix)


def matches(module: str, target: str) -> bool:
    """As PEFT matches: the whole name, or its end behind a dot. A full name, of one layer, counts for every layer here."""
    return target == ALL_LINEAR or module == target or module.endswith(f".{target}") or target.endswith(f".{module}")


def targeted(matrix: Matrix, targets: tuple[str, ...], family: str = "llama") -> tuple[int, ...]:
    """Outputs of each module of ``matrix`` that gets an adapter."""
    modules = modules_of(matrix, family)
    return tuple(outputs for module, outputs in modules if any(matches(module, target) for target in targets))


@lru_cache(maxsize=256)
def check_targets(spec: ModelSpec, targets: tuple[str, ...]) -> None:
    """Raise ConfigError for a target that no layer of ``spec`` has."""
    modules = {m for kind, _ in layer_kinds(spec) for p in kind.matrices for m, _ in modules_of(p, spec.family)}
    known = {ALL_LINEAR} | {module.rpartition(".")[2] for module in modules}
    for target in targets:
        if not any(matches(module, target) for module in modules):
            raise ConfigError(f"lora_targets={target!r} is not a matrix of this model. {did_you_mean(target, known)}")


def adapter_parameters(spec: ModelSpec, rank: int, targets: tuple[str, ...]) -> int:
    """Σ rank·(inputs + outputs) over the targeted matrices of all layers, every expert's included.

    Held against peft's own count in tests/planner/test_adapters.py.
    """
    trained = sum(
        count * product.copies * rank * (product.k + outputs)
        for kind, count in layer_kinds(spec)
        for product in kind.matrices
        for outputs in targeted(product, targets, spec.family)
    )
    return named("N_adapters", trained, "parameters", "of all adapters: rank·(inputs + outputs) of every targeted matrix")
