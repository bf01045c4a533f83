"""One table of a model's weight matrices, without torch: names, shapes, what is packed together, biases, how they are split.

Parameter counts, FLOP, adapters, Muon, weight names on disk, quantisation, lowering and meters read it, so that what a block
holds is stated here alone. ``core.families.weights`` names the same matrices as checkpoints do.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from twostroke.core.named import letter, named
from twostroke.core.spec import MlaSpec, ModelSpec

Split = Literal["column", "row", "vocabulary", "replicated", "expert"]
_PLACES = {"attention": "attn", "mlp": "mlp"}


ALL_LINEAR = "all-linear"
"""The name in ``lora.targets`` that stands for every matrix of the blocks that is a module: experts' are parameters."""


@dataclass(frozen=True)
class Matrix:
    """One weight matrix, and the product (rows, k) × (k, n) that it takes part in: n outputs, k inputs, biases apart.

    ``component`` is the row of the comparison table that it belongs to: attention, mlp or head. ``packed`` are matrices of
    their own that are held as one, by name and outputs, in the order of its rows. ``copies`` matrices of this shape are stored
    (experts), of which one token passes ``active``. ``split`` says how tensor parallelism divides it: by outputs (column), by
    inputs (row), by vocabulary, by whole experts, or not at all (replicated).
    """

    component: str
    name: str
    n: int
    k: int
    bias: bool = False
    copies: int = 1
    active: int = 1
    split: Split = "column"
    packed: tuple[tuple[str, int], ...] = ()

    @property
    def module(self) -> str:
        """Where it is in a block that the decoder builds: attn.qkv, mlp.down."""
        return f"{_PLACES[self.component]}.{self.name}"

    @property
    def chooses(self) -> bool:
        """Whether it is a router's, a gate's or an indexer's: small, kept plain by every scheme and never adapted."""
        return self.split == "replicated" and not self.name.endswith("_a")

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """(name, outputs) of what it packs, or of itself: what checkpoints store, adapters target and Muon orthogonalises."""
        return self.packed or ((self.name, self.n),)

    @property
    def rows(self) -> int:
        """copies·n, the rows of the one tensor that holds all its matrices, one after another."""
        return self.copies * self.n

    @property
    def weights(self) -> int:
        """n·k, the elements of one matrix."""
        return self.n * self.k

    @property
    def passed(self) -> int:
        """active·n·k, the elements that one token is multiplied with."""
        return self.active * self.weights

    @property
    def stored(self) -> int:
        """copies·n·k, the elements of all its matrices."""
        source = "config.json: matrix" if self.copies == 1 else "config.json: matrices of all experts"
        return named(f"N_{self.name}", self.copies * self.weights, "parameters", source)

    @property
    def biases(self) -> int:
        """Elements of the biases of all copies."""
        return self.rows if self.bias else 0


@dataclass(frozen=True)
class Norm:
    """One norm of a block by its name and its place there, over ``n`` numbers."""

    name: str
    module: str
    n: int


@dataclass(frozen=True)
class Vector:
    """``n`` stored numbers of a block that are neither a norm nor a bias, by their name and their place there. ``split`` is
    as a matrix's."""

    name: str
    module: str
    n: int
    split: Split = "replicated"


