"""Causal self-attention over a whole sequence: grouped queries, rotary positions, windows and packed documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twostroke.core import policy
from twostroke.core.matrices import attention_matrices, head_norms
from twostroke.core.spec import ModelSpec
from twostroke.kernels import flash_attention, training_attention
from twostroke.kernels.dropout import dropout
from twostroke.model.norm import RMSNorm, norm_offset
from twostroke.model.rope import by_halves, rotate, turned_by_halves

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


def compute_dtype(device: torch.device, weights: torch.dtype) -> torch.dtype:
    """The dtype of matrix products, which is that of the weights unless autocast is on."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else weights


def _name(dtype: torch.dtype) -> str:
    return "bf16" if dtype == torch.bfloat16 else "fp32" if dtype == torch.float32 else "fp16"


def prefers_explicit(device: torch.device, dtype: torch.dtype, n_tokens: int, training: bool) -> bool:
    """Whether training's attention is two batched products and a softmax instead of SDPA (``policy.attends_explicitly``).

    On CPUs without AMX, SDPA's flash kernel multiplies bf16 at fp32 speed: forward and backward took 19 and 35 ms, and explicit
    attention 8 and 11 (one thread, B=4, H=6, T=512). Scoring keeps SDPA, whose scores are fp32.
    """
    return training and policy.attends_explicitly(device.type, _name(dtype), n_tokens)


def must_be_explicit(spec: ModelSpec, device: torch.device, dtype: torch.dtype, n_tokens: int, training: bool) -> bool:
    """``prefers_explicit``, or scores are bounded or have sinks beside them, which SDPA cannot do."""
    return policy.is_beyond_sdpa(spec) or prefers_explicit(device, dtype, n_tokens, training)


def attends_natively(device: torch.device, dtype: torch.dtype, spec: ModelSpec, training: bool) -> bool:
    """Whether training's attention is the native library's, which is faster than torch's for the shapes that it supports."""
    fits = policy.fits_native_attention(device.type, _name(dtype), spec)
    return training and fits and training_attention.is_available()


class Packed(NamedTuple):
    """What flash attention knows of packed documents in a mask's place: ``flash_attention.document_starts`` and the window."""

    starts: Int[Tensor, " starts"]
    window: int | None


def attends_by_flash(device: torch.device, dtype: torch.dtype, spec: ModelSpec) -> bool:
    """Whether attention over packed documents is the flash kernel's on a GPU."""
    return policy.fits_flash_attention(device.type, _name(dtype), spec) and flash_attention.is_available(device)


def masks_of(
    spec: ModelSpec,
    documents: Int[Tensor, "B T"] | None,
    n_rows: int,
    n_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    training: bool,
) -> dict[int | None, Tensor | Packed | None]:
    """For each window of ``spec``'s layers what its blocks are told; built once a forward pass."""
    windows = {spec.window_of_layer(i) for i in range(spec.n_layers)}
    if attends_natively(device, dtype, spec, training):
        return {w: first_visible(n_tokens, w, documents, n_rows, device) for w in windows}
    if documents is not None and attends_by_flash(device, dtype, spec):
        starts = flash_attention.document_starts(documents)
        return {w: Packed(starts, None if w is None or w >= n_tokens else w) for w in windows}
    explicit = must_be_explicit(spec, device, dtype, n_tokens, training)
    return {w: attention_mask(n_tokens, w, documents, device, dtype, explicit) for w in windows}


def first_visible(
    n_tokens: int, window: int | None, documents: Int[Tensor, "B T"] | None, n_rows: int, device: torch.device
) -> Int[Tensor, "B T"]:
    """The first key that each query attends to, int32: the first token of its document, or the beginning of its ``window``.

    A document is a run of equal numbers. ``visible`` has the same information for each key.
    """
    index = torch.arange(n_tokens, dtype=torch.int32, device=device)
    first = torch.zeros(n_rows, n_tokens, dtype=torch.int32, device=device)
    if documents is not None:
        first[:, 1:] = torch.where(documents[:, 1:] != documents[:, :-1], index[1:], 0)
        first = first.cummax(dim=1).values
    return first if window is None else torch.maximum(first, index - (window - 1))


