"""Tensor with sequence parallel: each matrix is cut over the ranks of a replica, and the residual stream along the sequence.

q, k, v, gate and up are cut by their outputs, so that a rank has whole heads and a part of the MLP's width; the matrices after
them by their inputs, embedding and head by the vocabulary (Shoeybi et al. 2019, arXiv:1909.08053). Between the branches a rank
has a part of each sequence: norms and sums are computed once and not on every rank (Korthikanti et al., arXiv:2205.05198). A
branch gathers the sequence before it and scatters its ranks' sums after it. The decoder's modules are changed from outside.

Of a mixture no expert is cut, and the router chooses for a rank's part of the sequence (``expert_parallel``); shared experts
are cut as any MLP.
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
from twostroke.kernels.nf4 import Nf4Matrix, decoded_scales
from twostroke.model.adapters import AdaptedLinear, LowRank, LowRankExperts, Nf4Linear
from twostroke.model.decoder import Decoder, capped
from twostroke.model.experts import ExpertsMlp
from twostroke.training.exchanges import SENT, all_to_all, gather_into
from twostroke.training.ranks import Ranks
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
            if isinstance(stored, Vector) and stored.split == "column":
                found[name] = Cut((stored.n,), 0, (stored.n,))
            elif isinstance(stored, Matrix) and stored.split == "row":
                found[f"{name}.weight"] = Cut((stored.n, stored.k), 1, (stored.k,))
            elif isinstance(stored, Matrix) and stored.split == "column":
                parts = tuple(rows for _, rows in stored.parts)
                found[f"{name}.weight"] = Cut((stored.n, stored.k), 0, parts)
                if stored.bias:
                    found[f"{name}.bias"] = Cut((stored.n,), 0, parts)
    return found if spec.tied_embeddings else found | {"head.weight": table}


def adapter_cuts(decoder: Decoder) -> dict[str, Cut]:
    """The adapters' factors that tensor parallel cuts: B as the outputs of its matrix, A as the inputs. The other of the two is
    whole on each rank, and each has a part of its gradient."""
    splits = {
        f"blocks.{layer}.{stored.module}": stored.split
        for layer in range(decoder.spec.n_layers)
        for stored in block(decoder.spec, layer)
        if isinstance(stored, Matrix)
    }
    found = {}
    for name, module in decoder.named_modules():
        if isinstance(module, LowRank) and not isinstance(module, LowRankExperts):
            is_cut_by_inputs = splits[name.partition(".adapters.")[0]] == "row"
            factor, dim = ("a", 1) if is_cut_by_inputs else ("b", 0)
            shape = tuple(getattr(module, factor).shape)
            found[f"{name}.{factor}"] = Cut(shape, dim, (shape[dim],))
    return found


def check_tensor(recipe: TrainRecipe, spec: ModelSpec, n: int, n_context: int = 1) -> None:
    """Raise ConfigError if ``n`` ranks cannot train ``spec`` by tensor parallel, where ``n_context`` others share sequences:
    what they do not divide, or a feature that is not cut."""
    if n == 1:
        return
    length = recipe.train.sequence_length
    for name, value in (("n_kv_heads", spec.n_kv_heads), ("n_heads", spec.n_heads), *_mlp_widths(spec).items()):
        if value % n:
            raise ConfigError(f"parallel.tensor={n} must divide {name}={value}. Use {divisors(value)}.")
    if length % n:
        raise ConfigError(f"parallel.tensor={n} must divide train.sequence_length={length}. Use {divisors(length)}.")
    own = length // n_context
    if length % n_context == 0 and own % n:
        raise ConfigError(
            f"parallel.tensor={n} must divide the {own} tokens that each of parallel.context={n_context} ranks has of "
            f"train.sequence_length={length}. Use {divisors(own)}."
        )
    away = spec.departures
    refused = {
        "latent attention": spec.mla is not None,
        "dropout": spec.dropout > 0,
        "a norm over all heads together": spec.qk_norm and away.qk_norm_over_heads,
        "adapters with dropout (lora.dropout)": recipe.trains_adapters and recipe.lora.dropout > 0,
    }
    for what, present in refused.items():
        if present:
            raise ConfigError(f"the model has {what}, which parallel.tensor={n} does not cut yet. Use parallel.data or shard.")
    if recipe.method == "qlora":
        size = recipe.lora.nf4_block
        for stored in (stored for layer in range(spec.n_layers) for stored in block(spec, layer)):
            if not isinstance(stored, Matrix) or stored.split == "expert":
                continue
            if (columns := stored.k // (n if stored.split == "row" else 1)) % size:
                raise ConfigError(
                    f"lora.nf4_block={size} must divide the {columns} columns that a rank has of {stored.name} with "
                    f"parallel.tensor={n}: a scale is of one rank's values. Use {divisors(columns)}."
                )


def _mlp_widths(spec: ModelSpec) -> dict[str, int]:
    """Widths that are cut, by name: of dense layers, and of experts that every row passes."""
    found = {} if all(map(spec.has_experts, range(spec.n_layers))) else {"d_ff": spec.d_ff}
    shared = 0 if spec.moe is None else spec.moe.shared_width
    return found | {"the shared experts' width": shared} if shared else found


# -- what ranks send each other ---------------------------------------------------------------------------------------------


def _group(name: str) -> Any:
    return dist.distributed_c10d._resolve_process_group(cast(Any, name))


@torch.library.custom_op("twostroke::gather_sequence", mutates_args=())
def _gather(x: Tensor, group: str, n: int) -> Tensor:
    gathered = x.new_empty(x.shape[0], n * x.shape[1], *x.shape[2:])
    found = gathered if len(x) == 1 else x.new_empty(n, *x.shape)  # of one row ranks' parts are in their order
    gather_into(found.view(-1), x, _group(group), "tensor").wait()
    return gathered if len(x) == 1 else gathered.copy_(found.transpose(0, 1).reshape(gathered.shape))


@_gather.register_fake
def _(x: Tensor, group: str, n: int) -> Tensor:
    return x.new_empty(x.shape[0], n * x.shape[1], *x.shape[2:])


@torch.library.custom_op("twostroke::scatter_sequence", mutates_args=())
def _scatter(x: Tensor, group: str, n: int) -> Tensor:
    # An exchange of pieces that are added in one order in fp32: a ring's bytes, and half of gloo's own reduce-scatter.
    sent = x.unflatten(1, (n, -1)).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    all_to_all(received, sent, _group(group)).wait()
    SENT["tensor"] += (n - 1) * received[0].numel() * received.element_size()
    return tree_sum(list(received)).to(x.dtype).clone()


@_scatter.register_fake
def _(x: Tensor, group: str, n: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // n, *x.shape[2:])


@torch.library.custom_op("twostroke::over_ranks", mutates_args=())
def _over_ranks(x: Tensor, group: str, n: int) -> Tensor:
    found = torch.empty(n * x.numel(), dtype=x.dtype, device=x.device)
    gather_into(found, x, _group(group), "tensor").wait()
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
        return cls(ranks.group("tensor").group_name, ranks.at("tensor"), ranks.layout.tensor)

    def gathered(self, x: Tensor) -> Tensor:
        """(B, T, E) of each rank's (B, T/n, E), or rows one rank's after another's. Its gradient is the ranks' sum,
        scattered."""
        found: Tensor = _gather(x if x.dim() == 3 else x[None], self.name, self.n)
        return found if x.dim() == 3 else found[0]

    def scattered(self, x: Tensor) -> Tensor:
        """This rank's part (B, T/n, E) of the sum of each rank's (B, T, E), or of the rows of ``gathered``. Its gradient is
        gathered."""
        found: Tensor = _scatter(x if x.dim() == 3 else x[None], self.name, self.n)
        return found if x.dim() == 3 else found[0]

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


def gathered_logits(own: Tensor, spec: ModelSpec, ranks: Ranks) -> Tensor:
    """(…, V) of each rank's part of the vocabulary, of which the last ones may have fewer ids."""
    group = TensorGroup.of(ranks)
    each = rows_of(spec.vocab_size, 0, group.n)[1]
    parts = group.over_ranks(F.pad(own, (0, each - own.shape[-1])))
    return torch.cat(list(parts), dim=-1)[..., : spec.vocab_size]


