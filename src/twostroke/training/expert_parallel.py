"""Expert parallel: the ranks of a replica share each layer's experts, and rows travel to the experts they chose and back.

Each rank along ``expert`` computes micro-batches of its own (GShard, Lepikhin et al. 2020, arXiv:2006.16668). A router's rows
are sorted by expert, so those of one rank's experts are neighbours: one exchange takes them there, one back, and as many in the
backward pass. No row is dropped, and none is padded.

Beside tensor parallel no expert is cut: ranks along ``tensor`` have whole experts of their own too, so that E·T ranks share
them. Between the branches a rank has a part of each sequence, and sends the rows of that part, so no sequence is gathered for a
router (Liu et al. 2025, arXiv:2504.14960, fold the axes so).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from twostroke.core.errors import ConfigError
from twostroke.core.parallel_recipe import divisors
from twostroke.core.recipe import TrainRecipe
from twostroke.core.spec import ModelSpec
from twostroke.kernels.grouped import rows_in_order, sorted_rows
from twostroke.model.adapters import LowRankExperts, Nf4Experts, choose_targets
from twostroke.model.decoder import Decoder
from twostroke.model.experts import ExpertMatrix, ExpertsMlp
from twostroke.training.exchanges import SENT, all_to_all
from twostroke.training.ranks import Ranks
from twostroke.training.whole import Cut

TOKEN_AXES = ("context", "tensor")
"""Ranks along these have parts of the same sequences between the branches."""


def expert_axes(ranks: Ranks) -> tuple[str, ...]:
    """The axes along which ranks hold different experts."""
    return tuple(axis for axis in ("expert", "tensor") if ranks.size(axis) > 1)


def check_expert(recipe: TrainRecipe, spec: ModelSpec, n: int, n_tensor: int = 1) -> None:
    """Raise ConfigError if ``n`` ranks, of ``n_tensor`` that share each matrix, cannot share the experts of ``spec``, or what
    ``recipe`` trains of them."""
    if spec.moe is None:
        if n > 1:
            raise ConfigError(f"parallel.expert={n} shares out experts, and the model has none. Use parallel.data or shard.")
        return
    if n * n_tensor == 1:
        return
    words = " · ".join(f"{axis}={size}" for axis, size in (("expert", n), ("tensor", n_tensor)) if size > 1)
    if spec.moe.n_experts % (n * n_tensor):
        raise ConfigError(
            f"parallel.{words} must divide the model's {spec.moe.n_experts} experts. Use {divisors(spec.moe.n_experts)}."
        )
    of_experts = recipe.trains_adapters and any(t.copies > 1 for t in choose_targets(spec, recipe.lora.targets))
    if of_experts and recipe.lora.dropout > 0:
        raise ConfigError(
            f"lora.dropout={recipe.lora.dropout:g} leaves out values of rows, which parallel.{words} holds on another "
            "rank than their random numbers. Set lora.dropout=0, or leave experts out of lora.targets."
        )


class _ExchangeRows(torch.autograd.Function):
    """Rows ``sent`` to each rank of ``group``, one after another; those that came, of which ``received`` are from each."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.counts = sent, received
        ctx.group = group
        found = rows.new_empty(sum(received), rows.shape[1])
        all_to_all(found, rows.contiguous(), group, received, sent).wait()
        kept = sent[dist.get_rank(group)]
        SENT["expert"] += (len(rows) - kept) * rows.shape[1] * rows.element_size()
        return found

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        sent, received = ctx.counts
        return _ExchangeRows.apply(upstream[0], received, sent, ctx.group), None, None, None


def share_experts(decoder: Decoder, ranks: Ranks) -> dict[str, Cut]:
    """Keep this rank's experts of ``decoder``, and let rows travel to them. Returns how parameters were cut."""
    axes = expert_axes(ranks)
    n, rank = ranks.size(*axes), ranks.at(*axes)
    found: dict[str, Cut] = {}
    for name, module in decoder.named_modules():
        if isinstance(module, ExpertMatrix | Nf4Experts | LowRankExperts):
            for kind, parameter in module.named_parameters(name, recurse=False):
                found[kind] = Cut(tuple(parameter.shape), 0, (len(parameter),))
                parameter.data = found[kind].piece(parameter.data, rank, n)
            if isinstance(module, Nf4Experts):
                module.keep(rank * module.copies // n, (rank + 1) * module.copies // n)
            else:
                module.copies //= n
        elif isinstance(module, ExpertsMlp):
            _exchange_rows(module, ranks.group(*axes), n)
    return found


def balance_together(decoder: Decoder, ranks: Ranks) -> None:
    """Let the balance loss of each router in ``decoder`` be that of whole micro-batches where ranks have parts of them.

    It is a product: an expert's share of the choices times its mean probability. The means of parts add up to that of the
    whole, so that each rank adds its part's; the shares do not, so choices are counted over all ranks.
    """
    n = ranks.size(*TOKEN_AXES)
    for module in decoder.modules():
        if isinstance(module, ExpertsMlp) and module.balance_weight and n > 1:
            _count_choices_together(module, ranks.group(*TOKEN_AXES), n)


def _count_choices_together(mlp: ExpertsMlp, group: Any, n: int) -> None:
    def shares_of_choices(counts: Tensor, n_choices: int) -> Tensor:
        total = counts.clone()
        dist.all_reduce(total, group=group)  # whole numbers, whose sum is exact in any order
        return total / (n * n_choices)

    mlp._shares_of_choices = shares_of_choices  # type: ignore[method-assign]
    _leave_uncompiled(mlp)


def _leave_uncompiled(mlp: ExpertsMlp) -> None:
    """The whole layer, router and its losses too: with a graph that was broken at ``_routed`` alone, torch 2.13 came to other
    gradients than uncompiled (embedding's norm 1.3964 instead of 1.3987)."""
    mlp.forward = torch.compiler.disable(mlp.forward)  # type: ignore[method-assign]


def _exchange_rows(mlp: ExpertsMlp, group: Any, n: int) -> None:
    n_own = mlp.moe.n_experts // n

    def routed(x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        inverse = order.argsort()
        counts = torch.bincount(flat, minlength=n * n_own).view(n, n_own)
        arriving = torch.empty_like(counts)  # (rank, own expert)
        all_to_all(arriving, counts, group).wait()
        sent, received = counts.sum(dim=1).tolist(), arriving.sum(dim=1).tolist()
        rows = _ExchangeRows.apply(sorted_rows(x, order, inverse, mlp.moe.top_k), sent, received, group)
        # Each rank's rows are sorted by expert; here all ranks' are.
        own = torch.arange(n_own, device=x.device).repeat(n).repeat_interleave(arriving.flatten())
        here = own.argsort(stable=True)
        back = here.argsort()
        expert = own[here]
        ends = torch.searchsorted(expert, torch.arange(1, n_own + 1, device=x.device))
        gate, up = mlp.expert_gate_up(sorted_rows(rows, here, back, 1), ends, expert).chunk(2, dim=-1)
        y = rows_in_order(mlp.expert_down(mlp.activation(gate, up), ends, expert), here, back)
        returned = _ExchangeRows.apply(y, received, sent, group)
        in_order = rows_in_order(returned, order, inverse).view(*shares.shape, -1)
        return (in_order * shares[..., None]).sum(dim=1)

    mlp._routed = routed  # type: ignore[method-assign]
    _leave_uncompiled(mlp)
