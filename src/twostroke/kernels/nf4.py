"""NF4: four bits a weight at the quantiles of a normal distribution, one scale a block (QLoRA, arXiv:2305.14314, section 3).

This is the plain torch reference, which is also what trains: products multiply by the decoded matrix, which exists for one
product at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.core.policy import NF4_BLOCK, NF4_SCALE_BLOCK
from twostroke.kernels.grouped import multiply_each

NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 values of codes 0 … 15, as printed in the paper's appendix E and held by bitsandbytes.

They are quantiles of N(0, 1), 8 below and 9 above zero that share it, divided by the greatest. A test derives them.
"""


@dataclass(frozen=True)
class Nf4Matrix:
    """A matrix of ``shape`` in NF4: w = value[code] · scale of its block, blocks of ``block`` values counted row by row.

    ``codes`` hold two a byte, the first in the high half, as bitsandbytes packs them. ``scales`` are the blocks' max |w|:
    fp32, or under double quantisation int8 codes q with scale = q · ``scale_scales`` of 256 of them + ``scale_offset``, their
    mean. (bitsandbytes' 8-bit codes are spaced logarithmically; evenly spaced ones need no table.) Bits a weight at block 64:
    4 + 32/64 = 4.5, doubly quantised 4 + 8/64 + 32/(64·256) = 4.127.
    """

    shape: tuple[int, int]
    block: int
    codes: Tensor
    scales: Tensor
    scale_scales: Tensor | None = None
    scale_offset: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What it is held in, by name."""
        parts = {"codes": self.codes, "scales": self.scales}
        if self.scale_scales is not None and self.scale_offset is not None:
            parts |= {"scale_scales": self.scale_scales, "scale_offset": self.scale_offset}
        return parts


@torch.no_grad()
def quantize_nf4(weight: Tensor, block: int = NF4_BLOCK, double: bool = True) -> Nf4Matrix:
    """``weight`` in NF4: each value divided by its block's max |w| and rounded to the nearest of the 16 values.

    The last block is filled up with zeros. A block of zeros has scale 0. Scales are made first, doubly quantised where
    ``double``, and codes are chosen for the scales as they will be decoded, so that the second rounding costs least.
    """
    flat = weight.detach().float().flatten()
    blocks = F.pad(flat, (0, -flat.numel() % block)).view(-1, block)
    exact = blocks.abs().amax(dim=1)
    shape = (weight.shape[0], weight.shape[1])
    if double:
        offset = exact.mean()
        groups = F.pad(exact - offset, (0, -exact.numel() % NF4_SCALE_BLOCK)).view(-1, NF4_SCALE_BLOCK)
        scale_scales = groups.abs().amax(dim=1) / 127
        divisor = torch.where(scale_scales > 0, scale_scales, 1.0)
        scales = (groups / divisor[:, None]).round().to(torch.int8).flatten()[: exact.numel()].contiguous()
        decoded = _decoded_scales(scales, scale_scales, offset)
    else:
        scales, scale_scales, offset, decoded = exact, None, None, exact
    table = torch.tensor(NF4_VALUES, device=weight.device)
    middles = (table[1:] + table[:-1]) / 2
    normalised = blocks / torch.where(decoded != 0, decoded, 1.0)[:, None]
    codes = torch.bucketize(normalised.flatten(), middles).to(torch.uint8)
    return Nf4Matrix(shape, block, (codes[::2] << 4) | codes[1::2], scales, scale_scales, offset)


def decoded_scales(matrix: Nf4Matrix) -> Tensor:
    """The scale of each block of ``matrix`` in fp32."""
    return _decoded_scales(matrix.scales, matrix.scale_scales, matrix.scale_offset)


def _decoded_scales(scales: Tensor, scale_scales: Tensor | None, offset: Tensor | None) -> Tensor:
    if scale_scales is None or offset is None:
        return scales
    expanded = scale_scales.repeat_interleave(NF4_SCALE_BLOCK)[: scales.numel()]
    # A block's max |w| is not negative; rounding around the mean may come out below 0 for a block of very small weights.
    return (scales.float() * expanded + offset).clamp_min(0.0)


def dequantize_nf4(matrix: Nf4Matrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix that ``matrix`` stands for: products of value and scale in fp32, rounded to ``dtype``."""
    return _decoded(matrix, matrix.codes.int(), dtype)


