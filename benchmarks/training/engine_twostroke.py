"""This package: the step that ``twostroke train`` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from twostroke.core.recipe import DataRecipe, LoraRecipe, ModelRecipe, TrainRecipe
from twostroke.core.train_settings import TrainSettings
from twostroke.data.loader import Batch
from twostroke.model.initialise import initialise
from twostroke.model.load import load_model
from twostroke.training.adapters import load_adapted
from twostroke.training.clock import StepClock
from twostroke.training.optimizers import Optimizers
from twostroke.training.precision import MasterWeights
from twostroke.training.step import TrainStep

IGNORED = -100


class Engine:
    def __init__(self, job: dict[str, Any]) -> None:
        arrays = np.load(job["batches"])
        self._batches = [_batch(t, d) for t, d in zip(arrays["tokens"], arrays["documents"], strict=True)]
        settings = TrainSettings(
            steps=1,
            learning_rate=job["learning_rate"],
            dtype=job["options"].get("dtype", "bf16"),
            batch_size=self._batches[0].tokens.shape[0],
            sequence_length=self._batches[0].tokens.shape[1],
        )
        device = torch.device(job["device"])
        method = job["options"].get("method")
        if method is None:
            decoder = load_model(job["weights"], "fp32", device)
            if "seed" in job["options"]:
                initialise(decoder, job["options"]["seed"])
        else:
            recipe = TrainRecipe(
                method=method,
                model=ModelRecipe(init_from=str(Path(job["weights"]))),
                data=DataRecipe(sources=("stdlib",)),
                train=settings,
                lora=LoraRecipe(rank=16, alpha=32.0),
            )
            decoder = load_adapted(recipe, device)
        decoder.train()
        masters = MasterWeights.of(decoder, settings.dtype)
        optimizers = Optimizers(masters, decoder.spec, settings)
        self._step = TrainStep(decoder, masters, optimizers, settings.clip_norm, True, print)
        self._clock = StepClock(device)

    def step(self, index: int) -> float:
        self._clock.start()
        result = self._step([self._batches[index]], 1.0, self._clock)
        self._clock.finish()
        return result.loss

    def n_tokens(self, index: int) -> int:
        return self._batches[index].tokens.numel()


def _batch(tokens: np.ndarray, numbers: np.ndarray) -> Batch:
    """Rows of packed documents as the package's loader gives them; each document's last token predicts nothing."""
    begins = np.ones(tokens.shape, dtype=bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    index = np.arange(tokens.shape[1])
    start = np.maximum.accumulate(np.where(begins, index, 0), axis=1)
    targets = np.full(tokens.shape, IGNORED, dtype=np.int64)
    targets[:, :-1] = np.where(begins[:, 1:], IGNORED, tokens[:, 1:])
    documents = (np.cumsum(begins, axis=1) - 1).astype(np.int32)
    return Batch(
        torch.from_numpy(tokens.copy()),
        torch.from_numpy(targets),
        torch.from_numpy(index - start),
        torch.from_numpy(documents),
        int((targets != IGNORED).sum()),
    )
