"""Runs this package's training step and its peers' side by side on the same model, data and batches.

    python benchmarks/training/run.py --out benchmarks/training/runs/<date>-<machine>-<commit> --work WORK [--quick] [ROW …]

Engines of a row take turns step by step, each in a process of its own, so that what disturbs the machine disturbs all. Every
finished row is lines of ``raw.jsonl``; rows run again replace the former, so that a run can be made in parts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import recorded  # noqa: E402
from commands import resume_cost, startup  # noqa: E402
from peers import python_of  # noqa: E402
from rows import ENGINES, EVERY, GPU_GROUPS, GROUPS, QUICK, SIZES, Group, Size  # noqa: E402
from summary import summary  # noqa: E402

THREADS = 2
N_BATCHES = {"speed": 8, "loss": 50}
LEARNING_RATE = 1e-3


class Process:
    """One engine's process; stopped at the end of the ``with``."""

    def __init__(self, name: str, group: Group, folder: Path, environment: dict[str, str]) -> None:
        engine, size = ENGINES[name], SIZES[group.size]
        self.name = name
        job = {
            "module": engine.module,
            "options": engine.options,
            "size": dataclasses.asdict(size),
            "weights": str(weights_of(group.size, folder)),
            "batches": str(batches_of(size, group, folder)),
            "n_batches": N_BATCHES[group.kind],
            "learning_rate": LEARNING_RATE,
            "warm_up": group.warm_up,
            "threads": THREADS,
            "device": group.device,
        }
        self._log = (folder / f"{name.replace(' ', '-')}.log").open("w+", encoding="utf-8")
        command = [python_of(engine.venv, folder), str(HERE / "worker.py"), json.dumps(job)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment, cwd=HERE
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"{self.name} ended: {self._log.read()[-1500:]}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def ask(self, n_steps: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{n_steps}\n")
        self._process.stdin.flush()
        return self.reply()


def spec_of(size: Size) -> Any:
    from twostroke.core.spec import ModelSpec

    return ModelSpec(
        "llama", size.vocab_size, size.n_layers, size.width, size.n_heads, size.n_heads, 64, size.feed_forward,
        max_positions=size.sequence_length, tied_embeddings=True,
    )  # fmt: skip


def weights_of(name: str, folder: Path) -> Path:
    """Fresh weights of a size, saved by this package in the layout that every engine loads."""
    directory = folder / "weights" / name
    if not directory.is_dir():
        from twostroke.model.decoder import Decoder
        from twostroke.model.save import save_model

        directory.parent.mkdir(parents=True, exist_ok=True)
        save_model(Decoder(spec_of(SIZES[name])), spec_of(SIZES[name]), directory, "fp32")
    return directory


def batches_of(size: Size, group: Group, folder: Path) -> Path:
    n_batches = N_BATCHES[group.kind]
    name = f"{size.vocab_size}-{size.batch_size}-{size.sequence_length}-{group.layout}-{n_batches}.npz"
    path = folder / "batches" / name
    if not path.is_file():
        from batches import write_batches

        path.parent.mkdir(parents=True, exist_ok=True)
        write_batches(path, size.vocab_size, size.batch_size, size.sequence_length, n_batches, group.layout)
    return path


def run_group(
    name: str, group: Group, folder: Path, environment: dict[str, str], names: tuple[str, ...]
) -> list[dict[str, Any]]:
    """All engines of a group: started and warmed up, then in turn. One that fails is a row that says why. Warm-ups follow one
    another on a CPU; on a GPU they go on together, because compiling is most of them and a processor's work."""
    records: dict[str, dict[str, Any]] = {}
    running: list[Process] = []
    try:
        for engine in names:
            records[engine] = {"row": name, "engine": engine, "group": dataclasses.asdict(group), "size": group.size}
            running.append(Process(engine, group, folder, environment))
            if group.device == "cpu":
                _warmed(running, running[-1], records[engine])
        for process in [*running] if group.device != "cpu" else ():
            _warmed(running, process, records[process.name])
        for _ in range(group.rounds):
            for process in running:
                taken = process.ask(group.burst)
                for key, values in taken.items():
                    records[process.name][key] += values
        for process in running:
            records[process.name] |= process.ask(0)
    finally:
        for process in running:
            process.__exit__()
    return list(records.values())


