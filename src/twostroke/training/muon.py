"""Muon on processors whose products of bf16 are slow: torch's optimizer with its products in fp32.

``torch.optim.Muon`` orthogonalises in bf16 on every device. Where torch has no fast products of bf16 (``policy.BF16_FEATURES``)
that is most of a step: a million parameters took 9 s on two cores with AVX2 alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from twostroke.core.policy import multiplies_bf16
from twostroke.core.profile import read_fingerprint


def muon_class(device_kind: str) -> type[torch.optim.Muon]:
    """torch's Muon, or ``MuonInFp32`` where it is faster."""
    return torch.optim.Muon if multiplies_bf16(device_kind, read_fingerprint().isa) else MuonInFp32


class MuonInFp32(torch.optim.Muon):
    """The same update and state (Jordan 2024), orthogonalised in fp32. It adjusts rates as ``adjust_lr_fn`` = "original"."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["adjust_lr_fn"] not in (None, "original"):
                raise ValueError(f"adjust_lr_fn={group['adjust_lr_fn']!r} is not computed here; 'original' is")
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)
        return loss

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        momentum = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        direction = orthogonalised(direction, group["ns_coefficients"], group["ns_steps"], group["eps"])
        rate = float(group["lr"])
        weight.mul_(1 - rate * group["weight_decay"])
        weight.add_(direction, alpha=-rate * math.sqrt(max(1.0, weight.shape[0] / weight.shape[1])))


def orthogonalised(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """About U·Vᵀ of ``matrix`` = U·S·Vᵀ, by ``steps`` of Newton and Schulz's iteration with a quintic of ``coefficients``, in
    fp32."""
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.float().T if is_tall else matrix.float()
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
