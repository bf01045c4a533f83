"""Fits the planner's efficiencies to public measured serving tables and reports errors on rows that a fit had not seen.

    python benchmarks/planner/public_tables/fit.py --assets PATH [--out DIR] [--write-efficiencies]

PATH (or TWOSTROKE_ASSETS) holds profiles/, traces/ and configs/. Every row's reported error comes from a fit without its model,
without its batch size (to the nearest power of two) or without its tensor-parallel degree.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from twostroke.core.families import read_spec
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.serving import step_time
from twostroke.planner.serving.shape import Placement
from twostroke.planner.serving.step_time import Efficiencies, Pass, one_pass

TABLE = "profiles/measured_serving_h100_h200_b200.csv"
CONFIGS = {
    "meta-llama/Llama-3.1-70B": ("Llama-3.1-70B", "meta-llama--Meta-Llama-3.1-70B_config.json"),
    "meta-llama/Llama-3.1-8B-Instruct": ("Llama-3.1-8B", "meta-llama--Meta-Llama-3.1-8B_config.json"),
    "nvidia/Llama-3.1-8B-Instruct-FP8": ("Llama-3.1-8B", "meta-llama--Meta-Llama-3.1-8B_config.json"),
    "nvidia/Qwen3-32B-NVFP4": ("Qwen3-32B", "Qwen--Qwen3-32B_config.json"),
    "Qwen/Qwen3-235B-A22B-FP8": ("Qwen3-235B-A22B", "Qwen--Qwen3-235B-A22B_config.json"),
    "MiniMaxAI/MiniMax-M2.5": ("MiniMax-M2.5", "MiniMaxAI--MiniMax-M2.5_config.json"),
    "deepseek-ai/DeepSeek-V3": ("DeepSeek-V3", "deepseek-ai--DeepSeek-V3_config.json"),
    "nvidia/DeepSeek-R1-NVFP4": ("DeepSeek-V3", "deepseek-ai--DeepSeek-V3_config.json"),
    "nvidia/DeepSeek-V3.1-NVFP4": ("DeepSeek-V3", "deepseek-ai--DeepSeek-V3_config.json"),
    "zhipuai/GLM-5": ("GLM-5", "zai-org--GLM-5_config.json"),
}
"""Model path → (architecture, config). Models of one architecture are held out together."""

SYSTEMS = {"h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm", "b200_sxm": "b200-sxm"}
SCHEMES = {"": "bf16", "bf16": "bf16", "fp8": "fp8", "fp4": "nvfp4"}
"""The table's ``precision``; empty: the checkpoint's own bf16. ``moe_quant_mode``, filled for dense models too, is not read."""

MOST_PREFILL_SHARE = 0.5
"""Of the arithmetic peak. A series with a row above it cannot have computed its prompts: they came from a prefix cache."""

MEMORY_SHARE = 0.9
ACTIVATIONS_BYTES = 4e9
CHUNK_TOKENS = 8192
WAVES = 10
"""Requests of a run ÷ concurrency, where all of the first wave arrive at once (the usual setting of these load generators)."""


def token_s(decode: Pass, mixed: Pass, rates: Efficiencies, prompts_per_token: float) -> float:
    """Seconds between tokens of one request: its step, and the prompts of others that are computed beside it meanwhile.

    step + interference · prompts per token · (mixed − step), ``mixed`` being the step with one prompt in it: weights and
    launches are shared, arithmetic adds up. In a closed loop of B requests of n answer tokens, prompts per token = (B − 1)/n.
    """
    step = decode.seconds(rates)
    if not prompts_per_token:
        return step
    return step + rates.interference * prompts_per_token * max(0.0, mixed.seconds(rates) - step)


@dataclass(frozen=True)
class Row:
    id: str
    model: str
    dense: bool
    system: str
    engine: str
    version: str
    precision: str
    mode: str
    tensor: int
    devices: int
    batch: int
    prompt: int
    output: int
    tpot_s: float
    ttft_s: float
    running: float
    hits: bool  # its series' prompts came from a prefix cache
    decode: Pass
    mixed: Pass
    cached: Pass  # as mixed, with the prompt in the cache but for its last token
    prefill: Pass
    prompts_per_token: float
    prefill_share: float

    @property
    def batch_band(self) -> int:
        return 2 ** round(math.log2(self.batch))

    @property
    def series(self) -> tuple[str, ...]:
        return (self.system, self.model, self.engine, self.version, self.precision, self.mode)


def table_rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def cache_bytes(row: dict[str, str], precision: str) -> float:
    """Bytes of a cached element: TensorRT-LLM keeps an fp8 cache with fp8 and fp4 checkpoints, and runs on B200 are set to it;
    others keep the model's bf16. The table does not say; these are the engines' and the recipes' defaults."""
    return 1.0 if precision != "bf16" and (row["backend"] == "trtllm" or row["system"] == "b200_sxm") else 2.0


