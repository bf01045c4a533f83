"""LAMB: Adam's direction, as long for each matrix as the matrix is (You et al. 2019, arXiv:1904.00962, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Lamb(torch.optim.Optimizer):
    """w ← w − η·(‖w‖/‖r‖)·r with r = m̂/(√v̂ + ε) + λ·w. The ratio is 1 for vectors (norms, biases), as in the authors' code,
    and where either length is 0.

    States and parameters are of one floating type; ``step`` is a count in fp32, as torch's Adam has it.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, self.state[parameter], group)

    def _update(self, w: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        assert w.grad is not None
        if not state:
            state |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(w), "exp_avg_sq": torch.zeros_like(w)}
        state["step"] += 1
        t, (beta1, beta2) = state["step"].item(), group["betas"]
        m, v = state["exp_avg"].lerp_(w.grad, 1 - beta1), state["exp_avg_sq"]
        v.mul_(beta2).addcmul_(w.grad, w.grad, value=1 - beta2)
        unbiased = 1 - beta1**t
        r = v.sqrt().mul_(unbiased / (1 - beta2**t) ** 0.5).add_(unbiased * group["eps"])
        torch.div(m, r, out=r)
        if group["weight_decay"]:
            r.add_(w, alpha=group["weight_decay"])
        ratio = 1.0
        if w.dim() > 1:
            long, short = float(w.norm()), float(r.norm())
            ratio = long / short if long and short else 1.0
        w.add_(r, alpha=-group["lr"] * ratio)
