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
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from twostroke.core.errors import CapacityError
from twostroke.core.families import read_spec
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.serving import step_time
from twostroke.planner.serving.datasheet import CHUNK_TOKENS
from twostroke.planner.serving.policies import policy_of
from twostroke.planner.serving.shape import Placement
from twostroke.planner.serving.simulation import Simulated
from twostroke.planner.serving.step_time import FITTED, HOST_EDGE, Efficiencies, Network, Part, Pass, one_pass
from twostroke.planner.serving.strategy import GPU_MEMORY_UTILISATION
from twostroke.planner.truth.intervals import EXPERTS, FILE, LEAST_RUNS, LEVEL, SERVED, read_ranges

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "engines"), str(Path(__file__).parents[2])]
import recorded  # noqa: E402
from fit_intervals import fitted_range, intervals_text  # noqa: E402
from loads import simulated  # noqa: E402
from recipes import WARMED_UP_SINCE, cache_bytes  # noqa: E402

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

KINDS = ("dense", "experts")
MEASURED_ON = re.compile(r"measured=(\d{4}-\d\d-\d\d)")
"""The day in a row's source."""

SHORTEST = 0.8
"""InferenceX asks for lengths from 0.8 of the stated one to all of it (``--random-range-ratio 0.8``); other rows for equal
ones."""

ACTIVATIONS_BYTES = 4e9


def token_s(decode: Pass, mixed: Pass, rates: Efficiencies, prompts_per_token: Any) -> Any:
    """Seconds between tokens of one request: its step, and the prompts of others that are computed beside it meanwhile.

    step + prompts per token · (mixed − step), ``mixed`` being the step with a prompt in it (one in each attention group):
    weights and launches are shared, arithmetic adds up. In a closed loop of B requests in g groups and n answer tokens,
    prompts per token = (B/g − 1)/n.
    """
    step = decode.seconds(rates)
    return step + prompts_per_token * (mixed.seconds(rates) - step)


@dataclass(frozen=True)
class Row:
    id: str
    model: str
    dense: bool
    system: str
    engine: str
    version: str
    measured: str  # on which day, empty where that is not said
    precision: str
    mode: str
    at: Placement
    batch: int
    prompt: int
    output: int
    shortest: float  # least length ÷ longest, of prompts and of answers
    spec: ModelSpec
    hardware: Hardware
    width: float  # bytes of a cached element
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
    def tensor(self) -> int:
        return self.at.tensor

    @property
    def inference_x(self) -> bool:
        """Whether it was measured by InferenceX, whose lengths vary; the others measured otherwise."""
        return self.shortest < 1

    @property
    def is_cold(self) -> bool:
        """Whether its means hold what an engine compiles at first use: kernels of experts, of a server that nothing had warmed
        up. A dense model's are there before, or are captured at the start."""
        return self.inference_x and not self.dense and self.measured < WARMED_UP_SINCE

    @property
    def load(self) -> str:
        """Who measured it, and how."""
        return "others" if not self.inference_x else "InferenceX, not warmed up" if self.is_cold else "InferenceX"

    @property
    def batch_band(self) -> int:
        return 2 ** round(math.log2(self.batch))

    @property
    def series(self) -> tuple[str, ...]:
        return (self.system, self.model, self.engine, self.version, self.precision, self.mode)

    @property
    def kind(self) -> str:
        return "dense" if self.dense else "experts"