@dataclass(frozen=True)
class LayerKind:
    """One kind of layer: its matrices in the order they run, its attention, and its parameters outside matrices.

    ``qk_dim`` and ``v_dim`` are the widths of a head's keys and values as attention multiplies them, ``kv_elements`` what is
    cached per token. ``latent_dim`` is the width of the compressed keys and values that decoding attends to directly (latent
    attention; None elsewhere), of which ``qk_rope_dim`` more hold the position. ``top_keys`` bounds the keys that a query
    reads after ``index_heads`` heads of ``index_dim`` scored all of them. ``norm_parameters`` are those of the norms of width
    E, ``other_parameters`` norms inside attention, sinks, router scales and correction biases.
    """

    matrices: tuple[Matrix, ...]
    n_heads: int
    n_kv_heads: int
    qk_dim: int
    v_dim: int
    kv_elements: int
    window: int | None
    norm_parameters: int
    other_parameters: int
    mlp: Literal["dense", "moe"]
    gated: bool
    latent_dim: int | None = None
    qk_rope_dim: int = 0
    top_keys: int | None = None
    index_heads: int = 0
    index_dim: int = 0

    @property
    def flops_per_key(self) -> int:
        """QKᵀ and PV of one query with one key in all heads: 2·H·(d_qk + d_v), which is 4·H·D where both are D."""
        return 2 * self.n_heads * (self.qk_dim + self.v_dim)

    @property
    def decode_flops_per_key(self) -> int:
        """The same of a new token with a cached one. Latent attention is absorbed, as engines decode it: queries are taken into
        the latent space, where a key costs 2·H·(2·d_c + d_rope)."""
        if self.latent_dim is None:
            return self.flops_per_key
        return 2 * self.n_heads * (2 * self.latent_dim + self.qk_rope_dim)

    @property
    def qkv_elements(self) -> int:
        """A token's queries, keys and values as attention multiplies them: (H + 2K)·D where all heads are alike."""
        return self.n_heads * self.qk_dim + self.n_kv_heads * (self.qk_dim + self.v_dim)

    @property
    def index_flops_per_key(self) -> int:
        """FLOP of an indexer for one query and one key: a product in each of its heads, and their weighted sum."""
        return 2 * self.index_heads * (self.index_dim + 1)

    @property
    def matrix_parameters(self) -> int:
        """Elements of every stored matrix, all experts included."""
        return sum(m.stored for m in self.matrices)

    @property
    def active_matrix_parameters(self) -> int:
        """Elements of the matrices that one token is multiplied with."""
        return sum(m.stored if m.copies == m.active else m.active * m.weights for m in self.matrices)

    @property
    def parameters(self) -> int:
        """Everything stored: matrices, biases, norms and the rest."""
        biases = sum(m.biases for m in self.matrices)
        everything = self.matrix_parameters + biases + self.norm_parameters + self.other_parameters
        return named("N_block", everything, "parameters", "matrices, biases, norms and what else a layer stores")

    @property
    def idle_parameters(self) -> int:
        """Those of the experts that one token does not pass."""
        return sum((m.copies - m.active) * (m.weights + (m.n if m.bias else 0)) for m in self.matrices)


def block(spec: ModelSpec, layer: int) -> tuple[Matrix | Norm | Vector, ...]:
    """What the block ``layer`` that the decoder builds stores, in the order it runs."""
    *projections, out = attention_matrices(spec)
    mlp: tuple[Matrix | Vector, ...] = mlp_matrices(spec, layer)
    if spec.moe is not None and spec.has_experts(layer):
        correction = (Vector("correction_bias", "mlp.correction_bias", spec.moe.n_experts),) if spec.moe.correction_bias else ()
        mlp += correction
    heads: tuple[Norm | Vector, ...] = _head_norms(spec, spec.n_kv_heads, spec.head_dim)
    if spec.mla is not None:
        heads = _latent_norms(spec.mla)
    if spec.departures.attention_sinks:
        heads = (*heads, Vector("sinks", "attn.sinks", spec.n_heads, "column"))
    names = ("attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm")
    before, after, attn_post, mlp_post = (Norm(name, name, spec.d_model) for name in names)
    away = spec.departures
    if away.norms_after:
        return (*projections, *heads, out, before, *mlp, after)
    if away.norms_around:
        return (before, *projections, *heads, out, attn_post, after, *mlp, mlp_post)
    return (before, *projections, *heads, out, *(() if away.one_norm else (after,)), *mlp)


