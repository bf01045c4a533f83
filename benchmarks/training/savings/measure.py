"""Trains a few steps of one row in a process of its own and prints what it took, as one JSON line."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rows import LENGTH, ROWS, TABLE, Row, spec

from twostroke.data.loader import Batch
from twostroke.model.decoder import Decoder
from twostroke.training import step as step_module
from twostroke.training.clock import StepClock
from twostroke.training.memory import memory_bytes, peak_memory_bytes, reset_peak
from twostroke.training.offloaded_activations import OffloadedActivations
from twostroke.training.optimizers import Optimizers
from twostroke.training.parallelize import pick_device, use_available_cores
from twostroke.training.precision import MasterWeights
from twostroke.training.scratch import scratch_files
from twostroke.training.step import TrainStep

WARM_UP = 2


def whole_logits(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *_: Any) -> torch.Tensor:
    """The loss as most trainers take it: all logits, in fp32."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum", ignore_index=-100)


def batches(row: Row, seed: int, device: torch.device) -> list[Batch]:
    """The micro-batches of one window: two documents a row."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, spec().vocab_size, (ROWS, LENGTH + 1), generator=generator).to(device)
    half = torch.arange(LENGTH, device=device) % (LENGTH // 2)
    positions = half.expand(ROWS, LENGTH).contiguous()
    documents = (torch.arange(LENGTH, device=device) >= LENGTH // 2).int().expand(ROWS, LENGTH).contiguous()
    n = ROWS // row.micro_batches
    return [
        Batch(tokens[i : i + n, :-1], tokens[i : i + n, 1:], positions[i : i + n], documents[i : i + n], n * LENGTH)
        for i in range(0, ROWS, n)
    ]


def measure(row: Row, steps: int, compile: bool) -> dict[str, Any]:
    use_available_cores()
    device = pick_device()
    settings = row.train_settings()
    if row.logits == "whole":
        step_module.chunked_cross_entropy = whole_logits  # type: ignore[assignment]
    decoder = Decoder(spec(), device=device).train()
    masters = MasterWeights.of(decoder, settings.dtype)
    state, activations = scratch_files(settings, Path.cwd())  # on the disk of the checkout
    optimizers = Optimizers(masters, spec(), settings, state)
    own = (*decoder.parameters(), *decoder.buffers())
    offloaded = OffloadedActivations(activations, own) if activations is not None else None
    recomputed = settings.activation_checkpointing
    train = TrainStep(decoder, masters, optimizers, settings.clip_norm, compile, print, recomputed, offloaded=offloaded)
    clock = StepClock(device)
    times: list[float] = []
    losses: list[float] = []
    for number in range(WARM_UP + steps):
        if number == WARM_UP:
            reset_peak(device)
        window = batches(row, number, device)
        clock.start()
        began = time.perf_counter()
        losses.append(train(window, 1.0, clock).loss)
        clock.finish()
        times.append(time.perf_counter() - began)
    peak = peak_memory_bytes(device)
    return {
        "step_time_s": statistics.median(times[WARM_UP:]),
        "peak_memory_bytes": peak,
        "activations_bytes": train.activations_bytes(batches(row, 0, device)[0]),
        "weights_bytes": masters.weights_bytes,
        "gradients_bytes": masters.gradients_bytes,
        "optimizer_bytes": optimizers.state_bytes,
        "resident_after_bytes": memory_bytes(device),
        "losses": losses,
        "compiled": train.is_compiled,
        "device": str(device),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("row")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--eager", action="store_true")
    given = parser.parse_args()
    row = next(row for row in TABLE if row.name == given.row)
    print(json.dumps(measure(row, given.steps, not given.eager)))


if __name__ == "__main__":
    main()