def nf4_piece(matrix: Nf4Matrix, cut: Cut, rank: int, n: int) -> Nf4Matrix:
    """What ``rank`` of ``n`` holds of ``matrix`` by ``cut``, of whole blocks: the same codes, and their scales in fp32, because
    those that share a scale of scales are no neighbours in a piece."""
    rows, columns = matrix.shape

    def piece(held: Tensor, values: int) -> Tensor:
        """Of ``held``, which has an element for so many values of a row."""
        parts = tuple(part // values for part in cut.parts) if cut.dim else cut.parts
        own = Cut((rows, columns // values), cut.dim, parts).piece(held.view(rows, -1), rank, n)
        return own.flatten()

    codes, scales = piece(matrix.codes, 2), piece(decoded_scales(matrix), matrix.block)
    n_rows, n_columns = cut.piece_shape(rank, n)
    return Nf4Matrix((n_rows, n_columns), matrix.block, codes, scales)


def _cut_product(product: nn.Module, kind: str, cut: Cut, group: TensorGroup) -> None:
    """Keep this rank's piece of parameter ``kind`` of ``product``, which may be in NF4 or have adapters."""
    base = product.base if isinstance(product, AdaptedLinear) else product
    if isinstance(base, Nf4Linear) and kind == "weight":
        base.replace(nf4_piece(base.matrix, cut, group.rank, group.n))
    else:
        parameter = getattr(base, kind)
        parameter.data = cut.piece(parameter.data, group.rank, group.n)
    if isinstance(product, AdaptedLinear) and kind == "weight" and cut.dim == 0:
        product.rows = tuple(rows // group.n for rows in product.rows)


def _summed(product: Any, group: TensorGroup) -> nn.Module:
    """``product`` of a rank's inputs, summed over ranks, each of which gets its part of the sequence."""
    if isinstance(product, nn.Linear):
        return RowProduct(product, group)
    base: Any = product.base if isinstance(product, AdaptedLinear) else product
    if base.bias is not None:  # frozen, and added on each rank
        base.bias.data /= group.n
    product.register_forward_hook(lambda module, arguments, y: group.scattered(y))
    return cast(nn.Module, product)


def cut_decoder(decoder: Decoder, ranks: Ranks) -> dict[str, Cut]:
    """Keep this rank's pieces of ``decoder``'s parameters, and let its modules gather and scatter the sequence. Returns how
    parameters were cut."""
    group, spec = TensorGroup.of(ranks), decoder.spec
    adapters, parameters = adapter_cuts(decoder), dict(decoder.named_parameters())
    for name, cut in cuts(spec).items():
        module, _, kind = name.rpartition(".")
        _cut_product(decoder.get_submodule(module), kind, cut, group)
    for name, cut in adapters.items():
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
        attention.out = _summed(attention.out, group)
        gathering, has_experts = [attention], isinstance(mlp, ExpertsMlp)
        if not has_experts:
            mlp.down = _summed(mlp.down, group)
            gathering.append(mlp)
        elif mlp.has_shared:
            mlp.shared_down = _summed(mlp.shared_down, group)
            gathering.append(mlp.shared_gate_up)
        for module in gathering:
            module.register_forward_pre_hook(gather_input)
    decoder.final_norm.register_forward_hook(gather_output)
    return cuts(spec) | adapters
