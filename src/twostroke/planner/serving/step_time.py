"""Seconds of one engine step on accelerators known by their datasheet: what must be done at the vendor's rates, divided by the
shares of those rates that measured engines reach (``efficiencies.toml``).

A step computes decode tokens of many requests and, beside them, part of a prompt. Its time on the slowest device is

    Σ_products (memory³ + arithmetic³)^⅓ + cache + prompt attention + operators + collectives + step + requests·request

with memory = weight bytes ÷ (bandwidth · share), arithmetic = 2·rows·weights ÷ (peak · share). The fit and its errors on
models, batch sizes and tensor-parallel degrees that it had not seen are in benchmarks/planner/public_tables.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from twostroke.core.dtypes import bytes_of
from twostroke.core.errors import ConfigError, CorruptFileError, did_you_mean
from twostroke.core.matrices import LayerKind, Matrix, head_matrix, layer_kinds
from twostroke.core.named import Mark, inputs, largest, letter, named, records, smallest
from twostroke.core.schemes import scheme_of
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import (
    ASSUMED_ATTENTION_EFFICIENCY,
    ASSUMED_BANDWIDTH_EFFICIENCY,
    ASSUMED_PRODUCT_EFFICIENCY,
    Hardware,
    Link,
)
from twostroke.planner.hardware.network import all_to_all_s, ring_all_reduce_s, send_s
from twostroke.planner.money.power import Busy
from twostroke.planner.serving.shape import ENGINES, Placement
from twostroke.planner.work.weights import head_bytes, matrix_bytes

EFFICIENCIES_FILE = Path(__file__).parent / "efficiencies.toml"

LAYER_OPERATORS = {"norms": 2, "attention": 5, "mlp": 3}
"""Kernels of one dense layer under a fused engine: two norms with their sums; qkv, rotary turn with cache write, attention, its
combination, out; gate and up, activation, down. An all-reduce adds none: engines fuse it with the norm behind it."""

QUANTISING_OPERATORS = {"attention": 2, "mlp": 2}
"""More of them where activations are quantised before each of the four products."""

MOE_OPERATORS = {"mlp": 6}
"""More of them in a layer of experts: router, choice, ordering, gathering, their activation apart, weighting."""

LATENT_OPERATORS = {"attention": 4}
"""More of them under latent attention: compressing and rebuilding queries and keys, two norms."""

EDGE = 3.0
"""Exponent p of (memory^p + arithmetic^p)^(1/p): a roofline whose corner is rounded as kernels round it."""


# -- the shares that engines reach ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Efficiencies:
    """What an engine reaches on one generation of accelerators. Shares are of the datasheet's rate; times are seconds."""

    product_bandwidth_share: float
    cache_bandwidth_share: float
    arithmetic_share: float  # bf16
    fp8_share: float  # of arithmetic_share
    fp4_share: float  # of arithmetic_share
    attention_share: float  # of the bf16 peak, for the causal half
    link_share: float
    message_s: float  # α of one message of a ring inside a node
    operator_s: float
    step_s: float
    request_s: float
    interference: float  # share of other requests' prefills that a request's decoding waits for

    def arithmetic(self, dtype: str) -> float:
        """The share of a type's peak: types of a byte and of half a byte have factors of their own."""
        w = bytes_of(dtype)
        return self.arithmetic_share * (self.fp8_share if w == 1.0 else self.fp4_share if w == 0.5 else 1.0)


