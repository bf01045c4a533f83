"""The decoder defines what a model of any supported family computes. Training, scoring and parity tests run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twostroke.core.errors import InputError
from twostroke.core.spec import ModelSpec
from twostroke.kernels.dropout import dropout
from twostroke.model.attention import Attention, Packed, compute_dtype, masks_of
from twostroke.model.experts import ExpertsMlp
from twostroke.model.initialise import initialise
from twostroke.model.latent_attention import LatentAttention
from twostroke.model.mlp import GatedMlp, PlainMlp
from twostroke.model.norm import make_norm
from twostroke.model.rope import tables_by_layer

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Embedding(nn.Module):
    """A table of rows by id. ``nn.Embedding`` would draw random values at construction, even if weights are loaded next."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, ids: Int[Tensor, "#B T"]) -> Float[Tensor, "#B T E"]:
        return F.embedding(ids, self.weight)


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """``logits`` bounded to ±``cap`` by cap·tanh(logits/cap) (Gemma 2, arXiv:2408.00118, section 2), or as they are."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def make_mlp(spec: ModelSpec, layer: int) -> nn.Module:
    if spec.has_experts(layer):
        return ExpertsMlp(spec, layer)
    return GatedMlp(spec) if spec.mlp == "swiglu" else PlainMlp(spec)


class Block(nn.Module):
    """residual + attention(norm(residual)), then residual + mlp(norm(residual)).

    Families move the norms, put more of them around what is added, or compute both branches from one residual. No branch
    depends on a tensor's value, so that torch.compile makes one graph of it.
    """

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        away = spec.departures
        self.norms_after, self.parallel, self.residual_scale = away.norms_after, away.parallel_block, away.residual_scale
        self.attn_norm = make_norm(spec)
        self.attn = Attention(spec) if spec.mla is None else LatentAttention(spec)
        self.attn_post_norm = make_norm(spec) if away.norms_around else None
        self.mlp_norm = None if away.one_norm else make_norm(spec)
        self.mlp = make_mlp(spec, layer)
        self.mlp_post_norm = make_norm(spec) if away.norms_around else None
        # In transformers only GPT-2 has dropout on its residual branches. Other families have `attention_dropout` alone.
        self.residual_dropout = spec.dropout if spec.positions == "learned" else 0.0
        self.recompute: Callable[..., Tensor] | None = None  # set by training.activation_checkpointing

    def forward(
        self,
        residual: Float[Tensor, "B T E"],
        rope: tuple[Tensor, Tensor] | None,
        mask: Float[Tensor, "#B 1 T S"] | Int[Tensor, "B T"] | Packed | None,
    ) -> Float[Tensor, "B T E"]:
        # Without gradients nothing is kept for backward, so nothing is recomputed.
        if self.recompute is None or not torch.is_grad_enabled():
            return self._compute(residual, rope, mask)
        return self.recompute(self._compute, residual, rope, mask)

    def _compute(self, residual: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor | Packed | None) -> Tensor:
        if (biases := self._joint_biases()) is not None:
            return self._with_joint_bias(*biases, residual, rope, mask)
        if self.mlp_norm is None:  # both branches read one norm
            normed = self.attn_norm(residual)
            return residual + self._scaled(self.attn(normed, rope, mask)) + self._scaled(self.mlp(normed))
        attended = residual + self._added(self.attn, self.attn_norm, self.attn_post_norm, residual, rope, mask)
        read = residual if self.parallel else attended
        return attended + self._added(self.mlp, self.mlp_norm, self.mlp_post_norm, read)

    def _joint_biases(self) -> tuple[nn.Linear, nn.Linear] | None:
        """The matrices that end both branches of a parallel block, where their biases are trained and nothing comes between
        them and the residual stream."""
        if not self.parallel or self.norms_after or self.attn_post_norm is not None or self.residual_dropout:
            return None
        out, down = self.attn.out, getattr(self.mlp, "down", None)
        if not isinstance(out, nn.Linear) or not isinstance(down, nn.Linear):  # adapters, or experts
            return None
        return (out, down) if all(m.bias is not None and m.bias.requires_grad for m in (out, down)) else None

    def _with_joint_bias(
        self,
        out: nn.Linear,
        down: nn.Linear,
        residual: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        mask: Tensor | Packed | None,
    ) -> Tensor:
        """Both branches with their biases added up first, because both biases have one gradient. Of two sums of one tensor,
        torch 2.13's compiler makes a kernel for CPUs that declares one name twice, and the run goes on uncompiled."""
        attention, mlp = cast(Attention, self.attn), cast(PlainMlp, self.mlp)
        normed = self.attn_norm(residual)
        mixed = attention.mixed(normed, rope, mask)
        inner = mlp.inner(normed if self.mlp_norm is None else self.mlp_norm(residual))
        attended = residual + self._scaled(F.linear(mixed, out.weight))
        return attended + self._scaled(F.linear(inner, down.weight, out.bias + down.bias))

    def _added(
        self, branch: nn.Module, norm: nn.Module, post_norm: nn.Module | None, residual: Tensor, *context: Tensor | Any
    ) -> Tensor:
        """What ``branch`` adds to the residual stream."""
        x = norm(branch(residual, *context)) if self.norms_after else branch(norm(residual), *context)
        x = x if post_norm is None else post_norm(x)
        return self._scaled(x)

    def _scaled(self, x: Tensor) -> Tensor:
        return self._drop(x if self.residual_scale == 1.0 else x * self.residual_scale)

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.residual_dropout, self.training)


