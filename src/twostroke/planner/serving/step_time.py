"""Seconds of one engine step on accelerators known by their datasheet: what must be done at the vendor's rates, divided by the
shares of those rates that measured engines reach (``efficiencies.toml``).

A step computes decode tokens of many requests and, beside them, part of a prompt. Its time on the slowest device is

    Σ_products (memory³ + arithmetic³)^⅓ + max(experts' memory, experts' tiles) + cache + prompt attention + elementwise
    + operators + collectives + step + requests·request

with memory = weight bytes ÷ (bandwidth · share), arithmetic = 2·rows·weights ÷ (peak · share). Where an engine's host works
beside the device the last two terms are not added but joined (``HOST_EDGE``). The fit and its errors on
models, batch sizes and tensor-parallel degrees that it had not seen are in benchmarks/planner/public_tables.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

from twostroke.core.dtypes import FP8, bytes_of
from twostroke.core.errors import ConfigError, CorruptFileError, did_you_mean
from twostroke.core.matrices import LayerKind, Matrix, head_matrix, layer_kinds
from twostroke.core.named import Mark, inputs, largest, letter, named, records, smallest, square_root
from twostroke.core.schemes import scheme_of
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import (
    ASSUMED_ATTENTION_EFFICIENCY,
    ASSUMED_BANDWIDTH_EFFICIENCY,
    ASSUMED_PRODUCT_EFFICIENCY,
    Hardware,
    Link,
)
from twostroke.planner.hardware.network import all_reduce_sent_bytes, gather_sent_bytes
from twostroke.planner.money.power import Busy
from twostroke.planner.serving.shape import ENGINES, Placement
from twostroke.planner.work.weights import head_bytes, matrix_bytes

EFFICIENCIES_FILE = Path(__file__).parent / "efficiencies.toml"

LAYER_OPERATORS = {"norms": 2, "attention": 5, "mlp": 3}
"""Kernels of one dense layer under a fused engine: two norms with their sums; qkv, rotary turn with cache write, attention, its
combination, out; gate and up, activation, down. An all-reduce adds none: engines fuse it with the norm behind it."""

QUANTISING_OPERATORS = {"attention": 2, "mlp": 2}
"""More of them where activations are quantised before each of the four products."""

MOE_OPERATORS = {"mlp": 7}
"""More of them in a layer of experts: router, choice, ordering, gathering, quantising or activation apart, weighting,
summing."""

LATENT_OPERATORS = {"attention": 10}
"""More of them under latent attention: two compressions with their norms, rebuilding queries, folding keys and values in and
out, rotary turn and cache write apart, quantising before each."""

INDEX_OPERATORS = {"attention": 12}
"""More of them where an indexer chooses the keys: its queries, keys and weights, their norm, turn, transform and quantising,
its own cache, scores, the choice and the translation of what was chosen into pages."""

EDGE = 3.0
"""Exponent p of (memory^p + arithmetic^p)^(1/p): a roofline whose corner is rounded as kernels round it."""

HOST_EDGE = {"sglang": 1.5}
"""Exponent p of (device^p + host^p)^(1/p) in engines whose host works while the device does. SGLang's loop decides a batch
while the one before runs, and waits for its results in between (``event_loop_overlap``). 1.5 was chosen among 1, 1.25, 1.5, 2
and 3 on the public table. Under other engines a sum is nearer."""

TILE_ROWS = 128
"""Rows of a tile of the grouped products of experts on Hopper and Blackwell (wgmma's two warp groups, tcgen05): the last tile
of every expert that is needed is half empty on average, and costs as much as a full one."""

LATENT_TILE_HEADS = 64
"""Query heads of a tile of kernels that decode latent attention (FlashMLA: 64 or 128). Tensor parallel leaves a device fewer,
and they are filled up (sgl-project/sglang, pull requests 22372 and 27954). Where an indexer chose the keys, prompts take the
same kernels."""

EXPERT_SKEW = 1.0
"""Squared coefficient of variation of how often experts are chosen. 0 would be all equally often; 1 was chosen among 0, 0.5
and 1 on the public table, whose prompts are random tokens."""

ELEMENTWISE = {"norm": 8, "activation": 3, "gathered": 4}
"""Numbers of 2 bytes that are read and written for each number of a row: two norms with their sums (x and residual in and out);
gate and up in, their product out; a token's rows copied to its experts and their results back."""

QUANTISED_BYTES = 3
"""Bytes moved for each number that a product takes in quantised: 2 read, 1 written."""


# -- the shares that engines reach ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Efficiencies:
    """What an engine reaches on one generation of accelerators. Shares are of the datasheet's rate; times are seconds."""

    product_bandwidth_share: float
    fp4_bandwidth_share: float  # of product_bandwidth_share
    cache_bandwidth_share: float
    elementwise_share: float  # of the bandwidth
    arithmetic_share: float  # bf16
    fp8_share: float  # of arithmetic_share
    fp4_share: float  # of arithmetic_share
    grouped_share: float  # of the peak, for tiles of experts' products
    fp4_grouped_factor: float  # of grouped_share: kernels of 4 bits fill smaller tiles
    attention_share: float  # of the bf16 peak, for the causal half
    link_share: float
    reduce_s: float  # a small all-reduce inside a node, of any number of devices
    operator_s: float
    step_s: float
    request_s: float
    host_edge: float = 1.0  # exponent under which device and host add up: 1 one after the other, ∞ the longer of both

    def arithmetic(self, width: float) -> float:
        """The share of a type's peak: types of a byte and of half a byte have factors of their own."""
        return self.arithmetic_share * (self.fp8_share if width == 1.0 else self.fp4_share if width == 0.5 else 1.0)

    def bandwidth(self, width: float) -> float:
        """The share of the bandwidth at which weights are read."""
        return self.product_bandwidth_share * (self.fp4_bandwidth_share if width == 0.5 else 1.0)

    def grouped(self, width: float) -> float:
        """The share of a type's peak that tiles of experts' products reach."""
        return self.grouped_share * (self.fp4_grouped_factor if width == 0.5 else 1.0)


FITTED = tuple(f.name for f in fields(Efficiencies) if f.name != "host_edge")
"""Constants of ``Efficiencies`` that are fitted."""


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
    values = {name: float(table["constants"][name]["value"]) for name in FITTED}
    factors = [table["engine"].get(engine, {})]
    factors += [g["factors"] for g in table["generation"].values() if device in g["devices"]]
    for group in factors:
        for name, factor in group.items():
            values[name] *= float(factor)
    return Efficiencies(**values, host_edge=HOST_EDGE.get(engine, 1.0))


def front_end_s(engine: str = "any", experts: bool = False) -> float:
    """Seconds before a first token that no decode waits for: HTTP, tokenising, handing over, and what starting a prompt's
    operators takes longer than a captured step's, which is more with ``experts``. Measured TTFT less the simulated. "any"
    stands for an engine without a row."""
    table, kind = efficiencies_table()["front_end_s"], "experts" if experts else "dense"
    return float(table.get(engine, {}).get(kind, table["any"][kind]))


def is_fitted(hardware: Hardware) -> bool:
    """Whether engines were measured on ``hardware`` or on another device of its generation's table."""
    table = efficiencies_table()
    alike = (table["measured_on"], *(generation["devices"] for generation in table["generation"].values()))
    return hardware.basis == "datasheet" and any(hardware.name in devices for devices in alike)


# -- what one device holds and does ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """One kind of layer on one device of a tensor group: bytes it reads, elements a token is multiplied with."""

    count: int
    attention_bytes: float
    attention_elements: float
    mlp_bytes: float  # dense or shared MLP and router
    mlp_elements: float
    row_bytes: float  # moved beside products for each token
    experts: float  # experts of which this device holds all or a slice
    expert_ranks: int  # devices that hold different ones
    expert_bytes: float  # of one of them, here
    expert_elements: float
    expert_row_bytes: float  # moved beside products for each token of each expert
    top_k: int
    idle_share: float  # 1 − top_k/experts: probability that one token passes a given expert by; 1 without experts
    cache_elements: float  # per token, always read
    index_elements: float  # per token, read to choose keys
    prefill_pair_flops: float  # of one query with one key
    decode_pair_flops: float
    filled_heads: float  # heads of whole tiles ÷ heads, of latent attention; 1 elsewhere
    index_pair_flops: float
    window: int | None
    top_keys: int | None
    operators: tuple[int, int, int]  # of norms, attention, mlp

    @property
    def block_bytes(self) -> float:
        """Bytes of one layer's matrices."""
        return self.attention_bytes + self.mlp_bytes + self.experts * self.expert_bytes

    def touched(self, tokens: float) -> float:
        """Expected share of experts that ``tokens`` tokens need. The first needs top_k/E of them. Were all chosen equally
        often, the others would leave out (1 − top_k/E)^(tokens − 1) = e^−λ of the rest; with popularity spread as a gamma
        distribution of squared variation c they leave out (1 + c·λ)^(−1/c)."""
        if not self.experts:
            return 0.0
        if not self.idle_share or tokens <= 1:
            return smallest(1.0, tokens) * (1.0 - self.idle_share)
        meetings = -(tokens - 1) * math.log(self.idle_share)
        return 1.0 - self.idle_share * (1.0 + EXPERT_SKEW * meetings) ** (-1 / EXPERT_SKEW)

    def busiest(self, tokens: float) -> tuple[float, float]:
        """(experts needed, tokens computed by them) on the device that has most of either, with ``tokens`` in all."""
        if not self.experts:
            return 0.0, 0.0
        share, most = self.touched(tokens), normal_maximum(self.expert_ranks)
        needed = smallest(self.experts, self.experts * share + most * square_root(self.experts * share * (1 - share)))
        mean = tokens * self.top_k / self.expert_ranks
        load = smallest(tokens * self.top_k, mean + most * square_root(mean * (1 - 1 / self.expert_ranks)))
        return needed, load

    def keys(self, context: float) -> float:
        """Keys that a new token reads with ``context`` before it."""
        found = smallest(context, self.window or context)
        return smallest(found, self.top_keys or found)


@lru_cache(maxsize=64)
def normal_maximum(n: int) -> float:
    """Expected largest of ``n`` standard normal numbers: Φ⁻¹((n − 3/8)/(n + 1/4)) (Blom 1958); 0 for one."""
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25)) if n > 1 else 0.0


