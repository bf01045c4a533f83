"""What two ranks send in a step over a slow link, and how long it takes, by the way they send. See README.md."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import recorded
from rank_processes import answers

from twostroke.core.recipe import TrainRecipe, recipe_from_dict
from twostroke.core.spec import ModelSpec
from twostroke.data.prepare import prepare
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.training.layout import layout_of
from twostroke.planner.training.plan import plan_training
from twostroke.planner.training.shape import TrainingShape
from twostroke.training.measurement import StepRecord
from twostroke.training.ranks import joined
from twostroke.training.start import train

RANKS = 2
WINDOWS_MS = (5.0, 50.0)
SAMPLES_S = 0.001
WARM_UP = 2
STEPS = 8
NAMES = ("twostroke-rank-0", "twostroke-rank-1")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
DEVICE = "veth"
PORT = 29517

ALONE = "computing alone"
"""Replicas that exchange nothing before the last step: what a step takes without traffic."""

WAYS: dict[str, dict[str, Any]] = {
    ALONE: {"exact": False, "outer_every": 1000},
    "fp32, exact": {},
    "fp32": {"exact": False},
    **{name: {"exact": False, "compress": name} for name in ("bf16", "int8", "int4", "powersgd")},
    "ZeRO-3, exact": {"data": 1, "shard": RANKS},
    "ZeRO-3": {"data": 1, "shard": RANKS, "exact": False},
    "ZeRO-2, exact": {"data": 1, "shard": RANKS, "zero": 2},
    "DiLoCo, 8 steps": {"exact": False, "outer_every": STEPS},
    "streaming, 2 fragments": {"exact": False, "outer_every": STEPS, "fragments": 2},
    "streaming, int4": {"exact": False, "outer_every": STEPS, "fragments": 2, "compress": "int4"},
}


def recipe_of(folder: Path, parallel: dict[str, Any], tokens: int = 128) -> TrainRecipe:
    """12.2M parameters: 6 × 384, vocabulary 4,096; two micro-batches of ``tokens`` a rank, so that sums are in fp32."""
    return recipe_from_dict(
        {
            "output": str(folder),
            "model": {"family": "llama", "n_layers": 6, "d_model": 384, "n_heads": 6, "d_ff": 1024},
            "data": {"sources": ["stdlib"], "vocab_size": 4096},
            "train": {"steps": WARM_UP + STEPS, "batch_size": 1, "sequence_length": tokens, "grad_accumulation": 2 * RANKS}
            | {"compile": False, "dtype": "fp32"},
            "parallel": {"data": RANKS, "threads": 1} | parallel,
        }
    )


# -- the link -------------------------------------------------------------------------------------------------------------


def _ip(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"`{' '.join(words)}` failed: {done.stderr.strip() or done.stdout.strip()}")


@contextlib.contextmanager
def linked(mbit_per_s: float) -> Iterator[None]:
    """Two network namespaces with a pair of veth devices between them, each side sending at most ``mbit_per_s`` (tbf)."""
    _ip("ip", "netns", "add", NAMES[0])
    try:
        _ip("ip", "netns", "add", NAMES[1])
        try:
            _ip("ip", "link", "add", DEVICE, "netns", NAMES[0], "type", "veth", "peer", "name", DEVICE, "netns", NAMES[1])
            for name, address in zip(NAMES, ADDRESSES, strict=True):
                _ip("ip", "-n", name, "addr", "add", f"{address}/24", "dev", DEVICE)
                for device in (DEVICE, "lo"):
                    _ip("ip", "-n", name, "link", "set", device, "up")
                rate = f"{mbit_per_s:g}mbit"
                _ip(
                    "tc",
                    "-n",
                    name,
                    "qdisc",
                    "add",
                    "dev",
                    DEVICE,
                    "root",
                    "tbf",
                    "rate",
                    rate,
                    "burst",
                    "256kb",
                    "latency",
                    "50ms",
                )
            yield
        finally:
            _ip("ip", "netns", "del", NAMES[1])
    finally:
        _ip("ip", "netns", "del", NAMES[0])


@contextlib.contextmanager
def sampling(file: Path) -> Iterator[None]:
    """Inside, a process of its own reads the first rank's sent bytes a thousand times a second. At the end they are in
    ``file``."""
    sampler = subprocess.Popen(["ip", "netns", "exec", NAMES[0], sys.executable, __file__, "--sample", str(file)])
    try:
        yield
    finally:
        sampler.send_signal(signal.SIGTERM)
        sampler.wait()


def sample(file: Path) -> None:
    counter = os.open(f"/sys/class/net/{DEVICE}/statistics/tx_bytes", os.O_RDONLY)
    found: list[tuple[float, int]] = []
    ended: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    while not ended:
        found.append((time.monotonic(), int(os.pread(counter, 32, 0))))
        time.sleep(SAMPLES_S)
    file.write_text(json.dumps(found))


def peak_to_mean(samples: Sequence[tuple[float, int]], began: float, ended: float, window_s: float) -> float:
    """The most bytes in any window over those in a mean one, between two times."""
    times = [at for at, _ in samples]

    def sent_until(at: float) -> float:
        after = min(max(bisect_right(times, at), 1), len(samples) - 1)
        (t0, sent0), (t1, sent1) = samples[after - 1], samples[after]
        return sent0 + (sent1 - sent0) * min(max((at - t0) / (t1 - t0), 0.0), 1.0)

    edges = [at for at in times if began <= at <= ended - window_s]
    most = max(sent_until(at + window_s) - sent_until(at) for at in edges)
    return most / ((sent_until(ended) - sent_until(began)) / (ended - began) * window_s)


def measured(folder: Path, way: str, linked_by: str | None, tokens: int) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Of each step after the warm-up: bytes on the wire of the first rank (nan on loopback), counted bytes, and seconds. By
    window, how many times the mean the most in a window is."""
    recipe = folder / "way.json"
    recipe.write_text(json.dumps({"output": str(folder / way.replace(" ", "-")), "parallel": WAYS[way], "tokens": tokens}))
    more = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": linked_by or "lo", "TWOSTROKE_HOME": str(folder / "home")}
    words = [sys.executable, __file__, "--as-rank", str(recipe)]
    commands = [[*(["ip", "netns", "exec", name] if linked_by else []), *words] for name in NAMES]
    samples = folder / "samples.json"
    with sampling(samples) if linked_by else contextlib.nullcontext():
        said = answers(way, commands, PORT, more, ADDRESSES[0] if linked_by else "127.0.0.1")
    steps: list[dict[str, float]] = json.loads(said[0].splitlines()[-1])
    peaks: dict[str, float] = {}
    if linked_by and way != ALONE:
        read, began, ended = json.loads(samples.read_text()), steps[WARM_UP - 1]["ended_at"], steps[-1]["ended_at"]
        peaks = {f"{ms:g}": peak_to_mean(read, began, ended, ms / 1e3) for ms in WINDOWS_MS}
    return steps[WARM_UP:], peaks