class Decoder(nn.Module):
    """A decoder-only transformer of ``spec``. A new one holds the weights of ``initialise(…, seed=0)``, or none on device
    "meta".

    Engine, training and interop share its parameter names. ``twostroke.model.families`` maps them to each family's names on
    disk.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> None:
        super().__init__()
        spec.require_buildable()
        self.spec = spec
        with torch.device("meta"):  # layers draw no random values that ``initialise`` or loaded weights would overwrite
            self.embed = Embedding(spec.vocab_size, spec.d_model)
            learned = spec.positions == "learned"
            self.position_embed = Embedding(spec.max_positions, spec.d_model) if learned else None
            self.blocks = nn.ModuleList(Block(spec, i) for i in range(spec.n_layers))
            self.final_norm = make_norm(spec)
            self.head = None if spec.tied_embeddings else nn.Linear(spec.d_model, spec.vocab_size, bias=False)
        self.after_block: Callable[[int, Tensor, Tensor], Tensor] | None = None  # set by training.early_exit
        for parameter in self.parameters():  # buffers stay fp32
            parameter.data = parameter.data.to(dtype)
        place = torch.device(device or "cpu")
        if place.type != "meta":
            self.to_empty(device=place)
            initialise(self, seed=0)

    @property
    def logit_cap(self) -> float | None:
        """What ``capped`` bounds logits to, where the family has a bound."""
        return self.spec.departures.logit_cap

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What a model directory holds, by canonical name: parameters, and buffers that are no run's own."""
        held: dict[str, Tensor] = self.state_dict()
        return held

    @property
    def head_weight(self) -> Float[Tensor, "V E"]:
        """The output projection, which is the embedding itself if the two are tied."""
        return self.embed.weight if self.head is None else self.head.weight

    def hidden(
        self,
        tokens: Int[Tensor, "B T"],
        positions: Int[Tensor, "#B T"] | None = None,
        documents: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T E"]:
        """The residual stream after the final norm, times what the family scales logits with. ``positions`` default to 0…T−1;
        ``documents`` number the packed documents of a row, and attention stays within one. Training computes the loss from this
        in chunks of rows, without all logits at once.

        Raises InputError if learned positions end before T.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return self.stage(tokens, positions, documents, range(self.spec.n_layers))

    def stage(
        self,
        x: Int[Tensor, "B T"] | Float[Tensor, "B T E"],
        positions: Int[Tensor, "#B T"],
        documents: Int[Tensor, "B T"] | None,
        layers: range,
    ) -> Float[Tensor, "B T E"]:
        """What ``layers`` and what stands beside them at the model's ends make of ``x``: of tokens if they are the first ones,
        else of the residual stream of those before; read out after the last ones."""
        residual = self.entered(x, positions) if layers.start == 0 else x
        residual = self.through(residual, positions, documents, layers)
        return self.read_out(residual) if layers.stop == self.spec.n_layers else residual

    def entered(self, tokens: Int[Tensor, "B T"], positions: Int[Tensor, "#B T"]) -> Float[Tensor, "B T E"]:
        """The residual stream before the blocks. Raises what ``hidden`` raises."""
        n_tokens = tokens.shape[1]
        residual = self.embedded(tokens)
        if self.position_embed is not None:
            if n_tokens > self.spec.max_positions:
                raise InputError(
                    f"a sequence of {n_tokens} tokens is longer than the max_positions={self.spec.max_positions} learned "
                    "positions. "
                    "Shorten it."
                )
            residual = residual + self.position_embed(positions)
            residual = dropout(residual, self.spec.dropout, self.training)
        return residual

    def through(
        self,
        residual: Float[Tensor, "B T E"],
        positions: Int[Tensor, "#B T"],
        documents: Int[Tensor, "B T"] | None,
        layers: range,
    ) -> Float[Tensor, "B T E"]:
        """The residual stream after the blocks of ``layers``, which follow those that made it."""
        n_rows, n_tokens, spec = len(residual), positions.shape[1], self.spec  # tensor parallel cuts the residual stream
        ropes = tables_by_layer(spec, positions)
        dtype = compute_dtype(residual.device, residual.dtype)
        masks = masks_of(spec, documents, n_rows, n_tokens, residual.device, dtype, self.training)
        for i in layers:
            after = self.blocks[i](residual, ropes[i], masks[spec.window_of_layer(i)])
            residual = after if self.after_block is None else self.after_block(i, residual, after)
        return residual

    def embedded(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T E"]:
        """The residual stream before positions and blocks."""
        x: Tensor = self.embed(tokens)
        scale = self.spec.departures.embedding_scale
        return x if scale == 1.0 else x * scale

    def read_out(self, residual: Float[Tensor, "*rows E"]) -> Float[Tensor, "*rows E"]:
        """What the head multiplies: the final norm of the residual stream, times what the family scales logits with."""
        x: Tensor = self.final_norm(residual)
        scale = self.spec.departures.logit_scale
        return x if scale == 1.0 else x * scale

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        positions: Int[Tensor, "#B T"] | None = None,
        documents: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits of the next token at every position."""
        return self.logits(self.hidden(tokens, positions, documents))

    def logits(self, hidden: Float[Tensor, "*rows E"]) -> Float[Tensor, "*rows V"]:
        """Logits of what ``hidden`` or ``read_out`` returned."""
        return capped(F.linear(hidden, self.head_weight), self.logit_cap)