def _row_bytes(matrices: tuple[Matrix, ...], width: int, tensor: int, quantised: bool) -> float:
    """Bytes that norms, rotary turn, activation and quantising move for one token; experts' are counted apart."""
    numbers = 2.0 * ELEMENTWISE["norm"] * width
    for p in matrices:
        if p.split == "expert":
            continue
        taken, given = (p.k / tensor, p.n) if p.split == "row" else (p.k, p.n * _share(p, tensor, 1))
        numbers += 2 * given + (QUANTISED_BYTES * taken if quantised else 0)
    return numbers


def _share(product: Matrix, tensor: int, expert_devices: int) -> float:
    if product.split == "replicated":
        return 1.0
    return 1 / expert_devices if product.split == "expert" else 1 / tensor


def _operators(kind: LayerKind, quantised: bool) -> tuple[int, int, int]:
    """Kernels of one layer, by what the comparison table calls norms, attention and MLP."""
    counts = dict(LAYER_OPERATORS)
    more = [QUANTISING_OPERATORS] if quantised else []
    more += [MOE_OPERATORS] if kind.mlp == "moe" else []
    more += [LATENT_OPERATORS] if kind.latent_dim is not None else []
    more += [INDEX_OPERATORS] if kind.index_dim else []
    for group in more:
        for component, count in group.items():
            counts[component] += count
    return counts["norms"], counts["attention"], counts["mlp"]


