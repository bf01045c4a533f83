"""What two ranks send in a step over a slow link, and how long it takes, by the way they send. See README.md."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import recorded
from rank_processes import answers

from twostroke.core.policy import BURST_WINDOWS_MS
from twostroke.core.recipe import TrainRecipe, recipe_from_dict
from twostroke.core.spec import ModelSpec
from twostroke.data.prepare import prepare
from twostroke.planner.hardware.device import Link
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.training.layout import layout_of
from twostroke.planner.training.plan import plan_training
from twostroke.planner.training.shape import TrainingShape
from twostroke.training.bursts import Samples, most_sent
from twostroke.training.measurement import PEAKS, StepRecord, medians
from twostroke.training.parallelize import pick_device
from twostroke.training.ranks import joined
from twostroke.training.start import hardware_of, train

RANKS = 2
SAMPLES_S = 0.001
WARM_UP = 2
STEPS = 8
NAMES = ("twostroke-rank-0", "twostroke-rank-1")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
DEVICE = "veth"
PORT = 29517

PACE = "pace"
"""Share of the link's rate that ``pace_mbit`` is."""

BUCKET_BYTES = 256_000
"""What the shaped link lets through at once after a pause; with less a step of ZeRO-3 takes 4% longer."""

FRAME, PAYLOAD, ALPHA_S = 1514, 1448, 50e-6
"""Bytes of a full Ethernet frame and of TCP's payload in it, and a message's seconds before its first byte."""

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
    "DiLoCo, int4": {"exact": False, "outer_every": STEPS, "compress": "int4"},
    "streaming, int4": {"exact": False, "outer_every": STEPS, "fragments": 2, "compress": "int4"},
    "fp32, exact, half pace": {PACE: 0.5},
    "ZeRO-3, exact, half pace": {"data": 1, "shard": RANKS, PACE: 0.5},
}


def recipe_of(folder: Path, parallel: dict[str, Any], tokens: int = 128, mbit_per_s: float = 0.0) -> TrainRecipe:
    """12.2M parameters: 6 × 384, vocabulary 4,096; two micro-batches of ``tokens`` a rank, so that sums are in fp32."""
    if PACE in parallel:
        parallel = {key: value for key, value in parallel.items() if key != PACE} | {"pace_mbit": parallel[PACE] * mbit_per_s}
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
                    f"{BUCKET_BYTES // 1000}kb",
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


