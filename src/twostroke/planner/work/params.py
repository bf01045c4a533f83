"""How many parameters a model has, part by part, exactly."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from twostroke.core.matrices import layer_kinds, norm_parameters
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
