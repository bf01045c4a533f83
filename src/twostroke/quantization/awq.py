"""Inputs scaled before rounding: what large inputs multiply keeps more of its precision, and the model stays what it is.

Lin et al. 2023, "AWQ: Activation-aware Weight Quantization", arXiv:2306.00978: W·x = (W·diag(s))·(x/s), with s = mean|x|^α, and
α searched by the error of the layer's output. What makes x takes the division: the weight of a norm, the values that attention
mixes, or the half of a gated MLP that is multiplied. Each of them is exact, so a matrix whose inputs have no such source keeps
them: one behind a plain activation or a clamped one, one that shares its norm with another matrix or a router, and those of
latent attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from twostroke.core.matrices import Matrix, mlp_matrices
from twostroke.core.spec import ModelSpec
from twostroke.kernels.int4 import dequantize_groups, group_scales, round_to_groups
from twostroke.model.norm import LayerNorm, RMSNorm
from twostroke.quantization.roundings import TRIED_SCALES

if TYPE_CHECKING:
    from jaxtyping import Float, Int

EXPONENTS = tuple(i / (TRIED_SCALES - 1) for i in range(TRIED_SCALES))
"""Values of α that are tried; 0 leaves the inputs as they are."""

LEAST_GAIN = 0.99
"""Scaling is taken where it leaves at most so much of the output's error: less would be chance."""


@dataclass(frozen=True)
class Fold:
    """Where the inputs of the matrix ``reader`` come from, names below the block: a norm, or rows of another matrix.

    If row ``rows[i, c]`` of ``source`` is divided by a number, so is input c of copy i of ``reader`` (of experts; else there is
    one copy)."""

    source: str
    reader: str
    rows: Int[Tensor, "copies k"]


def folds(spec: ModelSpec, layer: int) -> Iterator[Fold]:
    """Every matrix of block ``layer`` whose inputs can be scaled without changing what the block computes."""
    away = spec.departures
    moe = spec.has_experts(layer)
    width = torch.arange(spec.d_model)[None]
    one_reader = not away.norms_after and not away.one_norm
    if spec.mla is None:
        if one_reader:
            yield Fold("attn_norm", "attn.qkv", width)
        by_head = torch.arange(spec.n_kv_heads * spec.head_dim).view(spec.n_kv_heads, 1, spec.head_dim)
        values = by_head.expand(-1, spec.queries_per_kv_head, -1).reshape(1, -1)
        yield Fold("attn.qkv", "attn.out", values + (spec.n_heads + spec.n_kv_heads) * spec.head_dim)
    first, *_ = (m for m in mlp_matrices(spec, layer) if not m.chooses)
    if one_reader and not moe:
        yield Fold("mlp_norm", first.module, width)
    if spec.mlp == "swiglu" and spec.activation != "clamped_swish":
        yield from (_of_gated(up, down) for up, down in _pairs(spec, layer))


def _pairs(spec: ModelSpec, layer: int) -> Iterator[tuple[Matrix, Matrix]]:
    matrices = {m.name: m for m in mlp_matrices(spec, layer)}
    for name, down in matrices.items():
        if name.endswith("down"):
            yield matrices[f"{name.removesuffix('down')}gate_up"], down


def _of_gated(up: Matrix, down: Matrix) -> Fold:
    one = torch.arange(down.k) + down.k  # rows of the gate come first
    return Fold(up.module, down.module, one + up.n * torch.arange(up.copies)[:, None])


@torch.inference_mode()
def search_scales(
    weight: Float[Tensor, "n k"], hessian: Float[Tensor, "k k"], size: Float[Tensor, " k"], group: int
) -> Float[Tensor, " k"] | None:
    """The scales of the inputs whose Σ x·xᵀ is ``hessian`` and whose mean|x| is ``size`` that leave the least of the output's
    error; None where none is better than no scales."""
    size = size.clamp_min(1e-4 * size.max().clamp_min(1e-12))
    importance, best, least = torch.diag(hessian), None, float("inf")
    for exponent in EXPONENTS:
        scale = size**exponent
        scale = scale / (scale.max() * scale.min()).sqrt()
        scaled = weight * scale
        ranges, zeros = group_scales(scaled, group, importance / scale.square(), searched=False)
        found = dequantize_groups(round_to_groups(scaled, ranges, zeros, group), ranges, zeros, group)
        error = (found - scaled) / scale
        lost = float(((error @ hessian) * error).sum(dtype=torch.float64))
        if exponent == 0.0:
            least = LEAST_GAIN * lost
        elif lost < least:
            best, least = scale, lost
    return best


@torch.inference_mode()
def fold_scales(
    block: nn.Module, fold: Fold, scale: Float[Tensor, "copies k"]
) -> tuple[Float[Tensor, "copies k"], Float[Tensor, " rows"]]:
    """Divide what ``fold`` names as the source by ``scale``, which is equal where inputs share a row, and multiply the reader's
    columns: ``block`` computes the same. Returns what the columns were multiplied with, and what the source's rows were divided
    by.

    A norm's new weight is rounded to bf16, in which it will be stored, and the columns take what it really became.
    """
    source = block.get_submodule(fold.source)
    weight = source.weight
    assert isinstance(weight, Tensor)
    divisor = torch.ones(len(weight))
    divisor[fold.rows] = scale
    if isinstance(source, RMSNorm | LayerNorm):
        offset = source.offset if isinstance(source, RMSNorm) else 0.0
        stored = ((weight + offset) / divisor - offset).bfloat16().float()
        usable = ((stored + offset) != 0) & ((weight + offset) != 0)
        divisor = torch.where(usable, (weight + offset) / torch.where(usable, stored + offset, 1.0), 1.0)
        weight.copy_(torch.where(usable, stored, weight))
    else:
        weight.div_(divisor[:, None])
    bias = getattr(source, "bias", None)
    if bias is not None:
        bias.div_(divisor)
    columns = divisor[fold.rows]
    reader = block.get_parameter(f"{fold.reader}.weight")
    reader.copy_((reader.unflatten(0, (len(columns), -1)) * columns[:, None]).flatten(0, 1))
    return columns, divisor


def shared(fold: Fold, sizes: Float[Tensor, "copies k"]) -> Float[Tensor, "copies k"]:
    """``sizes`` of inputs, their mean where several come from one row."""
    rows = fold.rows
    total, count = torch.zeros(int(rows.max()) + 1), torch.zeros(int(rows.max()) + 1)
    total.index_add_(0, rows.flatten(), sizes.flatten())
    count.index_add_(0, rows.flatten(), torch.ones(rows.numel()))
    return (total / count.clamp_min(1.0))[rows]
