"""Decoding on one and two threads, alone and beside a program that never pauses, by how threads and memory are placed.

    python benchmarks/threads/run.py [--before TREE] [--shape smollm-135m] [--rounds 3] --out benchmarks/threads/runs/NAME

Every cell has an engine in a process of its own; cells take turns within a round. TREE is another checkout with its own built
library, whose engine takes part in the cells that have no options.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "inference")]

import recorded  # noqa: E402

MEASURE = """
import json, sys, time
from twostroke.core.engine_settings import EngineSettings
from twostroke.engine.core import EngineCore
from twostroke.scheduling.sampling_params import SamplingParams
model, settings, seconds, requests = sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
core = EngineCore(model, EngineSettings(dtype="bf16", kv_cache_bytes=2**28, **settings))
for i in range(requests):
    core.add_request(f"{i}", [5 + i, 9, 3, 7] * 8, SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True))
for _ in range(12):
    core.step()
began, steps = time.perf_counter(), []
while time.perf_counter() - began < seconds:
    at = time.perf_counter()
    core.step()
    steps.append(time.perf_counter() - at)
steps.sort()
print(json.dumps({"tok_per_s": requests * len(steps) / (time.perf_counter() - began), "p50_s": steps[len(steps) // 2],
                  "p99_s": steps[int(len(steps) * 0.99)], "huge_page_bytes": getattr(core, "huge_page_bytes", 0)}))
"""
BUSY = "while True: pass"
CELLS: dict[str, dict[str, Any]] = {
    "": {},
    "pinned to cores": {"pin_threads": "cores"},
    "large pages off": {"huge_pages": "off"},
    "large pages on": {"huge_pages": "on"},
}


def measured(source: Path, model: Path, settings: dict[str, Any], seconds: float, requests: int) -> dict[str, float]:
    words = [sys.executable, "-c", MEASURE, str(model), json.dumps(settings), str(seconds), str(requests)]
    environment = os.environ | {"PYTHONPATH": str(source)}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    from cases import SHAPES
    from models import write_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--shape", default="smollm-135m", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    conditions = recorded.conditions()
    folder = Path(tempfile.mkdtemp(prefix="threads-"))
    model = write_model(SHAPES[args.shape], folder / "model")
    trees = {"after": SOURCE} | ({"before": args.before / "src"} if args.before else {})
    cells = [
        (name, tree, n_threads, busy)
        for busy in (0, 1)
        for n_threads in (1, 2)
        for name in CELLS
        for tree in trees
        if (n_threads == 2 or not name) and (tree == "after" or not name)
    ]
    found: dict[tuple[str, str, int, int], list[dict[str, float]]] = {cell: [] for cell in cells}
    for i in range(args.rounds):
        for cell in cells if i % 2 == 0 else cells[::-1]:
            name, tree, n_threads, busy = cell
            others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(busy)]
            try:
                settings = CELLS[name] | {"n_threads": n_threads}
                found[cell].append(measured(trees[tree], model, settings, args.seconds, args.requests))
            finally:
                for other in others:
                    other.kill()
                    other.wait()
    rows, lines = [], ["| threads | beside it | placement | library | tok/s | rounds | step p50 | p99 |", "|" + "---|" * 8]
    for (name, tree, n_threads, busy), runs in found.items():
        rates = [run["tok_per_s"] for run in runs]
        p50, p99 = (1e3 * statistics.median(run[key] for run in runs) for key in ("p50_s", "p99_s"))
        rows.append({"placement": name, "library": tree, "threads": n_threads, "busy_programs": busy, "runs": runs})
        beside = "a program" if busy else "nothing"
        lines.append(
            f"| {n_threads} | {beside} | {name or 'as the system likes'} | {tree} | {statistics.median(rates):.1f} | "
            f"{min(rates):.1f}–{max(rates):.1f} | {p50:.2f} ms | {p99:.2f} ms |"
        )
        print(lines[-1], flush=True)
    about = conditions | {"shape": args.shape, "requests": args.requests, "seconds": args.seconds, "rows": rows}
    text = "\n".join([f"{about['machine']}, {args.shape}, bf16.", "", *lines]) + "\n"
    recorded.write(args.out, {"result.json": about, "summary.md": text})


if __name__ == "__main__":
    main()
