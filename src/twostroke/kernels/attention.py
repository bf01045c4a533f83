"""Attention of few or many query tokens over the keys of one request each, without copying keys for the heads of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.core.crossovers import Crossovers

if TYPE_CHECKING:
    from jaxtyping import Float

DEFAULT = Crossovers()


def attention(
    q: Float[Tensor, "K B T G D"],
    k: Float[Tensor, "K B S D"],
    v: Float[Tensor, "K B S D"],
    mask: Float[Tensor, "#B T M"] | None,
    scale: float,
    crossovers: Crossovers = DEFAULT,
    poisoned: bool = False,
    cap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "K B T G D"]:
    """softmax(q·kᵀ·scale + mask)·v, the G query heads of a group over their one key head, by whichever kernel is faster here.

    ``mask`` is 0 or −∞, for the last M ≤ S keys (those before are seen by every query) and the same for all heads; every query
    must see a key. ``poisoned``: a key that is masked may be NaN, which an added mask leaves NaN; a comparison keeps it out.
    With ``cap`` a score s becomes cap·tanh(s/cap) before the mask. ``sinks`` are one more score of each head, without a value.
    """
    if poisoned or cap is not None or sinks is not None:
        return explicit_attention(q, k, v, mask, scale, poisoned, cap, sinks)
    n_kv, n_rows, n_queries = q.shape[:3]
    few = n_kv * n_rows * n_queries * k.shape[2] <= crossovers.flash_max_scores
    kernel = flash_attention if few and q.dtype == torch.bfloat16 else explicit_attention
    return kernel(q, k, v, mask, scale)


def flash_attention(
    q: Float[Tensor, "K B T G D"],
    k: Float[Tensor, "K B S D"],
    v: Float[Tensor, "K B S D"],
    mask: Float[Tensor, "#B T M"] | None,
    scale: float,
) -> Float[Tensor, "K B T G D"]:
    """In torch's fused kernel, with a group's heads as further query rows."""
    n_kv, n_rows, n_queries, group, head_dim = q.shape
    folded = q.reshape(n_kv, n_rows, n_queries * group, head_dim)
    if mask is not None:
        mask = F.pad(mask, (k.shape[2] - mask.shape[2], 0))
        mask = mask.repeat_interleave(group, dim=1)[None] if n_queries > 1 else mask[None]
    return F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale).view(q.shape)


def explicit_attention(
    q: Float[Tensor, "K B T G D"],
    k: Float[Tensor, "K B S D"],
    v: Float[Tensor, "K B S D"],
    mask: Float[Tensor, "#B T M"] | None,
    scale: float,
    poisoned: bool = False,
    cap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "K B T G D"]:
    """By two batched products and a softmax. Scores of bf16 inputs are rounded to bf16.

    On CPUs with AVX-512-BF16 and no AMX it is 3 times as fast as the fused kernel, which multiplies bf16 no faster than fp32;
    in fp32 it is a little faster (decode 32×256 keys: 343 against 395 µs).
    """
    n_kv, n_rows, n_queries, group, head_dim = q.shape
    n_keys = k.shape[2]
    folded = (q * scale).reshape(n_kv * n_rows, n_queries * group, head_dim)
    keys = k.reshape(n_kv * n_rows, n_keys, head_dim)
    if q.dtype == torch.bfloat16:
        keys = keys.contiguous()  # a slice of a longer run: copied 54 µs, multiplied as it is 153 (64 heads, 100 of 112 keys)
    scores = torch.bmm(folded, keys.transpose(1, 2))
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if mask is not None:
        last = scores.view(n_kv, n_rows, n_queries, group, n_keys)[..., n_keys - mask.shape[2] :]
        if poisoned:
            last.masked_fill_(mask[:, :, None].isneginf(), float("-inf"))
        else:
            last.add_(mask[:, :, None])
    if sinks is not None:
        of_heads = sinks.to(scores.dtype).view(n_kv, 1, 1, group, 1).expand(n_kv, n_rows, n_queries, group, 1)
        scores = torch.cat((scores, of_heads.reshape(*scores.shape[:2], 1)), dim=-1)
    mixed = torch.bmm(torch.softmax(scores, dim=-1)[..., :n_keys], v.reshape(n_kv * n_rows, n_keys, head_dim))
    return mixed.view(q.shape)
