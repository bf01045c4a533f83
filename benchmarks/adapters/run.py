"""What adapters cost a decode step, and what loading one costs. See README.md."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "inference"))

import recorded
from cases import SHAPES
from models import write_model
from random_adapters import write_adapter

from twostroke.core.engine_settings import EngineSettings
from twostroke.core.families import read_spec
from twostroke.engine.core import EngineCore
from twostroke.scheduling.sampling_params import SamplingParams

RANK, N_ADAPTERS, N_REQUESTS = 16, 8, 16
TARGETS = {"q, v": ["q_proj", "v_proj"], "every matrix": ["all-linear"]}
SCHEMES = ("bf16", "int8", "int4")
BLOCK_STEPS = 4


def asked_engine(base: Path, scheme: str, n_threads: int) -> EngineCore:
    """An engine in which all requests decode."""
    core = EngineCore(base, EngineSettings(dtype=scheme, max_model_len=1024, n_threads=n_threads))
    for i in range(N_REQUESTS):
        prompt = [(31 * i + 7 * j) % core.spec.vocab_size for j in range(100)]
        core.add_request(str(i), prompt, SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True))
    while core.scheduler.n_waiting or len(core.scheduler.decoding) < N_REQUESTS:
        core.step()
    return core


def median_step_s(core: EngineCore) -> float:
    """Of a block of steps, after one that does not count. Of one thread its processor time."""
    clock = time.thread_time if core.n_threads == 1 else time.perf_counter
    core.step()
    steps = []
    for _ in range(BLOCK_STEPS):
        began = clock()
        core.step()
        steps.append(clock() - began)
    return statistics.median(steps)


def cost_of_steps(base: Path, adapters: dict[str, list[Path]], scheme: str, rounds: int, n_threads: int) -> dict[str, Any]:
    """Milliseconds of a step by mode, and how much longer than without an adapter, over ``rounds``."""
    core = asked_engine(base, scheme, n_threads)
    requests = [core.scheduler.requests[str(i)] for i in range(N_REQUESTS)]
    times: dict[str, list[float]] = {}

    def block(mode: str, named: list[Any]) -> None:
        for i, request in enumerate(requests):  # as if they had been sent so: the step reads adapters from its requests
            request.adapter = named[i % len(named)]
        times.setdefault(mode, []).append(median_step_s(core))

    for _ in range(rounds):
        block("none", [None])
    before = times.pop("none")
    modes: dict[str, list[Any]] = {"none": [None]}
    for name, directories in adapters.items():
        held = [core.adapters.add(f"{name} {i}", directory) for i, directory in enumerate(directories)]
        for adapter in held:
            adapter.n_users += 1
        modes |= {f"1 on {name}": held[:1], f"{N_ADAPTERS} on {name}": held}
    for _ in range(rounds):
        for mode, named in modes.items():
            block(mode, named)
    for request in requests:
        request.adapter = None
    base_s = times["none"]
    over = {mode: [a / b - 1 for a, b in zip(of, base_s, strict=True)] for mode, of in times.items() if mode != "none"}
    return {
        "step_ms": {mode: 1e3 * statistics.median(of) for mode, of in times.items()},
        "over_none": {mode: statistics.median(of) for mode, of in over.items()},
        "over_none_quartiles": {mode: statistics.quantiles(of, n=4)[::2] for mode, of in over.items()},
        "before_any_was_loaded_ms": 1e3 * statistics.median(before),
        "adapter_bytes": {name: core.adapters.get(f"{name} 0").n_bytes for name in adapters},
    }


def cost_of_idle(base: Path, adapter: Path, scheme: str, rounds: int, n_threads: int) -> dict[str, Any]:
    """Steps without an adapter while one is loaded over those while none is: loaded and unloaded in turns."""
    core = asked_engine(base, scheme, n_threads)
    ratios = []
    for i in range(rounds):
        pair = {}
        for loaded in (False, True) if i % 2 else (True, False):
            if loaded:
                core.adapters.add("idle", adapter)
            pair[loaded] = median_step_s(core)
            if loaded:
                core.adapters.remove("idle")
        ratios.append(pair[True] / pair[False] - 1)
    return {"over_none": statistics.median(ratios), "quartiles": statistics.quantiles(ratios, n=4)[::2]}


def cost_of_loading(base: Path, adapter: Path, repeats: int) -> dict[str, Any]:
    core = EngineCore(base, EngineSettings(dtype="bf16", max_model_len=1024, n_threads=2))
    loads, unloads = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        core.adapters.add("a", adapter)
        loaded = time.perf_counter()
        core.adapters.remove("a")
        unloads.append(time.perf_counter() - loaded)
        loads.append(loaded - began)
    return {
        "load_ms": 1e3 * statistics.median(loads),
        "most_ms": 1e3 * max(loads),
        "unload_ms": 1e3 * statistics.median(unloads),
    }


def summary(results: dict[str, Any]) -> str:
    lines = [
        f"{results['machine']}, threads: {results['threads']}, torch {results['torch']}, Twostroke {results['twostroke']}, "
        f"load {results['load_average_at_start']:.1f} at the start",
        "",
        f"A step of {N_REQUESTS} requests, adapters of rank {RANK}; beside them how much longer than without an adapter:",
        "",
        "| weights | adapters | step | longer | middle half of the pairs |",
        "|---|---|---|---|---|",
    ]
    for scheme, found in results["steps"].items():
        lines.append(f"| {scheme} | none | {found['step_ms']['none']:.2f} ms | | |")
        idle = results["idle"][scheme]
        low, high = idle["quartiles"]
        lines.append(f"| | loaded, not named | | {idle['over_none']:+.1%} | {low:+.1%} to {high:+.1%} |")
        for mode, longer in found["over_none"].items():
            low, high = found["over_none_quartiles"][mode]
            lines.append(f"| | {mode} | {found['step_ms'][mode]:.2f} ms | {longer:+.1%} | {low:+.1%} to {high:+.1%} |")
    load, sizes = results["load"], next(iter(results["steps"].values()))["adapter_bytes"]
    held = ", ".join(f"{n_bytes / 1e6:.1f} MB on {name}" for name, n_bytes in sizes.items())
    lines += [
        "",
        f"An adapter takes {held}. Loading one on every matrix takes {load['load_ms']:.0f} ms (at most {load['most_ms']:.0f}), "
        f"unloading it {load['unload_ms']:.1f} ms.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "twostroke-adapters", help="kept models")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument(
        "--threads", type=int, default=2, help="1: steps' processor time is taken, which busy machines disturb less"
    )
    arguments = parser.parse_args()
    base = write_model(SHAPES["smollm-135m"], arguments.models / "smollm-135m")
    schemes, threads = arguments.schemes.split(","), arguments.threads
    with tempfile.TemporaryDirectory() as name:
        adapters = {
            of: [write_adapter(read_spec(base), base, targets, RANK, Path(name) / f"{of}-{i}", i) for i in range(N_ADAPTERS)]
            for of, targets in TARGETS.items()
        }
        results = recorded.conditions() | {
            "threads": threads,
            "steps": {scheme: cost_of_steps(base, adapters, scheme, arguments.rounds, threads) for scheme in schemes},
            "idle": {
                scheme: cost_of_idle(base, adapters["every matrix"][0], scheme, 2 * arguments.rounds, threads)
                for scheme in schemes
            },
            "load": cost_of_loading(base, adapters["every matrix"][0], arguments.rounds),
        }
    recorded.write(arguments.out, {"results.json": results, "summary.md": summary(results)})
    print(summary(results))


if __name__ == "__main__":
    main()
