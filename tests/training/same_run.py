"""Two runs held against each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from twostroke.training.checkpoint import list_checkpoints, load_checkpoint
from twostroke.training.finish import TrainingResult

EXACT = ("step", "loss", "grad_norm", "learning_rate", "tokens", "epoch")


def log_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]


def _exact(directory: Path) -> list[tuple[Any, ...]]:
    return [tuple(record[name] for name in EXACT) for record in log_of(directory)]


def assert_same_run(found: TrainingResult, wanted: TrainingResult) -> None:
    """Losses to the last bit, weights, optimizer, random and loader state, and the model's file byte for byte."""
    assert _exact(found.directory) == _exact(wanted.directory)
    ends = [load_checkpoint(list_checkpoints(result.directory / "checkpoints")[-1][1]) for result in (found, wanted)]
    for part in ("weights", "optimizer"):
        a, b = (getattr(end, part) for end in ends)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
    states = [{k: v for k, v in end.state.items() if k != "elapsed_s"} for end in ends]
    assert states[0] == states[1]
    assert (found.model / "model.safetensors").read_bytes() == (wanted.model / "model.safetensors").read_bytes()
