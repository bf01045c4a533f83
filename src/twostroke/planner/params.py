"""How many parameters a model has, part by part, exactly."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from twostroke.core.spec import ModelSpec


@dataclass(frozen=True)
class Product:
    """One weight matrix as the product (rows, k) × (k, n) that it takes part in: n outputs, k inputs, biases apart.

    ``component`` is the row of the comparison table that it belongs to: attention, mlp or head.
    """

    component: str
    name: str
    n: int
    k: int
    bias: bool = False

    @property
    def weights(self) -> int:
        """n·k, the elements of the matrix."""
        return self.n * self.k


def block_products(spec: ModelSpec) -> tuple[Product, ...]:
    """The weight matrices of one block, in the order they run: qkv, out, gate_up or up, down."""
    inner = spec.n_heads * spec.head_dim
    gated = spec.mlp == "swiglu"
    return (
        Product("attention", "qkv", spec.qkv_rows, spec.d_model, spec.qkv_bias),
        Product("attention", "out", spec.d_model, inner, spec.attn_out_bias),
        Product("mlp", "gate_up" if gated else "up", (2 if gated else 1) * spec.d_ff, spec.d_model, spec.mlp_bias),
        Product("mlp", "down", spec.d_model, spec.d_ff, spec.mlp_bias),
    )


def head_product(spec: ModelSpec) -> Product:
    """The output projection onto the vocabulary, whether its matrix is tied to the embedding or its own."""
    return Product("head", "head", spec.vocab_size, spec.d_model)


@dataclass(frozen=True)
class Parameters:
    """Parameter counts. ``total`` is exact: the embedding and positions, L blocks, the final norm, the untied head.

    ``attention_per_block`` and ``mlp_per_block`` hold matrices and biases (and QK-norm weights), ``norms_per_block`` the two
    block norms. ``active`` are those one token passes through: all of them in a dense model. ``in_products`` are those that
    a token is multiplied with: without an untied input embedding and learned positions, which are only looked up.
    """

    total: int
    embedding: int
    positions: int
    head: int
    final_norm: int
    attention_per_block: int
    mlp_per_block: int
    norms_per_block: int
    n_layers: int
    active: int
    in_products: int
    block_matrices: int

    @property
    def per_block(self) -> int:
        return self.attention_per_block + self.mlp_per_block + self.norms_per_block

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"per_block": self.per_block}


def count_parameters(spec: ModelSpec) -> Parameters:
    """Exact parameter counts of ``spec``.

    V·E·(1 if tied else 2) + P·E if positions are learned + L·[(H+2K)·D·E + E·H·D + (3 or 2)·E·F + biases + norms] + final
    norm, with G·E per norm, G = 2 for LayerNorm (weight and bias), 1 for RMSNorm. Llama-3.1-8B gives 8,030,261,248
    (tests/planner/test_params.py, which also holds it against the built decoder).
    """
    norm = spec.d_model * (2 if spec.norm == "layernorm" else 1)
    sizes = {"attention": 0, "mlp": 0}
    matrices = 0
    for product in block_products(spec):
        sizes[product.component] += product.weights + (product.n if product.bias else 0)
        matrices += product.weights
    if spec.qk_norm:
        sizes["attention"] += 2 * spec.head_dim
    embedding = spec.vocab_size * spec.d_model
    positions = spec.max_positions * spec.d_model if spec.positions == "learned" else 0
    head = 0 if spec.tied_embeddings else embedding
    blocks = spec.n_layers * (sizes["attention"] + sizes["mlp"] + 2 * norm)
    total = embedding + positions + head + blocks + norm
    return Parameters(
        total=total,
        embedding=embedding,
        positions=positions,
        head=head,
        final_norm=norm,
        attention_per_block=sizes["attention"],
        mlp_per_block=sizes["mlp"],
        norms_per_block=2 * norm,
        n_layers=spec.n_layers,
        active=total,
        in_products=total - positions - (0 if spec.tied_embeddings else embedding),
        block_matrices=spec.n_layers * matrices,
    )