def _decoded(matrix: Nf4Matrix, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """``dequantize_nf4`` from ``codes`` as whole numbers of 32 bits."""
    table = torch.tensor(NF4_VALUES, device=matrix.codes.device)
    # Both codes of a byte in one look-up of 256 pairs: half the look-ups, and no tensor of 64-bit indices for each weight.
    pairs = torch.stack((table.repeat_interleave(16), table.repeat(16)), dim=1)  # (256, 2)
    values = F.embedding(codes, pairs).view(-1, matrix.block)
    scales = decoded_scales(matrix)
    n_values = matrix.shape[0] * matrix.shape[1]
    return (values * scales[:, None]).to(dtype).flatten()[:n_values].view(matrix.shape)


class _Nf4Product(torch.autograd.Function):
    """x · Wᵀ with a frozen W that is decoded for the forward product and again for the backward one, never kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        codes: Tensor,
        scales: Tensor,
        scale_scales: Tensor | None,
        offset: Tensor | None,
        rows: int,
        columns: int,
        block: int,
    ) -> Tensor:
        ctx.save_for_backward(codes, scales, scale_scales, offset)
        ctx.sizes = (rows, columns, block)
        matrix = Nf4Matrix((rows, columns), block, codes, scales, scale_scales, offset)
        return F.linear(x, dequantize_nf4(matrix, x.dtype))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, columns, block = ctx.sizes
        gradient = upstream[0]
        matrix = Nf4Matrix((rows, columns), block, *ctx.saved_tensors)
        # A compiler joins equal operations of forward and backward and keeps their result between. The codes as int32 are two
        # bytes a weight, so here they come by other operations: six layers of width 512 kept 38 MB less.
        weight = _decoded(matrix, matrix.codes.view(torch.int8).int() & 0xFF, gradient.dtype)
        return (gradient @ weight, None, None, None, None, None, None, None)


def nf4_linear(x: Tensor, matrix: Nf4Matrix) -> Tensor:
    """x · Wᵀ in the dtype of ``x``, with gradients for ``x`` alone."""
    rows, columns = matrix.shape
    product: Tensor = _Nf4Product.apply(
        x, matrix.codes, matrix.scales, matrix.scale_scales, matrix.scale_offset, rows, columns, matrix.block
    )
    return product


def stacked(matrices: Sequence[Nf4Matrix]) -> dict[str, Tensor]:
    """The tensors of matrices of one shape, one after another: those of matrix i are ``tensor[i]``."""
    return {name: torch.stack([matrix.tensors[name] for matrix in matrices]) for name in matrices[0].tensors}


def _of_expert(held: Sequence[Tensor | None], sizes: Sequence[int], dtype: torch.dtype) -> Callable[[int], Tensor]:
    """The decoded matrix of an expert by its number, from tensors as ``stacked`` makes them and (rows, columns, block)."""

    def decoded(expert: int) -> Tensor:
        codes, scales, *second = (None if tensor is None else tensor[expert] for tensor in held)
        assert codes is not None
        assert scales is not None
        return dequantize_nf4(Nf4Matrix((sizes[0], sizes[1]), sizes[2], codes, scales, *second), dtype)

    return decoded


@torch.library.custom_op("twostroke::grouped_nf4_linear", mutates_args=())
def _grouped(
    x: Tensor, codes: Tensor, scales: Tensor, scale_scales: Tensor | None, offset: Tensor | None, ends: Tensor, sizes: list[int]
) -> Tensor:
    of_expert = _of_expert((codes, scales, scale_scales, offset), sizes, x.dtype)
    return multiply_each(x, lambda expert: of_expert(expert).t(), sizes[0], ends)


@_grouped.register_fake
def _(
    x: Tensor, codes: Tensor, scales: Tensor, scale_scales: Tensor | None, offset: Tensor | None, ends: Tensor, sizes: list[int]
) -> Tensor:
    return x.new_empty(x.shape[0], sizes[0])


@torch.library.custom_op("twostroke::grouped_nf4_linear_backward", mutates_args=())
def _grouped_backward(
    gradient: Tensor, codes: Tensor, scales: Tensor, scale_scales: Tensor | None, offset: Tensor | None, ends: Tensor,
    sizes: list[int],
) -> Tensor:  # fmt: skip
    return multiply_each(gradient, _of_expert((codes, scales, scale_scales, offset), sizes, gradient.dtype), sizes[1], ends)


@_grouped_backward.register_fake
def _(
    gradient: Tensor, codes: Tensor, scales: Tensor, scale_scales: Tensor | None, offset: Tensor | None, ends: Tensor,
    sizes: list[int],
) -> Tensor:  # fmt: skip
    return gradient.new_empty(gradient.shape[0], sizes[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *held, ctx.sizes = inputs
    ctx.save_for_backward(*held)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return _grouped_backward(gradient, *ctx.saved_tensors, ctx.sizes), None, None, None, None, None, None


_grouped.register_autograd(_backward, setup_context=_keep)


def grouped_nf4_linear(x: Tensor, shape: tuple[int, int], block: int, held: Mapping[str, Tensor], ends: Tensor) -> Tensor:
    """As ``kernels.grouped.grouped_linear``, over frozen matrices of ``shape`` in NF4, which ``held`` has as ``stacked`` makes
    them: (m, inputs) → (m, outputs), with gradients for ``x`` alone. One expert's matrix is decoded at a time."""
    tensors = (held["codes"], held["scales"], held.get("scale_scales"), held.get("scale_offset"))
    product: Tensor = _grouped(x, *tensors, ends, [*shape, block])
    return product
