"""The flat plan that a model is lowered to: a tuple of operations on a few named buffers, the same for every family.

A buffer has a row for each of the step's n tokens: ``residual`` is the residual stream (n, E), ``normed`` its normed copy
(n, E), ``qkv`` the packed projection (n, (H + 2K)·D), ``attention_out`` is (n, H·D), and ``mlp_inner``, between the two
products of the MLP, (n, F). The docstring of an operation names the buffers that it reads and writes. ``interpreter`` runs a
plan with torch and is the reference for faster runners.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from twostroke.core.crossovers import Crossovers
from twostroke.core.errors import ConfigError
from twostroke.core.schemes import scheme_of
from twostroke.core.spec import Activation, MlaSpec, ModelSpec, MoeSpec
from twostroke.kernels.matrix import ExpertMatrices, Matrix


@dataclass(frozen=True, eq=False)
class Embed:
    """residual ← scale · table[token] (+ positions[position]) in the plan's dtype. The tables stay in the format of their
    file."""

    table: Tensor
    positions: Tensor | None
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class Norm:
    """normed ← RMSNorm(residual), or LayerNorm(residual) if there is a bias, or residual if there is no weight."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float


@dataclass(frozen=True, eq=False)
class QkvProjection:
    """qkv ← normed·Wᵀ + b. ``module`` is where the matrix is in the decoder: adapters of it are found by that ("": none)."""

    matrix: Matrix
    module: str = ""


@dataclass(frozen=True, eq=False)
class LatentProjection:
    """qkv ← queries taken into the latent space, one key and one value of latent attention, from normed.

    A head's query is (rotated dimensions, ``absorb``·the others), the key (rotated dimensions, the normed latent), the value
    (zeros, the normed latent). ``matrix`` makes the queries, of RMSNorm(``down``·normed) where they are compressed.
    """

    mla: MlaSpec
    down: Matrix | None
    down_norm: Tensor | None
    matrix: Matrix
    kv: Matrix
    kv_norm: Tensor
    absorb: ExpertMatrices
    eps: float


@dataclass(frozen=True, eq=False)
class LatentValues:
    """attention_out ← each head's own matrix of ``heads`` times what it summed of the latents."""

    mla: MlaSpec
    heads: ExpertMatrices


@dataclass(frozen=True, eq=False)
class QkNorm:
    """qkv's query and key heads ← their RMSNorm, by head; with ``over_heads`` once over all query heads and once over all key
    heads. ``weight`` is (H + K, D)."""

    weight: Tensor
    eps: float
    over_heads: bool = False


@dataclass(frozen=True, eq=False)
class RopeAndCacheWrite:
    """qkv's queries and keys ← themselves, rotated by position with the angles ``spec.ropes[rope]``, unless it is None. Then
    the layer's cache ← keys and values."""

    layer: int
    rope: int | None


@dataclass(frozen=True, eq=False)
class PagedAttention:
    """attention_out ← attention of qkv's queries over the last ``window`` cached keys and values of their own request. With
    ``cap`` a score s becomes cap·tanh(s/cap). ``sinks`` (H) are one more score of each head, without a value."""

    layer: int
    window: int | None
    cap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, eq=False)
class GatherSampledRows:
    """residual, attention_out ← their rows that a token is sampled from. After the last attention only these are needed."""


@dataclass(frozen=True, eq=False)
class OutProjectionAdd:
    """residual ← residual + scale·(attention_out·Wᵀ + b), or with a ``norm`` residual + scale·RMSNorm(attention_out·Wᵀ + b).
    ``ends_block``: it is the last operation of its block."""

    matrix: Matrix
    norm: Norm | None = None
    scale: float = 1.0
    ends_block: bool = False
    module: str = ""


@dataclass(frozen=True, eq=False)
class MlpUp:
    """mlp_inner ← activation(normed·Wᵀ + b). If ``gated``, the product is gate and up, and mlp_inner ← activation(gate)·up. If
    ``shared``, it is shared experts', and rows are multiplied with their ``shared_shares``."""

    matrix: Matrix
    activation: Activation
    gated: bool
    shared: bool = False
    module: str = ""


@dataclass(frozen=True, eq=False)
class MlpDownAdd:
    """residual ← residual + scale·(mlp_inner·Wᵀ + b), or with a ``norm`` residual + scale·RMSNorm(mlp_inner·Wᵀ + b).
    ``ends_block``: it is the last operation of its block."""

    matrix: Matrix
    norm: Norm | None = None
    scale: float = 1.0
    ends_block: bool = True
    module: str = ""


@dataclass(frozen=True, eq=False)
class RouteTokens:
    """chosen, shares ← each row's experts and their shares (``model.experts.choose_experts``) by the logits normed·Wᵀ + b;
    routed ← normed. With a ``shared_gate`` g, shared_shares ← σ(normed·gᵀ)."""

    matrix: Matrix
    moe: MoeSpec
    correction: Tensor | None
    shared_gate: Matrix | None
    experts: ExpertMatrices
    """Whose inputs routed is, in the form that they read."""


@dataclass(frozen=True, eq=False)
class ExpertsAdd:
    """residual ← residual + scale·Σ shares·down_e(activation(gate_e)·up_e) over the chosen experts e of each row of routed. It
    is the last operation of its block."""

    layer: int
    gate_up: ExpertMatrices
    down: ExpertMatrices
    activation: Activation
    top_k: int
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class LmHead:
    """logits ← normed·Wᵀ in fp32; with ``cap`` cap·tanh(logits/cap)."""

    matrix: Matrix
    cap: float | None = None


