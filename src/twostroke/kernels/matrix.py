"""A weight matrix ready to be applied: packed once at loading, whatever format it is held in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.core.crossovers import Crossovers
from twostroke.core.policy import WEIGHT_ONLY_MULTIPLE
from twostroke.kernels.features import has_int8_weight_only, has_packed_linear, has_w8a8_linear

if TYPE_CHECKING:
    from jaxtyping import Float, Int8


class Matrix(Protocol):
    """``matrix(x, residual)`` is x·Wᵀ + bias + residual, (M, K) → (M, N), in x's dtype. Neither input is changed."""

    n_rows: int  # N, outputs
    n_columns: int  # K, inputs
    n_bytes: int
    """Bytes that one application must read: the weights, once, with their scales and bias."""

    held_bytes: int
    """Bytes that it keeps: ``n_bytes``, and a second copy where few rows and many want the weights in another order."""

    def __call__(self, x: Float[Tensor, "M K"], residual: Float[Tensor, "M N"] | None = None) -> Float[Tensor, "M N"]: ...


class ExpertMatrices(Protocol):
    """The matrices of ``copies`` experts; ``of(e)`` is expert e's."""

    copies: int
    n_bytes: int
    """Of all experts, each once."""

    held_bytes: int

    def of(self, expert: int) -> Callable[[Tensor], Tensor]: ...


class SeparateMatrices:
    """Experts' matrices, each by itself."""

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self.matrices, self.copies = tuple(matrices), len(matrices)
        self.n_bytes, self.held_bytes = sum(m.n_bytes for m in matrices), sum(m.held_bytes for m in matrices)

    def of(self, expert: int) -> Matrix:
        return self.matrices[expert]


class FloatMatrix:
    """fp32 or bf16 weights, reordered once for oneDNN where it can.

    Measured, one thread, bf16, reordered against ``F.linear`` (µs): 1536×576 41 and 90 for one row, 260 and 314 for 64;
    4096×384 75 and 192. fp32 gains more: 78 and 183, 507 and 1207. Only the reordered copy is kept.
    """

    def __init__(
        self, weight: Float[Tensor, "N K"], bias: Float[Tensor, " N"] | None = None, packed: bool | None = None
    ) -> None:
        self.n_rows, self.n_columns = weight.shape
        self.n_bytes = self.held_bytes = weight.nbytes + (bias.nbytes if bias is not None else 0)
        self.bias = bias
        self.packed = (weight.device.type == "cpu" and has_packed_linear(weight.dtype)) if packed is None else packed
        # The copy matters where the weight is mapped from a file: a step must not wait for the disk.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self.packed else weight.contiguous().clone()

    def __call__(self, x: Float[Tensor, "M K"], residual: Float[Tensor, "M N"] | None = None) -> Float[Tensor, "M N"]:
        if not self.packed:
            y = F.linear(x, self.weight, self.bias)
            return y if residual is None else y.add_(residual)
        if residual is None:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")