def _filled_heads(n_heads: float) -> float:
    return math.ceil(n_heads / LATENT_TILE_HEADS) * LATENT_TILE_HEADS / n_heads


def _shard(spec: ModelSpec, kind: LayerKind, count: int, scheme: str, at: Placement) -> Shard:
    read = {"attention": 0.0, "mlp": 0.0, "expert": 0.0}
    passed = dict(read)
    tensor, quantised = at.tensor, bytes_of(scheme_of(scheme).products[0]) < 2
    experts, top_k, inner = 0, 0, 0
    for p in kind.matrices:
        source = f"of a layer, in {scheme} with its scales"
        held = named(f"{p.name}_bytes", p.copies * matrix_bytes(spec, p, scheme), "bytes", source)
        if p.split == "expert":
            experts, top_k, inner = p.copies, p.active, p.k
            read["expert"] += held / p.copies / at.expert_slices
            passed["expert"] += p.weights / at.expert_slices
            continue
        read[p.component] += held * _share(p, tensor, 1)
        passed[p.component] += p.active * p.weights * _share(p, tensor, 1)
    latent = kind.latent_dim
    # One latent vector a token serves all heads, so every device keeps it whole.
    divided, kept = (min(tensor, kind.n_kv_heads), 0) if latent is None else (1, kind.index_dim)
    expert_row = 2.0 * (ELEMENTWISE["gathered"] * spec.d_model + ELEMENTWISE["activation"] * inner / at.expert_slices)
    return Shard(
        count=count,
        attention_bytes=read["attention"],
        attention_elements=passed["attention"],
        mlp_bytes=read["mlp"],
        mlp_elements=passed["mlp"],
        row_bytes=_row_bytes(kind.matrices, spec.d_model, tensor, quantised),
        experts=experts / at.expert_ranks,
        expert_ranks=at.expert_ranks,
        expert_bytes=read["expert"],
        expert_elements=passed["expert"],
        expert_row_bytes=expert_row if experts else 0.0,
        top_k=top_k,
        idle_share=1 - top_k / experts if experts else 1.0,
        cache_elements=(kind.kv_elements - kept) / divided,
        index_elements=float(kind.index_dim),
        prefill_pair_flops=kind.flops_per_key / tensor,
        decode_pair_flops=kind.decode_flops_per_key / tensor,
        filled_heads=_filled_heads(kind.n_heads / tensor) if latent is not None else 1.0,
        index_pair_flops=float(kind.index_flops_per_key),
        window=kind.window,
        top_keys=kind.top_keys,
        operators=_operators(kind, quantised),
    )


