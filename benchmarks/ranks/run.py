"""What a step takes, and holds, on one process and on two ranks of the same two cores. See README.md."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serving"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "inference"))

import recorded
from servers import machine, processor_line
from started import asked, home_with, said

from twostroke.core.recipe import TrainRecipe, recipe_from_dict
from twostroke.training.measurement import StepRecord
from twostroke.training.ranks import joined
from twostroke.training.start import train

WARM_UP, STEPS = 3, 7
PORT = 29519

Way = tuple[int, dict[str, Any], dict[str, Any]]
"""How many ranks (0: one process, as without ``[parallel]``), and what the recipe says under ``[parallel]`` and ``[train]``."""

WAYS: dict[str, Way] = {
    "one process": (0, {}, {}),
    "one process, optimizer on disk": (0, {}, {"offload_optimizer": "disk"}),
    "one process, activations on disk": (0, {}, {"offload_activations": "disk"}),
    "1 rank, exact": (1, {}, {}),
    "2 replicas, exact": (2, {"data": 2}, {}),
    "2 replicas": (2, {"data": 2, "exact": False}, {}),
    "2 shards, exact": (2, {"shard": 2}, {}),
    "2 shards": (2, {"shard": 2, "exact": False}, {}),
}
RATIOS = {
    "2 ranks of a thread ÷ one process of two, speed (aim 0.9)": ("one process", "2 replicas, exact"),
    "what exactness costs, one rank (aim 1.05)": ("1 rank, exact", "one process"),
    "what exactness costs, replicas (aim 1.05)": ("2 replicas, exact", "2 replicas"),
    "what exactness costs, shards (aim 1.05)": ("2 shards, exact", "2 shards"),
    "optimizer on disk (aim 1.2)": ("one process, optimizer on disk", "one process"),
    "activations on disk (aim 1.2)": ("one process, activations on disk", "one process"),
}
"""Each a quotient of two ways' seconds a step."""


def recipe_of(folder: Path, way: str) -> TrainRecipe:
    """12.2M parameters: 6 × 384, vocabulary 4,096; two micro-batches of 8 × 512 tokens, bf16, compiled, AdamW."""
    n, parallel, settings = WAYS[way]
    return recipe_from_dict(
        {
            "output": str(folder / "run"),
            "model": {"family": "llama", "n_layers": 6, "d_model": 384, "n_heads": 6, "d_ff": 1024},
            "data": {"sources": ["stdlib"], "vocab_size": 4096},
            "train": {"steps": WARM_UP + STEPS, "batch_size": 8, "sequence_length": 512, "grad_accumulation": 2} | settings,
        }
        | ({"parallel": {"threads": 2 // n} | parallel} if n else {})
    )


def as_rank(folder: Path, way: str) -> None:
    """Train, and print each step's seconds and the process's highest memory so far."""
    steps: list[tuple[float, int]] = []

    def after(record: StepRecord, eta_s: float) -> None:
        steps.append((record.step_time_s, record.peak_memory_bytes))

    if WAYS[way][0] == 0:
        torch.set_num_threads(2)
        train(recipe_of(folder, way), on_step=after)
    else:
        with joined() as ranks:
            train(recipe_of(folder, way), ranks=ranks, on_step=after)
    print(json.dumps(steps))


def measured(home: Path, way: str) -> dict[str, float]:
    """Median seconds of a step after the warm-up, and the peak memory of the first rank."""
    n = max(1, WAYS[way][0])
    first, *_ = said(home, __file__, way, n, PORT, threads=2 // n)
    seconds, peaks = zip(*json.loads(first), strict=True)
    return {"step_time_s": statistics.median(seconds[WARM_UP:]), "peak_memory_bytes": peaks[-1]}


def summary(results: dict[str, Any]) -> str:
    rounds = results["rounds"]
    versions = f"torch {results['torch']}, Twostroke {results['twostroke']}"
    lines = [
        f"{processor_line(results['machine'])}; {versions}; medians of {len(rounds)} rounds",
        "",
        "| way | s a step | least to most | peak memory of a rank, MiB |",
        "|---|---|---|---|",
    ]
    for way in WAYS:
        seconds = [one[way]["step_time_s"] for one in rounds]
        peak = statistics.median(one[way]["peak_memory_bytes"] for one in rounds) / 2**20
        lines.append(f"| {way} | {statistics.median(seconds):.3f} | {min(seconds):.3f} to {max(seconds):.3f} | {peak:.0f} |")
    lines += ["", "| quotient of steps, within a round | median | least to most |", "|---|---|---|"]
    for name, (above, below) in RATIOS.items():
        found = [one[above]["step_time_s"] / one[below]["step_time_s"] for one in rounds]
        lines.append(f"| {name} | {statistics.median(found):.3f} | {min(found):.3f} to {max(found):.3f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=3, help="How often each way is measured; every second round backwards.")
    arguments = asked(parser, as_rank)
    conditions = recorded.conditions() | {"machine": machine()}
    rounds: list[dict[str, dict[str, float]]] = []
    with home_with(recipe_of(Path(), "one process").data) as home:
        for i in range(arguments.rounds):
            ways = list(WAYS) if i % 2 == 0 else list(WAYS)[::-1]
            rounds.append({way: measured(home, way) for way in ways})
            print(json.dumps(rounds[-1]), flush=True)
    results = conditions | {"rounds": rounds}
    recorded.write(arguments.out, {"results.json": results, "summary.md": summary(results)})
    print(summary(results))


if __name__ == "__main__":
    main()
