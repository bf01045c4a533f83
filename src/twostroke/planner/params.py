"""How many parameters a model has, part by part, exactly, and which matrices a token is multiplied with in each layer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

from twostroke.core.spec import ModelSpec
from twostroke.planner.named import letter, named

Split = Literal["column", "row", "vocabulary", "replicated", "expert"]


@dataclass(frozen=True)
class Product:
    """One weight matrix as the product (rows, k) × (k, n) that it takes part in: n outputs, k inputs, biases apart.

    ``component`` is the row of the comparison table that it belongs to: attention, mlp or head. ``copies`` matrices of this
    shape are stored (experts), of which one token passes ``active``. ``split`` says how tensor parallelism divides it: by
    outputs (column), by inputs (row), by vocabulary, by whole experts, or not at all (replicated).
    """

    component: str
    name: str
    n: int
    k: int
    bias: bool = False
    copies: int = 1
    active: int = 1
    split: Split = "column"

    @property
    def weights(self) -> int:
        """n·k, the elements of one matrix."""
        return self.n * self.k

    @property
    def stored(self) -> int:
        """copies·n·k, the elements of all its matrices."""
        source = "config.json: matrix" if self.copies == 1 else "config.json: matrices of all experts"
        return named(f"N_{self.name}", self.copies * self.weights, "parameters", source)

    @property
    def biases(self) -> int:
        """Elements of the biases of all copies."""
        return self.copies * self.n if self.bias else 0


@dataclass(frozen=True)
class LayerKind:
    """One kind of layer: its products in the order they run, its attention, and its parameters outside matrices.

    ``qk_dim`` and ``v_dim`` are the widths of a head's keys and values as attention multiplies them, ``kv_elements`` what is
    cached per token. ``latent_dim`` is the width of the compressed keys and values that decoding attends to directly (latent
    attention; None elsewhere), of which ``qk_rope_dim`` more hold the position. ``top_keys`` bounds the keys that a query
    reads after ``index_heads`` heads of ``index_dim`` scored all of them. ``norm_parameters`` are those of the norms of width
    E, ``other_parameters`` norms inside attention, sinks, router scales and correction biases.
    """

    products: tuple[Product, ...]
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
    def index_flops_per_key(self) -> int:
        """FLOP of an indexer for one query and one key: a product in each of its heads, and their weighted sum."""
        return 2 * self.index_heads * (self.index_dim + 1)

    @property
    def matrix_parameters(self) -> int:
        """Elements of every stored matrix, all experts included."""
        return sum(p.stored for p in self.products)

    @property
    def active_matrix_parameters(self) -> int:
        """Elements of the matrices that one token is multiplied with."""
        return sum(p.stored if p.copies == p.active else p.active * p.weights for p in self.products)

    @property
    def parameters(self) -> int:
        """Everything stored: matrices, biases, norms and the rest."""
        biases = sum(p.biases for p in self.products)
        everything = self.matrix_parameters + biases + self.norm_parameters + self.other_parameters
        return named("N_block", everything, "parameters", "matrices, biases, norms and what else a layer stores")

    @property
    def idle_parameters(self) -> int:
        """Those of the experts that one token does not pass."""
        return sum((p.copies - p.active) * (p.weights + (p.n if p.bias else 0)) for p in self.products)


def block_products(spec: ModelSpec) -> tuple[Product, ...]:
    """The weight matrices of one block, in the order they run: qkv, out, gate_up or up, down.

    Of a uniform dense model; ``layer_kinds`` describes every other one too.
    """
    return _attention_products(spec, spec.n_kv_heads, spec.head_dim) + _mlp_products(spec, "", spec.d_ff)


def _attention_products(spec: ModelSpec, n_kv_heads: int, head_dim: int, values: bool = True) -> tuple[Product, ...]:
    rows = (spec.n_heads + (2 if values else 1) * n_kv_heads) * head_dim
    return (
        Product("attention", "qkv", rows, spec.d_model, spec.qkv_bias),
        Product("attention", "out", spec.d_model, spec.n_heads * head_dim, spec.attn_out_bias, split="row"),
    )


def _latent_products(spec: ModelSpec) -> tuple[Product, ...]:
    """Latent attention: compress, rebuild, project out. Decoding may fold ``kv_b`` into its neighbours: the same work."""
    mla, products = spec.mla, []
    assert mla is not None
    queries = spec.n_heads * (mla.qk_nope_dim + mla.qk_rope_dim)
    if mla.q_lora_rank is None:
        products.append(Product("attention", "q", queries, spec.d_model, False))
    else:
        products.append(Product("attention", "q_a", mla.q_lora_rank, spec.d_model, spec.qkv_bias, split="replicated"))
        products.append(Product("attention", "q_b", queries, mla.q_lora_rank))
    latent = mla.kv_lora_rank + mla.qk_rope_dim
    products.append(Product("attention", "kv_a", latent, spec.d_model, spec.qkv_bias, split="replicated"))
    products.append(Product("attention", "kv_b", spec.n_heads * (mla.qk_nope_dim + mla.v_dim), mla.kv_lora_rank))
    products.append(Product("attention", "out", spec.d_model, spec.n_heads * mla.v_dim, spec.attn_out_bias, split="row"))
    if spec.indexer is not None and mla.q_lora_rank is not None:
        index = spec.indexer
        products += [
            Product("attention", "index_q", index.n_heads * index.head_dim, mla.q_lora_rank, split="replicated"),
            Product("attention", "index_k", index.head_dim, spec.d_model, split="replicated"),
            Product("attention", "index_weights", index.n_heads, spec.d_model, split="replicated"),
        ]
    return tuple(products)


def _mlp_products(spec: ModelSpec, prefix: str, width: int) -> tuple[Product, ...]:
    gated = spec.mlp == "swiglu"
    return (
        Product("mlp", f"{prefix}{'gate_up' if gated else 'up'}", (2 if gated else 1) * width, spec.d_model, spec.mlp_bias),
        Product("mlp", f"{prefix}down", spec.d_model, width, spec.mlp_bias, split="row"),
    )


def _moe_products(spec: ModelSpec) -> tuple[Product, ...]:
    moe = spec.moe
    assert moe is not None
    experts = {"bias": moe.expert_bias, "copies": moe.n_experts, "active": moe.top_k, "split": "expert"}
    ups = 2 if spec.mlp == "swiglu" else 1
    routed: tuple[Product, ...] = (
        Product("mlp", "router", moe.n_experts, spec.d_model, moe.router_bias, split="replicated"),
        Product("mlp", "expert_gate_up" if ups == 2 else "expert_up", ups * moe.d_expert, spec.d_model, **experts),  # type: ignore[arg-type]
        Product("mlp", "expert_down", spec.d_model, moe.d_expert, **experts),  # type: ignore[arg-type]
    )
    shared = _mlp_products(spec, "shared_", moe.shared_width) if moe.shared_width else ()
    gate = (Product("mlp", "shared_gate", 1, spec.d_model, split="replicated"),) if moe.shared_gate else ()
    return routed + shared + gate


def _layer_kind(spec: ModelSpec, window: int | None, sparse: bool) -> LayerKind:
    """The layer with ``window`` (None: none) and, where ``sparse``, experts: nothing else tells layers of one model apart."""
    n_kv_heads, head_dim, values = spec.n_kv_heads, spec.head_dim, True
    if spec.global_attention is not None and window is None:
        n_kv_heads, head_dim = spec.global_attention.n_kv_heads, spec.global_attention.head_dim
        values = not spec.global_attention.keys_are_values
    other = 0
    if spec.qk_norm:
        other += (spec.n_heads + n_kv_heads) * head_dim if spec.departures.qk_norm_over_heads else 2 * head_dim
    other += spec.n_heads if spec.departures.attention_sinks else 0
    other += 1 if spec.departures.layer_scale else 0
    if spec.moe is not None and sparse:
        other += spec.moe.n_experts if spec.moe.correction_bias else 0
        other += spec.d_model + spec.moe.n_experts if spec.moe.router_scales else 0
    mlp = _moe_products(spec) if sparse else _mlp_products(spec, "", spec.d_ff)
    norms = spec.departures.norms_per_block * _norm_parameters(spec)
    if spec.mla is None:
        return LayerKind(
            products=_attention_products(spec, n_kv_heads, head_dim, values) + mlp,
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
    other += (mla.q_lora_rank or 0) + mla.kv_lora_rank  # the norms of the two latents
    other += 2 * index.head_dim if index else 0  # the indexer's key has a LayerNorm
    return LayerKind(
        products=_latent_products(spec) + mlp,
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
    experts = range(spec.n_layers) if spec.moe is None or spec.moe.layers is None else frozenset(spec.moe.layers)
    told_apart = Counter((spec.window_of_layer(i), spec.moe is not None and i in experts) for i in range(spec.n_layers))
    if len(told_apart) == 1:
        return ((_layer_kind(spec, *next(iter(told_apart))), spec.n_layers),)
    return tuple(
        (_layer_kind(spec, window, sparse), letter(f"L_{i}", count))
        for i, ((window, sparse), count) in enumerate(told_apart.items(), 1)
    )


def head_product(spec: ModelSpec) -> Product:
    """The output projection onto the vocabulary, whether its matrix is tied to the embedding or its own."""
    width = spec.departures.embedding_dim or spec.d_model
    return Product("head", "head", spec.vocab_size, width, spec.departures.head_bias, split="vocabulary")


def _norm_parameters(spec: ModelSpec) -> int:
    return spec.d_model * (2 if spec.norm == "layernorm" else 1)


@dataclass(frozen=True)
class Parameters:
    """Parameter counts. ``total`` is exact: the embedding and positions, L blocks, the norms around them, the untied head.

    ``head`` holds the untied output matrix and its bias, ``final_norm`` the norms outside blocks, ``projections`` the matrices
    between an embedding of another width and the blocks. ``attention``, ``mlp`` and ``norms`` are of all blocks: matrices and
    biases; the rest of a block (QK-norms, sinks, router scales) is in ``attention``. ``active`` are those one token passes
    through: all of them in a dense model, ``top_k`` experts in a mixture. ``in_products`` are those that a token is multiplied
    with: ``active`` without an untied input embedding and learned positions, which are only looked up. ``block_matrices`` are
    the stored elements of the blocks' matrices, ``active_matrices`` those of one token.
    """

    total: Annotated[int, "all, tied ones once"]
    embedding: Annotated[int, "input embedding"]
    positions: Annotated[int, "learned positions"]
    head: Annotated[int, "untied output matrix and its bias"]
    final_norm: Annotated[int, "norms outside blocks"]
    projections: Annotated[int, "between an embedding of another width and the blocks"]
    attention: Annotated[int, "of all blocks"]
    mlp: Annotated[int, "of all blocks"]
    norms: Annotated[int, "of all blocks"]
    n_layers: Annotated[int, "L"]
    active: Annotated[int, "those one token passes"]
    in_products: Annotated[int, "those a token is multiplied with"]
    block_matrices: Annotated[int, "stored elements of the blocks' matrices"]
    active_matrices: Annotated[int, "those of one token"]


@lru_cache(maxsize=256)
def count_parameters(spec: ModelSpec) -> Parameters:
    """Exact parameter counts of ``spec``: every tensor of a checkpoint, tied ones once.

    V·E·(1 if tied else 2) + P·E if positions are learned + Σ_layers [matrices + biases + norms + what else a layer stores] +
    final norm, with G·E per norm, G = 2 for LayerNorm (weight and bias), 1 for RMSNorm. Llama-3.1-8B gives 8,030,261,248 and
    DeepSeek-V3 671,026,419,200 (tests/planner/test_params.py, which also holds it against the built decoder, and
    tests/planner/test_every_config.py against transformers).
    """
    away, kinds = spec.departures, layer_kinds(spec)
    norm = _norm_parameters(spec)
    width = away.embedding_dim or spec.d_model
    embedding = _named("N_embedding", spec.vocab_size * width, "config.json")
    projections = 2 * width * spec.d_model if away.embedding_dim is not None else 0
    projections = _named("N_projections", projections, "between the embedding's width and the blocks'")
    positions = (spec.max_positions + away.extra_positions) * spec.d_model if spec.positions == "learned" else 0
    positions = _named("N_positions", positions, "learned positions")
    head = (0 if spec.tied_embeddings else spec.vocab_size * width) + (spec.vocab_size if away.head_bias else 0)
    head = _named("N_head", head, "output matrix of its own")
    norms_outside = _named("N_norms_outside", norm * (int(away.final_norm) + int(away.embedding_norm)), "norms outside blocks")
    mlp = sum(count * sum(p.stored + p.biases for p in kind.products if p.component == "mlp") for kind, count in kinds)
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