class Int8Matrix:
    """Symmetric int8 weights with one scale an output channel: W ≈ weight · scale.

    By the number of multiply-adds M·N·K: few run on int8 weights and bf16 activations; many quantise each row of x to 8 bits
    (scale max|row|/127) and multiply integers, where the CPU has VNNI, or else expand the weights to x's dtype for the call.
    """

    def __init__(
        self,
        weight: Int8[Tensor, "N K"],
        scale: Float[Tensor, " N"],
        bias: Float[Tensor, " N"] | None = None,
        crossovers: Crossovers | None = None,
        integers: bool | None = None,
    ) -> None:
        self.n_rows, self.n_columns = weight.shape
        self.bias = bias
        limit = (crossovers or Crossovers()).int8_weight_only_max_macs
        on_cpu = weight.device.type == "cpu"
        aligned = on_cpu and self.n_columns % WEIGHT_ONLY_MULTIPLE == 0 and has_int8_weight_only()
        self.largest_weight_only = int(limit) // (self.n_rows * self.n_columns) if aligned else 0
        self.scale = scale.float()
        self.integers = (on_cpu and has_w8a8_linear()) if integers is None else integers
        self.prepacked: Tensor | None = None
        if self.integers:
            self.prepacked = torch.ops.onednn.qlinear_prepack(weight, None)
            self.zero_points = torch.zeros(self.n_rows, dtype=torch.int64)
        # Matrices that never run weight-only keep the packed copy alone.
        keep = not self.integers or self.largest_weight_only > 0
        self.weight: Tensor | None = weight.contiguous().clone() if keep else None
        self.scale_bf16 = self.scale.bfloat16()
        self.n_bytes = weight.nbytes + 4 * self.n_rows + (bias.nbytes if bias is not None else 0)
        self.held_bytes = self.n_bytes + (weight.nbytes if self.integers and keep else 0)

    def __call__(self, x: Float[Tensor, "M K"], residual: Float[Tensor, "M N"] | None = None) -> Float[Tensor, "M N"]:
        if x.dtype == torch.bfloat16 and x.shape[0] <= self.largest_weight_only:
            y = self.weight_only(x)
        elif self.integers:
            y = self.w8a8(x)
        else:
            y = self.expanded(x)
        if self.bias is not None:
            y = y.add_(self.bias)
        return y if residual is None else y.add_(residual)

    def weight_only(self, x: Float[Tensor, "M K"]) -> Float[Tensor, "M N"]:
        assert self.weight is not None
        return torch.ops.aten._weight_int8pack_mm(x.contiguous(), self.weight, self.scale_bf16)

    def w8a8(self, x: Float[Tensor, "M K"]) -> Float[Tensor, "M N"]:
        codes, row_scale = quantize_rows(x)
        y = torch.ops.onednn.qlinear_pointwise(
            codes, 1.0, 128, self.prepacked, self.scale, self.zero_points, None, 1.0, 0, torch.float32, "none", [], ""
        )  # fmt: skip
        return y.mul_(row_scale).to(x.dtype)

    def expanded(self, x: Float[Tensor, "M K"]) -> Float[Tensor, "M N"]:
        assert self.weight is not None
        # Where oneDNN has no bf16 products torch's own are loops; fp32 is much faster there.
        dtype = x.dtype if has_packed_linear(x.dtype) else torch.float32
        return F.linear(x.to(dtype), self.weight.to(dtype)).mul_(self.scale.to(dtype)).to(x.dtype)


def quantize_rows(x: Float[Tensor, "M K"]) -> tuple[Tensor, Tensor]:
    """8-bit codes and scale of each row: x ≈ (codes − 128)·scale, scale = max|row|/127; a row of zeros has codes 128.

    Unsigned with zero point 128, because oneDNN multiplies signed activations by a plain loop where there is no AMX (measured:
    26 ms against 27 µs for a 576×1536 product).
    """
    x = x.float()
    # abs and amax: the infinity norm in one operation is four times as slow over many rows (torch 2.13, 32×704: 81 and 21 µs).
    scale = x.abs().amax(dim=1, keepdim=True).clamp_min_(1e-30).div_(127.0)
    # Cutting off after adding a half rounds, and saves an operation: few rows cost their operations, not their arithmetic.
    return (x * scale.reciprocal()).add_(128.5).to(torch.uint8), scale


def quantize_columns(weight: Float[Tensor, "N K"]) -> tuple[Int8[Tensor, "N K"], Float[Tensor, " N"]]:
    """Symmetric int8 of each output channel: weight ≈ codes·scale, scale = max|channel|/127; a channel of zeros has scale 1."""
    weight = weight.float()
    scale = weight.abs().amax(dim=1).div_(127.0)
    scale.masked_fill_(scale == 0, 1.0)
    return (weight / scale[:, None]).round_().to(torch.int8), scale
