"""Runs of `twostroke train --ranks` in processes of their own, and what a test does to their ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from twostroke.core.recipe import TrainRecipe

FAULTS = '''
"""Makes the main thread hang at its next lap or its next write of a checkpoint, or slow, at a signal."""
import signal, sys, time

def _sleep(*arguments):
    time.sleep(1e6)

def _loop(*arguments):
    while True:
        pass

def _hang(how, module, owner, name):
    setattr(getattr(sys.modules[module], owner), name, how)

def _slow(*_):
    clock = sys.modules["twostroke.training.clock"].StepClock
    lap = clock.lap
    clock.lap = lambda *arguments: (time.sleep(0.01), lap(*arguments))

if hasattr(signal, "SIGRTMIN"):
    lap, write = ("twostroke.training.clock", "StepClock", "lap"), ("twostroke.training.tensor_file", "HashedFile", "write")
    signal.signal(signal.SIGRTMIN + 1, lambda *_: _hang(_sleep, *lap))
    signal.signal(signal.SIGRTMIN + 2, lambda *_: _hang(_loop, *lap))
    signal.signal(signal.SIGRTMIN + 3, lambda *_: _hang(_sleep, *write))
    signal.signal(signal.SIGRTMIN + 4, _slow)
'''

SLEEP, LOOP, SLEEP_IN_SAVE, SLOW = (signal.SIGRTMIN + i for i in range(1, 5))


class Launched:
    """A launcher whose ranks hang when they are told to. ``lines`` are those of its stderr so far."""

    def __init__(self, recipe: TrainRecipe, folder: Path, n: int, options: Sequence[str] = ()) -> None:
        self.output = Path(recipe.output)
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(FAULTS)
        file = folder / "recipe.toml"
        file.write_text("")
        settings = recipe.train
        values: dict[str, object] = {
            "output": recipe.output, "data.sources": list(recipe.data.sources), "data.tokenizer": recipe.data.tokenizer,
            "train.compile": "false", "train.warmup_fraction": settings.warmup_fraction,
        }  # fmt: skip
        names = ("steps", "batch_size", "sequence_length", "grad_accumulation", "checkpoint_every", "optimizer", "dtype")
        values |= {f"train.{name}": getattr(settings, name) for name in names}
        values |= {f"model.{k}": getattr(recipe.model, k) for k in ("family", "n_layers", "d_model", "n_heads", "d_ff")}
        values["train.checkpoint_in_background"] = str(settings.checkpoint_in_background).lower()
        if recipe.parallel is not None:
            values |= {f"parallel.{k}": getattr(recipe.parallel, k) for k in ("shard", "zero")}
        words = [w for name, value in values.items() for w in ("--set", f"{name}={value}")]
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "twostroke", "train", str(file), "--ranks", str(n), *words, *options],
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )  # fmt: skip
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with contextlib.suppress(ValueError):  # closed at the end: ranks keep the pipe open for longer than their launcher
            for line in self.process.stderr:
                self.lines.append(line.rstrip("\n"))

    @property
    def said(self) -> str:
        return "\n".join(self.lines)

    def ranks(self) -> dict[int, psutil.Process]:
        found = {}
        for child in psutil.Process(self.process.pid).children():
            try:
                found[int(child.environ()["RANK"])] = child
            except (psutil.Error, KeyError):
                continue
        return found

    def step(self) -> int:
        """The last step in the log."""
        log = self.output / "log.jsonl"
        lines = log.read_bytes().splitlines() if log.is_file() else []
        try:
            return int(json.loads(lines[-1])["step"]) if lines else 0
        except ValueError:
            return 0

    def wait_for(self, what: Callable[[], object], within_s: float = 60.0) -> None:
        deadline = time.monotonic() + within_s
        while not what():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.01)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: self.step() >= step)

    def do(self, number: int, rank: int) -> tuple[float, str]:
        """Send ``number`` to ``rank``; (seconds until no rank of that attempt was left, what the launcher said of it)."""
        ranks, before = self.ranks(), len(self.lines)
        began = time.monotonic()
        ranks[rank].send_signal(number)
        self.wait_for(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks.values()))
        gone_s = time.monotonic() - began
        self.wait_for(lambda: any("start again" in line for line in self.lines[before:]))
        return gone_s, next(line for line in self.lines[before:] if "start again" in line)

    def ended(self, within_s: float = 60.0) -> int:
        try:
            return self.process.wait(within_s)
        finally:
            self.end()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(5)
        self.process.stderr.close()  # type: ignore[union-attr]
