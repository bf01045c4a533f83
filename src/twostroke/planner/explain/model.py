"""The terms that both phases share: parameters by part, and what a token leaves in the KV cache."""

from __future__ import annotations

from collections.abc import Iterable

from twostroke.core.matrices import LayerKind, Matrix, layer_kinds
from twostroke.core.spec import ModelSpec
from twostroke.planner.explain.term import Explanation
from twostroke.planner.params import Parameters, count_parameters

CONFIG = "config.json"

_ROWS_AND_COLUMNS = {
    "out": ("E", "H·D"),
    "q": ("H·D", "E"),
    "q_a": ("R_q", "E"),
    "q_b": ("H·D", "R_q"),
    "kv_a": ("(R_kv + D_rope)", "E"),
    "kv_b": ("H·(D_nope + D_v)", "R_kv"),
    "index_q": ("H_index·D_index", "R_q"),
    "index_k": ("D_index", "E"),
    "index_weights": ("H_index", "E"),
    "gate_up": ("2·F", "E"),
    "up": ("F", "E"),
    "down": ("E", "F"),
    "shared_gate_up": ("2·F_shared", "E"),
    "shared_up": ("F_shared", "E"),
    "shared_down": ("E", "F_shared"),
    "shared_gate": ("1", "E"),
    "router": ("X", "E"),
    "expert_gate_up": ("2·F_expert", "E"),
    "expert_up": ("F_expert", "E"),
    "expert_down": ("E", "F_expert"),
}
"""Outputs and inputs of each matrix by its name in ``planner.params``; ``qkv`` depends on the kind of layer."""


def letters(spec: ModelSpec, kind: LayerKind | None = None) -> dict[str, float]:
    """Letter → number, as in ``docs/notation.md``; heads are those of ``kind`` where layers differ."""
    kind = kind or layer_kinds(spec)[0][0]
    numbers: dict[str, float] = {
        "V": spec.vocab_size,
        "E": spec.d_model,
        "H": kind.n_heads,
        "K": kind.n_kv_heads,
        "D": kind.qk_dim,
        "D_v": kind.v_dim,
        "F": spec.d_ff,
        "P": spec.max_positions + spec.departures.extra_positions,
        "E_embedding": spec.departures.embedding_dim or spec.d_model,
    }
    if spec.moe is not None:
        numbers |= {"X": spec.moe.n_experts, "X_active": spec.moe.top_k}
        numbers |= {"F_expert": spec.moe.d_expert, "F_shared": spec.moe.shared_width}
    if spec.mla is not None:
        numbers |= {"R_q": spec.mla.q_lora_rank or 0, "R_kv": spec.mla.kv_lora_rank}
        numbers |= {"D_nope": spec.mla.qk_nope_dim, "D_rope": spec.mla.qk_rope_dim}
    if spec.indexer is not None:
        numbers |= {"H_index": spec.indexer.n_heads, "D_index": spec.indexer.head_dim}
    return numbers


def rows_and_columns(product: Matrix, kind: LayerKind) -> tuple[str, str]:
    """Formulas of n and k of a matrix."""
    if product.name == "qkv":
        shared = product.n == (kind.n_heads + kind.n_kv_heads) * kind.qk_dim
        return ("(H + K)·D" if shared else "(H + 2·K)·D"), "E"
    if product.name == "out" and kind.latent_dim is not None:
        return "E", "H·D_v"
    return _ROWS_AND_COLUMNS[product.name]


def stored(product: Matrix, kind: LayerKind) -> str:
    """Formula of the elements that a matrix's copies and biases store."""
    rows, columns = rows_and_columns(product, kind)
    one = f"{rows}·{columns}"
    if product.bias:
        one = f"({one} + {rows})"
    return f"X·{one}" if product.copies > 1 else one


def outside_matrices(spec: ModelSpec, kind: LayerKind) -> list[str]:
    """Formulas of a layer's parameters that are neither matrices nor biases nor norms of width E."""
    away = spec.departures
    parts = []
    if spec.qk_norm:
        parts.append("(H + K)·D" if away.qk_norm_over_heads else "2·D")
    parts += ["H"] if away.attention_sinks else []
    parts += ["1"] if away.layer_scale else []
    if kind.mlp == "moe" and spec.moe is not None:
        parts += ["X"] if spec.moe.correction_bias else []
        parts += ["E + X"] if spec.moe.router_scales else []
    if spec.mla is not None:
        parts.append("R_q + R_kv")
    if spec.indexer is not None:
        parts.append("2·D_index")
    return parts


def _storing(spec: ModelSpec) -> list[tuple[LayerKind, int]]:
    """Kinds of layer that store different parameters, with their number: a window changes what is computed, not stored."""
    found: dict[tuple[object, ...], tuple[LayerKind, int]] = {}
    for kind, count in layer_kinds(spec):
        key = (kind.matrices, kind.norm_parameters, kind.other_parameters)
        first, already = found.get(key, (kind, 0))
        found[key] = (first, already + count)
    return list(found.values())


def total(parts: Iterable[str]) -> str:
    return " + ".join(parts) or "0"