def _head_norms(spec: ModelSpec, n_kv_heads: int, head_dim: int) -> tuple[Norm, ...]:
    """The norms of queries and of keys: one of a head's width that all heads share, or one over all heads together."""
    if not spec.qk_norm:
        return ()
    heads = (spec.n_heads, n_kv_heads) if spec.departures.qk_norm_over_heads else (1, 1)
    return tuple(Norm(name, f"attn.{name}", n * head_dim) for name, n in zip(("q_norm", "k_norm"), heads, strict=True))


def block_matrices(spec: ModelSpec) -> tuple[Matrix, ...]:
    """The weight matrices of one dense block, in the order they run: qkv, out, gate_up or up, down.

    Of a uniform dense model; ``layer_kinds`` describes every other one too.
    """
    return attention_matrices(spec) + _mlp(spec, "", spec.d_ff)


def attention_matrices(spec: ModelSpec) -> tuple[Matrix, ...]:
    """The packed projection and attention's output of one block; of latent attention q (or q_a and q_b), kv_a, kv_b and out."""
    return _attention(spec, spec.n_kv_heads, spec.head_dim) if spec.mla is None else _latent(spec)


def mlp_matrices(spec: ModelSpec, layer: int) -> tuple[Matrix, ...]:
    """Those of ``layer``'s MLP: gate_up or up, and down; of experts the router, expert_gate_up, expert_down, and where there
    are shared ones shared_gate_up, shared_down and shared_gate."""
    return _moe(spec) if spec.has_experts(layer) else _mlp(spec, "", spec.d_ff)


def after_attention(matrix: Matrix) -> bool:
    """Whether it comes after attention in its block: only rows that are sampled from pass those of the last layer."""
    return matrix.component == "mlp" or matrix.name == "out"


@lru_cache(maxsize=256)
def block_kinds(spec: ModelSpec) -> tuple[tuple[tuple[Matrix, ...], tuple[int, ...]], ...]:
    """The matrices of a block that our engines run, and the layers that have these: one entry, or with experts in some layers
    alone two."""
    found: dict[bool, list[int]] = {}
    for layer in range(spec.n_layers):
        found.setdefault(spec.has_experts(layer), []).append(layer)
    return tuple((attention_matrices(spec) + mlp_matrices(spec, layers[0]), tuple(layers)) for layers in found.values())


def _attention(spec: ModelSpec, n_kv_heads: int, head_dim: int, values: bool = True) -> tuple[Matrix, Matrix]:
    keys = n_kv_heads * head_dim
    packed = (("q", spec.n_heads * head_dim), ("k", keys), ("v", keys))[: 3 if values else 2]
    return (
        Matrix("attention", "qkv", sum(n for _, n in packed), spec.d_model, spec.qkv_bias, packed=packed),
        Matrix("attention", "out", spec.d_model, spec.n_heads * head_dim, spec.attn_out_bias, split="row"),
    )


def _latent(spec: ModelSpec) -> tuple[Matrix, ...]:
    """Latent attention: compress, rebuild, project out. Decoding may fold ``kv_b`` into its neighbours: the same work."""
    mla, matrices = spec.mla, []
    assert mla is not None
    queries = spec.n_heads * (mla.qk_nope_dim + mla.qk_rope_dim)
    if mla.q_lora_rank is None:
        matrices.append(Matrix("attention", "q", queries, spec.d_model, False))
    else:
        matrices.append(Matrix("attention", "q_a", mla.q_lora_rank, spec.d_model, spec.qkv_bias, split="replicated"))
        matrices.append(Matrix("attention", "q_b", queries, mla.q_lora_rank))
    latent = mla.kv_lora_rank + mla.qk_rope_dim
    matrices.append(Matrix("attention", "kv_a", latent, spec.d_model, spec.qkv_bias, split="replicated"))
    matrices.append(Matrix("attention", "kv_b", spec.n_heads * (mla.qk_nope_dim + mla.v_dim), mla.kv_lora_rank))
    matrices.append(Matrix("attention", "out", spec.d_model, spec.n_heads * mla.v_dim, spec.attn_out_bias, split="row"))
    if spec.indexer is not None and mla.q_lora_rank is not None:
        index = spec.indexer
        matrices += [
            Matrix("attention", "index_q", index.n_heads * index.head_dim, mla.q_lora_rank, split="replicated"),
            Matrix("attention", "index_k", index.head_dim, spec.d_model, split="replicated"),
            Matrix("attention", "index_weights", index.n_heads, spec.d_model, split="replicated"),
        ]
    return tuple(matrices)


