"""Mixture of experts: a router chooses a few of many small MLPs for each token; none is ever dropped.

Rows are sorted by expert once a layer, and each expert multiplies the rows that chose it. All experts' matrices of a kind are
one tall tensor, an expert's rows after another's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twostroke.core.matrices import Matrix, mlp_matrices
from twostroke.core.spec import ModelSpec, MoeSpec
from twostroke.kernels.grouped import grouped_linear, rows_in_order, sorted_rows
from twostroke.model.attention import compute_dtype
from twostroke.model.mlp import gated

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


def choose_experts(
    moe: MoeSpec, logits: Float[Tensor, "n X"], correction: Float[Tensor, " X"] | None = None
) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """The shares of each row's experts in what it gets, in fp32, and the experts' numbers.

    ``correction`` is added for the choice alone. With groups, only experts of the best ``top_groups`` are chosen from: by their
    best score (DeepSeek-V2, arXiv 2405.04434, 2.2.2), with a correction by the sum of their two best (DeepSeek-V3, arXiv
    2412.19437, 2.1.2).
    """
    logits = logits.float()
    scores = torch.softmax(logits, dim=-1) if moe.scores == "softmax" else torch.sigmoid(logits)
    ranked = scores if correction is None else scores + correction
    if moe.n_groups > 1:
        by_group = ranked.unflatten(-1, (moe.n_groups, -1))  # (n, groups, X / groups)
        ranked = by_group.masked_fill(_left_out(by_group, moe.top_groups, correction is not None), float("-inf")).flatten(1)
    chosen = ranked.topk(moe.top_k, dim=-1).indices
    shares = scores.gather(1, chosen)
    if moe.normalised:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + 1e-20)
    return shares * moe.share_scale, chosen


def _left_out(by_group: Float[Tensor, "n groups m"], top_groups: int, by_two: bool) -> Bool[Tensor, "n groups 1"]:
    """True for each group that is not among its row's ``top_groups`` best. Groups are ranked by their best score, or with
    ``by_two`` by the sum of their two best scores; of equal groups the earlier one is ranked higher.

    It compares instead of sorting, because LiteRT's interpreter cannot run the sort that ``topk`` is traced to here. It adds
    instead of using "or", which coremltools cannot convert.
    """
    best = by_group.amax(-1)
    if by_two:
        is_best = torch.arange(by_group.shape[-1], device=by_group.device) == by_group.argmax(-1, keepdim=True)
        best = best + by_group.masked_fill(is_best, float("-inf")).amax(-1)
    this, other = best[:, :, None], best[:, None, :]
    before = torch.ones(best.shape[-1], best.shape[-1], device=best.device).tril(-1)  # 1 where the other group comes first
    better = (other > this).float() + (other == this).float() * before
    return better.sum(-1, keepdim=True) >= top_groups


class ExpertMatrix(nn.Module):
    """The matrices of all experts, (copies·n, k), and their biases (copies·n)."""

    def __init__(self, matrix: Matrix) -> None:
        super().__init__()
        self.copies = matrix.copies
        self.weight = nn.Parameter(torch.empty(matrix.rows, matrix.k))
        self.bias = nn.Parameter(torch.empty(matrix.rows)) if matrix.bias else None

    def forward(self, x: Float[Tensor, "m k"], ends: Int[Tensor, " X"], expert: Int[Tensor, " m"]) -> Float[Tensor, "m n"]:
        """Each row times its expert's matrix. Rows are sorted by ``expert``; expert e's end before ``ends[e]``."""
        dtype = compute_dtype(x.device, self.weight.dtype)
        y = grouped_linear(x.to(dtype), self.weight.unflatten(0, (self.copies, -1)).to(dtype), ends)
        if self.bias is None:
            return y
        chosen = F.one_hot(expert, self.copies).to(dtype)  # a product: the gradient of indexing adds up row by row
        return y + chosen @ self.bias.unflatten(0, (self.copies, -1)).to(dtype)


class _AddLoss(torch.autograd.Function):
    """``y`` itself, and ``scale`` times the gradient of ``loss`` in the backward pass: a loss that is added where it arises."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = ctx.saved_tensors
        return upstream[0], scale, None