def as_rank(file: Path) -> None:
    table = json.loads(file.read_text())
    counter = Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes")
    on_loopback = os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    steps: list[dict[str, float]] = []
    last = [int(counter.read_text())]

    def after(record: StepRecord, eta_s: float) -> None:
        now = int(counter.read_text())
        wire = float("nan") if on_loopback else now - last[0]
        sent = {"wire_bytes": wire, "sent_bytes": record.sent_bytes}
        steps.append(sent | {"step_time_s": record.step_time_s, "ended_at": time.monotonic()})
        last[0] = now

    with joined() as ranks:
        train(recipe_of(Path(table["output"]), table["parallel"], table["tokens"]), ranks=ranks, on_step=after)
    print(json.dumps(steps))


def planned_bytes(recipe: TrainRecipe, spec: ModelSpec) -> float:
    """Bytes that a rank sends in a step; of any machine, because they do not depend on it."""
    shape = TrainingShape.from_recipe(recipe)
    plan = plan_training(spec, shape, load_hardware("h100-sxm", "train"), layout_of(recipe.parallel, spec))
    return sum(traffic.sent_bytes for traffic in plan.traffic)


def row_of(folder: Path, way: str, linked_by: str | None, tokens: int) -> dict[str, Any]:
    steps, peaks = measured(folder, way, linked_by, tokens)
    run = folder / way.replace(" ", "-")
    spec = ModelSpec.from_dict(json.loads((run / "recipe.json").read_text())["resolved"]["spec"])
    mean = {name: statistics.fmean(step[name] for step in steps) for name in ("wire_bytes", "sent_bytes", "step_time_s")}
    losses = [json.loads(line)["loss"] for line in (run / "log.jsonl").read_text().splitlines()]
    planned = planned_bytes(recipe_of(run, WAYS[way], tokens), spec)
    return {"way": way, "planned_bytes": planned, "last_loss": losses[-1], "peaks": peaks} | mean


