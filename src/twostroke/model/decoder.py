"""The decoder: what a model of any supported family computes. Training, scoring and parity tests run this definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twostroke.core.errors import InputError
from twostroke.core.spec import ModelSpec
from twostroke.model.attention import (
    Attention,
    attends_natively,
    attention_mask,
    compute_dtype,
    first_visible,
    prefers_explicit,
)
from twostroke.model.initialise import initialise
from twostroke.model.mlp import make_mlp
from twostroke.model.norm import make_norm
from twostroke.model.rope import rope_tables

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Embedding(nn.Module):
    """A table of rows by id. nn.Embedding would draw every value at construction, also where weights are loaded next."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, ids: Int[Tensor, "#B T"]) -> Float[Tensor, "#B T E"]:
        return F.embedding(ids, self.weight)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). No branch depends on a tensor's value, so it compiles whole."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attn_norm = make_norm(spec)
        self.attn = Attention(spec)
        self.mlp_norm = make_norm(spec)
        self.mlp = make_mlp(spec)
        # transformers drops residual branches only in GPT-2; elsewhere `attention_dropout` is all there is.
        self.residual_dropout = spec.dropout if spec.positions == "learned" else 0.0
        self.recompute: Callable[..., Tensor] | None = None  # how training keeps less for backward than all

    def forward(
        self,
        x: Float[Tensor, "B T E"],
        rope: tuple[Tensor, Tensor] | None,
        mask: Float[Tensor, "#B 1 T S"] | Int[Tensor, "B T"] | None,
    ) -> Float[Tensor, "B T E"]:
        if self.recompute is None or not torch.is_grad_enabled():
            return self._compute(x, rope, mask)
        return self.recompute(self._compute, x, rope, mask)

    def _compute(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        x = x + self._drop(self.attn(self.attn_norm(x), rope, mask))
        return x + self._drop(self.mlp(self.mlp_norm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.residual_dropout, self.training) if self.residual_dropout > 0 else x


class Decoder(nn.Module):
    """A decoder-only transformer of ``spec``. Freshly made it holds ``initialise(…, seed=0)``; on device "meta", nothing.

    Parameter names are the canonical ones that the engine, training and interop share; ``twostroke.model.families`` maps
    them to each family's names on disk.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> None:
        super().__init__()
        spec.require_buildable()
        self.spec = spec
        with torch.device("meta"):
            self.embed = Embedding(spec.vocab_size, spec.d_model)
            learned = spec.positions == "learned"
            self.position_embed = Embedding(spec.max_positions, spec.d_model) if learned else None
            self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.n_layers))
            self.final_norm = make_norm(spec)
            self.head = None if spec.tied_embeddings else nn.Linear(spec.d_model, spec.vocab_size, bias=False)
        self.to(dtype)
        place = torch.device(device or "cpu")
        if place.type != "meta":
            self.to_empty(device=place)
            initialise(self, seed=0)

    @property
    def head_weight(self) -> Float[Tensor, "V E"]:
        """The output projection: the embedding itself where the two are tied."""
        return self.embed.weight if self.head is None else self.head.weight

    def hidden(
        self,
        tokens: Int[Tensor, "B T"],
        positions: Int[Tensor, "#B T"] | None = None,
        documents: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T E"]:
        """Activations after the final norm. ``positions`` default to 0…T−1; ``documents`` number the documents packed in a row.

        Raises InputError where learned positions end before T.
        """
        n_tokens = tokens.shape[1]
        if positions is None:
            positions = torch.arange(n_tokens, device=tokens.device)[None]
        x = self.embed(tokens)
        rope = None
        if self.position_embed is not None:
            if n_tokens > self.spec.max_positions:
                raise InputError(
                    f"a sequence of {n_tokens} tokens is longer than max_positions={self.spec.max_positions} learned positions."
                )
            x = x + self.position_embed(positions)
            x = F.dropout(x, self.spec.dropout, self.training) if self.spec.dropout > 0 else x
        else:
            rope = rope_tables(self.spec, positions)
        windows = [self.spec.window_of_layer(i) for i in range(self.spec.n_layers)]
        dtype = compute_dtype(x.device, x.dtype)
        masks: dict[int | None, Tensor | None]
        if attends_natively(x.device, dtype, self.spec, self.training):
            masks = {w: first_visible(n_tokens, w, documents, tokens.shape[0], x.device) for w in set(windows)}
        else:
            explicit = prefers_explicit(x.device, dtype, n_tokens, self.training)
            masks = {w: attention_mask(n_tokens, w, documents, x.device, dtype, explicit) for w in set(windows)}
        for block, window in zip(self.blocks, windows, strict=True):
            x = block(x, rope, masks[window])
        return self.final_norm(x)

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        positions: Int[Tensor, "#B T"] | None = None,
        documents: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits of the next token at every position."""
        return F.linear(self.hidden(tokens, positions, documents), self.head_weight)
