"""What a checkpoint costs a run, in the background and not, and what a resume costs. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import recorded

from twostroke.core.recipe import recipe_from_dict
from twostroke.training import build as build_module
from twostroke.training.build import capture
from twostroke.training.checkpoint import checkpoint_bytes, list_checkpoints, load_checkpoint
from twostroke.training.observers import Observer
from twostroke.training.parallelize import use_available_cores
from twostroke.training.run import RunState
from twostroke.training.saver import CheckpointSaver
from twostroke.training.start import start, train

MODES = ("none", "background", "none", "foreground")
BLOCK_STEPS = 8
SHARE = 0.02


def recipe_table(output: Path, steps: int, **train: Any) -> dict[str, Any]:
    """12.2M parameters: 6 × 384, vocabulary 4,096."""
    return {
        "output": str(output),
        "model": {"family": "llama", "n_layers": 6, "d_model": 384, "n_heads": 6, "d_ff": 1024},
        "data": {"sources": ["stdlib"], "vocab_size": 4096},
        "train": {"steps": steps, "batch_size": 4, "sequence_length": 512, **train},
    }


def cost_of_saves(folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds a checkpoint adds to a block of steps, by mode, and where they go."""
    steps = BLOCK_STEPS * (len(MODES) * rounds + 1)
    recipe = recipe_from_dict(recipe_table(folder / "saves", steps))
    blocks: list[tuple[str, float]] = []
    copies: list[float] = []
    writes: list[tuple[float, float]] = []
    write = CheckpointSaver._write

    def timed_write(self: CheckpointSaver, *args: Any) -> Path:
        began, cpu = time.perf_counter(), time.thread_time()
        path = write(self, *args)
        writes.append((time.perf_counter() - began, time.thread_time() - cpu))
        return path

    CheckpointSaver._write = timed_write  # type: ignore[method-assign]
    state = {"began": 0.0, "mode": "warm-up"}
    sizes: list[int] = []

    class Blocks(Observer):
        def after_step(self, run: RunState, record: Any) -> dict[str, Any]:
            if record.step % BLOCK_STEPS == 0:
                run.saver.settle()  # what a block's save still has to do belongs to the block
                now = time.perf_counter()
                if state["mode"] != "warm-up":
                    blocks.append((str(state["mode"]), now - float(state["began"])))
                mode = MODES[(record.step // BLOCK_STEPS - 1) % len(MODES)]
                state["mode"], state["began"] = mode, time.perf_counter()
                if mode != "none" and record.step < steps:
                    run.saver._in_background = mode == "background"
                    run.saver.begin(lambda: capture(run), wait=True)
                    if mode == "background":
                        copies.append(time.perf_counter() - float(state["began"]))
            if record.step == steps:  # behind the last block, whose time it would count to
                sizes.append(checkpoint_bytes(capture(run)))
            return {}

    train(recipe, observers=[Blocks()])
    CheckpointSaver._write = write  # type: ignore[method-assign]
    added: dict[str, list[float]] = {"background": [], "foreground": []}
    for number in range(1, len(blocks) - 1):
        mode, seconds = blocks[number]
        if mode != "none":
            added[mode].append(seconds - (blocks[number - 1][1] + blocks[number + 1][1]) / 2)
    found: dict[str, Any] = {
        "checkpoint_bytes": sizes[-1],
        "step_s": statistics.median(s for mode, s in blocks if mode == "none") / BLOCK_STEPS,
        "copy_s": statistics.median(copies[1:]),
        "writer_cpu_s": statistics.median(cpu for _, cpu in writes),
    }
    for mode, seconds in added.items():
        cost = statistics.median(seconds)
        found[f"{mode}_cost_s"] = cost
        found[f"{mode}_costs_s"] = [round(s, 4) for s in seconds]
        found[f"{mode}_interval_for_2_percent_s"] = cost / SHARE
    return found


def time_to_first_step(folder: Path, resume: bool, compiled: bool) -> float:
    """Seconds from the command to the first new line of the log; the run is then stopped with SIGTERM."""
    recipe, log = folder / "resume.toml", folder / f"resumed-{compiled}" / "log.jsonl"
    recipe.write_text(
        f'output = "{log.parent}"\n[model]\nn_layers = 6\nd_model = 384\nn_heads = 6\nd_ff = 1024\n'
        f"[train]\nsteps = 100000\nbatch_size = 4\nsequence_length = 512\ncompile = {str(compiled).lower()}\n"
    )
    before = log.read_text().count("\n") if log.is_file() else 0
    began = time.perf_counter()
    command = [str(Path(sys.executable).parent / "twostroke"), "train", str(recipe), *(["--resume"] if resume else [])]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not log.is_file() or log.read_text().count("\n") <= before:
        if process.poll() is not None:
            raise SystemExit(f"the run ended before its first step:\n{process.communicate()[1]}")
        time.sleep(0.005)
    seconds = time.perf_counter() - began
    process.send_signal(signal.SIGTERM)
    errors = process.communicate()[1]
    if process.returncode != 75:
        raise SystemExit(f"the run was not stopped with a checkpoint ({process.returncode}):\n{errors}")
    return seconds


def cost_of_resume(folder: Path, repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for compiled in (False, True):
        name = "compiled" if compiled else "eager"
        time_to_first_step(folder, resume=False, compiled=compiled)  # fills the compile cache
        shutil.rmtree(folder / f"resumed-{compiled}")
        begun = time_to_first_step(folder, resume=False, compiled=compiled)
        resumed = [time_to_first_step(folder, resume=True, compiled=compiled) for _ in range(repeats)]
        found |= {f"{name}_begun_s": begun, f"{name}_resumed_s": statistics.median(resumed), f"{name}_resumed_all_s": resumed}
    return found


def cost_of_verifying(folder: Path, repeats: int) -> dict[str, Any]:
    """Reading and verifying alone, and what ``build`` of a resumed run waits for it at the end."""
    directory = folder / "saves"
    newest = list_checkpoints(directory / "checkpoints")[-1][1]
    alone = []
    for _ in range(repeats):
        began = time.perf_counter()
        load_checkpoint(newest)
        alone.append(time.perf_counter() - began)
    (directory / "summary.json").unlink()
    waits, builds = [], []
    get = build_module.CheckpointReader.get

    def timed_get(self: Any) -> Any:
        began = time.perf_counter()
        found = get(self)
        waits.append(time.perf_counter() - began)
        return found

    build_module.CheckpointReader.get = timed_get  # type: ignore[method-assign]
    table = json.loads((directory / "recipe.json").read_text())
    table.pop("resolved")
    for _ in range(repeats):
        inputs = start(recipe_from_dict(table), resume=True)
        began = time.perf_counter()
        run = build_module.build(inputs)
        builds.append(time.perf_counter() - began)
        run.loader.close()
    build_module.CheckpointReader.get = get  # type: ignore[method-assign]
    return {
        "read_and_verify_alone_s": statistics.median(alone),
        "build_s": statistics.median(builds),
        "build_waits_for_it_s": statistics.median(waits),
    }


def summary(results: dict[str, Any]) -> str:
    saves, resume, verify = results["saves"], results["resume"], results["verify"]
    lines = [
        f"{results['machine']}, {results['threads']} threads, torch {results['torch']}, Twostroke {results['twostroke']}",
        "",
        f"A checkpoint of {saves['checkpoint_bytes'] / 1e6:.0f} MB, steps of {1e3 * saves['step_s']:.0f} ms:",
        "",
        "| | adds | for 2% of the time, not more often than every |",
        "|---|---|---|",
    ]
    lines += [
        f"| {mode} | {1e3 * saves[f'{mode}_cost_s']:.0f} ms | {saves[f'{mode}_interval_for_2_percent_s']:.0f} s |"
        for mode in ("background", "foreground")
    ]
    lines += [
        "",
        f"The step waits {1e3 * saves['copy_s']:.0f} ms for the copy; the writer takes {1e3 * saves['writer_cpu_s']:.0f} ms of "
        "a core.",
        "",
        "| from the command to the first new step | begun anew | resumed |",
        "|---|---|---|",
    ]
    lines += [
        f"| {name} | {resume[f'{name}_begun_s']:.2f} s | {resume[f'{name}_resumed_s']:.2f} s |"
        for name in ("eager", "compiled")
    ]
    share = verify["build_waits_for_it_s"] / verify["build_s"]
    lines += [
        "",
        f"Reading and verifying take {1e3 * verify['read_and_verify_alone_s']:.0f} ms alone; building the model waits "
        f"{1e3 * verify['build_waits_for_it_s']:.0f} ms for it, {100 * share:.0f}% of its {1e3 * verify['build_s']:.0f} ms.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    threads = use_available_cores()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:  # on the disk that a run would use, not in memory
        folder = Path(name)
        os.environ.setdefault("TWOSTROKE_HOME", str(folder / "home"))
        results = recorded.conditions() | {
            "threads": threads,
            "saves": cost_of_saves(folder, arguments.rounds),
            "verify": cost_of_verifying(folder, arguments.repeats),
            "resume": cost_of_resume(folder, arguments.repeats),
        }
    recorded.write(arguments.out, {"results.json": results, "summary.md": summary(results)})
    print(summary(results))


if __name__ == "__main__":
    main()
