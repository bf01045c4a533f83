"""Tensor with sequence parallel: each matrix is cut over the ranks of a replica, and the residual stream along the sequence.

q, k, v, gate and up are cut by their outputs, so that a rank has whole heads and a part of the MLP's width; the matrices after
them by their inputs, embedding and head by the vocabulary (Shoeybi et al. 2019, arXiv:1909.08053). Between the branches a rank
has a part of each sequence: norms and sums are computed once and not on every rank (Korthikanti et al., arXiv:2205.05198). A
branch gathers the sequence before it and scatters its ranks' sums after it. The decoder's modules are changed from outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from twostroke.core.errors import ConfigError
from twostroke.core.matrices import Matrix, Vector, block
from twostroke.core.parallel_recipe import divisors
from twostroke.core.recipe import TrainRecipe
from twostroke.core.spec import ModelSpec
from twostroke.data.packing import IGNORE_INDEX
from twostroke.model.decoder import Decoder, capped
from twostroke.training.ranks import SENT, Ranks, all_gather
from twostroke.training.tree_sums import tree_sum
from twostroke.training.whole import Cut, rows_of

# -- what each rank holds ---------------------------------------------------------------------------------------------------


def cuts(spec: ModelSpec) -> dict[str, Cut]:
    """The decoder's parameters that tensor parallel cuts, by name. Ranks hold all others whole."""
    table = Cut((spec.vocab_size, spec.d_model), 0, (spec.vocab_size,))
    found = {"embed.weight": table}
    for layer in range(spec.n_layers):
        for stored in block(spec, layer):
            name = f"blocks.{layer}.{stored.module}"
            if isinstance(stored, Vector):
                found[name] = Cut((stored.n,), 0, (stored.n,))
            elif isinstance(stored, Matrix) and stored.split == "row":
                found[f"{name}.weight"] = Cut((stored.n, stored.k), 1, (stored.k,))
            elif isinstance(stored, Matrix):
                parts = tuple(rows for _, rows in stored.parts)
                found[f"{name}.weight"] = Cut((stored.n, stored.k), 0, parts)
                if stored.bias:
                    found[f"{name}.bias"] = Cut((stored.n,), 0, parts)
    return found if spec.tied_embeddings else found | {"head.weight": table}


def check_tensor(recipe: TrainRecipe, spec: ModelSpec, n: int) -> None:
    """Raise ConfigError if ``n`` ranks cannot train ``spec`` by tensor parallel: what they do not divide, or a feature that is
    not cut."""
    if n == 1:
        return
    length = recipe.train.sequence_length
    for name, value in (("n_kv_heads", spec.n_kv_heads), ("n_heads", spec.n_heads), ("d_ff", spec.d_ff)):
        if value % n:
            raise ConfigError(f"parallel.tensor={n} must divide {name}={value}. Use {divisors(value)}.")
    if length % n:
        raise ConfigError(f"parallel.tensor={n} must divide train.sequence_length={length}. Use {divisors(length)}.")
    away = spec.departures
    refused = {
        "a mixture of experts": spec.moe is not None,
        "latent attention": spec.mla is not None,
        "dropout": spec.dropout > 0,
        "a norm over all heads together": spec.qk_norm and away.qk_norm_over_heads,
    }
    for what, present in refused.items():
        if present:
            raise ConfigError(f"the model has {what}, which parallel.tensor={n} does not cut yet. Use parallel.data or shard.")


# -- what ranks send each other ---------------------------------------------------------------------------------------------


def _group(name: str) -> Any:
    return dist.distributed_c10d._resolve_process_group(cast(Any, name))


@torch.library.custom_op("twostroke::gather_sequence", mutates_args=())
def _gather(x: Tensor, group: str, n: int) -> Tensor:
    found = torch.empty(n * x.numel(), dtype=x.dtype, device=x.device)
    all_gather(found, x.contiguous().view(-1), group=_group(group))
    SENT["tensor"] += (n - 1) * x.numel() * x.element_size()
    return found.view(n, *x.shape).transpose(0, 1).reshape(x.shape[0], -1, *x.shape[2:])


@_gather.register_fake
def _(x: Tensor, group: str, n: int) -> Tensor:
    return x.new_empty(x.shape[0], n * x.shape[1], *x.shape[2:])


@torch.library.custom_op("twostroke::scatter_sequence", mutates_args=())
def _scatter(x: Tensor, group: str, n: int) -> Tensor:
    # An exchange of pieces that are added in one order in fp32: a ring's bytes, and half of gloo's own reduce-scatter.
    sent = x.unflatten(1, (n, -1)).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=_group(group))
    SENT["tensor"] += (n - 1) * received[0].numel() * received.element_size()
    return tree_sum(list(received)).to(x.dtype).clone()