@lru_cache(maxsize=1024)
def shards(spec: ModelSpec, scheme: str, at: Placement) -> tuple[Shard, ...]:
    """Every kind of layer as one device sees it. Raises ConfigError for an unknown scheme."""
    return tuple(_shard(spec, kind, count, scheme, at) for kind, count in layer_kinds(spec))


@lru_cache(maxsize=1024)
def device_bytes(spec: ModelSpec, scheme: str, at: Placement) -> float:
    """Bytes of block matrices on one device, before pipeline parallelism divides the layers."""
    return sum(s.count * s.block_bytes for s in shards(spec, scheme, at))


# -- one pass at the datasheet's rates ------------------------------------------------------------------------------------


def compute_dtype(scheme: str, hardware: Hardware) -> str:
    """The type whose peak bounds a scheme's products on ``hardware``: the best of the scheme's that it has, else bf16, else
    fp32."""
    types = (*scheme_of(scheme).products, "bf16")
    return next((dtype for dtype in types if dtype in hardware.peak_flop_per_s), "fp32")


@dataclass(frozen=True)
class Part:
    """A component's share of a pass at ideal rates: products that read ``n_bytes`` and do ``flops``. ``width`` is the size of
    what is multiplied; ``grouped`` products are experts', whose last tiles' empty rows take ``padding_s`` more."""

    component: str
    flops: float
    n_bytes: float
    arithmetic_s: float
    memory_s: float
    width: float = 2.0
    grouped: bool = False
    padding_s: float = 0.0