def visible(
    n_tokens: int, window: int | None, documents: Int[Tensor, "B T"] | None, device: torch.device
) -> Bool[Tensor, "B T S"]:
    """True where query t may attend to key s: s ≤ t, t − s < ``window``, and both in the same document. B is 1 without
    documents.

    A window counts tokens of the row. Within a document that equals counting positions.
    """
    index = torch.arange(n_tokens, device=device)
    distance = index[:, None] - index[None, :]  # (T, S)
    allowed = distance >= 0
    if window is not None:
        allowed = allowed & (distance < window)
    if documents is None:
        return allowed[None]
    return allowed & (documents[:, :, None] == documents[:, None, :])


def attention_mask(
    n_tokens: int,
    window: int | None,
    documents: Int[Tensor, "B T"] | None,
    device: torch.device,
    dtype: torch.dtype,
    explicit: bool,
) -> Float[Tensor, "#B 1 T S"] | None:
    """0 where a query may attend to a key and −∞ elsewhere, built once a forward pass; None if SDPA's causal flag is enough.

    The mask is additive and in the compute dtype, because SDPA would convert a boolean mask to that in every layer. Measured on
    two CPU cores, bf16, B=16, H=6, T=512, forward and backward: boolean 131 and 296 ms, additive bf16 126 and 256, additive
    fp32 130 and 266, causal flag without a mask 121 and 284.
    """
    if window is not None and window >= n_tokens:
        window = None  # it hides nothing from sequences of this length
    if window is None and documents is None and not explicit:
        return None
    allowed = visible(n_tokens, window, documents, device)
    return torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(~allowed, float("-inf"))[:, None]


def explicit_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B K S D"],
    v: Float[Tensor, "B K S D"],
    mask: Float[Tensor, "#B 1 T S"],
    dropped: float,
    scale: float,
    cap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "B H T D"]:
    """softmax(q·kᵀ·scale + mask)·v under a causal ``mask``, in blocks of queries that stop at the last key that a block attends
    to. With ``cap`` scores are bounded to cap·tanh(score/cap) before the mask. A head's sink is one more score, without a
    value.

    The query heads of a group are a dimension beside their key head, so that keys and values are not copied for each.
    """
    n_rows, n_heads, n_tokens, head_dim = q.shape
    n_kv_heads = k.shape[1]
    q = (q * scale).reshape(n_rows, n_kv_heads, n_heads // n_kv_heads, n_tokens, head_dim)  # (B, K, G, T, D)
    k, v, mask = k[:, :, None], v[:, :, None], mask[:, :, None]
    blocks = []
    for start, end in policy.query_blocks(n_tokens):
        scores = q[..., start:end, :] @ k[..., :end, :].transpose(-1, -2)
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        scores = scores + mask[..., start:end, :end]
        if sinks is not None:
            beside = sinks.view(n_kv_heads, -1, 1, 1).to(scores.dtype).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, beside), dim=-1)
        probabilities = dropout(torch.softmax(scores, dim=-1)[..., :end], dropped)
        blocks.append(probabilities @ v[..., :end, :])
    return torch.cat(blocks, dim=-2).reshape(n_rows, n_heads, n_tokens, head_dim)


