"""What is measured: one model, and a row for each way to train it with less memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from twostroke.core.recipe import ModelRecipe, spec_from_recipe
from twostroke.core.spec import ModelSpec
from twostroke.core.train_settings import TrainSettings
from twostroke.planner.training.shape import TrainingShape

VOCABULARY = 16_384
ROWS, LENGTH = 8, 512


@dataclass(frozen=True)
class Row:
    """``settings`` beside batch and length; ``logits`` "whole" takes the loss of all logits at once."""

    name: str
    settings: dict[str, object]
    logits: str = "chunked"
    micro_batches: int = 1

    def train_settings(self) -> TrainSettings:
        made: TrainSettings = TrainSettings(
            steps=1,
            batch_size=ROWS // self.micro_batches,
            sequence_length=LENGTH,
            grad_accumulation=self.micro_batches,
            **self.settings,  # type: ignore[arg-type]
        )
        return made

    def shape(self) -> TrainingShape:
        return replace(TrainingShape.from_settings(self.train_settings()), logits=self.logits)


TABLE = (
    Row("bf16", {}),
    Row("selective", {"activation_checkpointing": "selective"}),
    Row("full", {"activation_checkpointing": "full"}),
    Row("whole-logits", {}, logits="whole"),
    Row("accumulate-4", {}, micro_batches=4),
    Row("pure-bf16", {"dtype": "pure_bf16"}),
    Row("pure-bf16-full", {"dtype": "pure_bf16", "activation_checkpointing": "full"}),
    Row("fp32", {"dtype": "fp32"}),
    Row("optimizer-on-disk", {"offload_optimizer": "disk"}),
    Row("activations-on-disk", {"offload_activations": "disk"}),
    Row("both-on-disk", {"offload_optimizer": "disk", "offload_activations": "disk"}),
)


def spec() -> ModelSpec:
    """17M parameters: 6 layers of 384, and a vocabulary that makes logits large beside them."""
    sizes = ModelRecipe(n_layers=6, d_model=384, n_heads=6, d_ff=1024, tied_embeddings=True)
    return spec_from_recipe(sizes, VOCABULARY, LENGTH)