@dataclass(frozen=True)
class Network:
    """Collectives of a pass: how many there are whose start is fitted (inside a node, over a fast link), seconds that the
    starts of others take, and seconds of what is sent at the link's own rate."""

    fitted_starts: float = 0.0
    starts_s: float = 0.0
    sending_s: float = 0.0
    source: str = ""

    def seconds(self, rates: Efficiencies) -> float:
        return self.fitted_starts * rates.reduce_s + self.starts_s + self.sending_s / rates.link_share


def collectives(count: float, messages: int, sent_bytes: float, link: Link, steps: float = 1.0) -> Network:
    """``count`` collectives, each of ``messages`` one after another and ``sent_bytes`` of each rank, in so many ``steps``.
    Over a fast link engines have kernels of their own, which all ranks join at once."""
    if not count:
        return Network()
    sending_s, source = count * sent_bytes / link.bytes_per_s, f"over a {link.kind} link: {link.source}"
    if link.is_fast and link.kind != "measured":
        return Network(count * steps, 0.0, sending_s, source)
    return Network(0.0, count * steps * messages * link.alpha_s, sending_s, source)


@dataclass(frozen=True)
class Pass:
    """One pass over all layers on the slowest device at the datasheet's rates: ``products``, reading the ``cache``, attention
    of ``prompts``, ``elementwise_s`` of what is moved beside products; all-reduces in a tensor group, all-to-alls of experts,
    and sends from stage to stage."""

    products: tuple[Part, ...]
    cache: Part
    prompts: Part
    elementwise_s: float
    operators: tuple[float, float, float]  # of norms, attention, mlp
    steps: float
    requests: float
    reduces: Network
    exchanges: Network
    sends: Network
    basis: str = "datasheet"

    longest = staticmethod(largest)

    def named(self, what: str, seconds: float, source: str) -> float:
        """``seconds`` of a part of the pass."""
        if not records():
            return seconds
        mark: Mark = "measured" if self.basis == "measured" else "datasheet"
        return named(f"{what}_s", seconds, "s", f"{source}; {_RATES[mark]}", mark)

    def limits(self, part: Part, rates: Efficiencies) -> tuple[float, float]:
        """(arithmetic, memory) seconds of products alone. Empty rows of tiles count as memory: like the weights that they wait
        for they grow with the experts that are needed, not with tokens."""
        if not part.grouped:
            return part.arithmetic_s / rates.arithmetic(part.width), part.memory_s / rates.bandwidth(part.width)
        reached = rates.grouped(part.width)
        memory = self.longest(part.memory_s / rates.product_bandwidth_share, part.padding_s / reached)
        return part.arithmetic_s / reached, memory

    def product_s(self, part: Part, rates: Efficiencies) -> float:
        """(memory^p + arithmetic^p)^(1/p) of one component's products; of experts' the longer of reading and whole tiles."""
        if part.grouped:
            return self.grouped_s(part, rates)
        arithmetic, memory = self.limits(part, rates)
        if records():
            memory = self.named(f"{part.component}_reading", memory, "weights of all layers, each read once")
            arithmetic = self.named(f"{part.component}_arithmetic", arithmetic, "FLOP of all layers")
        p = letter("p", EDGE)
        seconds = (memory**p + arithmetic**p) ** (1 / p)
        return named(f"{part.component}_products_s", seconds, "s", "the longer of both, the corner between them rounded")

    def grouped_s(self, part: Part, rates: Efficiencies) -> float:
        """Products of experts: reading those that are needed, or computing their tiles."""
        memory = part.memory_s / rates.product_bandwidth_share
        tiles = (part.arithmetic_s + part.padding_s) / rates.grouped(part.width)
        if records():
            memory = self.named("experts_reading", memory, "weights of the experts that are needed, each read once")
            tiles = self.named("experts_tiles", tiles, "FLOP of all layers, the last tile of each expert half empty")
        return named("experts_products_s", self.longest(memory, tiles), "s", "the longer of both")

    def cache_s(self, rates: Efficiencies) -> float:
        memory, arithmetic = self.cache.memory_s / rates.cache_bandwidth_share, self.cache.arithmetic_s / rates.attention_share
        return self.named("cache", self.longest(memory, arithmetic), "attention over keys that are cached")

    def prompts_s(self, rates: Efficiencies) -> float:
        return self.named("prompt_attention", self.prompts.arithmetic_s / rates.attention_share, "attention over new keys")

    def moved_s(self, rates: Efficiencies) -> float:
        """Norms, activations, quantising and what else only moves numbers."""
        source = "numbers that are read and written beside products"
        return self.named("elementwise", self.elementwise_s / rates.elementwise_share, source)

    def network_s(self, rates: Efficiencies) -> float:
        """Collectives and sends. Over a fast link the start is the fitted one, of an engine's own all-reduce in a captured
        graph; a library's is several times that. Between nodes it is the hardware's."""
        kinds = (("reduces", self.reduces), ("exchanges", self.exchanges), ("sends", self.sends))
        return sum(named(f"{name}_s", one.seconds(rates), "s", one.source) for name, one in kinds if one.source)

    def starts_s(self, rates: Efficiencies) -> float:
        return sum(self.operators) * rates.operator_s

    def around_s(self, rates: Efficiencies) -> float:
        """Scheduling and sampling: a step's and each request's."""
        return self.named("scheduling", self.steps * rates.step_s + self.requests * rates.request_s, "scheduling and sampling")

    def seconds(self, rates: Efficiencies) -> float:
        return self.with_host(self.device_s(rates), self.around_s(rates), rates.host_edge)

    @staticmethod
    def with_host(device_s: float, host_s: float, edge: float) -> float:
        return device_s + host_s if edge == 1.0 else (device_s**edge + host_s**edge) ** (1 / edge)

    def host_s(self, rates: Efficiencies) -> float:
        """What of scheduling and sampling the device waits for."""
        return self.around_s(rates) if rates.host_edge == 1.0 else self.seconds(rates) - self.device_s(rates)

    def device_s(self, rates: Efficiencies) -> float:
        """What the device takes between a step's first operator and its last."""
        products = sum(self.product_s(part, rates) for part in self.products)
        attention = self.cache_s(rates) + self.prompts_s(rates)
        return products + attention + self.moved_s(rates) + self.starts_s(rates) + self.network_s(rates)

    def busy(self, rates: Efficiencies) -> Busy:
        """What the pass keeps busy. The time that grows with requests counts as reading: tables put on requests what kernels
        do for each row beside the products (logits, sampling, activations), and devices draw that much while it lasts."""
        limits = [self.limits(part, rates) for part in self.products]
        attention_s = (self.cache.arithmetic_s + self.prompts.arithmetic_s) / rates.attention_share
        computing_s = sum(arithmetic for arithmetic, _ in limits) + attention_s
        cache_s, rows_s = self.cache.memory_s / rates.cache_bandwidth_share, self.requests * rates.request_s
        reading_s = sum(memory for _, memory in limits) + cache_s + self.moved_s(rates) + rows_s
        return Busy(self.seconds(rates), reading_s, computing_s, self.network_s(rates))