class Attention(nn.Module):
    """Packed query, key and value projection, rotary embedding, softmax(q·kᵀ·scale)·v, output projection.

    One large product is faster than three small ones; ``core.families`` joins and splits it for the files on disk.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = spec.n_heads, spec.n_kv_heads, spec.head_dim
        self.dropout = spec.dropout
        qkv, out = attention_matrices(spec)
        self.qkv = nn.Linear(qkv.k, qkv.n, bias=qkv.bias)
        norms = [RMSNorm(norm.n, spec.norm_eps, norm_offset(spec)) for norm in head_norms(spec)]
        self.q_norm = norms[0] if norms else None
        self.k_norm = norms[1] if norms else None
        self.norm_over_heads = spec.departures.qk_norm_over_heads
        self.spec, self.scale, self.cap = spec, spec.attention_scale, spec.departures.attention_cap
        self.sinks = nn.Parameter(torch.empty(spec.n_heads)) if spec.departures.attention_sinks else None
        self.out = nn.Linear(out.k, out.n, bias=out.bias)

    def _norm_heads(self, norm: RMSNorm, heads: Float[Tensor, "B T H D"]) -> Float[Tensor, "B T H D"]:
        """Each head by itself, or all of a token's together."""
        return norm(heads.flatten(2)).view(heads.shape) if self.norm_over_heads else norm(heads)

    def forward(
        self,
        x: Float[Tensor, "B T E"],
        rope: tuple[Tensor, Tensor] | None,
        mask: Float[Tensor, "#B 1 T S"] | Int[Tensor, "B T"] | Packed | None,
    ) -> Float[Tensor, "B T E"]:
        """An integer ``mask`` is that of ``first_visible`` and selects native attention, ``Packed`` a GPU's."""
        out: Tensor = self.out(self.mixed(x, rope, mask))
        return out

    def mixed(
        self,
        x: Float[Tensor, "B T E"],
        rope: tuple[Tensor, Tensor] | None,
        mask: Float[Tensor, "#B 1 T S"] | Int[Tensor, "B T"] | Packed | None,
    ) -> Float[Tensor, "B T HD"]:
        """All heads' weighted values, which the output projection reads."""
        n_rows, n_tokens, _ = x.shape
        qkv = self.qkv(x).view(n_rows, n_tokens, self.n_heads + 2 * self.n_kv_heads, self.head_dim)
        reordered = rope is not None and not turned_by_halves(self.spec)
        first = mask if isinstance(mask, Tensor) and mask.dtype == torch.int32 else None
        if first is not None and not reordered and self.q_norm is None:
            return self._natively(qkv, first, rope)
        q, k, v = qkv.split((self.n_heads, self.n_kv_heads, self.n_kv_heads), dim=2)  # (B, T, H | K | K, D)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._norm_heads(self.q_norm, q), self._norm_heads(self.k_norm, k)
        if reordered:
            q, k = by_halves(q, self.spec), by_halves(k, self.spec)
        if first is not None:  # the native operator splits and rotates qkv itself
            return self._natively(torch.cat((q, k, v), dim=2), first, rope)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if isinstance(mask, Packed):
            return flash_attention.flash_attention(q, k, v, mask.starts, self.scale, mask.window).flatten(2)
        weighted_values = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return weighted_values.transpose(1, 2).reshape(n_rows, n_tokens, self.n_heads * self.head_dim)

    def _natively(
        self, qkv: Float[Tensor, "B T heads D"], first: Int[Tensor, "B T"], rope: tuple[Tensor, Tensor] | None
    ) -> Float[Tensor, "B T HD"]:
        attend = training_attention.packed_attention
        return attend(qkv, first, rope, self.n_heads, self.scale, self.cap, self.sinks).flatten(2)

    def attend(
        self,
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B K T D"],
        v: Float[Tensor, "B K T D"],
        mask: Float[Tensor, "#B 1 T S"] | None,
    ) -> Float[Tensor, "B H T D"]:
        """Each query's weighted values."""
        dropped = self.dropout if self.training else 0.0
        if mask is not None and must_be_explicit(self.spec, q.device, q.dtype, q.shape[2], self.training):
            return explicit_attention(q, k, v, mask, dropped, self.scale, self.cap, self.sinks)
        # enable_gqa instead of keys and values expanded to H heads takes 118 and 276 ms instead of 138 and 332 on a CPU.
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropped, is_causal=mask is None, scale=self.scale, enable_gqa=self.n_heads != self.n_kv_heads
        )