def placement_of(row: dict[str, str], part: str) -> Placement:
    def number(name: str) -> int:
        return int(row[part + name] or 1) or 1

    tensor = number("tp_size")
    stage = max(tensor * number("attention_dp_size"), number("moe_tp_size") * number("moe_ep_size"))
    stage -= stage % tensor
    return Placement(tensor=tensor, expert=max(stage, tensor), pipeline=number("pp_size"))


def requests_of(row: dict[str, str]) -> int:
    """Requests in flight on one copy of the model: the table's batch is of one attention group; of separated pools, of a decode
    worker."""
    if row["mode"] == "disagg":
        return int(row["decode_batch_size"] or 1) * (int(row["decode_attention_dp_size"] or 1) or 1)
    return int(row["batch_size"]) * int(row["attention_dp_size"] or 1)


def running_requests(
    spec: ModelSpec, scheme: str, at: Placement, width: float, batch: int, row: Any, hardware: Hardware
) -> float:
    """Requests that decode at once: the batch, or what the KV cache holds. TensorRT-LLM reserves a request's whole length,
    others take pages as it grows: half of the answer on average."""
    head = 2 * step_time.head_matrix(spec).weights * 2.0 / at.tensor
    held = step_time.device_bytes(spec, scheme, at.tensor, at.stage_devices) / at.pipeline + head
    room = MEMORY_SHARE * hardware.memory_bytes - held - ACTIVATIONS_BYTES
    grown = 1.0 if row["backend"] == "trtllm" else 0.5
    length = int(row["isl"]) + grown * int(row["osl"])
    shards = step_time.shards(spec, scheme, at.tensor, at.stage_devices)
    token = sum(s.count * (s.cache_elements + s.index_elements) for s in shards) * width / at.pipeline
    return max(1.0, min(float(batch), at.attention_groups * room / (token * length)))


