"""Runs killed with SIGKILL, in processes of their own that are forked warm; what they leave is resumed and compared."""

from __future__ import annotations

import hashlib
import json
import mmap
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

from twostroke.core.recipe import TrainRecipe
from twostroke.model.safetensors_file import tensor_bytes
from twostroke.training import step as step_module
from twostroke.training.checkpoint import list_checkpoints, load_checkpoint
from twostroke.training.measurement import OVER_RANKS, PEAKS
from twostroke.training.saver import CheckpointSaver
from twostroke.training.start import train

OF_THE_CLOCK = {
    "tok_per_s", "mfu", "memory_bytes", "peak_memory_bytes", "step_time_s", "forward_s", "backward_s", "optimizer_s", "data_s",
    "elapsed_s", "sent_bytes", "data_wait_share", "warm_up", "rank_compute_s", "rank_waiting_s", "straggler_ratio",
    *PEAKS, *OVER_RANKS,
}  # fmt: skip
"""Keys of a log line that say when and where a step was done; all others must be equal."""

IN_WINDOW, IN_SAVE, PLACES = 0, 1, 2


def _marked(owner: Any, name: str, place: int, marks: mmap.mmap) -> None:
    """While ``owner.name`` runs, byte ``place`` of ``marks`` is 1: it outlives the process."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        marks[place] = 1
        try:
            return original(*args, **kwargs)
        finally:
            marks[place] = 0

    setattr(owner, name, wrapped)


def _child(recipe: TrainRecipe, marks_file: str) -> None:
    import torch

    torch.set_num_threads(1)
    with open(marks_file, "r+b") as stream:
        marks = mmap.mmap(stream.fileno(), PLACES)
    _marked(step_module.TrainStep, "forward_backward", IN_WINDOW, marks)
    _marked(CheckpointSaver, "_write", IN_SAVE, marks)
    train(recipe, resume=(Path(recipe.output) / "recipe.json").is_file())


class Killer:
    """Starts runs in forked processes and kills them."""

    def __init__(self, folder: Path) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["twostroke.training.start", "torch._dynamo", "sympy"])
        self._marks = folder / "marks"

    def run(self, recipe: TrainRecipe, kill_after_s: float | None) -> tuple[bool, bool, bool]:
        """Start or resume ``recipe``; (whether it was killed, inside an accumulation window, inside a save)."""
        self._marks.write_bytes(bytes(PLACES))
        process = self._context.Process(target=_child, args=(recipe, str(self._marks)))
        process.start()
        process.join(kill_after_s)
        killed = process.is_alive()
        if killed:
            process.kill()
            process.join()
        else:
            assert process.exitcode == 0
        marks = self._marks.read_bytes()
        process.close()
        return killed, killed and bool(marks[IN_WINDOW]), killed and bool(marks[IN_SAVE])

    def time_of(self, recipe: TrainRecipe) -> float:
        """Seconds that the whole run takes, forked, undisturbed."""
        began = time.perf_counter()
        self.run(recipe, None)
        return time.perf_counter() - began


def fingerprint(directory: Path) -> dict[str, str]:
    """Hashes of all that a finished run left, save its times: weights, optimizer, states, log, anomalies, model."""
    end = load_checkpoint(list_checkpoints(directory / "checkpoints")[-1][1])
    lines = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    anomalies = directory / "anomalies.jsonl"
    parts: dict[str, list[bytes]] = {
        name: [key.encode() + bytes(tensor_bytes(tensors[key])) for key in sorted(tensors)]
        for name, tensors in (("weights", end.weights), ("optimizer", end.optimizer))
    }
    parts |= {name: [_plain(value)] for name, value in end.state.items() if name != "elapsed_s"}
    parts["log"] = [_plain({k: v for k, v in line.items() if k not in OF_THE_CLOCK}) for line in lines]
    parts["anomalies"] = [anomalies.read_bytes() if anomalies.is_file() else b""]
    parts["model"] = [(directory / "model" / "model.safetensors").read_bytes()]
    return {name: hashlib.sha256(b"\0".join(content)).hexdigest() for name, content in parts.items()}


def _plain(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def kill_until_done(
    killer: Killer, recipe: TrainRecipe, length_s: float, kills: int, draw: random.Random
) -> list[tuple[bool, bool]]:
    """Run ``recipe`` and kill it ``kills`` times at moments drawn over its length, resuming each time; then let it finish.

    Returns where each kill fell: (inside an accumulation window, inside a save).
    """
    places = []
    for _ in range(kills):
        killed, in_window, in_save = killer.run(recipe, draw.uniform(0, length_s))
        if killed:
            places.append((in_window, in_save))
    killer.run(recipe, None)
    return places