def _latent_norms(mla: MlaSpec) -> tuple[Norm, ...]:
    """The norms of the compressed queries, if they are compressed, and of the latent."""
    queries = () if mla.q_lora_rank is None else (Norm("q_a_norm", "attn.q_a_norm", mla.q_lora_rank),)
    return (*queries, Norm("kv_a_norm", "attn.kv_a_norm", mla.kv_lora_rank))


def _up(spec: ModelSpec, prefix: str, width: int, bias: bool, **of_experts: Any) -> Matrix:
    gated = spec.mlp == "swiglu"
    packed = (("gate", width), ("up", width)) if gated else ()
    name, n = f"{prefix}{'gate_up' if gated else 'up'}", (2 if gated else 1) * width
    return Matrix("mlp", name, n, spec.d_model, bias, packed=packed, **of_experts)


def _mlp(spec: ModelSpec, prefix: str, width: int) -> tuple[Matrix, ...]:
    return (
        _up(spec, prefix, width, spec.mlp_bias),
        Matrix("mlp", f"{prefix}down", spec.d_model, width, spec.mlp_bias, split="row"),
    )


def _moe(spec: ModelSpec) -> tuple[Matrix, ...]:
    moe = spec.moe
    assert moe is not None
    experts: dict[str, Any] = {"copies": moe.n_experts, "active": moe.top_k, "split": "expert"}
    routed: tuple[Matrix, ...] = (
        Matrix("mlp", "router", moe.n_experts, spec.d_model, moe.router_bias, split="replicated"),
        _up(spec, "expert_", moe.d_expert, moe.expert_bias, **experts),
        Matrix("mlp", "expert_down", spec.d_model, moe.d_expert, moe.expert_bias, **experts),
    )
    shared = _mlp(spec, "shared_", moe.shared_width) if moe.shared_width else ()
    gate = (Matrix("mlp", "shared_gate", 1, spec.d_model, split="replicated"),) if moe.shared_gate else ()
    return routed + shared + gate


def _layer_kind(spec: ModelSpec, window: int | None, sparse: bool) -> LayerKind:
    """The layer with ``window`` (None: none) and, where ``sparse``, experts: nothing else tells layers of one model apart."""
    n_kv_heads, head_dim, values = spec.n_kv_heads, spec.head_dim, True
    if spec.global_attention is not None and window is None:
        n_kv_heads, head_dim = spec.global_attention.n_kv_heads, spec.global_attention.head_dim
        values = not spec.global_attention.keys_are_values
    other = sum(norm.n for norm in _head_norms(spec, n_kv_heads, head_dim))
    other += spec.n_heads if spec.departures.attention_sinks else 0
    other += 1 if spec.departures.layer_scale else 0
    if spec.moe is not None and sparse:
        other += spec.moe.n_experts if spec.moe.correction_bias else 0
        other += spec.d_model + spec.moe.n_experts if spec.moe.router_scales else 0
    mlp = _moe(spec) if sparse else _mlp(spec, "", spec.d_ff)
    norms = spec.departures.norms_per_block * norm_parameters(spec)
    if spec.mla is None:
        return LayerKind(
            matrices=_attention(spec, n_kv_heads, head_dim, values) + mlp,
            n_heads=spec.n_heads,
            n_kv_heads=n_kv_heads,
            qk_dim=head_dim,
            v_dim=head_dim,
            kv_elements=2 * n_kv_heads * head_dim,
            window=window,
            norm_parameters=norms,
            other_parameters=other,
            mlp="moe" if sparse else "dense",
            gated=spec.mlp == "swiglu",
        )
    mla, index = spec.mla, spec.indexer
    other += sum(norm.n for norm in _latent_norms(mla))
    other += 2 * index.head_dim if index else 0  # the indexer's key has a LayerNorm
    return LayerKind(
        matrices=_latent(spec) + mlp,
        n_heads=spec.n_heads,
        n_kv_heads=spec.n_heads,
        qk_dim=mla.qk_nope_dim + mla.qk_rope_dim,
        v_dim=mla.v_dim,
        kv_elements=mla.kv_lora_rank + mla.qk_rope_dim + (index.head_dim if index else 0),
        window=window,
        norm_parameters=norms,
        other_parameters=other,
        mlp="moe" if sparse else "dense",
        gated=spec.mlp == "swiglu",
        latent_dim=mla.kv_lora_rank,
        qk_rope_dim=mla.qk_rope_dim,
        top_keys=index.top_k if index else None,
        index_heads=index.n_heads if index else 0,
        index_dim=index.head_dim if index else 0,
    )


