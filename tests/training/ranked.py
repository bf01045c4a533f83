"""Runs of several ranks, in processes that are forked warm, one thread each, and what they are held against."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from twostroke.core.errors import TwostrokeError
from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.core.recipe import TrainRecipe
from twostroke.training.checkpoint import Checkpoint, list_checkpoints, load_checkpoint
from twostroke.training.start import train

JOIN_S = 250.0
"""Ten layouts of four ranks, one after another, take 100 s on two slow cores that other tests use too."""

Prepare = Callable[[int], None]
"""``prepare(rank)``, called in each rank's process before it trains."""


def _rank(
    work: Callable[..., Any], arguments: tuple[Any, ...], rank: int, n: int, port: int, answers: Any, folder: str
) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "TWOSTROKE_HOME": folder,
    }  # fmt: skip
    from twostroke.training.ranks import joined

    try:
        with joined() as ranks:
            answers.put((rank, "done", work(ranks, *arguments), False))
    except TwostrokeError as error:
        answers.put((rank, type(error).__name__, str(error), error.is_told))
    except BaseException:
        answers.put((rank, "broken", traceback.format_exc(), False))


def _train(ranks: Any, recipe: TrainRecipe, resume: bool, stop_after: int | None) -> str:
    stop = None if stop_after is None else (lambda step: ranks.rank == ranks.n - 1 and step >= stop_after)
    return str(train(recipe, resume, ranks=ranks, should_stop=stop).summary["weights_sha256"])


def _train_each(ranks: Any, recipes: list[TrainRecipe]) -> list[str]:
    return [str(train(recipe, ranks=ranks).summary["weights_sha256"]) for recipe in recipes]


class RankRunner:
    """Starts ranks that train together."""

    def __init__(self, folder: Path) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["twostroke.training.start", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"]
        )
        self._folder = folder

    def start(self, work: Callable[..., Any], n: int, *arguments: Any) -> tuple[list[Any], Any]:
        """(processes of ``n`` ranks that call ``work(ranks, *arguments)``, the queue of their answers)."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        answers = self._context.Queue()
        processes = [
            self._context.Process(target=_rank, args=(work, arguments, rank, n, port, answers, str(self._folder)))
            for rank in range(n)
        ]
        for process in processes:
            process.start()
        return processes, answers

    def call(self, work: Callable[..., Any], n: int, *arguments: Any) -> list[tuple[str, Any, bool]]:
        """Of each rank: ("done" or the error's type, result or sentence, whether another rank has told it)."""
        processes, answers = self.start(work, n, *arguments)
        try:
            found = sorted(answers.get(timeout=JOIN_S) for _ in processes)
            for process in processes:
                process.join(JOIN_S)
            assert not any(process.exitcode for process in processes)
        finally:
            for process in processes:
                process.kill()
        broken = [what for _, kind, what, _ in found if kind == "broken"]
        assert not broken, "\n".join(broken)
        return [tuple(answer[1:]) for answer in found]

    def train(self, n: int, recipe: TrainRecipe, resume: bool = False, stop_after: int | None = None) -> list[Any]:
        return self.call(_train, n, recipe, resume, stop_after)

    def train_each(self, n: int, recipes: list[TrainRecipe]) -> None:
        """Train ``recipes`` one after another, on the same ranks."""
        answers = self.call(_train_each, n, recipes)
        assert [kind for kind, *_ in answers] == ["done"] * n, answers
        assert all(hashes == answers[0][1] for _, hashes, _ in answers)


def train_each_counting(counts: dict[str, int], ranks: Any, recipes: list[TrainRecipe]) -> list[dict[str, int]]:
    """What ``counts`` comes to in this process by training each of ``recipes``."""
    found = []
    for recipe in recipes:
        counts.clear()
        train(recipe, ranks=ranks)
        found.append(dict(counts))
    return found


def values_of(directory: Path) -> list[tuple[Any, ...]]:
    """What every line of the step log says of the run itself."""
    names = ("step", "loss", "grad_norm", "block_grad_norms", "tokens", "epoch", "skipped")
    lines = (directory / "log.jsonl").read_text().splitlines()
    return [tuple(json.loads(line).get(name) for name in names) for line in lines]


def laid_out(recipe: TrainRecipe, name: str, **parallel: Any) -> TrainRecipe:
    return dataclasses.replace(recipe, output=f"{recipe.output}-{name}", parallel=ParallelRecipe(**parallel))


def last_checkpoint(recipe: TrainRecipe) -> Checkpoint:
    return load_checkpoint(list_checkpoints(Path(recipe.output) / "checkpoints")[-1][1])


def end_of(recipe: TrainRecipe) -> tuple[Any, ...]:
    """Everything that a run leaves that must not depend on its layout."""
    end = last_checkpoint(recipe)
    state = {k: v for k, v in end.state.items() if k != "elapsed_s"}
    tensors = [(name, t.dtype, t.numpy().tobytes() if t.dtype != torch.bfloat16 else t.float().numpy().tobytes())
               for part in (end.weights, end.optimizer) for name, t in sorted(part.items())]  # fmt: skip
    return tensors, state, values_of(Path(recipe.output))


def furthest(found: TrainRecipe, wanted: TrainRecipe) -> tuple[float, float]:
    """The largest relative difference of a step's loss or gradient's norm, and of a weight by its tensor's norm."""
    steps = [values_of(Path(recipe.output)) for recipe in (found, wanted)]
    loss = max(abs(a[i] - b[i]) / b[i] for a, b in zip(*steps, strict=True) for i in (1, 2))
    ends = last_checkpoint(found).weights, last_checkpoint(wanted).weights
    assert ends[0].keys() == ends[1].keys()
    weight = max(float((ends[0][name] - w).norm() / w.norm().clamp_min(1e-3)) for name, w in ends[1].items())
    return loss, weight


def assert_close_to_one_rank(
    runner: RankRunner, recipe: TrainRecipe, n: int, parallel: dict[str, Any], limits: tuple[float, float]
) -> None:
    """``limits``: of ``furthest``."""
    alone = laid_out(recipe, "alone")
    train(alone)
    several = laid_out(recipe, "several", **parallel)
    answers = runner.train(n, several)
    assert [kind for kind, *_ in answers] == ["done"] * n, answers
    loss, weight = furthest(several, alone)
    assert loss < limits[0], (loss, weight)
    assert weight < limits[1], (loss, weight)


def assert_bits_of_one_rank(runner: RankRunner, recipe: TrainRecipe, layouts: list[tuple[int, dict[str, Any]]]) -> None:
    """Ranks of each of ``layouts`` leave what one rank leaves, and the same model file."""
    torch.set_num_threads(1)
    alone = laid_out(recipe, "alone")
    train(alone)
    assert_bits_of(alone, runner, recipe, layouts)


def assert_bits_of(
    alone: TrainRecipe, runner: RankRunner, recipe: TrainRecipe, layouts: list[tuple[int, dict[str, Any]]]
) -> None:
    """Ranks of each of ``layouts`` leave what the run of ``alone`` left, and the same model file."""
    wanted = end_of(alone)
    by_n: dict[int, list[TrainRecipe]] = {}
    for n, parallel in layouts:
        by_n.setdefault(n, []).append(laid_out(recipe, f"{n}-{parallel}", **parallel))
    for n, recipes in by_n.items():
        runner.train_each(n, recipes)
        for several in recipes:
            assert end_of(several) == wanted, several.parallel
            assert (Path(several.output) / "model" / "model.safetensors").read_bytes() == (
                Path(alone.output) / "model" / "model.safetensors"
            ).read_bytes()
