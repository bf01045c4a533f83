"""Causal attention of training over packed documents on an NVIDIA GPU, by torch's flash kernel for documents of any lengths.

Under a mask torch takes another kernel, which reads a (T, T) mask for every row and computes both halves of the square. The
flash kernel (Dao 2023, arXiv:2307.08691) is told where documents begin instead, and walks the keys of a query's document alone.

The operators here wrap ``aten::_flash_attention_forward``, which torch's own ``torch.nn.attention.varlen`` calls as well: that
module's signature changed between torch 2.10 and 2.13, and the operator's only grew.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

LEAST_CAPABILITY = (8, 0)
"""Ampere: the oldest generation that the kernel was written for."""


PROVEN_WITHIN = 2e-2
"""Relative error of the values and gradients that prove the kernel: rounding to bf16 costs some 5e-3."""


@cache
def is_available(device: torch.device) -> bool:
    """True on an NVIDIA GPU where the kernel gives what plain attention does, values and gradients. It is tried once a process,
    because the operator below is torch's own business and may change."""
    has_kernel = device.type == "cuda" and torch.version.cuda is not None
    if not has_kernel or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return False
    try:
        with torch.random.fork_rng([device]):
            return _error(device) < PROVEN_WITHIN
    except (RuntimeError, TypeError, ValueError):
        return False


def _error(device: torch.device) -> float:
    """The largest relative error of the kernel over two documents in bf16, values and gradients, against plain attention in
    fp32."""
    documents = (torch.arange(48, device=device) >= 20).to(torch.int32)[None]
    own = [torch.randn(1, 48, heads, 32, device=device, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    exact = [x.float().requires_grad_() for x in own]
    rounded = [x.requires_grad_() for x in own]
    q, k, v = (x if x.shape[2] == 4 else x.repeat_interleave(2, dim=2) for x in exact)
    index = torch.arange(48, device=device)
    seen = (index <= index[:, None]) & (documents[0] == documents[0][:, None]) & (index > index[:, None] - 9)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.2
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)
    found = flash_attention(rounded[0], rounded[1], rounded[2], document_starts(documents), 0.2, 9)
    upstream = torch.randn_like(expected)
    pairs = [(found, expected)]
    wanted = torch.autograd.grad(expected, exact, upstream)
    pairs += zip(torch.autograd.grad(found, rounded, upstream.bfloat16()), wanted, strict=True)
    with torch.no_grad():
        return max(float((one.float() - other).norm() / other.norm()) for one, other in pairs)


@torch.library.custom_op("twostroke::flash_attention", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    before, after = _sides(window)
    found = torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, longest, longest, 0.0, True, False,
        scale=scale, window_size_left=before, window_size_right=after,
    )  # fmt: skip
    return found[0], found[1]


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op("twostroke::flash_attention_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    before, after = _sides(window)
    random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of a dropout that is not there
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        gradient.contiguous(), q, k, v, out, log_sums, starts, starts, longest, longest, 0.0, True,
        random, torch.empty(0, device=q.device), scale=scale, window_size_left=before, window_size_right=after,
    )  # fmt: skip
    return dq, dk, dv


@_attend_backward.register_fake
def _(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _sides(window: int | None) -> tuple[int | None, int | None]:
    """How many keys before and after a query's own a ``window`` shows, as the operator counts; None: all that are causal."""
    return (None, None) if window is None else (window - 1, 0)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts, *of = inputs
    ctx.save_for_backward(q, k, v, *output, starts)
    ctx.of = of  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    found = _attend_backward(gradients[0], *ctx.saved_tensors, *ctx.of)  # type: ignore[attr-defined]
    return *found, None, None, None, None


_attend.register_autograd(_backward, setup_context=_keep)


def document_starts(documents: Tensor) -> Tensor:
    """Where each document of ``documents`` (B, T) begins in the flattened rows, and their end: int32 (n + 1,). A document is a
    run of equal numbers within a row. The device is waited for, because their number is not known before; a compiled graph is
    told that it varies, or each number would be another graph."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    end = torch.full((1,), documents.numel(), dtype=torch.int32, device=documents.device)
    starts = torch.cat((begins.flatten().nonzero().flatten().to(torch.int32), end))
    torch._dynamo.mark_dynamic(starts, 0)
    return starts


def flash_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float, window: int | None = None) -> Tensor:
    """softmax(q·kᵀ·scale)·v of (B, T, H, D) queries and (B, T, K, D) keys and values in bf16 or fp16, as (B, T, H, D): a token
    sees its document's tokens up to itself, at most the last ``window``.

    ``starts`` are ``document_starts``. D must be a multiple of 8 and at most 256. On other devices than ``is_available`` names
    the operator raises NotImplementedError. Proven in tests/kernels/test_flash_attention.py.
    """
    result: Tensor = _attend(*(t.flatten(0, 1) for t in (q, k, v)), starts, q.shape[1], scale, window)[0]
    return result.view_as(q)
