"""How long a plan takes: commands in processes of their own, as a user waits for them, and a simulation alone.

python benchmarks/planner/speed/run.py --out RUN
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import recorded

from twostroke.core.families import named_model
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.serving.drawn import Lognormal
from twostroke.planner.serving.plan import plan_serving, strategy_of
from twostroke.planner.serving.policies import policy_of
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.serving.simulation import simulate
from twostroke.planner.serving.step_table import StepTable
from twostroke.planner.serving.workload import Workload

MODEL, DEVICE = "meta-llama/Llama-3.1-8B", "h100-sxm"
LAYOUTS, REQUESTS = 10_000, 10_000
LOAD = 0.8
"""Share of the rate that a full batch answers at which the simulated requests come."""


class Timed(NamedTuple):
    """One row: what is timed, the seconds of each repeat, the most that it may take, and what does it once."""

    what: str
    seconds: list[float]
    aim_s: float
    work: Callable[[], float]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def command_s(*words: str) -> float:
    """Seconds of a command from its start to its end."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "twostroke", *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    return time.perf_counter() - began


def _as_installed() -> dict[str, str]:
    """The environment, in which Python keeps the bytecode of what it imports, as it does of an installed package."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def enumerated() -> int:
    """Layouts that `plan search` looks at."""
    words = [sys.executable, "-m", "twostroke", "plan", "search", MODEL, "--no-simulation", "--json"]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return sum(found["enumerated"] for found in _searches(json.loads(done.stdout)))


def _searches(document: object) -> list[dict[str, int]]:
    """Every part of a document that says how many candidates were looked at."""
    if isinstance(document, list):
        return [found for one in document for found in _searches(one)]
    if not isinstance(document, dict):
        return []
    if "enumerated" in document:
        return [document]
    return [found for one in document.values() for found in _searches(one)]


def simulation_s() -> float:
    """Seconds of simulating requests of lognormal lengths, none of whose steps was priced before."""
    spec, hardware = named_model(MODEL).spec, load_hardware(DEVICE)
    full = plan_serving(spec, ServingShape(batch=64, prompt_tokens=1024, output_tokens=256), hardware)
    rate = LOAD * full.output_tok_per_s / full.shape.output_tokens
    workload = Workload.open(rate, REQUESTS, Lognormal(800, 0.7, 4096), Lognormal(200, 0.7, 1024), warmup=100, seed=1)
    began = time.perf_counter()
    simulate(workload, policy_of("vllm"), StepTable(strategy_of(spec, full.shape, hardware).step_seconds), full.pages)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    serve, search = ("plan", "serve", MODEL, "--hardware", DEVICE), ("plan", "search", MODEL)
    conditions, count = recorded.conditions(), enumerated()
    rows = [
        Timed("`plan serve --no-simulation`", [], 0.3, lambda: command_s(*serve, "--no-simulation")),
        Timed("`plan serve`", [], 1.2, lambda: command_s(*serve)),
        Timed(
            f"`plan search`, for {LAYOUTS:,} of its {count:,} layouts", [], 5.0, lambda: command_s(*search) * LAYOUTS / count
        ),
        Timed(f"a simulation of {REQUESTS:,} requests", [], 5.0, simulation_s),
    ]
    command_s(*serve)  # bytecode
    for _ in range(options.repeats):  # in turn, so that what else runs on the machine meets all of them
        for row in rows:
            row.seconds.append(row.work())
    lines = [
        f"{conditions['machine']}. {MODEL}; load before {conditions['load_average_at_start']:.1f}.",
        "",
        "| what | seconds (median) | least and most | aim | |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        verdict = "met" if row.median_s <= row.aim_s else "missed"
        ends = f"{min(row.seconds):.2f} to {max(row.seconds):.2f}"
        lines.append(f"| {row.what} | {row.median_s:.2f} | {ends} | {row.aim_s:g} | {verdict} |")
    text = "\n".join(lines) + "\n"
    raw = conditions | {
        "layouts": count,
        "rows": [{"what": row.what, "seconds": row.seconds, "aim_s": row.aim_s} for row in rows],
    }
    recorded.write(options.out, {"raw.json": raw, "summary.md": text})
    print(text, end="")


if __name__ == "__main__":
    main()
