"""Early exit in training: layer dropout that grows with depth, and losses of what the outputs of earlier layers predict.

Both are LayerSkip's (Elhoushi et al. 2024, arXiv:2404.16710, sections 4.1 and 4.2): the first layers with final norm and head
become a model of their own, which drafts for the whole one (``engine.speculation.early_exit``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from twostroke.core.train_settings import TrainSettings
from twostroke.model.decoder import Decoder


def dropout_rates(n_layers: int, most: float) -> list[float]:
    """The probability that a row passes by each layer: ``most``·(exp(l·ln 2/(L − 1)) − 1), 0 of the first and ``most`` of the
    last."""
    return [most * math.expm1(layer * math.log(2) / max(1, n_layers - 1)) for layer in range(n_layers)]


def exits_of_step(n_layers: int, per_step: int, step: int) -> tuple[int, ...]:
    """Numbers of layers after which the head reads in ``step``: ``per_step`` of 1 … L − 1, all of them in turn, ascending."""
    return tuple(sorted(1 + (step * per_step + i) % (n_layers - 1) for i in range(per_step)))


def loss_shares(n_layers: int, scale: float, exits: Sequence[int]) -> tuple[float, ...]:
    """Shares of the losses, first of the last layer's and then of ``exits``'; their sum is 1.

    After e layers a loss weighs ``scale``·Σ_{i ≤ e} i, after all of them L + ``scale``·Σ_{i < L} i.
    """
    weights = [n_layers + scale * n_layers * (n_layers - 1) / 2, *(scale * e * (e + 1) / 2 for e in exits)]
    return tuple(weight / sum(weights) for weight in weights)


class EarlyExit:
    """Layer dropout and exit losses of a run of ``steps`` steps. ``decoder`` calls it after each block.

    Rows that pass by a layer are drawn from torch's generator, whose state is in checkpoints. Layer dropout of a model that is
    trained ``from_scratch`` begins at 0 and grows exponentially to the last step. ``outputs`` are those that the last forward
    pass with gradients left for the exits of this step, ``shares`` those of the losses, the last layer's first.
    """

    def __init__(self, decoder: Decoder, settings: TrainSettings, steps: int, from_scratch: bool) -> None:
        self._rates = dropout_rates(decoder.spec.n_layers, settings.layer_dropout)
        self._n_layers, self._settings = decoder.spec.n_layers, settings
        self._steps, self._from_scratch = steps, from_scratch
        self.outputs: list[Tensor] = []
        self.begin(0)
        decoder.after_block = self._after_block

    @classmethod
    def of(cls, decoder: Decoder, settings: TrainSettings, steps: int, from_scratch: bool) -> EarlyExit | None:
        """None if ``settings`` ask for neither."""
        asked = settings.layer_dropout > 0 or settings.exit_loss > 0
        return cls(decoder, settings, steps, from_scratch) if asked else None

    def begin(self, step: int) -> None:
        """Everything that follows is of ``step``."""
        settings, n_layers = self._settings, self._n_layers
        self._share = math.expm1(step * math.log(2) / max(1, self._steps - 1)) if self._from_scratch else 1.0
        self.exits = exits_of_step(n_layers, settings.exits_per_step, step) if settings.exit_loss else ()
        self.shares = loss_shares(n_layers, settings.exit_loss, self.exits)

    def _after_block(self, layer: int, before: Tensor, after: Tensor) -> Tensor:
        """The residual stream after ``layer``, which had made ``after`` (B, T, E) of ``before``."""
        if not torch.is_grad_enabled():  # scoring passes every layer
            return after
        rate = self._share * self._rates[layer]
        if rate > 0:
            passes = torch.rand(len(after), 1, 1, device=after.device) >= rate
            after = torch.where(passes, after, before)
        if layer + 1 in self.exits:
            self.outputs.append(after)
        return after
