"""Causal self-attention over a whole sequence: grouped queries, rotary positions, windows and packed documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twostroke.core.spec import ModelSpec
from twostroke.model.norm import RMSNorm
from twostroke.model.rope import rotate

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


def attention_mask(
    n_tokens: int, window: int | None, documents: Int[Tensor, "B T"] | None, device: torch.device
) -> Bool[Tensor, "B 1 T S"] | None:
    """True where query t may see key s: s ≤ t, t − s < ``window``, and the same document. None when causality alone decides.

    A window counts tokens of the row, which within a document is the same as counting its positions.
    """
    if window is not None and window >= n_tokens:
        window = None
    if window is None and documents is None:
        return None
    index = torch.arange(n_tokens, device=device)
    distance = index[:, None] - index[None, :]  # (T, S)
    allowed = distance >= 0
    if window is not None:
        allowed = allowed & (distance < window)
    allowed = allowed[None]  # (1, T, S)
    if documents is not None:
        allowed = allowed & (documents[:, :, None] == documents[:, None, :])
    return allowed[:, None]


class Attention(nn.Module):
    """Packed query, key and value projection, rotary turn, softmax(q·kᵀ/√D)·v, output projection."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = spec.n_heads, spec.n_kv_heads, spec.head_dim
        self.dropout = spec.dropout
        self.qkv = nn.Linear(spec.d_model, spec.qkv_rows, bias=spec.qkv_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.out = nn.Linear(spec.n_heads * spec.head_dim, spec.d_model, bias=spec.attn_out_bias)

    def forward(
        self,
        x: Float[Tensor, "B T E"],
        rope: tuple[Tensor, Tensor] | None,
        mask: Bool[Tensor, "B 1 T S"] | None,
    ) -> Float[Tensor, "B T E"]:
        n_rows, n_tokens, _ = x.shape
        qkv = self.qkv(x).view(n_rows, n_tokens, self.n_heads + 2 * self.n_kv_heads, self.head_dim)
        q, k, v = qkv.split((self.n_heads, self.n_kv_heads, self.n_kv_heads), dim=2)  # (B, T, H | K | K, D)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2),  # (B, H, T, D)
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None,
            enable_gqa=self.n_heads != self.n_kv_heads,
        )
        return self.out(mixed.transpose(1, 2).reshape(n_rows, n_tokens, self.n_heads * self.head_dim))
