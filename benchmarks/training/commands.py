"""Rows that time ``twostroke train`` itself: from the command to its first step, what a resume and checkpoints cost."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rows import Size

TRIES = 3


def _recipe(size: Size, folder: Path, name: str) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(
        f'method = "pretrain"\noutput = "{folder / name}"\n[model]\nn_layers = {size.n_layers}\nd_model = {size.width}\n'
        f'n_heads = {size.n_heads}\nd_ff = {size.feed_forward}\n[data]\nsources = ["stdlib"]\n'
        f"vocab_size = {size.vocab_size}\nheld_out_fraction = 0.001\n[train]\nsteps = 3\nbatch_size = {size.batch_size}\n"
        f"sequence_length = {size.sequence_length}\n",
        encoding="utf-8",
    )
    return path


def _train(recipe: Path, output: Path, environment: dict[str, str], *settings: str) -> dict[str, Any]:
    """Runs the command; its summary, with the seconds of the whole command as ``command_s``."""
    command = [sys.executable, "-m", "twostroke", "train", str(recipe), "--json"]
    for setting in (f"output={output}", *settings):
        command += ["--set", setting]
    if output.exists():
        command.append("--resume")
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode not in (0, 75):
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    return result["measurement"] | {"command_s": time.perf_counter() - began}


def _environment(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    return environment | {"TWOSTROKE_HOME": str(folder / "home"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}


def startup(row: str, size: Size, folder: Path, environment: dict[str, str]) -> list[dict[str, Any]]:
    """Seconds from the command to the end of the first step: compile cache empty, and filled. The data was prepared before."""
    folder = folder / row
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = _environment(folder, environment)
    recipe = _recipe(size, folder, row)
    _train(recipe, folder / "prepare", environment, "train.compile=false", "train.steps=1", "train.batch_size=1")
    taken: dict[str, list[float]] = {"cold": [], "warm": []}
    for attempt in range(TRIES):
        shutil.rmtree(folder / "inductor", ignore_errors=True)
        for kind in ("cold", "warm"):
            output = folder / f"{kind}-{attempt}"
            taken[kind].append(_train(recipe, output, environment)["startup_s"])
            shutil.rmtree(output)
    return [{"row": row, "engine": f"twostroke, {kind} compile cache", "startup_s": values} for kind, values in taken.items()]


def resume_cost(row: str, size: Size, folder: Path, environment: dict[str, str]) -> list[dict[str, Any]]:
    """How much longer a resumed run takes to its first step than a fresh one, and what a checkpoint in the middle costs."""
    folder = folder / row
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = _environment(folder, environment)
    recipe = _recipe(size, folder, row)
    _train(recipe, folder / "prepare", environment, "train.steps=2")
    fresh, resumed, plain, saving = [], [], [], []
    n_steps, every = 16, 4
    for attempt in range(TRIES):
        output = folder / f"plain-{attempt}"
        without = _train(recipe, output, environment, f"train.steps={n_steps}")
        fresh.append(without["startup_s"])
        plain.append(without["train_time_s"] - without["startup_s"])
        shutil.rmtree(output)
        with_saves = _train(recipe, output, environment, f"train.steps={n_steps}", f"train.checkpoint_every={every}")
        saving.append(with_saves["train_time_s"] - with_saves["startup_s"])
        (output / "summary.json").unlink()  # as if it had been killed before its last checkpoint
        shutil.rmtree(max(path for path in (output / "checkpoints").iterdir() if path.is_dir()))
        shutil.rmtree(output / "model", ignore_errors=True)
        again = _train(recipe, output, environment, f"train.steps={n_steps}", f"train.checkpoint_every={every}")
        resumed.append(again["startup_s"])
        shutil.rmtree(output)
    saves = n_steps // every - 1
    return [
        {"row": row, "engine": "twostroke, fresh, warm cache", "startup_s": fresh},
        {"row": row, "engine": "twostroke, resumed", "startup_s": resumed},
        {
            "row": row,
            "engine": "twostroke, a checkpoint",
            "checkpoint_s": [(b - a) / saves for a, b in zip(plain, saving, strict=True)],
        },
    ]
