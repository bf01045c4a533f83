"""Causal attention of training over packed documents by the native library, forward and backward, as one operator of torch's.

The operator reads queries, keys and values as the projection left them, side by side, and turns them itself, so that a compiled
block holds nothing between its projections but this call. No probabilities are kept: backward computes them again block by
block from the logarithms of their sums (Dao et al. 2022, arXiv:2205.14135), and skips blocks outside a document or window.

Measured on two cores with AVX-512-BF16 (H=6, D=64, T=512, 8,192 tokens, milliseconds of forward and backward): 18 on full rows
and 15 on rows of documents of 230 tokens, where the products, masks, softmax and copies of explicit attention took 40.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from twostroke.core.policy import NATIVE_HEAD_MULTIPLE
from twostroke.kernels.native_library import library, mirror


@mirror("TrainingAttention")
class _Shape(ctypes.Structure):
    """``TrainingAttention`` of ``native/training_attention.h``."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("n_rows", "n_tokens", "n_heads", "n_kv_heads", "width")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("qkv", "first", "cos", "sin")),
        ("rope_rows", ctypes.c_int64),
        ("cap", ctypes.c_float),
        ("sinks", ctypes.c_void_p),
    )


@cache
def is_available() -> bool:
    """True where the native library was built and this processor has the instructions (AVX-512-BF16)."""
    native = library()
    return native is not None and bool(native.ts_trains_attention())


