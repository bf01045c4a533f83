"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over a whole sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twostroke.core.matrices import attention_matrices
from twostroke.core.spec import ModelSpec
from twostroke.kernels.dropout import dropout
from twostroke.model.norm import RMSNorm
from twostroke.model.rope import rotate

if TYPE_CHECKING:
    from jaxtyping import Float

LATENT_NORM_EPS = 1e-6
"""Of both latents' norms, whatever the model's other norms have (transformers' DeepseekV3RMSNorm)."""


class LatentAttention(nn.Module):
    """Keys and values are rebuilt from one latent vector a token; a part of each key, alike in all heads, holds the position.

    The engine computes the same with the rebuilding matrices absorbed into queries and results (``engine.lowering``).
    """

    q: nn.Linear
    q_a: nn.Linear
    q_b: nn.Linear
    kv_a: nn.Linear
    kv_b: nn.Linear
    out: nn.Linear

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.mla is not None
        self.mla, self.n_heads, self.scale, self.dropout = spec.mla, spec.n_heads, spec.attention_scale, spec.dropout
        self.neighbours_turn = spec.departures.neighbours_turn
        for matrix in attention_matrices(spec):
            self.add_module(matrix.name, nn.Linear(matrix.k, matrix.n, bias=matrix.bias))
        self.q_a_norm = None if self.mla.q_lora_rank is None else RMSNorm(self.mla.q_lora_rank, LATENT_NORM_EPS)
        self.kv_a_norm = RMSNorm(self.mla.kv_lora_rank, LATENT_NORM_EPS)

    def _turned(self, x: Float[Tensor, "B T N R"], rope: tuple[Tensor, Tensor] | None) -> Float[Tensor, "B T N R"]:
        if rope is None:
            return x
        if self.neighbours_turn:
            x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
        half = self.mla.qk_rope_dim // 2
        return rotate(x, rope[0][..., :half], rope[1][..., :half])

    def heads(self, x: Float[Tensor, "B T E"], rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys (B, H, T, D_nope + D_rope), and values (B, H, T, D_v), of each token. ``rope`` are the tables of
        ``model.rope``, whose first angles are those that turn."""
        mla, shape = self.mla, (*x.shape[:2], self.n_heads, -1)
        queries = self.q(x) if self.q_a_norm is None else self.q_b(self.q_a_norm(self.q_a(x)))
        q_nope, q_rope = queries.view(shape).split((mla.qk_nope_dim, mla.qk_rope_dim), dim=-1)
        latent, k_rope = self.kv_a(x).split((mla.kv_lora_rank, mla.qk_rope_dim), dim=-1)
        k_nope, v = self.kv_b(self.kv_a_norm(latent)).view(shape).split((mla.qk_nope_dim, mla.v_dim), dim=-1)
        k_rope = self._turned(k_rope[:, :, None], rope).expand(-1, -1, self.n_heads, -1)
        q = torch.cat((q_nope, self._turned(q_rope, rope)), dim=-1).transpose(1, 2)  # (B, H, T, D)
        return q, torch.cat((k_nope, k_rope), dim=-1).transpose(1, 2), v.transpose(1, 2)

    def forward(
        self, x: Float[Tensor, "B T E"], rope: tuple[Tensor, Tensor] | None, mask: Float[Tensor, "#B 1 T S"] | None
    ) -> Float[Tensor, "B T E"]:
        q, k, v = self.heads(x, rope)
        dropped = self.dropout if self.training else 0.0
        if mask is None:
            values = F.scaled_dot_product_attention(q, k, v, None, dropped, is_causal=True, scale=self.scale)
        else:
            scores = (q * self.scale) @ k.transpose(-1, -2) + mask
            values = dropout(torch.softmax(scores, dim=-1), dropped) @ v
        return self.out(values.transpose(1, 2).flatten(2))