@_scatter.register_fake
def _(x: Tensor, group: str, n: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // n, *x.shape[2:])


@torch.library.custom_op("twostroke::over_ranks", mutates_args=())
def _over_ranks(x: Tensor, group: str, n: int) -> Tensor:
    found = torch.empty(n * x.numel(), dtype=x.dtype, device=x.device)
    all_gather(found, x.contiguous().view(-1), group=_group(group))
    SENT["tensor"] += (n - 1) * x.numel() * x.element_size()
    return found.view(n, *x.shape)


@_over_ranks.register_fake
def _(x: Tensor, group: str, n: int) -> Tensor:
    return x.new_empty(n, *x.shape)


def _keep_group(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.group, ctx.n = inputs


def _gather_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return _scatter(gradient, ctx.group, ctx.n), None, None


def _scatter_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return _gather(gradient, ctx.group, ctx.n), None, None


_gather.register_autograd(_gather_backward, setup_context=_keep_group)
_scatter.register_autograd(_scatter_backward, setup_context=_keep_group)


@dataclass(frozen=True)
class TensorGroup:
    """The ``n`` ranks that hold one replica's matrices together, of which this is number ``rank``."""

    name: str
    rank: int
    n: int

    @classmethod
    def of(cls, ranks: Ranks) -> TensorGroup:
        return cls(ranks.mesh.get_group("tensor").group_name, ranks.tensor, ranks.layout.tensor)

    def gathered(self, x: Tensor) -> Tensor:
        """(B, T, …) of each rank's (B, T/n, …). Its gradient is the ranks' sum, scattered."""
        found: Tensor = _gather(x, self.name, self.n)
        return found

    def scattered(self, x: Tensor) -> Tensor:
        """This rank's part (B, T/n, …) of the sum of each rank's (B, T, …). Its gradient is gathered."""
        found: Tensor = _scatter(x, self.name, self.n)
        return found

    def over_ranks(self, x: Tensor) -> Tensor:
        """(n, …): ``x`` of each rank, without gradients."""
        found: Tensor = _over_ranks(x, self.name, self.n)
        return found

    def own(self, n_tokens: int) -> slice:
        """This rank's part of a sequence."""
        each = n_tokens // self.n
        return slice(self.rank * each, (self.rank + 1) * each)


# -- what each rank computes ------------------------------------------------------------------------------------------------


class RowProduct(nn.Module):
    """A rank's inputs times its columns of a matrix, summed over ranks; each gets its part of the sequence, plus the bias."""

    def __init__(self, linear: nn.Linear, group: TensorGroup) -> None:
        super().__init__()
        self.weight, self.bias, self._group = linear.weight, linear.bias, group

    def forward(self, x: Tensor) -> Tensor:
        y = self._group.scattered(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class CutEmbedding(nn.Module):
    """The rows of ids that a rank holds, and zeros of others, summed over ranks."""

    def __init__(self, weight: nn.Parameter, first: int, group: TensorGroup) -> None:
        super().__init__()
        self.weight, self._first, self._group = weight, first, group

    def forward(self, ids: Tensor) -> Tensor:
        own = ids - self._first
        is_held = (own >= 0) & (own < self.weight.shape[0])
        rows = F.embedding(torch.where(is_held, own, 0), self.weight)
        return self._group.scattered(torch.where(is_held[..., None], rows, 0.0))


class CutChunkLoss:
    """``training.loss.chunk_loss`` of a head whose vocabulary is cut: ranks exchange three numbers a row, and no logits.

    Each has the whole loss and the gradient of its logits. That of ``hidden`` is then a part of a sum over ranks.
    """

    def __init__(self, first: int, group: TensorGroup) -> None:
        self._first, self._group = first, group

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor, cap: float | None = None) -> tuple[Tensor, Tensor]:
        logits = capped(F.linear(hidden, weight).float(), cap)
        valid = targets != IGNORE_INDEX
        largest = logits.amax(dim=-1)
        is_target = torch.arange(logits.shape[-1], device=logits.device)[None] + self._first == targets[:, None]
        sums = (logits - largest[:, None]).exp().sum(dim=-1)
        own = torch.stack((largest, sums, torch.where(is_target, logits, 0.0).sum(dim=-1)))
        all_largest, all_sums, picked = self._group.over_ranks(own).unbind(1)
        top = all_largest.amax(dim=0)
        log_total = top + (all_sums * (all_largest - top).exp()).sum(dim=0).log()
        loss = torch.where(valid, log_total - picked.sum(dim=0), 0.0).sum()
        softmax = (logits - log_total[:, None]).exp()
        gradient = torch.where(valid[:, None], softmax - is_target.float(), 0.0)
        if cap is not None:
            gradient = gradient * (1.0 - (logits / cap).square())
        return loss, gradient.to(hidden.dtype)


def chunk_of_cut(spec: ModelSpec, ranks: Ranks) -> CutChunkLoss:
    """The loss of a decoder that ``cut_decoder`` cut."""
    group = TensorGroup.of(ranks)
    return CutChunkLoss(rows_of(spec.vocab_size, group.rank, group.n)[0], group)


def cut_decoder(decoder: Decoder, ranks: Ranks) -> None:
    """Keep this rank's pieces of ``decoder``'s parameters, and let its modules gather and scatter the sequence."""
    group, spec = TensorGroup.of(ranks), decoder.spec
    parameters = dict(decoder.named_parameters())
    for name, cut in cuts(spec).items():
        parameters[name].data = cut.piece(parameters[name].data, group.rank, group.n)

    def gather_input(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (group.gathered(arguments[0]), *arguments[1:])

    def gather_output(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        return group.gathered(output)

    def own_positions(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (arguments[0][:, group.own(arguments[0].shape[1])],)

    first, _ = rows_of(spec.vocab_size, group.rank, group.n)
    decoder.embed = cast(Any, CutEmbedding(decoder.embed.weight, first, group))
    if decoder.position_embed is not None:
        decoder.position_embed.register_forward_pre_hook(own_positions)
    for unit in decoder.blocks:
        attention, mlp = cast(Any, unit).attn, cast(Any, unit).mlp
        attention.n_heads //= group.n
        attention.n_kv_heads //= group.n
        attention.out, mlp.down = RowProduct(attention.out, group), RowProduct(mlp.down, group)
        for branch in (attention, mlp):
            branch.register_forward_pre_hook(gather_input)
    decoder.final_norm.register_forward_hook(gather_output)
