"""How many parameters a model has, part by part, exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from twostroke.core.errors import ConfigError, did_you_mean
from twostroke.core.families import weight_names
from twostroke.core.matrices import ALL_LINEAR, Matrix, layer_kinds, norm_parameters
from twostroke.core.named import named
from twostroke.core.spec import ModelSpec


@dataclass(frozen=True)
class Parameters:
    """Parameter counts, exact."""

    total: Annotated[int, "of all tensors, tied ones once"]
    embedding: Annotated[int, "input embedding"]
    positions: Annotated[int, "learned positions"]
    head: Annotated[int, "untied output matrix and its bias"]
    final_norm: Annotated[int, "norms outside blocks"]
    projections: Annotated[int, "between an embedding of another width and the blocks"]
    attention: Annotated[int, "matrices and biases of all blocks, QK-norms, sinks and router scales with them"]
    mlp: Annotated[int, "matrices and biases of all blocks"]
    norms: Annotated[int, "of all blocks"]
    n_layers: Annotated[int, "L, layers"]
    active: Annotated[int, "those one token passes: all in a dense model, top_k experts in a mixture"]
    in_products: Annotated[int, "active without an untied input embedding and learned positions, which are only looked up"]
    block_matrices: Annotated[int, "stored elements of the blocks' matrices"]
    active_matrices: Annotated[int, "those of them that one token is multiplied with"]


@lru_cache(maxsize=256)
def count_parameters(spec: ModelSpec) -> Parameters:
    """Exact parameter counts of ``spec``: every tensor of a checkpoint, tied ones once.

    V·E·(1 if tied else 2) + P·E if positions are learned + Σ_layers [matrices + biases + norms + what else a layer stores] +
    final norm, with G·E per norm, G = 2 for LayerNorm (weight and bias), 1 for RMSNorm. Llama-3.1-8B gives 8,030,261,248 and
    DeepSeek-V3 671,026,419,200 (tests/planner/test_params.py, which also holds it against the built decoder, and
    tests/planner/test_every_config.py against transformers).
    """
    away, kinds = spec.departures, layer_kinds(spec)
    norm = norm_parameters(spec)
    width = away.embedding_dim or spec.d_model
    embedding = _named("N_embedding", spec.vocab_size * width, "config.json")
    projections = 2 * width * spec.d_model if away.embedding_dim is not None else 0
    projections = _named("N_projections", projections, "between the embedding's width and the blocks'")
    positions = (spec.max_positions + away.extra_positions) * spec.d_model if spec.positions == "learned" else 0
    positions = _named("N_positions", positions, "learned positions")
    head = (0 if spec.tied_embeddings else spec.vocab_size * width) + (spec.vocab_size if away.head_bias else 0)
    head = _named("N_head", head, "output matrix of its own")
    norms_outside = _named("N_norms_outside", norm * (int(away.final_norm) + int(away.embedding_norm)), "norms outside blocks")
    mlp = sum(count * sum(p.stored + p.biases for p in kind.matrices if p.component == "mlp") for kind, count in kinds)
    norms = sum(count * kind.norm_parameters for kind, count in kinds)
    blocks = sum(count * kind.parameters for kind, count in kinds)
    tied = "embedding, blocks, norms around them" + ("; the head is the embedding" if spec.tied_embeddings else ", head")
    total = _named("N", embedding + positions + head + projections + norms_outside + blocks, tied)
    active = total - sum(count * kind.idle_parameters for kind, count in kinds)
    active = _named("N_active", active, "those one token passes: all, or of experts those its router picks")
    multiplied = active - positions - (0 if spec.tied_embeddings else embedding)
    matrices = sum(count * kind.matrix_parameters for kind, count in kinds)
    met = sum(count * kind.active_matrix_parameters for kind, count in kinds)
    return Parameters(
        total=total,
        embedding=embedding,
        positions=positions,
        head=head,
        final_norm=norms_outside,
        projections=projections,
        attention=blocks - mlp - norms,
        mlp=mlp,
        norms=norms,
        n_layers=spec.n_layers,
        active=active,
        in_products=_named("N_multiplied", multiplied, "those a token is multiplied with: tables that are looked up left out"),
        block_matrices=_named("N_matrices", matrices, "matrices of all blocks, biases apart"),
        active_matrices=_named("N_matrices_active", met, "of them those that one token is multiplied with"),
    )


def _named(symbol: str, parameters: int, source: str) -> int:
    return named(symbol, parameters, "parameters", source)


def modules_of(matrix: Matrix, family: str = "llama") -> tuple[tuple[str, int], ...]:
    """(name on disk below the layer, outputs) of the modules that ``matrix`` packs together, or of the parameter that holds it
    of all experts; none for a router."""
    return weight_names(family).parts(matrix)


def matches(module: str, target: str) -> bool:
    """As PEFT matches: the whole name, or its end behind a dot. A full name, of one layer, counts for every layer here."""
    return target == ALL_LINEAR or module == target or module.endswith(f".{target}") or target.endswith(f".{module}")


def targeted(matrix: Matrix, targets: tuple[str, ...], family: str = "llama") -> tuple[int, ...]:
    """Outputs of each module of ``matrix`` that gets an adapter. Of experts that are chosen those that a target names: "all
    linear" modules leave them out, as PEFT does, for which they are no modules."""
    modules = modules_of(matrix, family)
    if matrix.copies > 1:
        targets = tuple(target for target in targets if target != ALL_LINEAR)
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

    Held against peft's own count in tests/planner/test_planned_adapters.py.
    """
    trained = _adapters(spec, rank, targets, lambda product: product.copies)
    return named("N_adapters", trained, "parameters", "of all adapters: rank·(inputs + outputs) of every targeted matrix")


def active_adapter_parameters(spec: ModelSpec, rank: int, targets: tuple[str, ...]) -> int:
    """Those that one token passes: of experts the adapters of the chosen ones."""
    passed = _adapters(spec, rank, targets, lambda product: product.active)
    return named("N_adapters_active", passed, "parameters", "of adapters: those that one token passes")


def _adapters(spec: ModelSpec, rank: int, targets: tuple[str, ...], times: Callable[[Matrix], int]) -> int:
    return sum(
        count * times(product) * rank * (product.k + outputs)
        for kind, count in layer_kinds(spec)
        for product in kind.matrices
        for outputs in targeted(product, targets, spec.family)
    )