def read_rows(assets: Path) -> tuple[list[Row], dict[str, int]]:
    """Rows that have a config, and how many were left out of each model that has none."""
    specs: dict[str, ModelSpec] = {}
    rows: list[Row] = []
    left_out: dict[str, int] = defaultdict(int)
    machines = {name: load_hardware(file) for name, file in SYSTEMS.items()}
    for row in table_rows(assets / TABLE):
        if row["model_path"] not in CONFIGS:
            left_out[row["model_path"]] += 1
            continue
        model, file = CONFIGS[row["model_path"]]
        spec = specs.setdefault(file, read_spec(assets / "configs/hf" / file)) if file not in specs else specs[file]
        hardware, scheme = machines[row["system"]], SCHEMES[row["precision"]]
        part = "decode_" if row["mode"] == "disagg" else ""
        at = placement_of(row, part)
        first = placement_of(row, "prefill_") if part else at
        batch = requests_of(row)
        prompt, output = int(row["isl"]), int(row["osl"])
        width = cache_bytes(row, scheme)
        running = running_requests(spec, scheme, at, width, batch, row, hardware)
        tpot, ttft = float(row["silicon_tpot_ms"]) / 1e3, float(row["silicon_ttft_ms"]) / 1e3
        context = prompt + output / 2
        common = {"decoding": running, "context": context}
        chunks = -(-prompt // CHUNK_TOKENS)
        decode = one_pass(spec, scheme, width, at, hardware, **common)
        mixed = one_pass(spec, scheme, width, at, hardware, **common, prompt_tokens=prompt)
        cached = one_pass(spec, scheme, width, at, hardware, **common, prompt_tokens=prompt, hit_tokens=prompt - 1)
        prefill = one_pass(spec, scheme, width, first, hardware, prompt_tokens=prompt, steps=chunks)
        others = 0.0 if part else max(0.0, running / at.attention_groups - 1) / output
        computed = sum(p.arithmetic_s for p in prefill.products)
        rows.append(
            Row(
                row["id"], model, spec.moe is None, row["system"], row["backend"], row["backend_version"], scheme, row["mode"],
                at.tensor, at.devices, batch, prompt, output, tpot, ttft, running, False, decode, mixed, cached, prefill,
                others,
                computed * batch / (ttft + (output - 1) * tpot) / first.attention_groups,
            )
        )  # fmt: skip
    impossible = {r.series for r in rows if r.dense and r.prefill_share > MOST_PREFILL_SHARE}
    return [_with_hits(r) if r.series in impossible else r for r in rows], dict(left_out)


def _with_hits(row: Row) -> Row:
    return Row(**{f.name: True if f.name == "hits" else getattr(row, f.name) for f in fields(Row)})


# -- constants as a vector ------------------------------------------------------------------------------------------------

ENGINES = ("vllm", "trtllm", "sglang")
ENGINE_CONSTANTS = {"operator_s": 0.25, "step_s": 0.5, "request_s": 0.5, "interference": 0.1}
"""Constants that each engine may have its own factor of, with the factor's prior spread (of its logarithm) around 1."""
GENERATION_CONSTANTS = {"product_bandwidth_share": 0.2, "arithmetic_share": 0.3}
"""The same for Blackwell."""


@dataclass(frozen=True)
class Prior:
    name: str
    value: float
    spread: float
    source: str


def priors(independent: dict[str, float]) -> list[Prior]:
    """Where the constants are expected before the table is read. The narrow ones come from other measurements."""
    vidur = "Vidur's H100 profiles"
    return [
        Prior("product_bandwidth_share", independent["product_bandwidth_share"], 0.15, vidur),
        Prior("cache_bandwidth_share", independent["product_bandwidth_share"], 0.15, vidur),
        Prior("arithmetic_share", independent["arithmetic_share"], 0.08, vidur),
        Prior("fp8_share", 1.0, 0.3, "none"),
        Prior("fp4_share", 1.0, 0.3, "none"),
        Prior("attention_share", 0.5, 0.5, "FlashAttention-2: 50–73% forward, arXiv 2307.08691"),
        Prior("link_share", independent["link_share"], 0.3, vidur),
        Prior("message_s", 1e-6, 0.7, "an NVLink round trip"),
        Prior("operator_s", 3e-6, 0.7, "aiconfigurator's constant latency of a kernel"),
        Prior("step_s", 1e-3, 1.0, "none"),
        Prior("request_s", 1e-5, 1.0, "none"),
        Prior("interference", 0.95, 0.15, "1 − 1/(2 · 10 waves)"),
        *(Prior(f"{e}.{name}", 1.0, spread, "1") for e in ENGINES for name, spread in ENGINE_CONSTANTS.items()),
        *(Prior(f"blackwell.{name}", 1.0, spread, "1") for name, spread in GENERATION_CONSTANTS.items()),
    ]


NAMES = [f.name for f in fields(Efficiencies)]


def constants(vector: Sequence[float], names: Sequence[str]) -> Callable[[str, str], Efficiencies]:
    """Efficiencies by (engine, system) from logarithms."""
    values = dict(zip(names, np.exp(vector), strict=True))
    made: dict[tuple[str, str], Efficiencies] = {}

    def of(engine: str, system: str) -> Efficiencies:
        if (engine, system) not in made:
            mine = {name: values[name] for name in NAMES}
            for name in ENGINE_CONSTANTS:
                mine[name] *= values[f"{engine}.{name}"]
            if system == "b200_sxm":
                for name in GENERATION_CONSTANTS:
                    mine[name] *= values[f"blackwell.{name}"]
            made[engine, system] = Efficiencies(**{name: float(v) for name, v in mine.items()})
        return made[engine, system]

    return of


def predict(row: Row, of: Callable[[str, str], Efficiencies], hits: bool = False) -> float:
    return token_s(row.decode, row.cached if hits else row.mixed, of(row.engine, row.system), row.prompts_per_token)


def fit(rows: Sequence[Row], expected: Sequence[Prior], start: Any = None) -> Any:
    """Logarithms of the constants that minimise Huber's loss of log(predicted/measured) TPOT, threshold and unit 8%, plus
    (log value − log prior)² / 2·spread²: damped Gauss–Newton with iterated weights. Rows whose prompts were cached are fitted
    as such."""
    names = [p.name for p in expected]
    centre = np.log([p.value for p in expected])
    precision = 1 / np.array([p.spread for p in expected]) ** 2
    measured = np.log([r.tpot_s for r in rows])
    unit, vector, damping = 0.08, (centre if start is None else start).copy(), 1e-2

    def residuals(at: Any) -> Any:
        of = constants(at, names)
        return np.log([predict(r, of, r.hits) for r in rows]) - measured

    def cost(r: Any, at: Any) -> float:
        size = np.abs(r) / unit
        return float(np.where(size < 1, size**2 / 2, size - 0.5).sum() + ((at - centre) ** 2 * precision).sum() / 2)

    now = residuals(vector)
    best = cost(now, vector)
    for _ in range(40):
        slopes = np.empty((len(rows), len(vector)))
        for k in range(len(vector)):
            moved = vector.copy()
            moved[k] += 1e-5
            slopes[:, k] = (residuals(moved) - now) / 1e-5
        weights = np.minimum(1, unit / np.maximum(np.abs(now), 1e-9)) / unit**2
        normal = slopes.T @ (slopes * weights[:, None]) + np.diag(precision)
        gradient = slopes.T @ (weights * now) + (vector - centre) * precision
        gained = 0.0
        while damping < 1e8:
            tried = vector + np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
            then = residuals(tried)
            value = cost(then, tried)
            if value < best:
                gained, best, vector, now, damping = best - value, value, tried, then, max(damping / 3, 1e-6)
                break
            damping *= 4
        if gained < 1e-4 * best:
            break
    return vector


# -- independent measurements ---------------------------------------------------------------------------------------------


def vidur_shares(assets: Path, device: str, hardware: Hardware) -> dict[str, float]:
    """Shares of the datasheet that Vidur's profiles of 16-bit MLP products and of NCCL all-reduces show."""
    reading, multiplying = [], []
    for model in ("7b", "70b"):
        path = assets / f"profiles/vidur/{device}/Llama-2-{model}-hf_mlp.csv"
        for row in table_rows(path):
            tokens, ranks = int(row["num_tokens"]), int(row["num_tensor_parallel_workers"])
            width, inner = int(row["n_embd"]), int(row["n_expanded_embd"]) // ranks
            for name, n, k in (("mlp_up_proj", 2 * inner, width), ("mlp_down_proj", width, inner)):
                seconds = float(row[f"time_stats.{name}.median"]) / 1e3
                if tokens <= 16 and n * k * 2 > 64e6:  # smaller ones are launch and cache
                    reading.append(2 * n * k / seconds / hardware.read_bandwidth[0].bytes_per_s)
                if tokens >= 1024:
                    multiplying.append(2 * tokens * n * k / seconds / hardware.peak_flop_per_s["bf16"])
    link = []
    collectives = assets / f"profiles/vidur/network_{device}_dgx_all_reduce.csv"
    for row in table_rows(collectives):
        ranks, size = int(row["num_workers"]), float(row["size"])
        if ranks == int(row["devices_per_node"]) and size >= 3e7:
            seconds = float(row["time_stats.all_reduce.median"]) / 1e3
            link.append(2 * (ranks - 1) / ranks * size / seconds / hardware.link.bytes_per_s)
    return {
        "product_bandwidth_share": median(reading), "arithmetic_share": median(multiplying), "link_share": median(link),
    }  # fmt: skip


def splitwise_errors(assets: Path, of: Callable[[str, str], Efficiencies]) -> list[tuple[str, str, float, float, int]]:
    """(device, phase, median error, bias, rows) of the fitted constants on Splitwise's Llama-2-70B timings in bf16, unseen by
    the fit: an engine of 2023 on A100 and H100."""
    spec = read_spec(assets / "configs/hf/meta-llama--Meta-Llama-3.1-70B_config.json").with_(vocab_size=32000)
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in table_rows(assets / "traces/splitwise_perf_model.csv"):
        device = {"a100-80gb": "a100-sxm-80gb", "h100-80gb": "h100-sxm"}.get(row["hardware"])
        if row["model"] != "llama2-70b" or device is None:
            continue
        hardware, at = load_hardware(device), Placement(tensor=int(row["tensor_parallel"]))
        prompt, batch, output = (int(row[name]) for name in ("prompt_size", "batch_size", "token_size"))
        rates = of("vllm", "h100_sxm")
        step = one_pass(spec, "bf16", 2.0, at, hardware, decoding=batch, context=prompt + output / 2)
        first = one_pass(spec, "bf16", 2.0, at, hardware, prompt_tokens=prompt, prompts=batch)
        errors[device, "decode"].append(step.seconds(rates) / (float(row["token_time"]) / 1e3) - 1)
        errors[device, "prefill"].append(first.seconds(rates) / (float(row["prompt_time"]) / 1e3) - 1)
    return [(*key, float(np.median(np.abs(v))), float(np.median(v)), len(v)) for key, v in sorted(errors.items())]


# -- report ---------------------------------------------------------------------------------------------------------------


def error_table(title: str, keyed: Iterable[tuple[tuple[str, ...], float]]) -> list[str]:
    groups: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for key, error in keyed:
        groups[key].append(error)
    lines = [f"### {title}", "", "| rows | n | median error | p90 | bias |", "|---|---:|---:|---:|---:|"]
    for key in sorted(groups):
        found = np.array(groups[key])
        size = np.abs(found)
        middle, high, bias = (100 * v for v in (np.median(size), np.quantile(size, 0.9), np.median(found)))
        lines.append(f"| {' · '.join(filter(None, key))} | {len(found)} | {middle:.1f}% | {high:.1f}% | {bias:+.1f}% |")
    return [*lines, ""]


def first_token_s(row: Row, of: Callable[[str, str], Efficiencies]) -> float:
    """Prefill, half a step until it starts, and the wait of a closed loop: others' prompts that come in the same step, and the
    first wave, which arrives at once: P·(B − 1)/2·(1/output + 1/waves). Requests beyond the cache wait for a turn."""
    rates = of(row.engine, row.system)
    prefill = row.prefill.seconds(rates)
    step = predict(row, of)
    if row.mode == "disagg":
        return prefill
    wait = prefill * max(0.0, row.running - 1) / 2 * (1 / row.output + 1 / WAVES)
    turns = max(0.0, row.batch / row.running - 1)
    return prefill + wait + step / 2 + turns * row.output * step


def held_out(rows: Sequence[Row], key: Callable[[Row], Any], expected: Sequence[Prior], start: Any) -> dict[str, float]:
    """Row id → predicted TPOT of a fit without the rows that share its key."""
    found: dict[str, float] = {}
    for value in sorted({key(r) for r in rows}):
        vector = fit([r for r in rows if key(r) != value], expected, start)
        of = constants(vector, [p.name for p in expected])
        found |= {r.id: predict(r, of) for r in rows if key(r) == value}
        print(f"  without {value}: {sum(key(r) == value for r in rows)} rows", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, default=os.environ.get("TWOSTROKE_ASSETS"), help="folder of the public tables")
    parser.add_argument("--out", type=Path, help="folder for summary.md and predictions.csv")
    parser.add_argument("--write-efficiencies", action="store_true", help="store the constants in the package")
    options = parser.parse_args()
    if options.assets is None or not Path(options.assets).is_dir():
        parser.exit(2, f"--assets={options.assets} is no folder. Name the folder that holds {TABLE}.\n")
    assets = Path(options.assets)
    rows, left_out = read_rows(assets)
    dense = [r for r in rows if r.dense and r.mode == "agg"]
    h100 = vidur_shares(assets, "h100", load_hardware("h100-sxm"))
    a100 = vidur_shares(assets, "a100", load_hardware("a100-sxm-80gb"))
    expected = priors(h100)
    names = [p.name for p in expected]
    vector = fit(dense, expected)
    of = constants(vector, names)
    values = dict(zip(names, np.exp(vector), strict=True))
    print(json.dumps({k: float(f"{v:.4g}") for k, v in values.items()}), file=sys.stderr)
    splits = {
        "model": held_out(dense, lambda r: r.model, expected, vector),
        "batch": held_out(dense, lambda r: r.batch_band, expected, vector),
        "tensor": held_out(dense, lambda r: r.tensor, expected, vector),
    }
    text = summary(rows, dense, of, splits, expected, values, h100, a100, splitwise_errors(assets, of), left_out)
    print(text)
    if options.out:
        write_run(options.out, text, rows, of, splits)
    if options.write_efficiencies:
        write_efficiencies(values, dense, splits["model"])


def summary(
    rows: Sequence[Row], dense: Sequence[Row], of: Callable[[str, str], Efficiencies], splits: dict[str, dict[str, float]],
    expected: Sequence[Prior], values: dict[str, float], h100: dict[str, float], a100: dict[str, float],
    splitwise: Sequence[tuple[str, str, float, float, int]], left_out: dict[str, int],
) -> str:  # fmt: skip
    def error(predicted: float, row: Row) -> float:
        return predicted / row.tpot_s - 1

    lines = ["# Serving latency against public tables", "", "Relative error of TPOT; bias is the median signed error.", ""]
    titles = {"model": "a model", "batch": "a batch size", "tensor": "a tensor-parallel degree"}
    lines += ["## Dense models, aggregated serving, rows that the fit had not seen", ""]
    for split, title in titles.items():
        predicted = splits[split]
        lines += error_table(f"Without {title}: by device", (((r.system,), error(predicted[r.id], r)) for r in dense))
        lines += error_table(
            f"Without {title}: by series",
            (((r.system, r.model, r.engine, r.precision, "cached prompts" if r.hits else ""), error(predicted[r.id], r))
             for r in dense),
        )  # fmt: skip
    lines += error_table("All rows seen (no test of anything)", (((r.system,), error(predict(r, of), r)) for r in dense))
    hits = [r for r in dense if r.hits]
    if hits:
        lines += [
            f"{len(hits)} rows are of series whose throughput would need more than {MOST_PREFILL_SHARE:.0%} of the arithmetic "
            "peak for prompts alone: their prompts came from a prefix cache. The fit takes them as such; the errors above do "
            "not (nobody would know beforehand). Told of it, in sample:", "",
        ]  # fmt: skip
        lines += error_table("Cached prompts, told", (((r.system, r.model), error(predict(r, of, True), r)) for r in hits))
    lines += ["## Experts, and prefill apart from decode: constants of the dense rows, no row of these seen", ""]
    others = [r for r in rows if not (r.dense and r.mode == "agg")]
    lines += error_table(
        "By device and mode",
        (((r.system, r.mode, "over 8 devices as written" if r.tensor > 8 else ""), error(predict(r, of), r)) for r in others),
    )
    lines += error_table(
        "By model", (((r.model, r.system, r.engine, r.precision, r.mode), error(predict(r, of), r)) for r in others)
    )
    lines += [f"Left out, no config at hand: {', '.join(f'{k} ({v} rows)' for k, v in left_out.items())}.", ""]
    lines += ["## Time to the first token (not fitted)", ""]
    lines += error_table(
        "Dense, aggregated", (((r.system, r.model, r.engine), first_token_s(r, of) / r.ttft_s - 1) for r in dense)
    )
    lines += error_table("Others", (((r.system, r.mode), first_token_s(r, of) / r.ttft_s - 1) for r in others))
    lines += ["## Independent measurements", "", "| share of the datasheet | H100 (Vidur) | A100 (Vidur) | fitted |"]
    lines += ["|---|---:|---:|---:|"]
    lines += [f"| {k} | {h100[k]:.3f} | {a100[k]:.3f} | {values[k]:.3f} |" for k in h100]
    lines += ["", "| Splitwise, Llama-2-70B bf16 (not fitted) | median error | bias | rows |", "|---|---:|---:|---:|"]
    lines += [f"| {d} {phase} | {100 * e:.1f}% | {100 * b:+.1f}% | {n} |" for d, phase, e, b, n in splitwise]
    lines += ["", "## Constants", "", "| constant | fitted | expected before | spread | from |", "|---|---:|---:|---:|---|"]
    lines += [f"| {p.name} | {values[p.name]:.4g} | {p.value:.4g} | {p.spread} | {p.source} |" for p in expected]
    return "\n".join([*lines, ""])


def write_run(
    out: Path, text: str, rows: Sequence[Row], of: Callable[[str, str], Efficiencies], splits: dict[str, dict[str, float]]
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.md").write_text(text, encoding="utf-8")
    (out / "command.txt").write_text(
        "python benchmarks/planner/public_tables/fit.py --assets ASSETS --out RUN\n"
        f"python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}\n",
        encoding="utf-8",
    )
    with (out / "predictions.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["id", "model", "system", "engine", "precision", "mode", "tensor", "batch", "running", "prompt",
                         "output", "cached_prompts", "measured_tpot_ms", "unseen_model_ms", "unseen_batch_ms",
                         "unseen_tensor_ms",
                         "all_dense_rows_ms", "measured_ttft_ms", "predicted_ttft_ms"])  # fmt: skip
        for r in rows:
            unseen = [f"{1e3 * splits[s][r.id]:.4g}" if r.id in splits[s] else "" for s in ("model", "batch", "tensor")]
            writer.writerow([r.id, r.model, r.system, r.engine, r.precision, r.mode, r.tensor, r.batch, f"{r.running:.4g}",
                             r.prompt, r.output, int(r.hits), f"{1e3 * r.tpot_s:.5g}", *unseen, f"{1e3 * predict(r, of):.4g}",
                             f"{1e3 * r.ttft_s:.5g}", f"{1e3 * first_token_s(r, of):.4g}"])  # fmt: skip


def write_efficiencies(values: dict[str, float], dense: Sequence[Row], unseen: dict[str, float]) -> None:
    """``planner/serving/efficiencies.toml`` anew: constants, and the median error on models that a fit had not seen."""
    units = {name: "s" if name.endswith("_s") else "1" for name in NAMES}
    source = "ai-dynamo/aiconfigurator measured serving table (Apache-2.0)"
    lines = [
        "# What serving engines reach of a datasheet's rates. Written by benchmarks/planner/public_tables/fit.py; don't edit.",
        f'source = "{source}, fitted by benchmarks/planner/public_tables"',
        f'date = "{date.today().isoformat()}"',
        'kind = "measured on H100, H200 and B200; assumed for other accelerators"',
        "",
    ]
    lines += [f'[constants.{name}]\nvalue = {values[name]:.4g}\nunit = "{units[name]}"\n' for name in NAMES]
    for engine in ENGINES:
        lines += [f"[engine.{engine}]", *(f"{name} = {values[f'{engine}.{name}']:.4g}" for name in ENGINE_CONSTANTS), ""]
    lines += [
        "[generation.blackwell]",
        'devices = ["b200-sxm", "b300-sxm", "gb200", "gb300"]',
        "[generation.blackwell.factors]",
    ]
    lines += [f"{name} = {values[f'blackwell.{name}']:.4g}" for name in GENERATION_CONSTANTS]
    lines += ["", "[unseen_model_error]"]
    for system, device in SYSTEMS.items():
        errors = [abs(unseen[r.id] / r.tpot_s - 1) for r in dense if r.system == system]
        lines.append(f"{device} = {median(errors):.3f}")
    step_time.EFFICIENCIES_FILE.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
