"""Keeps a mixture's experts evenly chosen: two losses of the router, and a bias that moves against the load."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from twostroke.core.train_settings import TrainSettings
from twostroke.model.experts import ExpertsMlp


def correction_biases(decoder: nn.Module) -> dict[str, Tensor]:
    """The biases of all routers that have one, by canonical name. They are no gradient's: ``ExpertBalance`` moves them."""
    found = {f"{name}.correction_bias": mlp.correction_bias for name, mlp in _mixtures(decoder).items()}
    return {name: bias for name, bias in found.items() if bias is not None}


def _mixtures(decoder: nn.Module) -> dict[str, ExpertsMlp]:
    return {name: module for name, module in decoder.named_modules() if isinstance(module, ExpertsMlp)}


class ExpertBalance:
    """The routers of one run; none where ``decoder`` has no experts. ``moves_biases``: correction biases are trained."""

    def __init__(self, decoder: nn.Module, settings: TrainSettings, moves_biases: bool) -> None:
        self.mixtures = list(_mixtures(decoder).values())
        self.rate = settings.balance_bias_rate if moves_biases else 0.0
        for mlp in self.mixtures:
            mlp.balance_weight, mlp.z_weight = settings.balance_weight, settings.router_z_weight

    def begin_window(self) -> None:
        """Count choices from here."""
        for mlp in self.mixtures:
            mlp.load.zero_()

    def set_scale(self, scale: float) -> None:
        """``scale`` of the loss of the micro-batch to come, which the routers' losses get too."""
        for mlp in self.mixtures:
            mlp.loss_scale.fill_(scale)

    @torch.no_grad()
    def update(self) -> float | None:
        """Move each correction bias by ±rate, up where an expert had less than the mean load of the window and down where it
        had more (Wang et al. 2024, arXiv:2408.15664). Returns the largest load of an expert over the mean, None without
        experts."""
        if not self.mixtures:
            return None
        worst = 0.0
        for mlp in self.mixtures:
            mean = mlp.load.mean()
            worst = max(worst, float(mlp.load.max() / mean.clamp_min(1.0)))
            if mlp.correction_bias is not None and self.rate:
                mlp.correction_bias += self.rate * torch.sign(mean - mlp.load)
        return worst