@lru_cache(maxsize=256)
def layer_kinds(spec: ModelSpec) -> tuple[tuple[LayerKind, int], ...]:
    """(kind, how many layers are of it), in order of first appearance; a uniform model has one entry."""
    told_apart = Counter(_told_apart(spec))
    if len(told_apart) == 1:
        return ((_layer_kind(spec, *next(iter(told_apart))), spec.n_layers),)
    return tuple(
        (_layer_kind(spec, window, sparse), letter(f"L_{i}", count))
        for i, ((window, sparse), count) in enumerate(told_apart.items(), 1)
    )


def layers_by_kind(spec: ModelSpec) -> tuple[int, ...]:
    """Of each layer its place in ``layer_kinds``."""
    told_apart = _told_apart(spec)
    places = {kind: place for place, kind in enumerate(dict.fromkeys(told_apart))}
    return tuple(places[kind] for kind in told_apart)


def _told_apart(spec: ModelSpec) -> list[tuple[int | None, bool]]:
    """(window, whether it has experts) of each layer."""
    experts = range(spec.n_layers) if spec.moe is None or spec.moe.layers is None else frozenset(spec.moe.layers)
    return [(spec.window_of_layer(i), spec.moe is not None and i in experts) for i in range(spec.n_layers)]


def head_matrix(spec: ModelSpec) -> Matrix:
    """The output projection onto the vocabulary, whether its matrix is tied to the embedding or its own."""
    width = spec.departures.embedding_dim or spec.d_model
    return Matrix("head", "head", spec.vocab_size, width, spec.departures.head_bias, split="vocabulary")


def head_norms(spec: ModelSpec) -> tuple[Norm, ...]:
    """The norms of queries and keys in a block of a uniform dense model; empty for a model without them."""
    return _head_norms(spec, spec.n_kv_heads, spec.head_dim)


def qkv_rows(spec: ModelSpec) -> int:
    """Rows of the packed query, key and value projection of a uniform dense model: (H + 2K)·D."""
    return block_matrices(spec)[0].n


def pair_flops(spec: ModelSpec) -> int:
    """FLOP of one query with one key in one layer of a uniform dense model, all heads: 4·H·D."""
    return layer_kinds(spec)[0][0].flops_per_key


def norm_parameters(spec: ModelSpec) -> int:
    """Elements of one norm of width E: its weight, and LayerNorm's bias."""
    return spec.d_model * (2 if has_norm_bias(spec) else 1)


def has_norm_bias(spec: ModelSpec) -> bool:
    """Whether norms of width E store a bias."""
    return spec.norm == "layernorm" and spec.departures.norm_bias