def _shape(
    qkv: Tensor,
    first: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    sinks: Tensor | None,
    n_heads: int,
    scale: float,
    cap: float,
) -> _Shape:
    n_rows, n_tokens, n_all, width = qkv.shape
    for name, tensor, dtype in (("qkv", qkv, torch.bfloat16), ("first", first, torch.int32)):
        if tensor.dtype != dtype or not tensor.is_contiguous():
            raise TypeError(f"{name} is {tensor.dtype} with strides {tensor.stride()}; contiguous {dtype} is read")
    if width % NATIVE_HEAD_MULTIPLE or first.shape != (n_rows, n_tokens):
        raise ValueError(
            f"head dimension {width} must be a multiple of {NATIVE_HEAD_MULTIPLE}, first {tuple(first.shape)} one per token"
        )
    shape = _Shape(
        n_rows, n_tokens, n_heads, (n_all - n_heads) // 2, width, scale, qkv.data_ptr(), first.data_ptr(), None, None, 0, cap
    )
    if cos is not None and sin is not None:
        if cos.dtype != torch.float32 or cos.shape != sin.shape or cos.shape[1:] != (n_tokens, width // 2):
            raise ValueError(f"angles are {tuple(cos.shape)} {cos.dtype}; fp32 of (1 or rows, tokens, half the width) is read")
        shape.cos, shape.sin, shape.rope_rows = cos.data_ptr(), sin.data_ptr(), cos.shape[0]
    if sinks is not None:
        if sinks.dtype != torch.float32 or sinks.shape != (n_heads,):
            raise ValueError(f"sinks are {tuple(sinks.shape)} {sinks.dtype}; fp32, one for each of {n_heads} heads, is read")
        shape.sinks = sinks.data_ptr()
    return shape


def _library() -> ctypes.CDLL:
    native = library()
    if native is None:
        raise RuntimeError("the native library is not there; ask is_available() first")
    if native.ts_threads() != torch.get_num_threads():
        native.ts_set_threads(torch.get_num_threads())
    return native


@torch.library.custom_op("twostroke::packed_attention", mutates_args=())
def _attend(
    qkv: Tensor,
    first: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    sinks: Tensor | None,
    n_heads: int,
    scale: float,
    cap: float,
) -> tuple[Tensor, Tensor]:
    n_rows, n_tokens, _, width = qkv.shape
    qkv, first = qkv.contiguous(), first.contiguous()
    cos, sin, sinks = (None if t is None else t.contiguous() for t in (cos, sin, sinks))
    out = qkv.new_empty(n_rows, n_tokens, n_heads, width)
    log_sums = torch.empty(n_rows, n_heads, n_tokens, dtype=torch.float32)
    shape = _shape(qkv, first, cos, sin, sinks, n_heads, scale, cap)
    _library().ts_attend(ctypes.byref(shape), out.data_ptr(), log_sums.data_ptr())
    return out, log_sums


@_attend.register_fake
def _(
    qkv: Tensor,
    first: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    sinks: Tensor | None,
    n_heads: int,
    scale: float,
    cap: float,
) -> tuple[Tensor, Tensor]:
    n_rows, n_tokens, _, width = qkv.shape
    return qkv.new_empty(n_rows, n_tokens, n_heads, width), qkv.new_empty(n_rows, n_heads, n_tokens, dtype=torch.float32)


@torch.library.custom_op("twostroke::packed_attention_backward", mutates_args=())
def _attend_backward(
    qkv: Tensor,
    first: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    sinks: Tensor | None,
    n_heads: int,
    scale: float,
    cap: float,
    out: Tensor,
    log_sums: Tensor,
    gradient: Tensor,
) -> tuple[Tensor, Tensor]:
    qkv, first, out, log_sums, gradient = (t.contiguous() for t in (qkv, first, out, log_sums, gradient))
    cos, sin, sinks = (None if t is None else t.contiguous() for t in (cos, sin, sinks))
    qkv_gradient, sink_gradient = torch.empty_like(qkv), _sink_gradient(qkv, sinks, n_heads)
    shape = _shape(qkv, first, cos, sin, sinks, n_heads, scale, cap)
    pointers = [t.data_ptr() for t in (out, log_sums, gradient, qkv_gradient)]
    _library().ts_attend_backward(ctypes.byref(shape), *pointers, None if sinks is None else sink_gradient.data_ptr())
    return qkv_gradient, sink_gradient


def _sink_gradient(qkv: Tensor, sinks: Tensor | None, n_heads: int) -> Tensor:
    """Room for the gradient of each row's sinks, so that their sum over rows does not depend on threads; none without sinks."""
    return qkv.new_empty(0 if sinks is None else qkv.shape[0], n_heads, dtype=torch.float32)


@_attend_backward.register_fake
def _(
    qkv: Tensor,
    first: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    sinks: Tensor | None,
    n_heads: int,
    scale: float,
    cap: float,
    out: Tensor,
    log_sums: Tensor,
    gradient: Tensor,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format), _sink_gradient(qkv, sinks, n_heads)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, first, cos, sin, sinks, *of = inputs
    ctx.save_for_backward(qkv, first, cos, sin, sinks, *output)
    ctx.of = of  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    *read, out, log_sums = ctx.saved_tensors  # type: ignore[attr-defined]
    qkv_gradient, by_row = _attend_backward(*read, *ctx.of, out, log_sums, gradients[0])  # type: ignore[attr-defined]
    return qkv_gradient, None, None, None, None if read[-1] is None else by_row.sum(0), None, None, None


_attend.register_autograd(_backward, setup_context=_keep)


def packed_attention(
    qkv: Tensor,
    first: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    n_heads: int,
    scale: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(q·kᵀ·scale)·v of (B, T, H + 2K, D) bf16 as (B, T, H, D): query t sees keys ``first[b, t]`` … t.

    ``first`` (B, T) int32 must not fall along a row and not exceed t. ``rope`` are cos and sin, fp32 (B or 1, T, D/2), by which
    queries and keys are turned on the way. With ``cap`` scores are bounded to cap·tanh(score/cap); ``sinks`` (H,) are one more
    score a head, without a value. Gradients reach ``qkv`` and ``sinks``. Proven in tests/kernels/test_training_attention.py.
    """
    cos, sin = (None, None) if rope is None else rope
    sinks = None if sinks is None else sinks.float()
    result: Tensor = _attend(qkv, first, cos, sin, sinks, n_heads, scale, cap or 0.0)[0]
    return result