def peaks_of(samples: Samples, steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """By window in ms, the median over ``steps`` that send of the most that is sent in one."""
    found: dict[str, list[float]] = {}
    for step in steps:
        inside = [(at, sent) for at, sent in samples if step["ended_at"] - step["step_time_s"] <= at <= step["ended_at"]]
        for ms in BURST_WINDOWS_MS if step["sent_bytes"] else ():
            found.setdefault(str(ms), []).append(most_sent(inside, ms / 1e3))
    return {ms: statistics.median(most) for ms, most in found.items()}


def measured(
    folder: Path, way: str, linked_by: str | None, case: dict[str, Any]
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Of each step after the warm-up: bytes on the wire of the first rank (nan on loopback), counted bytes, and seconds. By
    window, the most bytes on the wire in one."""
    recipe = folder / "way.json"
    recipe.write_text(json.dumps({"output": str(folder / way.replace(" ", "-")), "parallel": WAYS[way]} | case))
    more = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": linked_by or "lo", "TWOSTROKE_HOME": str(folder / "home")}
    words = [sys.executable, __file__, "--as-rank", str(recipe)]
    commands = [[*(["ip", "netns", "exec", name] if linked_by else []), *words] for name in NAMES]
    samples = folder / "samples.json"
    with sampling(samples) if linked_by else contextlib.nullcontext():
        said = answers(way, commands, PORT, more, ADDRESSES[0] if linked_by else "127.0.0.1")
    steps: list[dict[str, float]] = json.loads(said[0].splitlines()[-1])
    peaks: dict[str, float] = {}
    if linked_by and way != ALONE:
        peaks = peaks_of(json.loads(samples.read_text()), steps[WARM_UP:])
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
        recipe = recipe_of(Path(table["output"]), table["parallel"], table["tokens"], table["mbit_per_s"])
        train(recipe, ranks=ranks, on_step=after)
    print(json.dumps(steps))


def planned(recipe: TrainRecipe, spec: ModelSpec, mbit_per_s: float) -> dict[str, float]:
    """What a plan says of a step: bytes, of any machine, because they do not depend on it; and where this one is calibrated
    seconds and the most bytes in a window, over a link of the given rate, or of ranks that share it if that is 0. Of the bytes
    the shaped link's bucket is a part."""
    shape, layout = TrainingShape.from_recipe(recipe), layout_of(recipe.parallel, spec, RANKS)
    hardware, _ = hardware_of(pick_device())
    names = ["sent_bytes_per_step"]
    if hardware is None:
        hardware = load_hardware("h100-sxm", "train")
    else:
        names += ["step_time_s", *PEAKS]
        if mbit_per_s:
            link = Link(ALPHA_S, mbit_per_s * 1e6 / 8 * PAYLOAD / FRAME, "measured", "the shaped link")
            hardware, layout = replace(hardware, network=link), replace(layout, devices_per_node=1)
    prediction = plan_training(spec, shape, hardware, layout).prediction()
    found = {name: float(prediction[name]) for name in names}
    if shape.pace_mbit or not mbit_per_s:  # paced bytes take nothing at once
        return found
    return found | {name: min(found[name] + BUCKET_BYTES, found["sent_bytes_per_step"]) for name in PEAKS if name in found}


def row_of(folder: Path, way: str, linked_by: str | None, case: dict[str, Any]) -> dict[str, Any]:
    steps, peaks = measured(folder, way, linked_by, case)
    run = folder / way.replace(" ", "-")
    spec = ModelSpec.from_dict(json.loads((run / "recipe.json").read_text())["resolved"]["spec"])
    mean = {name: statistics.fmean(step[name] for step in steps) for name in ("wire_bytes", "sent_bytes", "step_time_s")}
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    own = medians([line for line in lines[WARM_UP:] if line["sent_bytes"]], PEAKS)
    plan = planned(recipe_of(run, WAYS[way], **case), spec, case["mbit_per_s"] if linked_by else 0.0)
    return {"way": way, "planned": plan, "last_loss": lines[-1]["loss"], "peaks": peaks, "peaks_in_the_log": own} | mean


def summary(results: dict[str, Any]) -> str:
    lines = [f"{results['machine']}, torch {results['torch']}, Twostroke {results['twostroke']}, {results['link']}"]
    for case in results["cases"]:
        rate, rows = case["mbit_per_s"], case["rows"]
        alone = next((r["step_time_s"] for r in rows if r["way"] == ALONE), None)
        lines += ["", f"{rate:g} Mbit/s, two micro-batches of {case['tokens']} tokens a rank"]
        lines[-1] += ":" if alone is None else f", of which a step alone takes {alone:.3f} s:"
        peaks = [f"{what}, {ms} ms" for ms in BURST_WINDOWS_MS for what in ("peak MB", "planned", "in the log", "peak ÷ mean")]
        head = [
            "way",
            "planned MB a step",
            "counted",
            "on the wire",
            "wire ÷ plan",
            "link alone s",
            "step s",
            "planned s",
            "÷ the longer",
        ]
        lines += ["", f"| {' | '.join([*head, *peaks])} |", "|" + "---|" * (len(head) + len(peaks))]
        for r in (r for r in rows if r["way"] != ALONE):
            plan, step_s = r["planned"], r["step_time_s"]
            sent, planned_s = plan["sent_bytes_per_step"], plan.get("step_time_s", math.nan)
            link_s = sent / (rate * 1e6 / 8)
            cells = [f"{n_bytes / 1e6:.2f}" for n_bytes in (sent, r["sent_bytes"], r["wire_bytes"])]
            cells += [f"{r['wire_bytes'] / sent:.4f}", f"{link_s:.3f}", f"{step_s:.3f}", f"{planned_s:.3f}"]
            cells.append("" if alone is None else f"{step_s / max(link_s, alone):.2f}")
            for ms, name in zip(BURST_WINDOWS_MS, PEAKS, strict=True):
                most = r["peaks"].get(str(ms), math.nan)
                told = (most, plan.get(name, math.nan), r["peaks_in_the_log"].get(name, math.nan))
                cells += [f"{n_bytes / 1e6:.2f}" for n_bytes in told]
                cells.append(f"{most / (r['wire_bytes'] / step_s * ms / 1e3):.2f}")
            lines.append(f"| {r['way']} | {' | '.join(cells)} |")
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
                case = {"mbit_per_s": rate, "tokens": tokens}
                cases.append(case | {"rows": [row_of(each, way, linked_by, case) for way in arguments.ways]})
    results = conditions | {
        "link": "loopback, nothing shaped" if arguments.loopback else "two network namespaces, veth, tbf",
        "ways": WAYS,
        "cases": cases,
    }
    recorded.write(arguments.out, {"results.json": results, "summary.md": summary(results)})
    print(summary(results))


if __name__ == "__main__":
    main()