@lru_cache(maxsize=1)
def efficiencies_table() -> dict[str, Any]:
    """``efficiencies.toml`` as it stands. Raises CorruptFileError."""
    try:
        return tomllib.loads(EFFICIENCIES_FILE.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CorruptFileError(f"{EFFICIENCIES_FILE.name} of the installed package is not readable: {error}.") from None


@lru_cache(maxsize=64)
def efficiencies(engine: str = "any", device: str = "") -> Efficiencies:
    """Constants for ``engine`` on ``device`` (a hardware name): the general ones times the engine's and the generation's own
    factors. Raises ConfigError for an engine that is not in the table."""
    if engine not in ENGINES:
        raise ConfigError(f"engine={engine!r} is not in the measured tables. {did_you_mean(engine, ENGINES)}")
    table = efficiencies_table()
    values = {name: float(table["constants"][name]["value"]) for name in (f.name for f in fields(Efficiencies))}
    factors = [table["engine"].get(engine, {})]
    factors += [g["factors"] for g in table["generation"].values() if device in g["devices"]]
    for group in factors:
        for name, factor in group.items():
            values[name] *= float(factor)
    return Efficiencies(**values)


# -- what one device holds and does ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """One kind of layer on one device of a tensor group: bytes it reads, elements a token is multiplied with."""

    count: int
    attention_bytes: float
    attention_elements: float
    mlp_bytes: float  # dense or shared MLP and router
    mlp_elements: float
    expert_bytes: float  # all experts that are held here
    expert_elements: float  # of the experts one token passes, spread evenly
    idle_share: float  # 1 − top_k/experts: probability that one token passes a given expert by; 1 without experts
    cache_elements: float  # per token, always read
    index_elements: float  # per token, read to choose keys
    prefill_pair_flops: float  # of one query with one key
    decode_pair_flops: float
    window: int | None
    top_keys: int | None
    operators: tuple[int, int, int]  # of norms, attention, mlp

    def touched(self, tokens: float) -> float:
        """Expected share of experts that ``tokens`` tokens need: 1 − (1 − top_k/E)^tokens, choices taken as independent."""
        return 1.0 - self.idle_share**tokens if self.expert_bytes else 0.0

    def keys(self, context: float) -> float:
        """Keys that a new token reads with ``context`` before it."""
        found = smallest(context, self.window or context)
        return smallest(found, self.top_keys or found)


def _share(product: Matrix, tensor: int, expert_devices: int) -> float:
    if product.split == "replicated":
        return 1.0
    return 1 / expert_devices if product.split == "expert" else 1 / tensor


def _shard(spec: ModelSpec, kind: LayerKind, count: int, scheme: str, tensor: int, expert_devices: int) -> Shard:
    read = {"attention": 0.0, "mlp": 0.0, "expert": 0.0}
    passed = dict(read)
    idle = 1.0
    for p in kind.matrices:
        name, share = p.component, _share(p, tensor, expert_devices)
        if p.split == "expert":
            name, idle = "expert", 1 - p.active / p.copies
        source = f"of a layer, in {scheme} with its scales"
        held = named(f"{p.name}_bytes", p.copies * matrix_bytes(spec, p, scheme), "bytes", source)
        read[name] += held * share
        passed[name] += p.active * p.weights * share
    latent = kind.latent_dim
    # One latent vector a token serves all heads, so every device keeps it whole.
    divided, kept = (min(tensor, kind.n_kv_heads), 0) if latent is None else (1, kind.index_dim)
    cached = (kind.kv_elements - kept) / divided
    pair, decode_pair = kind.flops_per_key / tensor, kind.decode_flops_per_key / tensor
    counts = dict(LAYER_OPERATORS)
    more = [QUANTISING_OPERATORS] if bytes_of(scheme_of(scheme).products[0]) < 2 else []
    more += [MOE_OPERATORS] if kind.mlp == "moe" else []
    more += [LATENT_OPERATORS] if latent is not None else []
    for group in more:
        for component, count_more in group.items():
            counts[component] += count_more
    return Shard(
        count=count,
        attention_bytes=read["attention"],
        attention_elements=passed["attention"],
        mlp_bytes=read["mlp"],
        mlp_elements=passed["mlp"],
        expert_bytes=read["expert"],
        expert_elements=passed["expert"],
        idle_share=idle,
        cache_elements=cached,
        index_elements=float(kind.index_dim),
        prefill_pair_flops=pair,
        decode_pair_flops=decode_pair,
        window=kind.window,
        top_keys=kind.top_keys,
        operators=(counts["norms"], counts["attention"], counts["mlp"]),
    )


@lru_cache(maxsize=1024)
def shards(spec: ModelSpec, scheme: str, tensor: int, expert_devices: int) -> tuple[Shard, ...]:
    """Every kind of layer as one device sees it. Raises ConfigError for an unknown scheme."""
    return tuple(_shard(spec, kind, count, scheme, tensor, expert_devices) for kind, count in layer_kinds(spec))


@lru_cache(maxsize=1024)
def device_bytes(spec: ModelSpec, scheme: str, tensor: int, expert_devices: int) -> float:
    """Bytes of block matrices on one device, before pipeline parallelism divides the layers."""
    return sum(
        s.count * (s.attention_bytes + s.mlp_bytes + s.expert_bytes) for s in shards(spec, scheme, tensor, expert_devices)
    )


# -- one pass at the datasheet's rates ------------------------------------------------------------------------------------


def compute_dtype(scheme: str, hardware: Hardware) -> str:
    """The type whose peak bounds a scheme's products on ``hardware``: the best of the scheme's that it has, else bf16, else
    fp32."""
    types = (*scheme_of(scheme).products, "bf16")
    return next((dtype for dtype in types if dtype in hardware.peak_flop_per_s), "fp32")


@dataclass(frozen=True)
class Part:
    """A component's share of a pass at ideal rates: products that read ``n_bytes`` and do ``flops``."""

    component: str
    flops: float
    n_bytes: float
    arithmetic_s: float
    memory_s: float


@dataclass(frozen=True)
class Pass:
    """One pass over all layers on the slowest device at the datasheet's rates: ``products``, reading the ``cache``, attention
    of ``prompts``; ``reduces`` all-reduces of ``reduced_bytes`` among ``tensor`` devices, ``exchanges`` all-to-alls, ``sends``
    from stage to stage."""

    products: tuple[Part, ...]
    cache: Part
    prompts: Part
    operators: tuple[float, float, float]  # of norms, attention, mlp
    steps: float
    requests: float
    tensor: int
    reduces: int
    reduced_bytes: float
    exchanges: int
    exchanged_bytes: float
    exchange_devices: int
    sends: int
    sent_bytes: float
    dtype: str
    link: Link
    far_link: Link
    basis: str = "datasheet"

    def named(self, what: str, seconds: float, source: str) -> float:
        """``seconds`` of a part of the pass."""
        if not records():
            return seconds
        mark: Mark = "measured" if self.basis == "measured" else "datasheet"
        return named(f"{what}_s", seconds, "s", f"{source}; {_RATES[mark]}", mark)

    def product_s(self, part: Part, rates: Efficiencies) -> float:
        """(memory^p + arithmetic^p)^(1/p) of one component's products."""
        memory = part.memory_s / rates.product_bandwidth_share
        arithmetic = part.arithmetic_s / rates.arithmetic(self.dtype)
        if records():
            memory = self.named(f"{part.component}_reading", memory, "weights of all layers, each read once")
            arithmetic = self.named(f"{part.component}_arithmetic", arithmetic, "FLOP of all layers")
        seconds = memory + arithmetic
        if memory and arithmetic:
            big, small = (memory, arithmetic) if memory > arithmetic else (arithmetic, memory)
            p = letter("p", EDGE)
            seconds = big * (1 + (small / big) ** p) ** (1 / p)
        source = "the longer of both, the corner between them rounded"
        return named(f"{part.component}_products_s", seconds, "s", source)

    def cache_s(self, rates: Efficiencies) -> float:
        seconds = largest(self.cache.memory_s / rates.cache_bandwidth_share, self.cache.arithmetic_s / rates.attention_share)
        return self.named("cache", seconds, "attention over keys that are cached")

    def prompts_s(self, rates: Efficiencies) -> float:
        return self.named("prompt_attention", self.prompts.arithmetic_s / rates.attention_share, "attention over new keys")

    def network_s(self, rates: Efficiencies) -> float:
        """Collectives and sends. Inside a node α is the fitted one, of an engine's own all-reduce in a captured graph; a
        library's is several times that. Between nodes it is the hardware's."""
        seconds = 0.0
        near = self.tensor > 1 or self.exchange_devices > 1
        if near and self.reduces:
            once = ring_all_reduce_s(self.reduced_bytes, self.tensor, scaled_link(self.link, rates))
            seconds += named(
                "reduces_s", self.reduces * once, "s", f"all-reduces over a {self.link.kind} link: {self.link.source}"
            )
        if self.exchanges:
            once = all_to_all_s(self.exchanged_bytes, self.exchange_devices, scaled_link(self.link, rates))
            source = f"all-to-alls over a {self.link.kind} link: {self.link.source}"
            seconds += named("exchanges_s", self.exchanges * once, "s", source)
        if self.sends:
            once = send_s(self.sent_bytes, scaled_link(self.far_link, rates))
            source = f"from stage to stage over a {self.far_link.kind} link: {self.far_link.source}"
            seconds += named("sends_s", self.sends * once, "s", source)
        return seconds

    def starts_s(self, rates: Efficiencies) -> float:
        return sum(self.operators) * rates.operator_s

    def around_s(self, rates: Efficiencies) -> float:
        """Scheduling and sampling: a step's and each request's."""
        return self.named("scheduling", self.steps * rates.step_s + self.requests * rates.request_s, "scheduling and sampling")

    def seconds(self, rates: Efficiencies) -> float:
        products = sum(self.product_s(part, rates) for part in self.products)
        whole = products + self.cache_s(rates) + self.prompts_s(rates) + self.starts_s(rates)
        return whole + self.network_s(rates) + self.around_s(rates)

    def busy(self, rates: Efficiencies) -> Busy:
        """What the pass keeps busy. The time that grows with requests counts as reading: tables put on requests what kernels
        do for each row beside the products (logits, sampling, activations), and devices draw that much while it lasts."""
        reading = self._sum(lambda part: part.memory_s, rates.product_bandwidth_share, rates.cache_bandwidth_share)
        computing = self._sum(lambda part: part.arithmetic_s, rates.arithmetic(self.dtype), rates.attention_share)
        rows_s = self.requests * rates.request_s
        return Busy(self.seconds(rates), reading + rows_s, computing, self.network_s(rates))

    def _sum(self, of: Callable[[Part], float], products_share: float, attention_share: float) -> float:
        """Seconds of a limit over all parts, each at its share of the datasheet's rate."""
        return sum(map(of, self.products)) / products_share + (of(self.cache) + of(self.prompts)) / attention_share


_RATES = {
    "measured": "rate measured on this machine",
    "datasheet": "datasheet's rate × a share fitted to public measured tables (efficiencies.toml), or assumed",
}


def scaled_link(link: Link, rates: Efficiencies) -> Link:
    """``link`` as collectives of serving engines find it: the fitted α on a fast one, the fitted share of its rate."""
    if link.kind == "measured":
        return link
    alpha = min(link.alpha_s, rates.message_s) if link.is_fast else link.alpha_s
    return Link(alpha, link.bytes_per_s * rates.link_share, "measured", link.source)  # nothing else is taken off


def one_pass(
    spec: ModelSpec,
    scheme: str,
    cache_bytes: float,
    placement: Placement,
    hardware: Hardware,
    decoding: float = 0.0,
    context: float = 0.0,
    prompt_tokens: float = 0.0,
    hit_tokens: float = 0.0,
    prompts: float = 1.0,
    checked: float = 1.0,
    steps: float = 1.0,
) -> Pass:
    """What a pass of ``decoding`` requests with ``context`` tokens before them and ``prompts`` prompts of ``prompt_tokens``, of
    which ``hit_tokens`` are in the cache already, asks of the slowest device. ``checked`` tokens of each decoding request go
    through at once (speculation); ``cache_bytes`` is the size of a cached element.

    Stages of a pipeline work one after another on 1/pipeline of the requests each, so a token's time is the sum over all
    layers and sends.
    """
    dtype = compute_dtype(scheme, hardware)
    bandwidth, peak = hardware.read_bandwidth[0].bytes_per_s, hardware.peak_flop_per_s[dtype]
    if hardware.basis == "measured":
        bandwidth = hardware.read_bandwidth[-1].bytes_per_s
    plain = letter("π_bf16", hardware.peak_flop_per_s.get("bf16", hardware.peak_flop_per_s.get("fp32", peak)))
    bandwidth, peak = letter("β", bandwidth), letter("π", peak)
    groups, stage = placement.attention_groups, placement.stage_devices
    here = decoding / placement.pipeline / groups  # requests that one attention group has in a micro-batch
    fresh = prompts * (prompt_tokens - hit_tokens)
    rows = here * checked + fresh  # a prompt is one group's; the others wait for it in the experts' exchange
    everywhere = rows if groups == 1 else here * checked * groups + fresh
    sums = {"attention": [0.0, 0.0], "mlp": [0.0, 0.0]}
    cache_read = cache_flops = prompt_flops = 0.0
    norms = turning = mlps = 0  # kernels
    reduces = exchanges = 0
    pairs = prompts * (prompt_tokens - hit_tokens) * (prompt_tokens + hit_tokens) / 2
    for shard in shards(spec, scheme, placement.tensor, stage):
        count = shard.count
        attention, mlp = sums["attention"], sums["mlp"]
        attention[0] += count * shard.attention_bytes
        attention[1] += count * 2.0 * rows * shard.attention_elements
        mlp[0] += count * (shard.mlp_bytes + shard.touched(everywhere) * shard.expert_bytes)
        mlp[1] += count * 2.0 * (rows * shard.mlp_elements + everywhere * shard.expert_elements)
        keys = shard.keys(context)
        cache_read += count * here * (keys * shard.cache_elements + context * shard.index_elements)
        cache_flops += count * here * checked * keys * shard.decode_pair_flops
        if pairs:
            reach = shard.window or shard.top_keys
            mean = pairs / fresh
            used = (
                pairs if reach is None or reach >= prompt_tokens else fresh * min(mean, reach - reach**2 / (2 * prompt_tokens))
            )
            prompt_flops += count * used * shard.prefill_pair_flops
        norms += count * shard.operators[0]
        turning += count * shard.operators[1]
        mlps += count * shard.operators[2]
        reduces += 2 * count if placement.tensor > 1 else 0
        exchanges += 2 * count if groups > 1 and shard.expert_bytes else 0
    head = head_matrix(spec)
    sampled = here * checked + prompts * (1.0 if prompt_tokens else 0.0)
    head_read = head_bytes(spec, scheme) / placement.tensor
    head_flops = 2.0 * sampled * head.weights / placement.tensor
    products = (
        *(Part(name, flops, n_bytes, flops / peak, n_bytes / bandwidth) for name, (n_bytes, flops) in sums.items()),
        Part("head", head_flops, head_read, head_flops / plain, head_read / bandwidth),
    )
    width = scheme_of(scheme).kept_bytes
    moe = spec.moe
    return Pass(
        products=products,
        cache=Part(
            "attention", cache_flops, cache_read * cache_bytes, cache_flops / plain, cache_read * cache_bytes / bandwidth
        ),
        prompts=Part("attention", prompt_flops, 0.0, prompt_flops / plain, 0.0),
        operators=(norms * steps, turning * steps, mlps * steps + exchanges),
        steps=steps,
        requests=decoding / groups,
        tensor=placement.tensor,
        reduces=reduces,
        reduced_bytes=rows * spec.d_model * width,
        exchanges=exchanges,
        exchanged_bytes=rows * spec.d_model * width * (moe.top_k if moe else 1) / max(1, placement.tensor),
        exchange_devices=stage,
        sends=placement.pipeline - 1,
        sent_bytes=rows * spec.d_model * width,
        dtype=dtype,
        link=hardware.link_for(stage),
        far_link=hardware.link_for(placement.devices),
        basis=hardware.basis,
    )


MEASURED = Efficiencies(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0)
"""A calibrated machine's rates are what it reaches already."""

CPU = replace(
    MEASURED,
    product_bandwidth_share=ASSUMED_BANDWIDTH_EFFICIENCY,
    cache_bandwidth_share=ASSUMED_BANDWIDTH_EFFICIENCY,
    arithmetic_share=ASSUMED_PRODUCT_EFFICIENCY,
    attention_share=ASSUMED_ATTENTION_EFFICIENCY,
)
"""A CPU that is known by its datasheet: assumed shares, no graph of captured kernels whose times could be fitted."""


def efficiencies_of(hardware: Hardware, engine: str = "any") -> Efficiencies:
    """The constants that hold for ``hardware``: the fitted ones for an accelerator's datasheet, assumed ones for a CPU's,
    and none for a calibrated machine."""
    if hardware.basis == "measured":
        return inputs(replace(MEASURED, operator_s=hardware.op_launch_s))
    found = replace(CPU, operator_s=hardware.op_launch_s) if hardware.kind == "cpu" else efficiencies(engine, hardware.name)
    return inputs(found)