class ExpertsMlp(nn.Module):
    """Σ shares · down_e(activation(gate_e(x)) · up_e(x)) over a row's experts, plus the shared experts of every row.

    Training adds two losses to the router's gradient, each times a row: ``balance_weight``·X·Σ f_e·P_e with the share f_e of
    choices and the mean probability P_e of an expert (Fedus et al. 2021, arXiv:2101.03961, 2.2), and
    ``z_weight``·mean(logsumexp²) (Zoph et al. 2022, arXiv:2202.08906, 2.1). ``load`` counts the choices of each expert.
    """

    router: nn.Linear
    expert_gate_up: ExpertMatrix
    expert_down: ExpertMatrix
    shared_gate_up: nn.Linear
    shared_down: nn.Linear
    shared_gate: nn.Linear
    correction_bias: Tensor | None
    load: Tensor
    loss_scale: Tensor

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        assert spec.moe is not None
        self.moe, self.activation = spec.moe, gated(spec.activation)
        self.balance_weight = self.z_weight = 0.0
        matrices = {matrix.name: matrix for matrix in mlp_matrices(spec, layer)}
        for name, matrix in matrices.items():
            alone = matrix.copies == 1
            self.add_module(name, nn.Linear(matrix.k, matrix.n, matrix.bias) if alone else ExpertMatrix(matrix))
        self.has_shared, self.has_shared_gate = "shared_gate_up" in matrices, "shared_gate" in matrices
        correction = torch.empty(spec.moe.n_experts) if spec.moe.correction_bias else None
        self.register_buffer("correction_bias", correction)
        self.register_buffer("load", torch.empty(spec.moe.n_experts), persistent=False)
        self.register_buffer("loss_scale", torch.empty(()), persistent=False)

    def forward(self, normed: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        x = normed.flatten(0, -2)
        logits = self.router(x).float()
        shares, chosen = choose_experts(self.moe, logits, self.correction_bias)
        y = self.with_shared(self._routed(x, shares.to(x.dtype), chosen), x)
        if self.training and torch.is_grad_enabled():
            y = self._with_losses(y, logits, chosen)
        return y.view(normed.shape)

    def with_shared(self, y: Float[Tensor, "*n E"], x: Float[Tensor, "*n E"]) -> Float[Tensor, "*n E"]:
        """``y`` with what the shared experts make of ``x``, if there are any."""
        if not self.has_shared:
            return y
        gate, up = self.shared_gate_up(x).chunk(2, dim=-1)
        shared = self.shared_down(self.activation(gate, up))
        return y + (torch.sigmoid(self.shared_gate(x)) * shared if self.has_shared_gate else shared)

    def _routed(
        self, x: Float[Tensor, "n E"], shares: Float[Tensor, "n k"], chosen: Int[Tensor, "n k"]
    ) -> Float[Tensor, "n E"]:
        k = self.moe.top_k
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        inverse = order.argsort()
        expert = flat[order]
        ends = torch.searchsorted(expert, torch.arange(1, self.moe.n_experts + 1, device=x.device))
        gate, up = self.expert_gate_up(sorted_rows(x, order, inverse, k), ends, expert).chunk(2, dim=-1)
        sorted_y = self.expert_down(self.activation(gate, up), ends, expert)
        return (rows_in_order(sorted_y, order, inverse).view(*shares.shape, -1) * shares[..., None]).sum(dim=1)

    def _with_losses(self, y: Tensor, logits: Float[Tensor, "n X"], chosen: Int[Tensor, "n k"]) -> Tensor:
        n, n_experts = logits.shape
        with torch.no_grad():
            counts = F.one_hot(chosen.flatten(), n_experts).sum(dim=0).float()
            self.load.add_(counts)
        if self.balance_weight == 0.0 and self.z_weight == 0.0:
            return y
        shares = self._shares_of_choices(counts, chosen.numel())
        balance = n_experts * (torch.softmax(logits, dim=-1).mean(dim=0) * shares).sum()
        z = logits.logsumexp(dim=-1).square().mean()
        return _AddLoss.apply(y, n * (self.balance_weight * balance + self.z_weight * z), self.loss_scale)

    def _shares_of_choices(self, counts: Float[Tensor, " X"], n_choices: int) -> Float[Tensor, " X"]:
        return counts / n_choices