def table_rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def measured_once(rows: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """The table holds several exports of one database: of rows with the same load and the same times the first is kept."""
    seen: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        times = (f"{float(row['silicon_tpot_ms']):.2f}", f"{float(row['silicon_ttft_ms']):.0f}")
        same = (row[k] for k in ("model_path", "system", "backend", "mode", "isl", "osl"))
        seen.setdefault((*same, *times), row)
    return list(seen.values())


def placement_of(row: dict[str, str], part: str) -> Placement:
    """The table's columns as a placement. Exports of InferenceX (those with ``attention_dp_size``) multiply what shares
    devices: one measurement stands in them as tp 8, ep 8 and as tp 64, moe_tp 8, moe_ep 8. Aggregated rows are on one node,
    and with attention data parallel each of its devices is a group of its own."""

    def number(name: str) -> int:
        return int(row[part + name] or 1) or 1

    tensor, groups, slices, ranks = (number(f"{n}_size") for n in ("tp", "attention_dp", "moe_tp", "moe_ep"))
    if not part and row["attention_dp_size"] and groups > 1:
        devices = slices if slices > 1 else groups
        return Placement(1, number("pp_size"), devices)
    if not part and row["attention_dp_size"] and slices > 1 and ranks > 1:
        return Placement(slices, number("pp_size"), ranks)
    stage = max(tensor * groups, slices * ranks)
    expert = stage if stage > tensor else ranks
    return Placement(tensor, number("pp_size"), expert)


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
    grown = 1.0 if row["backend"] == "trtllm" else 0.5
    length = int(row["isl"]) + grown * int(row["osl"])
    return max(1.0, min(float(batch), cache_tokens(spec, scheme, at, width, hardware, row["backend"]) / length))


def cache_tokens(spec: ModelSpec, scheme: str, at: Placement, width: float, hardware: Hardware, engine: str) -> float:
    """Tokens that the KV cache of one copy holds."""
    head = 2 * step_time.head_matrix(spec).weights * 2.0 / at.tensor
    held = step_time.device_bytes(spec, scheme, at) / at.pipeline + head
    room = policy_of(engine).room_bytes(GPU_MEMORY_UTILISATION, hardware.memory_bytes, held, ACTIVATIONS_BYTES)
    shards = step_time.shards(spec, scheme, at)
    token = sum(s.count * (s.cache_elements + s.index_elements) for s in shards) * width / at.pipeline
    return max(0.0, at.attention_groups * room / token)


def read_rows(assets: Path) -> tuple[list[Row], dict[str, int]]:
    """Rows that have a config, and how many were left out of each model that has none."""
    specs: dict[str, ModelSpec] = {}
    rows: list[Row] = []
    left_out: dict[str, int] = defaultdict(int)
    machines = {name: load_hardware(file) for name, file in SYSTEMS.items()}
    for row in measured_once(table_rows(assets / TABLE)):
        if row["model_path"] not in CONFIGS:
            left_out[row["model_path"]] += 1
            continue
        model, file = CONFIGS[row["model_path"]]
        spec = specs.setdefault(file, read_spec(assets / "configs/hf" / file)) if file not in specs else specs[file]
        rows.append(read_row(row, model, spec, machines[row["system"]]))
    impossible = {r.series for r in rows if r.dense and r.prefill_share > MOST_PREFILL_SHARE}
    return [_with_hits(r) if r.series in impossible else r for r in rows], dict(left_out)


def read_row(row: dict[str, str], model: str, spec: ModelSpec, hardware: Hardware) -> Row:
    scheme, part = SCHEMES[row["precision"]], "decode_" if row["mode"] == "disagg" else ""
    at = placement_of(row, part)
    first = placement_of(row, "prefill_") if part else at
    batch, longest, last = requests_of(row), int(row["isl"]), int(row["osl"])
    shortest = SHORTEST if row["attention_dp_size"] and "silicon_concurrency" in row["silicon_data_source"] else 1.0
    prompt, output = ((1 + shortest) / 2 * n for n in (longest, last))
    width = cache_bytes(row, scheme)
    running = running_requests(spec, scheme, at, width, batch, row, hardware)
    tpot, ttft = float(row["silicon_tpot_ms"]) / 1e3, float(row["silicon_ttft_ms"]) / 1e3
    groups = at.attention_groups
    common: dict[str, Any] = {"decoding": running, "context": prompt + output / 2, "prompts": groups}
    decode = one_pass(spec, scheme, width, at, hardware, **common | {"prompts": 0})
    mixed = one_pass(spec, scheme, width, at, hardware, **common, prompt_tokens=prompt)
    cached = one_pass(spec, scheme, width, at, hardware, **common, prompt_tokens=prompt, hit_tokens=prompt - 1)
    prefill = one_pass(spec, scheme, width, first, hardware, prompt_tokens=prompt, steps=math.ceil(prompt / CHUNK_TOKENS))
    computed = sum(p.arithmetic_s for p in prefill.products)
    return Row(
        row["id"], model, spec.moe is None, row["system"], row["backend"], row["backend_version"],
        day[1] if (day := MEASURED_ON.search(row["silicon_data_source"])) else "", scheme, row["mode"],
        at, batch, longest, last, shortest, spec, hardware, width, tpot, ttft, running, False, decode, mixed, cached, prefill,
        0.0 if part else max(0.0, running / groups - 1) / output,
        computed * batch / (ttft + (output - 1) * tpot) / first.attention_groups,
    )  # fmt: skip


def _with_hits(row: Row) -> Row:
    return Row(**{f.name: True if f.name == "hits" else getattr(row, f.name) for f in fields(Row)})


# -- many rows at once ----------------------------------------------------------------------------------------------------


class StackedPass(Pass):
    """Passes of many rows, each number an array: the package's own formulas, run on all rows at once."""

    longest = staticmethod(np.maximum)

    @staticmethod
    def with_host(device_s: Any, host_s: Any, edge: Any) -> Any:
        return (device_s**edge + host_s**edge) ** (1 / edge)


def stacked(passes: Sequence[Pass]) -> StackedPass:
    """One pass whose numbers are arrays. Parts that a row has not are 0 bytes and 0 FLOP."""

    def numbers(things: Sequence[Any], cls: Any, **words: Any) -> Any:
        kept = (f.name for f in fields(cls) if f.name not in words)
        return cls(**{name: np.array([float(getattr(t, name)) for t in things]) for name in kept}, **words)

    keys = dict.fromkeys((part.component, part.grouped) for one in passes for part in one.products)
    parts = []
    for component, grouped in keys:
        none = Part(component, 0.0, 0.0, 0.0, 0.0, 1.0, grouped)
        mine = [next((p for p in one.products if (p.component, p.grouped) == (component, grouped)), none) for one in passes]
        parts.append(numbers(mine, Part, component=component, grouped=grouped))
    one = {name: numbers([getattr(p, name) for p in passes], Part, component="attention", grouped=False)
           for name in ("cache", "prompts")}  # fmt: skip
    nets = {name: numbers([getattr(p, name) for p in passes], Network, source="all rows")
            for name in ("reduces", "exchanges", "sends")}  # fmt: skip
    plain = {name: np.array([getattr(p, name) for p in passes]) for name in ("elementwise_s", "steps", "requests")}
    operators = tuple(np.array([p.operators[i] for p in passes]) for i in range(3))
    return StackedPass(products=tuple(parts), operators=operators, basis="datasheet", **one, **nets, **plain)


class StackedRates(Efficiencies):
    """Efficiencies of many rows."""

    def arithmetic(self, width: Any) -> Any:
        return self.arithmetic_share * np.where(width == 1.0, self.fp8_share, np.where(width == 0.5, self.fp4_share, 1.0))

    def bandwidth(self, width: Any) -> Any:
        return self.product_bandwidth_share * np.where(width == 0.5, self.fp4_bandwidth_share, 1.0)

    def grouped(self, width: Any) -> Any:
        return self.grouped_share * np.where(width == 0.5, self.fp4_grouped_factor, 1.0)


class Table:
    """Rows with their passes stacked, and which constants each takes."""

    def __init__(self, rows: Sequence[Row], told: bool = True) -> None:
        self.rows = list(rows)
        self.decode = stacked([r.decode for r in rows])
        self.mixed = stacked([r.cached if told and r.hits else r.mixed for r in rows])
        self.prompts_per_token = np.array([r.prompts_per_token for r in rows])
        self.tpot_s = np.array([r.tpot_s for r in rows])
        self.unit = np.array([UNIT["dense" if r.dense else "experts"] for r in rows])
        self.engine = {e: np.array([r.engine == e for r in rows]) for e in ENGINES}
        self.host_edge = np.array([HOST_EDGE.get(r.engine, 1.0) for r in rows])
        self.blackwell = np.array([r.system in BLACKWELL for r in rows])

    def rates(self, values: dict[str, float]) -> StackedRates:
        mine = {name: np.full(len(self.rows), values[name]) for name in NAMES}
        for engine, those in self.engine.items():
            for name in ENGINE_CONSTANTS:
                mine[name] = mine[name] * np.where(those, values[f"{engine}.{name}"], 1.0)
        for name in GENERATION_CONSTANTS:
            mine[name] = mine[name] * np.where(self.blackwell, values[f"blackwell.{name}"], 1.0)
        return StackedRates(**mine, host_edge=self.host_edge)

    def predict(self, values: dict[str, float]) -> Any:
        return token_s(self.decode, self.mixed, self.rates(values), self.prompts_per_token)


# -- constants as a vector ------------------------------------------------------------------------------------------------

ENGINES = ("vllm", "trtllm", "sglang")
BLACKWELL = ("b200_sxm",)
ENGINE_CONSTANTS = {"operator_s": 0.2, "step_s": 0.5, "request_s": 0.25, "reduce_s": 0.3}
"""Constants that each engine may have its own factor of, with the factor's prior spread (of its logarithm) around 1. What a
request takes beside its tokens is the same work everywhere: factors that were fitted with twice the spread differ by 0.25. With
it an engine that is known by experts alone puts on requests what their layers take."""
GENERATION_CONSTANTS = {"product_bandwidth_share": (1.0, 0.05), "arithmetic_share": (1.0, 0.08), "reduce_s": (1.5, 0.15)}
"""The same for Blackwell, with where each is expected."""
UNIT = {"dense": 0.06, "experts": 0.2}
"""Size of a usual residual, as a logarithm: what a layer of experts does is known less well, and should tell less of the
rest."""


@dataclass(frozen=True)
class Prior:
    name: str
    value: float
    spread: float
    source: str


def priors(independent: dict[str, float]) -> list[Prior]:
    """Where the constants are expected before the table is read. The narrow ones come from other measurements."""
    vidur, kernels = "Vidur's H100 profiles", "aiconfigurator's kernel measurements of vLLM 0.20"
    return [
        Prior("product_bandwidth_share", 0.92, 0.08, f"{kernels}: 0.83 to 1.0; {vidur}"),
        Prior("fp4_bandwidth_share", 0.75, 0.15, f"{kernels}: nvfp4 products of few rows 0.4 to 0.7 on B200"),
        Prior("cache_bandwidth_share", 0.8, 0.15, f"{kernels}: 0.65 to 0.9 of long contexts"),
        Prior("elementwise_share", 0.7, 0.2, "fused kernels of few numbers a row"),
        Prior("arithmetic_share", independent["arithmetic_share"], 0.08, vidur),
        Prior("fp8_share", 0.9, 0.1, "power-limited at twice the rate"),
        Prior("fp4_share", 0.75, 0.15, f"{kernels}: 0.53 to 0.59 of the peak on B200, bf16 0.75 to 0.85"),
        Prior("grouped_share", 0.25, 0.3, f"{kernels}: 0.2 of the peak for 16,384 tokens, nvfp4 on B200"),
        Prior("fp4_grouped_factor", 1.0, 0.3, "none"),
        Prior("attention_share", 0.5, 0.2, "FlashAttention-2: 50–73% forward, arXiv 2307.08691"),
        Prior("link_share", 0.45, 0.25, f"{kernels}: all-reduces of 16 to 64 MB 0.3 to 0.5; {vidur} 0.8"),
        Prior("reduce_s", 5e-6, 0.2, f"{kernels}: 4.5 to 6 µs in a graph, on 2, 4 and 8 devices"),
        Prior("operator_s", 3e-6, 0.3, "aiconfigurator's constant latency of a kernel"),
        Prior("step_s", 1.5e-3, 0.5, "none"),
        Prior("request_s", 1e-5, 1.0, "none"),
        *(Prior(f"{e}.{name}", 1.0, spread, "1") for e in ENGINES for name, spread in ENGINE_CONSTANTS.items()),
        *(Prior(f"blackwell.{name}", value, spread, "7 µs beside 4.5" if name == "reduce_s" else "1")
          for name, (value, spread) in GENERATION_CONSTANTS.items()),
    ]  # fmt: skip


NAMES = FITTED


def constants(vector: Sequence[float], names: Sequence[str]) -> Callable[[str, str], Efficiencies]:
    """Efficiencies by (engine, system) from logarithms."""
    values = dict(zip(names, np.exp(vector), strict=True))
    made: dict[tuple[str, str], Efficiencies] = {}

    def of(engine: str, system: str) -> Efficiencies:
        if (engine, system) not in made:
            mine = {name: values[name] for name in NAMES}
            for name in ENGINE_CONSTANTS:
                mine[name] *= values[f"{engine}.{name}"]
            if system in BLACKWELL:
                for name in GENERATION_CONSTANTS:
                    mine[name] *= values[f"blackwell.{name}"]
            found = {name: float(v) for name, v in mine.items()}
            made[engine, system] = Efficiencies(**found, host_edge=HOST_EDGE.get(engine, 1.0))
        return made[engine, system]

    return of


def fit(rows: Sequence[Row], expected: Sequence[Prior], start: Any = None, rounds: int = 30) -> Any:
    """Logarithms of the constants that minimise Huber(ln predicted − ln measured) + (ln constant − ln prior)²/spread², by
    damped Gauss-Newton. Residuals are counted in ``UNIT``; ones beyond it weigh linearly."""
    table, names = Table(rows), [p.name for p in expected]
    centre, precision = np.log([p.value for p in expected]), np.array([p.spread**-2 for p in expected])
    vector, damping, unit = centre.copy() if start is None else start.copy(), 1e-2, table.unit

    def residuals(at: Any) -> Any:
        return np.log(table.predict(dict(zip(names, np.exp(at), strict=True))) / table.tpot_s)

    def cost(r: Any, at: Any) -> float:
        size = np.abs(r) / unit
        return float(np.where(size < 1, size**2 / 2, size - 0.5).sum() + ((at - centre) ** 2 * precision).sum() / 2)

    now = residuals(vector)
    best = cost(now, vector)
    for _ in range(rounds):
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
        if gained < 1e-5 * best:
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


def held_out(rows: Sequence[Row], key: Callable[[Row], Any], expected: Sequence[Prior]) -> dict[str, float]:
    """Row id → predicted TPOT of a fit without the rows that share its key. It begins where constants are expected before the
    table is read: a fit that begins at that of all rows could stay there."""
    found: dict[str, float] = {}
    for value in sorted({key(r) for r in rows}):
        left = [r for r in rows if key(r) == value]
        vector = fit([r for r in rows if key(r) != value], expected)
        values = dict(zip([p.name for p in expected], np.exp(vector), strict=True))
        found |= zip((r.id for r in left), map(float, Table(left, told=False).predict(values)), strict=True)
        print(f"  without {value}: {len(left)} rows", file=sys.stderr)
    return found


def residuals(rows: Iterable[Row], predicted: dict[str, float]) -> list[float]:
    """ln(measured ÷ predicted) of TPOT, of rows whose prompts were computed."""
    return [math.log(r.tpot_s / predicted[r.id]) for r in rows if not r.hits]


def covered(rows: Sequence[Row], predicted: dict[str, float], key: Callable[[Row], Any]) -> float:
    """Share of rows inside a ``LEVEL`` interval that was fitted to the held-out residuals of the others, the row's key
    apart."""
    inside = []
    for value in {key(r) for r in rows}:
        others = residuals([r for r in rows if key(r) != value], predicted)
        low, high = np.quantile(others, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        inside += [low <= r <= high for r in residuals([r for r in rows if key(r) == value], predicted)]
    return float(np.mean(inside))


SPLITS: dict[str, tuple[str, Callable[[Row], Any]]] = {
    "model": ("a model", lambda r: r.model),
    "batch": ("a batch size", lambda r: r.batch_band),
    "tensor": ("a tensor-parallel degree", lambda r: r.tensor),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, default=os.environ.get("TWOSTROKE_ASSETS"), help="folder of the public tables")
    parser.add_argument("--out", type=Path, help="folder for summary.md and predictions.csv")
    parser.add_argument("--loads", type=int, default=0, help="rows whose load is simulated, every n-th of them; 0: none")
    parser.add_argument("--write-efficiencies", action="store_true", help="store the constants and intervals in the package")
    options = parser.parse_args()
    if options.assets is None or not Path(options.assets).is_dir():
        parser.exit(2, f"--assets={options.assets} is no folder. Name the folder that holds {TABLE}.\n")
    assets = Path(options.assets)
    rows, left_out = read_rows(assets)
    h100 = vidur_shares(assets, "h100", load_hardware("h100-sxm"))
    a100 = vidur_shares(assets, "a100", load_hardware("a100-sxm-80gb"))
    expected = priors(h100)
    names = [p.name for p in expected]
    vector = fit(rows, expected)
    of = constants(vector, names)
    values = dict(zip(names, np.exp(vector), strict=True))
    print(json.dumps({k: float(f"{v:.4g}") for k, v in values.items()}), file=sys.stderr)
    splits = {name: held_out(rows, key, expected) for name, (_, key) in SPLITS.items()}
    loads = simulated_loads(rows, of, options.loads) if options.loads else {}
    first_s = first_tokens_s(loads)
    lines = summary(rows, values, splits, expected, left_out)
    lines += first_tokens(loads, first_s) + independent(h100, a100, values, splitwise_errors(assets, of), expected)
    text = "\n".join([*lines, ""])
    print(text)
    if options.out:
        write_run(options.out, text, rows, Table(rows, told=False).predict(values), splits, first_s)
    if options.write_efficiencies:
        write_efficiencies(values, rows, splits["model"], loads)
        write_intervals(rows, splits["model"], loads, first_s)


def simulated_loads(rows: Sequence[Row], of: Callable[[str, str], Efficiencies], n: int) -> dict[str, tuple[Row, Simulated]]:
    """Every k-th aggregated row's load, with the constants of all rows: TTFT was never fitted."""
    known = [r for r in rows if r.mode == "agg" and not r.hits]
    found = {}
    for row in known[:: max(1, len(known) // n)]:
        held = cache_tokens(row.spec, row.precision, row.at, row.width, row.hardware, row.engine)
        try:
            found[row.id] = (row, simulated(row, of(row.engine, row.system), held))
        except CapacityError as error:
            print(f"  {row.id}: {error}", file=sys.stderr)
    return found


def summary(
    rows: Sequence[Row], values: dict[str, float], splits: dict[str, dict[str, float]], expected: Sequence[Prior],
    left_out: dict[str, int],
) -> list[str]:  # fmt: skip
    def error(predicted: float, row: Row) -> float:
        return predicted / row.tpot_s - 1

    lines = ["# Serving latency against public tables", "", "Relative error of TPOT; bias is the median signed error.", ""]
    lines += ["## Rows that the fit had not seen", ""]
    for split, (title, _) in SPLITS.items():
        predicted = splits[split]
        for what, key in (("engine", lambda r: (r.kind, r.engine)), ("device", lambda r: (r.kind, r.system))):
            lines += error_table(f"Without {title}: by {what}", ((key(r), error(predicted[r.id], r)) for r in rows))
    for mode in ("agg", "disagg"):
        lines += error_table(
            f"Without a model: by series, {mode}",
            (((r.kind, r.system, r.model, r.engine, r.precision, "cached prompts" if r.hits else ""),
              error(splits["model"][r.id], r)) for r in rows if r.mode == mode),
        )  # fmt: skip
    lines += [
        "## Intervals",
        "",
        "Range of measured ÷ predicted that holds 90% of rows of unseen models, and the share inside",
        "",
    ]
    lines += ["such a range that was fitted without the row's own model.", "", "| rows | n | low | high | inside |"]
    lines += ["|---|---:|---:|---:|---:|"]
    for kind in KINDS:
        those = [r for r in rows if r.kind == kind and not r.hits]
        low, high = np.exp(np.quantile(residuals(those, splits["model"]), [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
        inside = covered(those, splits["model"], lambda r: r.model)
        lines.append(f"| {kind} | {len(those)} | {low:.2f} | {high:.2f} | {inside:.0%} |")
    every = Table(rows, told=False).predict(values)
    lines += ["", *error_table("All rows seen (no test of anything)",
                               (((r.kind, r.engine), error(p, r)) for r, p in zip(rows, every, strict=True)))]  # fmt: skip
    hits = [r for r in rows if r.hits]
    if hits:
        told = Table(hits).predict(values)
        lines += [
            f"{len(hits)} rows are of series whose throughput would need more than {MOST_PREFILL_SHARE:.0%} of the arithmetic "
            "peak for prompts alone: their prompts came from a prefix cache. The fit takes them as such; the errors above do "
            "not (nobody would know beforehand). Told of it, in sample:", "",
        ]  # fmt: skip
        lines += error_table(
            "Cached prompts, told", (((r.system, r.model), error(p, r)) for r, p in zip(hits, told, strict=True))
        )
    return [*lines, f"Left out, no config at hand: {', '.join(f'{k} ({v} rows)' for k, v in left_out.items())}.", ""]


Loads = dict[str, tuple[Row, Simulated]]
FRONT_ENDS_S = [0.002 * n for n in range(251)]


def front_ends_s(loads: Loads) -> dict[str, dict[str, float]]:
    """Seconds of a first token that are not in steps (``step_time.front_end_s``), by engine ("any" stands for all) and kind of
    model. The ones that make the mean of |ln (simulated mean TTFT + it) − ln measured| least, of the rows of InferenceX's
    servers that were warm: the others were measured otherwise."""
    found: dict[str, dict[str, float]] = {}
    for engine in ("any", *ENGINES):
        for kind in KINDS:
            pairs = [
                (r.ttft_s, s.ttft_s.mean) for r, s in loads.values()
                if r.inference_x and not r.is_cold and r.kind == kind and engine in ("any", r.engine)
            ]  # fmt: skip
            if pairs:
                found.setdefault(engine, {})[kind] = min(
                    FRONT_ENDS_S, key=lambda a: sum(abs(math.log((t + a) / measured)) for measured, t in pairs)
                )
    return found


def first_tokens_s(loads: Loads) -> dict[str, float]:
    """Mean TTFT of each row, with the front end that the engine's rows of its kind and of other batch sizes tell, whatever
    their model."""
    rows = [row for row, _ in loads.values()]
    others = {
        band: front_ends_s({i: pair for i, pair in loads.items() if pair[0].batch_band != band})
        for band in {row.batch_band for row in rows}
    }

    def front_end_s(row: Row) -> float:
        found = others[row.batch_band]
        return found.get(row.engine, {}).get(row.kind, found.get("any", {}).get(row.kind, 0.0))

    return {i: found.ttft_s.mean + front_end_s(row) for i, (row, found) in loads.items()}


def first_tokens(loads: Loads, first_s: dict[str, float]) -> list[str]:
    """Errors of simulated loads. TTFT: the table's is a mean."""
    if not loads:
        return []
    pairs = list(loads.values())
    lines = ["## Loads, simulated", ""]
    lines += error_table(
        "TTFT, with the front end of other batch sizes' rows",
        (((r.kind, r.engine, r.load), first_s[i] / r.ttft_s - 1) for i, (r, _) in loads.items()),
    )  # fmt: skip
    lines += error_table("TTFT, steps alone", (((r.kind, r.engine), s.ttft_s.mean / r.ttft_s - 1) for r, s in pairs))
    return lines + error_table("TPOT, mean", (((r.kind, r.engine), s.tpot_s.mean / r.tpot_s - 1) for r, s in pairs))


def independent(
    h100: dict[str, float], a100: dict[str, float], values: dict[str, float],
    splitwise: Sequence[tuple[str, str, float, float, int]], expected: Sequence[Prior],
) -> list[str]:  # fmt: skip
    lines = ["## Independent measurements", "", "| share of the datasheet | H100 (Vidur) | A100 (Vidur) | fitted |"]
    lines += ["|---|---:|---:|---:|"]
    lines += [f"| {k} | {h100[k]:.3f} | {a100[k]:.3f} | {values[k]:.3f} |" for k in h100]
    lines += ["", "| Splitwise, Llama-2-70B bf16 (not fitted) | median error | bias | rows |", "|---|---:|---:|---:|"]
    lines += [f"| {d} {phase} | {100 * e:.1f}% | {100 * b:+.1f}% | {n} |" for d, phase, e, b, n in splitwise]
    lines += ["", "## Constants", "", "| constant | fitted | expected before | spread | from |", "|---|---:|---:|---:|---|"]
    return lines + [f"| {p.name} | {values[p.name]:.4g} | {p.value:.4g} | {p.spread} | {p.source} |" for p in expected]


def write_run(
    out: Path, text: str, rows: Sequence[Row], every: Any, splits: dict[str, dict[str, float]],
    first_s: dict[str, float],
) -> None:  # fmt: skip
    about = f"python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}"
    recorded.write(out, {"summary.md": text, "command.txt": f"{recorded.command()}\n{about}\n"})
    with (out / "predictions.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["id", "model", "system", "engine", "precision", "mode", "tensor", "expert", "batch",
                         "running", "prompt",
                         "output", "cached_prompts", "measured_tpot_ms", "unseen_model_ms", "unseen_batch_ms",
                         "unseen_tensor_ms", "all_rows_ms", "measured_ttft_ms", "simulated_ttft_ms"])  # fmt: skip
        for r, seen in zip(rows, every, strict=True):
            unseen = [f"{1e3 * splits[s][r.id]:.4g}" for s in SPLITS]
            first = f"{1e3 * first_s[r.id]:.4g}" if r.id in first_s else ""
            writer.writerow([r.id, r.model, r.system, r.engine, r.precision, r.mode, r.tensor, r.at.expert, r.batch,
                             f"{r.running:.4g}", r.prompt, r.output, int(r.hits), f"{1e3 * r.tpot_s:.5g}", *unseen,
                             f"{1e3 * seen:.4g}", f"{1e3 * r.ttft_s:.5g}", first])  # fmt: skip


def write_efficiencies(values: dict[str, float], rows: Sequence[Row], unseen: dict[str, float], loads: Loads) -> None:
    """``planner/serving/efficiencies.toml`` anew: constants, and the median error on models that a fit had not seen. Without
    simulated loads the front ends stay as they are."""
    front = front_ends_s(loads) if loads else step_time.efficiencies_table()["front_end_s"]
    units = {name: "s" if name.endswith("_s") else "1" for name in NAMES}
    source = "ai-dynamo/aiconfigurator measured serving table (Apache-2.0)"
    lines = [
        "# What serving engines reach of a datasheet's rates. Written by benchmarks/planner/public_tables/fit.py; don't edit.",
        f'source = "{source}, fitted by benchmarks/planner/public_tables"',
        f'date = "{date.today().isoformat()}"',
        'kind = "measured on H100, H200 and B200; assumed for other accelerators"',
        f"measured_on = {json.dumps(list(SYSTEMS.values()))}",
        "",
    ]
    for engine, by_kind in front.items():
        lines += [f"[front_end_s.{engine}]", *(f"{kind} = {seconds:.3f}" for kind, seconds in by_kind.items()), ""]
    lines += [f'[constants.{name}]\nvalue = {values[name]:.4g}\nunit = "{units[name]}"\n' for name in NAMES]
    for engine in ENGINES:
        lines += [f"[engine.{engine}]", *(f"{name} = {values[f'{engine}.{name}']:.4g}" for name in ENGINE_CONSTANTS), ""]
    lines += [
        "[generation.blackwell]",
        'devices = ["b200-sxm", "b300-sxm", "gb200", "gb300"]',
        "[generation.blackwell.factors]",
    ]
    lines += [f"{name} = {values[f'blackwell.{name}']:.4g}" for name in GENERATION_CONSTANTS]
    for engine in ("any", *ENGINES):
        lines += ["", f"[unseen_model_error.{engine}]"]
        for kind in KINDS:
            those = [r for r in rows if r.kind == kind and engine in ("any", r.engine) and not r.hits]
            lines.append(f"{kind} = {median(abs(unseen[r.id] / r.tpot_s - 1) for r in those):.3f}")
    step_time.EFFICIENCIES_FILE.write_text("\n".join([*lines, ""]), encoding="utf-8")


def write_intervals(rows: Sequence[Row], unseen: dict[str, float], loads: Loads, first_s: dict[str, float]) -> None:
    """The rows of ``planner/truth/intervals.toml`` that these residuals tell: TPOT of unseen models, and TTFT where loads were
    simulated; dense models and experts apart."""
    source = f"public measured tables, unseen models; benchmarks/planner/public_tables, {date.today().isoformat()}"
    ranges = dict(read_ranges())
    for kind, basis in (("dense", SERVED), ("experts", EXPERTS)):
        ranges["decode", basis, "decode"] = fitted_range(residuals([r for r in rows if r.kind == kind], unseen), source)
        first = [math.log(r.ttft_s / first_s[i]) for i, (r, _) in loads.items() if r.kind == kind]
        if len(first) >= LEAST_RUNS:
            ranges["ttft", basis, "serve"] = fitted_range(first, source)
    FILE.write_text(intervals_text(ranges), encoding="utf-8")


if __name__ == "__main__":
    main()