_RATES = {
    "measured": "rate measured on this machine",
    "datasheet": "datasheet's rate × a share fitted to public measured tables (efficiencies.toml), or assumed",
}


@dataclass
class _Sums:
    """What the layers of a pass add up to on one device."""

    attention: float = 0.0  # bytes
    attention_flops: float = 0.0
    mlp: float = 0.0
    mlp_flops: float = 0.0
    experts: float = 0.0
    experts_flops: float = 0.0
    padding_flops: float = 0.0
    moved: float = 0.0
    cache: float = 0.0
    cache_flops: float = 0.0
    prompt_flops: float = 0.0
    index_flops: float = 0.0  # decoding
    prompt_index_flops: float = 0.0
    norms: int = 0
    turning: int = 0
    mlps: int = 0
    reduces: int = 0
    exchanges: int = 0

    def add(self, shard: Shard, rows: float, everywhere: float, tile: int) -> None:
        """A kind of layer with ``rows`` tokens on the device and ``everywhere`` in all; experts' products are in tiles of
        ``tile`` rows."""
        count = shard.count
        needed, load = shard.busiest(everywhere)
        self.attention += count * shard.attention_bytes
        self.attention_flops += count * 2.0 * rows * shard.attention_elements
        self.mlp += count * shard.mlp_bytes
        self.mlp_flops += count * 2.0 * rows * shard.mlp_elements
        self.experts += count * needed * shard.expert_bytes
        self.experts_flops += count * 2.0 * load * shard.expert_elements
        self.padding_flops += count * needed * tile * shard.expert_elements
        self.moved += count * (rows * shard.row_bytes + load * shard.expert_row_bytes)
        self.norms += count * shard.operators[0]
        self.turning += count * shard.operators[1]
        self.mlps += count * shard.operators[2]