def summary(results: dict[str, Any]) -> str:
    lines = [f"{results['machine']}, torch {results['torch']}, Twostroke {results['twostroke']}, {results['link']}"]
    for case in results["cases"]:
        rate, rows = case["mbit_per_s"], case["rows"]
        alone = next((r["step_time_s"] for r in rows if r["way"] == ALONE), None)
        lines += ["", f"{rate:g} Mbit/s, two micro-batches of {case['tokens']} tokens a rank"]
        lines[-1] += ":" if alone is None else f", of which a step alone takes {alone:.3f} s:"
        windows = " | ".join(f"peak ÷ mean, {ms:g} ms" for ms in WINDOWS_MS)
        lines += [
            "",
            "| way | planned MB a step | counted | on the wire | wire ÷ plan | link alone s | step s | ÷ the longer "
            f"| {windows} |",
            "|---|---|---|---|---|---|---|---|" + "---|" * len(WINDOWS_MS),
        ]
        for r in rows:
            if r["way"] == ALONE:
                continue
            link_s = r["planned_bytes"] / (rate * 1e6 / 8)
            over = "" if alone is None else f"{r['step_time_s'] / max(link_s, alone):.2f}"
            peaks = " | ".join(f"{peak:.1f}" for peak in r["peaks"].values()) or " | "
            lines.append(
                f"| {r['way']} | {r['planned_bytes'] / 1e6:.2f} | {r['sent_bytes'] / 1e6:.2f} | {r['wire_bytes'] / 1e6:.2f} "
                f"| {r['wire_bytes'] / r['planned_bytes']:.4f} | {link_s:.3f} | {r['step_time_s']:.3f} | {over} | {peaks} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--mbit", type=float, nargs="+", default=[1000.0, 100.0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512], help="of a micro-batch")
    parser.add_argument("--sample", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--loopback", action="store_true", help="without root: counted bytes alone, no shaped link")
    arguments = parser.parse_args()
    if arguments.as_rank:
        as_rank(arguments.as_rank)
        return
    if arguments.sample:
        sample(arguments.sample)
        return
    if arguments.out is None:
        parser.error("--out is missing")
    conditions = recorded.conditions()
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(recipe_of(folder, {}).data)
        for rate, tokens in itertools.product(arguments.mbit, arguments.tokens):
            with contextlib.nullcontext() if arguments.loopback else linked(rate):
                each = folder / f"{rate:g}-{tokens}"
                each.mkdir()
                linked_by = None if arguments.loopback else DEVICE
                rows = [row_of(each, way, linked_by, tokens) for way in arguments.ways]
                cases.append({"mbit_per_s": rate, "tokens": tokens, "rows": rows})
    results = conditions | {
        "link": "loopback, nothing shaped" if arguments.loopback else "two network namespaces, veth, tbf",
        "ways": WAYS,
        "cases": cases,
    }
    recorded.write(arguments.out, {"results.json": results, "summary.md": summary(results)})
    print(summary(results))


if __name__ == "__main__":
    main()