BlockProduct = QkvProjection | OutProjectionAdd | MlpUp | MlpDownAdd | LatentProjection
Product = BlockProduct | LmHead
Adaptable = QkvProjection | OutProjectionAdd | MlpUp | MlpDownAdd
"""Whose products adapters add to, where they have a ``module``."""
Op = (
    Product
    | Embed
    | Norm
    | QkNorm
    | RopeAndCacheWrite
    | PagedAttention
    | GatherSampledRows
    | LatentValues
    | RouteTokens
    | ExpertsAdd
)


@dataclass(frozen=True, eq=False)
class Plan:
    """``weights`` names the format of the blocks' matrices (fp32, bf16, int8, …), ``dtype`` the type of activations."""

    spec: ModelSpec
    ops: tuple[Op, ...]
    weights: str
    dtype: str
    crossovers: Crossovers

    def first(self, n_layers: int) -> Plan:
        """The first ``n_layers`` layers, then the final norm and the head: the same operations with the same matrices, those of
        layers at the same places. Without the last layer's ``GatherSampledRows`` every row of a step has logits. Raises
        ConfigError unless there are more layers than that."""
        ends = self._ends()
        if not 1 <= n_layers < len(ends):
            raise ConfigError(f"layers={n_layers} must be from 1 to {len(ends) - 1}, before the last of {len(ends)} layers.")
        return replace(self, ops=(*self.ops[: ends[n_layers - 1]], *self.ops[-2:]))

    def between(self, begin: int, end: int, states: Tensor) -> Plan:
        """Layers [``begin``, ``end``), then the final norm and the head. A row's token is the row of ``states`` (rows, E; fp32)
        that holds its residual stream before them. Only a plan that ends with the last layer gathers rows."""
        ends = [0, *self._ends()]
        return replace(self, ops=(Embed(states, None), *self.ops[ends[begin] : ends[end]], *self.ops[-2:]))

    def cache_writes(self, begin: int, states: Tensor) -> Plan:
        """What layers from ``begin`` on write to the cache for rows that all of them read as they stand in ``states``; their
        tokens are as in ``between``. There are no logits."""
        ends = self._ends()
        kept: list[Op] = [Embed(states, None)]
        for first, last in zip(ends[begin - 1 : -1], ends[begin:], strict=True):
            block = self.ops[first:last]
            writes = next(place for place, op in enumerate(block) if isinstance(op, RopeAndCacheWrite))
            kept += block[: writes + 1]
        return replace(self, ops=tuple(kept))

    def _ends(self) -> list[int]:
        """The place behind each block."""
        return [place for place, op in enumerate(self.ops, start=1) if _ends_block(op)]

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a step reads, however many rows it has; of experts those of one row. The embedding's rows, a
        few kB, are left out."""
        total = 0
        norms: dict[int, int] = {}
        for op in self.ops:
            total += sum(matrix.n_bytes for matrix in _matrices(op))
            if isinstance(op, ExpertsAdd):
                total += sum(matrix.n_bytes * op.top_k // matrix.copies for matrix in (op.gate_up, op.down))
            elif isinstance(op, RouteTokens) and op.correction is not None:
                total += op.correction.nbytes
            elif isinstance(op, LatentProjection):
                total += op.kv_norm.nbytes + (0 if op.down_norm is None else op.down_norm.nbytes)
            norm = op.norm if isinstance(op, OutProjectionAdd | MlpDownAdd) else op
            if isinstance(norm, Norm):  # one norm may serve both branches of a block
                norms[id(norm)] = sum(t.nbytes for t in (norm.weight, norm.bias) if t is not None)
            elif isinstance(op, QkNorm):
                # All query heads share one row and all key heads another, unless the norm is over all of them.
                total += op.weight.nbytes if op.over_heads else 2 * op.weight[0].nbytes
        return total + sum(norms.values())

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's matrices; 0 without experts."""
        matrices = next(((op.gate_up, op.down) for op in self.ops if isinstance(op, ExpertsAdd)), ())
        return sum(matrix.n_bytes // matrix.copies for matrix in matrices)

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights in the formats that compute, second copies included. A tied embedding counts once, as the head:
        tokens are looked up in the table's file, of which a step reads a few rows."""
        embed = self.ops[0]
        assert isinstance(embed, Embed)
        element_bytes = int(scheme_of(self.weights).kept_bytes)
        total = self.step_bytes
        for op in self.ops:
            total += sum(matrix.held_bytes - matrix.n_bytes for matrix in _matrices(op))
            if isinstance(op, ExpertsAdd):
                idle = (matrix.held_bytes - matrix.n_bytes * op.top_k // matrix.copies for matrix in (op.gate_up, op.down))
                total += sum(idle)
        if not self.spec.tied_embeddings:
            total += embed.table.numel() * element_bytes
        if embed.positions is not None:
            total += embed.positions.numel() * element_bytes
        return total


def _ends_block(op: Op) -> bool:
    return isinstance(op, ExpertsAdd) or (isinstance(op, OutProjectionAdd | MlpDownAdd) and op.ends_block)


def _matrices(op: Op) -> tuple[Matrix | ExpertMatrices, ...]:
    """The matrices that every row is multiplied with, those of heads as one."""
    if isinstance(op, RouteTokens):
        return (op.matrix,) if op.shared_gate is None else (op.matrix, op.shared_gate)
    if isinstance(op, LatentProjection):
        return (op.matrix, op.kv, op.absorb) if op.down is None else (op.down, op.matrix, op.kv, op.absorb)
    if isinstance(op, LatentValues):
        return (op.heads,)
    return (op.matrix,) if isinstance(op, Product) else ()
