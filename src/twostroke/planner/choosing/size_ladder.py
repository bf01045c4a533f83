"""Choosing a model: the size that a time budget on this machine trains to the lowest predicted loss.

The rule is all in this file. For every rung of a ladder of shapes the planner predicts how many tokens the budget trains
(``steps_for_budget``), and a parametric law says what loss N parameters reach after D tokens:

    L(N, D) = E + A / N^α + B / D'^β,   D' = U + U·R*·(1 − exp(−(D/U − 1)/R*)) once D exceeds the U unique tokens

with the form and coefficients of Hoffmann et al. 2022 (arXiv 2203.15556, approach 3) and the discount of repeated tokens of
Muennighoff et al. 2023 (arXiv 2305.16264). The coefficients were fitted to far larger models on other text: *assumed* here.
The lowest L wins; of equals the smaller rung, which is cheaper to serve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from twostroke.core.errors import ConfigError
from twostroke.core.spec import ModelSpec
from twostroke.core.train_settings import TrainSettings
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.training.plan import plan_training, steps_for_budget
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.work.params import count_parameters

HEAD_DIM = 64

LADDER: tuple[tuple[int, int], ...] = (
    (2, 3), (2, 4), (3, 4), (3, 6), (4, 6), (5, 6), (6, 6), (6, 8), (8, 8), (8, 12), (10, 12), (12, 12), (16, 16), (16, 24),
    (24, 24), (32, 32),
)  # fmt: skip
"""Rungs as (heads, layers): width E = 64·heads, F = ⌈8/3·E⌉ to a multiple of 64. From 0.7 M to 6.5 G parameters in blocks."""

LAW = {"E": 1.69, "A": 406.4, "alpha": 0.34, "B": 410.7, "beta": 0.28}
"""Hoffmann et al. 2022, approach 3; N without embeddings, D in tokens, loss in nats per token. Assumed."""

REPEAT_HALF_LIFE = 15.4
"""R* of Muennighoff et al. 2023: how fast repeated epochs lose value."""

LEAST_STEPS = 200
"""Steps a rung must get to be considered at all: with fewer the law says nothing, and no schedule has room. The smallest rung
is always considered."""


@dataclass(frozen=True)
class Rung:
    """One size of model that a budget could train."""

    DOCUMENT = "d_model n_layers n_parameters steps tokens predicted_loss"

    spec: ModelSpec
    n_parameters: Annotated[int, "N"]
    steps: Annotated[int, "updates within the budget"]
    tokens: Annotated[int, "tokens read"]
    predicted_loss: Annotated[float, "nats a token, by an assumed law: for ranking, not a promise"]

    @property
    def d_model(self) -> Annotated[int, "E"]:
        return self.spec.d_model

    @property
    def n_layers(self) -> Annotated[int, "L"]:
        return self.spec.n_layers


def feed_forward_width(d_model: int) -> int:
    """⌈8/3·E⌉ rounded up to a multiple of 64: SwiGLU with as many weights as a plain 4·E MLP."""
    return -(-8 * d_model // (3 * 64)) * 64


def rung(heads: int, layers: int, vocab_size: int, max_positions: int) -> ModelSpec:
    """The llama-family model of one rung, embeddings tied."""
    width = HEAD_DIM * heads
    return ModelSpec(
        family="llama",
        vocab_size=vocab_size,
        n_layers=layers,
        d_model=width,
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=HEAD_DIM,
        d_ff=feed_forward_width(width),
        max_positions=max_positions,
        tied_embeddings=True,
    )


def effective_tokens(tokens: float, unique_tokens: float) -> float:
    """D': tokens of fresh text worth as much as ``tokens`` read from ``unique_tokens`` again and again."""
    if tokens <= unique_tokens:
        return tokens
    repeats = tokens / unique_tokens - 1
    return unique_tokens * (1 + REPEAT_HALF_LIFE * (1 - math.exp(-repeats / REPEAT_HALF_LIFE)))


def predicted_loss(n_parameters: float, tokens: float, unique_tokens: float) -> float:
    """E + A/N^α + B/D'^β nats per token, by the assumed law above."""
    data = effective_tokens(tokens, unique_tokens)
    return LAW["E"] + LAW["A"] / n_parameters ** LAW["alpha"] + LAW["B"] / data ** LAW["beta"]


def rank_models(
    budget_s: float, vocab_size: int, n_train_tokens: int, settings: TrainSettings, hardware: Hardware
) -> list[Rung]:
    """Every rung that fits the memory, best first. Raises ConfigError for impossible inputs or where none fits."""
    for name, value in (("budget_s", budget_s), ("vocab_size", vocab_size), ("n_train_tokens", n_train_tokens)):
        if not value > 0:
            raise ConfigError(f"{name}={value} must be above 0.")
    shape = TrainingShape.from_settings(settings, steps=0)
    candidates: list[Rung] = []
    for heads, layers in LADDER:
        spec = rung(heads, layers, vocab_size, settings.sequence_length)
        if plan_training(spec, shape, hardware).peak_memory_bytes > hardware.memory_bytes:
            continue
        steps = steps_for_budget(spec, shape, hardware, budget_s)
        if candidates and steps < LEAST_STEPS:
            continue
        tokens = steps * shape.tokens_per_step
        parameters = count_parameters(spec)
        loss = predicted_loss(parameters.block_matrices, tokens, n_train_tokens)
        candidates.append(Rung(spec, parameters.total, steps, tokens, loss))
    if not candidates:
        raise ConfigError(
            f"no model of the ladder trains in {hardware.memory_bytes / 1e9:.1f} GB with "
            f"train.batch_size={settings.batch_size} and train.sequence_length={settings.sequence_length}. Use a smaller batch."
        )
    return sorted(candidates, key=lambda c: c.predicted_loss)  # stable, and the ladder goes up: of equals the smaller is first


def pick_model(budget_s: float, vocab_size: int, n_train_tokens: int, settings: TrainSettings, hardware: Hardware) -> ModelSpec:
    """The model to train for ``budget_s`` seconds on ``hardware``: the first of ``rank_models``. Deterministic."""
    return rank_models(budget_s, vocab_size, n_train_tokens, settings, hardware)[0].spec