def explain_model(terms: Explanation, spec: ModelSpec) -> None:
    """Parameters of each matrix, of a block, of everything; those that one token passes; those it is multiplied with."""
    parameters, kinds = count_parameters(spec), _storing(spec)
    norm = "2·E" if spec.norm == "layernorm" else "E"
    numbers = letters(spec)
    for number, (kind, count) in enumerate(kinds, 1):
        suffix = f"_{number}" if len(kinds) > 1 else ""
        own = letters(spec, kind)
        label = f" of a {kind.mlp} layer, {count} of them" if suffix else f" of a block, L = {count}"
        for product in kind.matrices:
            terms.add(
                "parameters", f"N_{product.name}{suffix}", product.stored + product.biases, "parameters",
                stored(product, kind), f"{CONFIG}: matrix{' and bias' if product.bias else ''}{label}", **own,
            )  # fmt: skip
        matrices = [f"N_{p.name}{suffix}" for p in kind.matrices]
        norms = f"{spec.departures.norms_per_block}·{norm}"
        terms.add(
            "parameters", f"N_block{suffix}", kind.parameters, "parameters",
            total([*matrices, norms, *outside_matrices(spec, kind)]), f"matrices, norms and what else is stored{label}", **own,
        )  # fmt: skip
    _ends(terms, spec, parameters, numbers)
    blocks = [f"L_{i}·N_block_{i}" for i in range(1, len(kinds) + 1)] if len(kinds) > 1 else ["L·N_block"]
    layers: dict[str, float] = {f"L_{i}": count for i, (_, count) in enumerate(kinds, 1)} if len(kinds) > 1 else {}
    layers["L"] = spec.n_layers
    outside = int(spec.departures.final_norm) + int(spec.departures.embedding_norm)
    ends = [t.symbol for t in terms if t.symbol in ("N_embedding", "N_positions", "N_projections", "N_head")]
    terms.add(
        "parameters", "N", parameters.total, "parameters", total([*ends, *blocks, f"{outside}·{norm}"]),
        "embedding, blocks, norms around them" + ("; the head is the embedding" if spec.tied_embeddings else ", head"),
        **numbers, **layers,
    )  # fmt: skip
    idle = []
    for number, (kind, _) in enumerate(kinds, 1):
        suffix = f"_{number}" if len(kinds) > 1 else ""
        experts = [f"N_{p.name}{suffix}" for p in kind.matrices if p.copies > 1]
        if experts:
            idle.append(f"L{suffix}·(1 − X_active/X)·({total(experts)})")
    terms.add(
        "parameters", "N_active", parameters.active, "parameters", " − ".join(["N", *idle]),
        "those one token passes: the experts its router picks" if idle else "dense: a token passes all of them",
        **numbers, **layers,
    )  # fmt: skip
    looked_up = ["N_positions"] if parameters.positions else []
    looked_up += [] if spec.tied_embeddings else ["N_embedding"]
    terms.add(
        "parameters", "N_multiplied", parameters.in_products, "parameters", " − ".join(["N_active", *looked_up]),
        "those a token is multiplied with: without tables that are only looked up",
    )  # fmt: skip
    _matrices(terms, spec, parameters, kinds, numbers | layers)


def _ends(terms: Explanation, spec: ModelSpec, parameters: Parameters, numbers: dict[str, float]) -> None:
    """What surrounds the blocks."""
    terms.add("parameters", "N_embedding", parameters.embedding, "parameters", "V·E_embedding", CONFIG, **numbers)
    if parameters.positions:
        terms.add("parameters", "N_positions", parameters.positions, "parameters", "P·E", "learned positions", **numbers)
    if parameters.projections:
        source = "between the embedding's width and the blocks'"
        terms.add("parameters", "N_projections", parameters.projections, "parameters", "2·E_embedding·E", source, **numbers)
    if parameters.head:
        parts = ([] if spec.tied_embeddings else ["V·E_embedding"]) + (["V"] if spec.departures.head_bias else [])
        terms.add("parameters", "N_head", parameters.head, "parameters", total(parts), "output matrix of its own", **numbers)


def _matrices(
    terms: Explanation, spec: ModelSpec, parameters: Parameters, kinds: list[tuple[LayerKind, int]], numbers: dict[str, float]
) -> None:
    """Elements of the blocks' matrices: stored, and met by one token."""
    parts, active = [], []
    for number, (kind, _) in enumerate(kinds, 1):
        suffix = f"_{number}" if len(kinds) > 1 else ""
        for product in kind.matrices:
            rows, _ = rows_and_columns(product, kind)
            bias = f" − {rows}" + ("·X" if product.copies > 1 else "") if product.bias else ""
            matrix = f"(N_{product.name}{suffix}{bias})" if bias else f"N_{product.name}{suffix}"
            parts.append(f"L{suffix}·{matrix}")
            active.append(f"L{suffix}·{matrix}" + ("·X_active/X" if product.copies > 1 else ""))
    terms.add(
        "parameters", "N_matrices", parameters.block_matrices, "parameters", total(parts),
        "matrices of all blocks, biases apart", **numbers,
    )  # fmt: skip
    if parameters.active_matrices != parameters.block_matrices:
        terms.add(
            "parameters", "N_matrices_active", parameters.active_matrices, "parameters", total(active),
            "those that one token is multiplied with", **numbers,
        )  # fmt: skip