def _prompt_pairs(shard: Shard, pairs: float, fresh: float, prompt_tokens: float) -> float:
    """Pairs of a new token with one before it, of ``pairs`` in all, that a layer computes within its reach."""
    reach = shard.window or shard.top_keys
    if reach is None or reach >= prompt_tokens:
        return pairs
    return fresh * smallest(pairs / fresh, reach - reach**2 / (2 * prompt_tokens))


def _prompt_flops(shard: Shard, pairs: float, fresh: float, prompt_tokens: float, filled: float) -> float:
    """FLOP of a prompt's attention in a layer: heads with keys of their own, or where an indexer chose among them latent ones,
    as decoding has them."""
    within = _prompt_pairs(shard, pairs, fresh, prompt_tokens)
    chosen = shard.top_keys is not None and shard.top_keys < prompt_tokens
    return within * (shard.decode_pair_flops * filled if chosen else shard.prefill_pair_flops)


def devices_of_a_token(top_k: int, devices: int) -> float:
    """Expected number of devices that hold one of a token's experts, chosen at random: n·(1 − (1 − 1/n)^k). Its row is sent to
    each of them once, as products take it in (fp8), and comes back in the working type: "FP8 dispatching and BF16 combining"
    (github.com/deepseek-ai/DeepEP, README)."""
    return devices * (1.0 - (1.0 - 1.0 / devices) ** top_k)


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

    Attention groups share requests and prompts evenly; the group with a prompt more is the slowest. Stages of a pipeline work
    one after another on 1/pipeline of the requests each, so a token's time is the sum over all layers and sends.
    """
    dtype = compute_dtype(scheme, hardware)
    bandwidth, peak = hardware.read_bandwidth[0].bytes_per_s, hardware.peak_flop_per_s[dtype]
    if hardware.basis == "measured":
        bandwidth = hardware.read_bandwidth[-1].bytes_per_s
    plain = letter("π_bf16", hardware.peak_flop_per_s.get("bf16", hardware.peak_flop_per_s.get("fp32", peak)))
    bandwidth, peak = letter("β", bandwidth), letter("π", peak)
    tensor, groups = placement.tensor, placement.attention_groups
    here = decoding / placement.pipeline / groups  # requests that one attention group has in a micro-batch
    new = prompt_tokens - hit_tokens
    mine = largest(smallest(prompts, 1.0), prompts / groups) if groups > 1 else prompts  # prompts of the group that has most
    fresh = mine * new
    rows = here * checked + fresh
    everywhere = rows if groups == 1 else here * checked * groups + prompts * new
    pairs = mine * new * (prompt_tokens + hit_tokens) / 2
    fitted = hardware.kind == "gpu" and hardware.basis != "measured"  # else nothing is lost between products
    sums, tile = _Sums(), TILE_ROWS if fitted else 0
    for shard in shards(spec, scheme, placement):
        count, keys = shard.count, shard.keys(context)
        sums.add(shard, rows, everywhere, tile)
        sums.cache += count * here * (keys * shard.cache_elements + context * shard.index_elements)
        filled = shard.filled_heads if fitted else 1.0
        sums.cache_flops += count * here * checked * keys * shard.decode_pair_flops * filled
        sums.index_flops += count * here * checked * context * shard.index_pair_flops
        if pairs:
            sums.prompt_flops += count * _prompt_flops(shard, pairs, fresh, prompt_tokens, filled)
            sums.prompt_index_flops += count * pairs * shard.index_pair_flops
        spread = groups > 1 and shard.experts > 0  # their tokens come and go by all-to-alls instead of ending in an all-reduce
        sums.reduces += (1 if spread else 2) * count if tensor > 1 else 0
        sums.exchanges += 2 * count if spread else 0
    head = head_matrix(spec)
    sampled = here * checked + (mine if prompt_tokens else 0.0)
    head_read = head_bytes(spec, scheme) / tensor
    head_flops = 2.0 * sampled * head.weights / tensor
    read, w = sums.cache * cache_bytes, bytes_of(dtype)
    index_peak = hardware.peak_flop_per_s.get(FP8, plain)  # DeepSeek-V3.2's indexer multiplies in fp8
    cache_s, prompts_s = sums.cache_flops / plain, sums.prompt_flops / plain
    if sums.index_flops or sums.prompt_index_flops:
        cache_s, prompts_s = cache_s + sums.index_flops / index_peak, prompts_s + sums.prompt_index_flops / index_peak
    products = (
        Part("attention", sums.attention_flops, sums.attention, sums.attention_flops / peak, sums.attention / bandwidth, w),
        Part("mlp", sums.mlp_flops, sums.mlp, sums.mlp_flops / peak, sums.mlp / bandwidth, w),
        Part(
            "mlp",
            sums.experts_flops,
            sums.experts,
            sums.experts_flops / peak,
            sums.experts / bandwidth,
            w,
            grouped=True,
            padding_s=sums.padding_flops / peak,
        ),
        Part("head", head_flops, head_read, head_flops / plain, head_read / bandwidth),
    )
    near, far = hardware.link_for(placement.stage_devices), hardware.link_for(placement.devices)
    row_bytes, stage = rows * spec.d_model * scheme_of(scheme).kept_bytes, placement.stage_devices
    reduced, exchanged = all_reduce_sent_bytes(row_bytes, tensor), 0.0
    if spec.moe:
        there_and_back = rows * spec.d_model * (bytes_of(dtype) + scheme_of(scheme).kept_bytes) / 2
        exchanged = gather_sent_bytes(there_and_back * devices_of_a_token(spec.moe.top_k, stage) / tensor, stage)
    return Pass(
        products=tuple(part for part in products if part.n_bytes),
        cache=Part("attention", sums.cache_flops + sums.index_flops, read, cache_s, read / bandwidth),
        prompts=Part("attention", sums.prompt_flops + sums.prompt_index_flops, 0.0, prompts_s, 0.0),
        elementwise_s=sums.moved / bandwidth if fitted else 0.0,
        operators=(sums.norms * steps, sums.turning * steps, sums.mlps * steps),
        steps=steps,
        requests=decoding / groups,
        reduces=collectives(sums.reduces, 2 * (tensor - 1), reduced, near, steps),
        exchanges=collectives(sums.exchanges, stage - 1, exchanged, near, steps),
        sends=collectives(placement.pipeline - 1, 1, row_bytes, far),
        basis=hardware.basis,
    )


MEASURED = Efficiencies(
    product_bandwidth_share=1.0,
    fp4_bandwidth_share=1.0,
    cache_bandwidth_share=1.0,
    elementwise_share=1.0,
    arithmetic_share=1.0,
    fp8_share=1.0,
    fp4_share=1.0,
    grouped_share=1.0,
    fp4_grouped_factor=1.0,
    attention_share=1.0,
    link_share=1.0,
    reduce_s=0.0,
    operator_s=0.0,
    step_s=0.0,
    request_s=0.0,
)
"""A calibrated machine's rates are what it reaches already."""

CPU = replace(
    MEASURED,
    product_bandwidth_share=ASSUMED_BANDWIDTH_EFFICIENCY,
    cache_bandwidth_share=ASSUMED_BANDWIDTH_EFFICIENCY,
    arithmetic_share=ASSUMED_PRODUCT_EFFICIENCY,
    grouped_share=ASSUMED_PRODUCT_EFFICIENCY,
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
