"""Adapters of random numbers, to be timed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from twostroke.core.spec import ModelSpec
from twostroke.model.adapter_directory import CONFIG_NAME, WEIGHTS_NAME
from twostroke.model.adapters import PEFT_PREFIX, choose_targets


def write_adapter(spec: ModelSpec, base: Path, targets: Sequence[str], rank: int, directory: Path, seed: int) -> Path:
    """An adapter in peft's layout."""
    directory.mkdir(parents=True)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for target in choose_targets(spec, targets):
        for which, shape in (("A", (rank, target.columns)), ("B", (target.rows, rank))):
            tensors[f"{PEFT_PREFIX}{target.stored}.lora_{which}.weight"] = 0.02 * torch.randn(shape, generator=generator)
    save_file(tensors, directory / WEIGHTS_NAME)
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "base_model_name_or_path": str(base),
        "target_modules": list(targets),
    }  # fmt: skip
    (directory / CONFIG_NAME).write_text(json.dumps(config))
    return directory