def _warmed(running: list[Process], process: Process, record: dict[str, Any]) -> None:
    """Wait until ``process`` has warmed up. One that fails is no longer ``running``, and its ``record`` says why."""
    try:
        record |= process.reply() | {"step_time_s": [], "loss": [], "tokens": [], "waited_s": []}
    except RuntimeError as error:
        record["failed"] = recorded.without_folders(str(error))[-600:]
        running.remove(process)
        process.__exit__()
    print(f"  {process.name}: warm", file=sys.stderr, flush=True)


def _merged(raw: Path) -> list[dict[str, Any]]:
    """The last record of every row and engine, in the order of the rows."""
    last = {(r["row"], r["engine"]): r for r in map(json.loads, raw.read_text(encoding="utf-8").splitlines())}
    order = [*EVERY, *GPU_GROUPS]
    return sorted(last.values(), key=lambda record: order.index(record["row"]))


def _versions() -> dict[str, Any]:
    from importlib.metadata import version

    from twostroke.ledger.code_version import code_version

    names = ("torch", "transformers", "peft", "numpy")
    return {
        "command": recorded.command(),
        "code": code_version(),
        "python": platform.python_version(),
        "machine": recorded.machine(),
        "threads": THREADS,
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        **{name: version(name) for name in names},
    }


def product_rate(device: str) -> float:
    """FLOP/s of the best of five 4096³ bf16 products: what a share of the device's rate is a share of."""
    wait = "torch.cuda.synchronize()" if device == "cuda" else "pass"
    code = (
        f"import torch, time; torch.set_num_threads({THREADS})\n"
        f"a, b = (torch.randn(4096, 4096).bfloat16().to('{device}') for _ in 'ab'); a @ b; {wait}\n"
        f"t = []\nfor _ in range(5):\n s = time.perf_counter(); a @ b; {wait}; t.append(time.perf_counter() - s)\n"
        "print(2 * 4096**3 / min(t))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="Folder of this run's results.")
    parser.add_argument("--work", type=Path, help="Folder for weights, batches, environments and runs; kept.")
    parser.add_argument("--quick", action="store_true", help=f"Only {', '.join(QUICK)}.")
    parser.add_argument("--engine", action="append", help="Only this engine of each row; may be repeated.")
    parser.add_argument(
        "--venv", action="append", default=[], help="NAME=PATH of a peer's virtual environment: litgpt, bitsandbytes."
    )
    parser.add_argument("--list", action="store_true", help="Name the rows and stop.")
    parser.add_argument("rows", nargs="*", help="Rows to run; all where none is named.")
    arguments = parser.parse_args()
    if arguments.list or arguments.out is None or arguments.work is None:
        print("\n".join((*EVERY, *GPU_GROUPS)))
        return
    unknown = set(arguments.rows) - {*EVERY, *GPU_GROUPS}
    if unknown:
        raise SystemExit(f"{sorted(unknown)[0]!r} is no row. Use some of {', '.join((*EVERY, *GPU_GROUPS))}.")
    out, folder = arguments.out.resolve(), arguments.work.resolve()
    out.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    for given in arguments.venv:
        name, _, path = given.partition("=")
        python_of(name, folder, Path(path))
    from twostroke.core.openmp import limit_spinning

    environment = dict(os.environ) | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    limit_spinning(environment)
    raw = out / "raw.jsonl"
    recorded.write(out, {"versions.json": _versions()})
    for row in arguments.rows or (QUICK if arguments.quick else EVERY):
        print(f"{row} …", file=sys.stderr, flush=True)
        rate = product_rate(GROUPS[row].device if row in GROUPS else "cpu")
        if row in GROUPS:
            wanted = tuple(e for e in GROUPS[row].engines if not arguments.engine or e in arguments.engine)
            records = run_group(row, GROUPS[row], folder, environment, wanted)
        elif row.startswith("startup-"):
            records = startup(row, SIZES[row.removeprefix("startup-")], folder, environment)
        else:
            records = resume_cost(row, SIZES["12M"], folder, environment)
        with raw.open("a", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(record | {"product_flop_per_s": rate}) + "\n")
        (out / "summary.md").write_text(summary(_merged(raw)), encoding="utf-8")
    print((out / "summary.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
