"""What serving a model will take: memory by term, prefill and decode time by component, latency, throughput, energy, money."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from twostroke.core import engines
from twostroke.core.described import As
from twostroke.core.dtypes import bytes_of
from twostroke.core.errors import CapacityError, ConfigError
from twostroke.core.matrices import block_matrices
from twostroke.core.named import letter, named, smallest, within
from twostroke.core.policy import (
    CACHE_SHARE,
    MAX_PAGES,
    PAGE_TOKENS,
    TOKEN_BUDGET,
    WEIGHT_ONLY_MULTIPLE,
    default_pages,
)
from twostroke.core.schemes import MIXED, NATIVE, PLANNED, TORCH_STEPS, scheme_of
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import DATASHEET_NOTE, Hardware
from twostroke.planner.money.cost import Cost, TokenPrices, cost_of, token_prices, usd_per_million_tokens
from twostroke.planner.serving import native, native_products
from twostroke.planner.serving.load import Latency, Steps, closed_loop
from twostroke.planner.serving.pages import batch_pages, largest_batch, request_pages, touched_pages
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.serving.step_time import (
    Efficiencies,
    Part,
    Pass,
    device_bytes,
    efficiencies_of,
    efficiencies_table,
    one_pass,
)
from twostroke.planner.serving.torch_runner import decode_ratio, engine_decode_works, engine_prefill_works, prefill_ratio
from twostroke.planner.work.component import Work, merge, shown, total_seconds
from twostroke.planner.work.flops import decode_flops, prefill_flops
from twostroke.planner.work.params import Parameters, count_parameters
from twostroke.planner.work.weights import kv_bytes_per_token, matrices_bytes, mixed_weights_bytes, weights_bytes
from twostroke.scheduling.step import logits_bytes

GPU_MEMORY_UTILISATION = 0.9
CPU_MEMORY_UTILISATION = 0.5
"""Share of memory that weights and KV cache may take at most: others live on a CPU machine too."""


class ServingMemory:
    """Bytes of one device."""

    weights: Annotated[float, "bytes"]
    kv_cache: Annotated[float, "bytes", "of whole pages"]
    activations: Annotated[float, "bytes", "of the longest prefill"]
    logits: Annotated[float, "bytes", "of a step of the batch, fp32"]
    process: Annotated[float, "bytes", "resident at rest (CPU)"]
    peak: Annotated[float, "bytes", "of all terms"]


class ServingPrediction:
    """Predictions of serving, by their ledger names."""

    ttft_s: Annotated[float, "s", "to the first token of an idle server"]
    tpot_s: Annotated[float, "s", "between tokens"]
    e2e_s: Annotated[float, "s", "of a whole answer"]
    prefill_tok_per_s: Annotated[float, "tok/s", "of one prompt"]
    decode_tok_per_s: Annotated[float, "tok/s", "of all requests"]
    output_tok_per_s: Annotated[float, "tok/s", "of all requests, prefills included"]
    weights_bytes: Annotated[float, "bytes"]
    kv_cache_bytes: Annotated[float, "bytes", "that are set aside"]
    peak_memory_bytes: Annotated[float, "bytes"]
    model_bytes: Annotated[float, "bytes", "on disk"]
    startup_s: Annotated[float, "s", "before the first request"]
    energy_per_mtok_kwh: Annotated[float, "kWh", "per million output tokens"]
    cost_per_mtok_usd: Annotated[float, "$", "per million output tokens"]


class ServingPasses:
    """Passes by component."""

    prefill: Annotated[tuple[Work, ...], "one prompt"]
    decode: Annotated[tuple[Work, ...], "one step of the batch"]


@dataclass(frozen=True)
class ServingPlan:
    """Everything predicted of serving. ``prefill`` is one prompt alone; ``decode`` one step of the whole batch, at the mean
    context of an answer."""

    DOCUMENT = (
        "model shape hardware parameters planned_only prediction memory_bytes kv_bytes_per_token kv_request_bytes loaded pages "
        "devices largest_batch passes prefill_flops_per_token decode_flops_per_token cost_per_hour token_prices notes"
    )

    spec: Annotated[ModelSpec, "what is served", As("model")]
    shape: Annotated[ServingShape, "how"]
    hardware: Annotated[Hardware, "on what"]
    parameters: Annotated[Parameters, "counts"]
    memory_bytes: dict[str, float]
    """By term. The native engine's cache takes memory as it is touched: what the batch's requests touch is counted, and a
    server that runs on fills it up to ``kv_cache_bytes``. Logits are those of the batch: ``prompt_logprobs`` take up to
    ``scheduling.step.scored_rows`` rows more."""

    kv_bytes_per_token: Annotated[float, "bytes", "of the cache a token"]
    pages: Annotated[int, "pages of the cache"]
    kv_cache_bytes: float  # what the engine sets aside for it on one device
    largest_batch: Annotated[int, "such requests that memory holds while they decode"]
    prefill: tuple[Work, ...]
    decode: tuple[Work, ...]
    prefill_flops_per_token: Annotated[float, "FLOP", "of a prompt token"]
    decode_flops_per_token: Annotated[float, "FLOP", "of an output token"]
    model_bytes: float
    startup_s: float
    cost_per_hour: Annotated[Cost, "of all devices of one copy"]
    check_s: float | None = None  # a step that checks drafted tokens
    prompt_beside_s: float | None = None  # what a prompt adds to a step; None: it runs apart and takes its whole prefill
    interference: float = 1.0
    notes: Annotated[tuple[str, ...], "what to bear in mind"] = ()

    @property
    def planned_only(
        self,
    ) -> Annotated[tuple[str, ...], "what of it `twostroke serve` and `generate` do not run; empty where they run all of it"]:
        """What of it ``twostroke serve`` and ``generate`` do not run, in words; empty where they run all of it."""
        shape, hardware = self.shape, self.hardware
        return engines.not_served(
            self.spec, weights=shape.scheme, cache=shape.cache_dtype, devices=self.devices,
            speculates=shape.speculation is not None, accelerator=hardware.label if hardware.kind == "gpu" else None,
            engine=None if shape.engine == "any" else shape.engine,
        )  # fmt: skip

    @property
    def passes(self) -> Annotated[dict[str, tuple[Work, ...]], ServingPasses, "time by component"]:
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def memory_and_peak(self) -> Annotated[dict[str, float], ServingMemory, "bytes by term", As("memory_bytes")]:
        return {**self.memory_bytes, "peak": self.peak_memory_bytes}

    @property
    def ttft_s(self) -> float:
        """First token of a request that arrives at an idle server: its prefill."""
        return named("ttft_s", total_seconds(self.prefill), "s", "one prompt alone, one component after another")

    @property
    def step_s(self) -> float:
        """One plain decode step of ``batch`` requests."""
        source = f"one step of {self.shape.batch} requests, one component after another"
        return named("step_s", total_seconds(self.decode), "s", source)

    @property
    def tpot_s(self) -> float:
        """Seconds between tokens of one request while ``batch`` requests decode and none arrives: one decode step; with
        speculation step ÷ speed-up."""
        if self.shape.speculation is None or self.check_s is None:
            return named("tpot_s", self.step_s, "s", "a token a step")
        between = self.step_s / self.shape.speculation.speed_up_of(self.step_s, self.check_s)
        return named(
            "tpot_s", between, "s", "Leviathan et al., arXiv 2211.17192: drafting, and a step that checks γ + 1 tokens"
        )

    @property
    def devices(self) -> Annotated[int, "devices of one copy"]:
        """Accelerators that hold one copy."""
        return self.shape.placement.devices

    @property
    def added_by_a_prompt_s(self) -> float:
        """Seconds by which others' decoding is held up when a prompt is computed: a step with it − a step without, or the
        whole prefill where it runs apart; times the share that is felt."""
        beside = self.ttft_s if self.prompt_beside_s is None else self.prompt_beside_s
        return self.interference * beside

    @property
    def steps(self) -> Steps:
        """What ``load`` computes waiting from."""
        shape, ours = self.shape, self.prompt_beside_s is None
        fresh, budget = shape.prompt_tokens - shape.hit_tokens, TOKEN_BUDGET if ours else CHUNK_TOKENS
        return Steps(self.ttft_s, self.added_by_a_prompt_s, self.tpot_s, fresh, shape.output_tokens, budget)

    @property
    def loaded(self) -> Annotated[Latency, "latency beside other users"]:
        """Of ``batch`` users who each ask again when answered, all answers equally long: ``load.closed_loop``."""
        return closed_loop(self.steps, self.shape.prompts)

    @property
    def decode_tok_per_s(self) -> float:
        """batch / TPOT, all requests together."""
        return named("decode_tok_per_s", self.shape.batch / self.tpot_s, "tok/s", "all requests together")

    @property
    def prefill_tok_per_s(self) -> float:
        return named("prefill_tok_per_s", self.shape.prompt_tokens / self.ttft_s, "tok/s", "one prompt alone")

    @property
    def e2e_s(self) -> float:
        """TTFT + (output − 1)·TPOT."""
        seconds = self.ttft_s + (self.shape.output_tokens - 1) * self.tpot_s
        return named("e2e_s", seconds, "s", "the first token is the prefill's")

    @property
    def output_tok_per_s(self) -> float:
        """Output tokens/s of a full batch kept full: batch·output ÷ (a prefill a prompt, one after another, + output·TPOT)."""
        shape = self.shape
        rate = shape.batch * shape.output_tokens / (shape.prompts * self.ttft_s + shape.output_tokens * self.tpot_s)
        return named("output_tok_per_s", rate, "tok/s", "a batch kept full, prefills one after another")

    @property
    def usd_per_mtok(self) -> float:
        """$ per million output tokens of the machine's price, prefill included, never idle."""
        usd = usd_per_million_tokens(self.output_tok_per_s, self._usd_per_hour)
        return named("usd_per_mtok", usd, "usd", "per million output tokens, prefill included, never idle")

    @property
    def _usd_per_hour(self) -> float:
        return self.devices * self.hardware.usd_per_hour.named("usd_per_hour", "usd/h")

    @property
    def usd_by_phase(self) -> Annotated[TokenPrices, "rent of the time that each phase takes, never idle", As("token_prices")]:
        """$ per million input tokens (prefill) and output tokens (decode), each by the time it takes; never idle."""
        return token_prices(self.prefill_tok_per_s, self.decode_tok_per_s, self._usd_per_hour)

    @property
    def kwh_per_mtok(self) -> float:
        """kWh per million output tokens."""
        kwh = self.cost_per_hour.energy_kwh * 1e6 / (3600 * self.output_tok_per_s)
        return named("kwh_per_mtok", kwh, "kWh", "per million output tokens", section="money")

    @property
    def kv_request_bytes(self) -> Annotated[float, "bytes", "of one prompt's cache"]:
        """KV cache of one prompt: what would move if prefill and decode were on two machines."""
        moved = self.shape.prompt_tokens * self.kv_bytes_per_token
        return named("kv_prompt_bytes", moved, "bytes", "a prompt's: what would move between machines of prefill and decode")

    @property
    def peak_memory_bytes(self) -> float:
        return named("peak_memory_bytes", sum(self.memory_bytes.values()), "bytes", "all are held while serving")

    def prediction(self) -> Annotated[dict[str, float | dict[str, float]], ServingPrediction, "the results"]:
        """Ledger names → values."""
        return {
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "e2e_s": self.e2e_s,
            "prefill_tok_per_s": self.prefill_tok_per_s,
            "decode_tok_per_s": self.decode_tok_per_s,
            "output_tok_per_s": self.output_tok_per_s,
            "weights_bytes": self.memory_bytes["weights"],
            "kv_cache_bytes": self.kv_cache_bytes,
            "peak_memory_bytes": self.peak_memory_bytes,
            "model_bytes": self.model_bytes,
            "startup_s": self.startup_s,
            "energy_per_mtok_kwh": self.kwh_per_mtok,
            "cost_per_mtok_usd": self.usd_per_mtok,
        }


# -- memory ---------------------------------------------------------------------------------------------------------------


def request_kv_bytes(spec: ModelSpec, shape: ServingShape) -> float:
    """Most KV cache that one request holds at a time: whole pages · page · bytes per token (``kv_pages.request_pages``)."""
    held = request_pages(spec, shape) * page_bytes(spec, shape)
    source = "a request's last page is counted whole"
    if spec.window_of_every_layer is not None:
        source += "; what is behind the window is given back"
    return named("kv_request_bytes", held, "bytes", source)


def page_bytes(spec: ModelSpec, shape: ServingShape) -> float:
    """One page over all layers and devices."""
    return letter("page", PAGE_TOKENS) * kv_bytes_per_token(spec, shape.cache_dtype)


def weights_on_device(spec: ModelSpec, shape: ServingShape) -> float:
    """Bytes of weights on one device: the blocks' matrices as ``Placement`` divides them, the rest (embedding, head, norms)
    by tensor; all of it where there is one device. Stages hold equally many layers, the first the embedding, the last the head:
    the fuller one is counted."""
    whole, at = weights_bytes(spec, shape.scheme), shape.placement
    if at.devices == 1:
        return named("weights_bytes", whole, "bytes", f"all of them on one device, in {shape.scheme}")
    rest = whole - matrices_bytes(spec, shape.scheme)
    stages = smallest(at.pipeline, spec.n_layers)
    layers = -(-spec.n_layers // stages) / spec.n_layers
    ends = rest / at.tensor / (1 if stages == 1 or spec.tied_embeddings else 2)
    held = layers * device_bytes(spec, shape.scheme, at.tensor, at.stage_devices) + ends
    source = "one device: matrices cut by tensor parallel, whole experts spread, layers by stage; embedding or head at an end"
    return named("weights_bytes", held, "bytes", source)


def second_copies_bytes(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> float:
    """Bytes of the int8 matrices that our engine holds twice, plain for few rows and packed for many: those that one row passes
    with int8 weights alone, where the machine has both kernels. No copy is on disk."""
    names = scheme_of(shape.scheme).torch
    both = len(names) > 1 and all(map(hardware.has_scheme, names))
    if not both or not runs_our_engine(spec, shape, hardware):
        return 0.0
    limit = hardware.crossovers.int8_weight_only_max_macs
    twice = sum(p.weights for p in block_matrices(spec) if p.weights <= limit and p.k % WEIGHT_ONLY_MULTIPLE == 0)
    source = "int8 matrices held twice: plain for few rows, packed for many"
    return named("second_copies_bytes", spec.n_layers * twice * 1.0, "bytes", source)


def stored_scheme_name(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> str:
    """The scheme as it is on disk: where the native engine runs, the row that our files mean by its name."""
    return scheme_of(shape.scheme).here.name if runs_natively(spec, shape, hardware) else shape.scheme


def weights_held(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> float:
    """What the weights take in memory: packed, in the native engine; else ``weights_on_device`` and ``second_copies_bytes``."""
    if runs_natively(spec, shape, hardware):
        packed = native_products.native_weights_bytes(spec, shape.scheme, shape.head, shape.in_int8)
        multiplied = scheme_of(shape.scheme).multiplied("native")
        source = f"packed by the native library in {multiplied}, the head in {shape.head}; an embedding of its own"
        return named("weights_bytes", packed, "bytes", source)
    return weights_on_device(spec, shape) + second_copies_bytes(spec, shape, hardware)


def kv_bytes_on_device(spec: ModelSpec, shape: ServingShape, kv_bytes: float) -> float:
    """Of ``kv_bytes`` of cached tokens what one device keeps: key heads divided by tensor (no further than there are heads,
    and not at all under latent attention), layers by pipeline, requests by attention groups."""
    at = shape.placement
    heads = 1 if spec.mla is not None else smallest(at.tensor, spec.n_kv_heads)
    return kv_bytes / (heads * smallest(at.pipeline, spec.n_layers) * at.attention_groups)


def memory_for_kv(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> float:
    """Bytes left for the KV cache on one device: utilisation · memory − weights − the process at rest. May be negative."""
    share = letter("share", GPU_MEMORY_UTILISATION if hardware.kind == "gpu" else CPU_MEMORY_UTILISATION)
    held, process = weights_held(spec, shape, hardware), letter("process", hardware.process.resident_bytes)
    source = f"{hardware.label}: memory {hardware.basis}, share assumed"
    return named("room_for_kv_bytes", share * hardware.memory_bytes - held - process, "bytes", source, "assumed")


def cache_pages(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> int:
    """Pages that the engine takes: of ``kv_cache_bytes``, or ``default_pages`` in ``CACHE_SHARE`` of the memory that weights
    and process leave on a CPU, in all that may be used on a GPU."""
    page, longest = kv_bytes_on_device(spec, shape, page_bytes(spec, shape)), shape.max_model_len or spec.max_positions
    if hardware.kind == "gpu":
        free = memory_for_kv(spec, shape, hardware)
    else:
        held = weights_held(spec, shape, hardware) + hardware.process.resident_bytes
        free = CACHE_SHARE * (hardware.memory_bytes - held)
    pages = int(shape.kv_cache_bytes // page) if shape.kv_cache_bytes else default_pages(page, free, longest)
    return letter("pages", min(pages, MAX_PAGES) if runs_our_engine(spec, shape, hardware) else pages)


# -- time -----------------------------------------------------------------------------------------------------------------


def prefill_works(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> tuple[Work, ...]:
    """One prompt through the model, what the cache has of it left out; our own engine's held to the anchors."""
    if runs_natively(spec, shape, hardware):
        ratio = native.prefill_ratio(spec, shape, hardware)
        return tuple(work.stretched(ratio) for work in native.prefill_works(spec, shape, hardware))
    if not runs_our_engine(spec, shape, hardware):
        return accelerator_works(spec, prompt_pass(spec, shape, hardware), efficiencies_of(hardware, shape.engine))
    ratio = prefill_ratio(spec, shape, hardware)
    return tuple(work.stretched(ratio) for work in engine_prefill_works(spec, shape, hardware))


def decode_works(spec: ModelSpec, shape: ServingShape, hardware: Hardware, batch: int | None = None) -> tuple[Work, ...]:
    """One step of ``batch`` requests (default: the shape's), each with prompt + output/2 tokens before it."""
    if batch is not None:
        shape = replace(shape, batch=batch)
    if runs_natively(spec, shape, hardware):
        return native.decode_works(spec, shape, hardware)
    if not runs_our_engine(spec, shape, hardware):
        return accelerator_works(spec, decode_pass(spec, shape, hardware), efficiencies_of(hardware, shape.engine))
    ratio = decode_ratio(spec, shape, hardware)
    return tuple(work.stretched(ratio) for work in engine_decode_works(spec, shape, hardware))


# -- accelerators known by their datasheet --------------------------------------------------------------------------------

CHUNK_TOKENS = 8192
"""Prompt tokens that engines on accelerators compute in one step at most."""


def runs_our_engine(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> bool:
    """Whether rates of this very engine were measured for the plan: a calibrated CPU, one device, a dense model of equal
    layers. Everything else is planned by ``step_time``."""
    plain = spec.moe is None and spec.mla is None and spec.global_attention is None
    measured = hardware.basis == "measured" and hardware.kind == "cpu"  # the engine computes on the CPU, always
    return measured and shape.placement.devices == 1 and plain and shape.scheme in engine_schemes(hardware)


def runs_natively(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> bool:
    """Whether that engine is the native one, whose rates the machine's profile holds."""
    return hardware.runs_natively and runs_our_engine(spec, shape, hardware)


def engine_schemes(hardware: Hardware) -> tuple[str, ...]:
    """How our own engine can hold weights on a calibrated machine, as far as its steps were measured."""
    return NATIVE if hardware.runs_natively else TORCH_STEPS


def decode_pass(
    spec: ModelSpec, shape: ServingShape, hardware: Hardware, prompt: bool = False, checked: int = 1, batch: int | None = None
) -> Pass:
    """A step of the batch at an answer's mean context, with one prompt beside it where asked for; each request with ``checked``
    tokens."""
    return one_pass(
        spec, shape.scheme, bytes_of(shape.cache_dtype), shape.placement, hardware,
        decoding=batch or shape.batch, context=shape.context, checked=checked,
        prompt_tokens=shape.prompt_tokens if prompt else 0.0, hit_tokens=shape.hit_tokens if prompt else 0.0,
    )  # fmt: skip


def prompt_pass(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> Pass:
    """One prompt alone, in steps of ``CHUNK_TOKENS``."""
    fresh = shape.prompt_tokens - shape.hit_tokens
    return one_pass(
        spec, shape.scheme, bytes_of(shape.cache_dtype), shape.placement, hardware,
        prompt_tokens=shape.prompt_tokens, hit_tokens=shape.hit_tokens, steps=-(-fresh // CHUNK_TOKENS),
    )  # fmt: skip


def accelerator_works(spec: ModelSpec, once: Pass, rates: Efficiencies) -> tuple[Work, ...]:
    """A pass by component. Collectives are shared by attention and MLP, each of which ends in one; scheduling and sampling
    stand with the head. Norms move their bytes within what products were fitted to, so only their launches count."""
    network = once.network_s(rates) / 2
    norms, attention, mlp = (count * rates.operator_s for count in once.operators)
    launches = {"attention": attention + network, "mlp": mlp + network, "head": once.around_s(rates)}
    works = [Work.limited("norms", 0.0, 0.0, 0.0, 0.0, norms)]
    works += [_work_of(part, once, rates, launches[part.component]) for part in once.products]
    for part, seconds in ((once.cache, once.cache_s(rates)), (once.prompts, once.prompts_s(rates))):
        if seconds:
            arithmetic, memory = part.arithmetic_s / rates.attention_share, part.memory_s / rates.cache_bandwidth_share
            works.append(Work("attention", part.flops, part.n_bytes, arithmetic, memory, 0.0, seconds))
    return merge(works)


def _work_of(part: Part, once: Pass, rates: Efficiencies, launch_s: float) -> Work:
    arithmetic, memory = part.arithmetic_s / rates.arithmetic(once.dtype), part.memory_s / rates.product_bandwidth_share
    seconds = once.product_s(part, rates) + launch_s
    return Work(part.component, part.flops, part.n_bytes, arithmetic, memory, launch_s, seconds)


def serving_times(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> tuple[float, float, float]:
    """(bytes on one device, TTFT, TPOT) of a shape and nothing else: what a search asks thousands of times. TTFT and TPOT are
    those of ``ServingPlan``."""
    memory = weights_held(spec, shape, hardware) + kv_bytes_on_device(
        spec, shape, batch_pages(spec, shape, shape.batch) * page_bytes(spec, shape)
    )
    if runs_our_engine(spec, shape, hardware):
        return memory, total_seconds(prefill_works(spec, shape, hardware)), total_seconds(decode_works(spec, shape, hardware))
    rates = efficiencies_of(hardware, shape.engine)
    step = decode_pass(spec, shape, hardware).seconds(rates)
    if shape.speculation is not None:
        check = decode_pass(spec, shape, hardware, checked=shape.speculation.draft_tokens + 1).seconds(rates)
        step /= shape.speculation.speed_up_of(step, check)
    return memory, prompt_pass(spec, shape, hardware).seconds(rates), step


def check_s(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> float | None:
    """A step that checks γ drafted tokens and draws one more, for every request; None without speculation. Our own engine takes
    the rows of so many requests (their cache is read once a row, so this is the slower side)."""
    if shape.speculation is None:
        return None
    rows = shape.speculation.draft_tokens + 1
    if runs_our_engine(spec, shape, hardware):
        return total_seconds(decode_works(spec, shape, hardware, rows * shape.batch))
    return decode_pass(spec, shape, hardware, checked=rows).seconds(efficiencies_of(hardware, shape.engine))


def check_placement(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> None:
    """Raises ConfigError where heads, layers or experts do not divide, or where a calibrated machine is asked for more than its
    engine does."""
    tensor, pipeline, expert = shape.tensor, shape.pipeline, shape.expert
    if spec.n_heads % tensor or (spec.n_kv_heads % tensor and tensor % spec.n_kv_heads):
        fitting = [
            d for d in range(1, spec.n_heads + 1) if not spec.n_heads % d and not (spec.n_kv_heads % d and d % spec.n_kv_heads)
        ]
        raise ConfigError(
            f"tensor={tensor} must divide n_heads={spec.n_heads} and go with n_kv_heads={spec.n_kv_heads}. "
            f"Use one of {', '.join(map(str, fitting))}."
        )
    if pipeline > spec.n_layers:
        raise ConfigError(f"pipeline={pipeline} is more than the model's n_layers={spec.n_layers}. Use at most that many.")
    if expert > 1 and spec.moe is None:
        raise ConfigError(f"expert={expert} spreads experts, and this model has none. Use --tensor or --pipeline.")
    if spec.moe is not None and spec.moe.n_experts % expert:
        raise ConfigError(f"expert={expert} must divide n_experts={spec.moe.n_experts}.")
    if expert > tensor and expert % tensor:
        raise ConfigError(f"expert={expert} must be a multiple of tensor={tensor}, or at most as much.")
    if shape.in_int8:
        known = {f"{layer}.{p.name}" for layer in range(spec.n_layers) for p in block_matrices(spec)}
        unknown = sorted(set(shape.in_int8) - known)
        if unknown or scheme_of(shape.scheme).beside is None:
            raise ConfigError(
                f"in_int8={(unknown or shape.in_int8)[0]!r} must be a matrix of the model, as 0.down, and scheme="
                f"{shape.scheme!r} one that holds some matrices in 8 bits. Those do: {', '.join(MIXED)}."
            )
    ours = engine_schemes(hardware)
    if hardware.basis == "measured" and hardware.kind == "cpu" and shape.scheme not in ours:
        raise ConfigError(
            f"scheme={shape.scheme!r} is not served by the engine on this machine. Use one of {', '.join(ours)}, or "
            "name an accelerator with --hardware."
        )
    if hardware.basis != "measured" and not scheme_of(shape.scheme).planned:
        raise ConfigError(
            f"scheme={shape.scheme!r} is our engine's own, on a calibrated CPU (--hardware this). "
            f"On {hardware.label} use one of {', '.join(PLANNED)}."
        )


def rate_note(hardware: Hardware) -> str:
    """How far a datasheet plan is to be trusted: the error on models that the fit had not seen, where that was measured."""
    error = efficiencies_table()["unseen_model_error"].get(hardware.name)
    if error is None:
        return DATASHEET_NOTE
    return (
        "rates are the datasheet's times shares fitted to public measurements; on models that the fit had not seen, the "
        f"median error of TPOT on this device was {error:.0%}."
    )


# -- the plan -------------------------------------------------------------------------------------------------------------


def plan_serving(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> ServingPlan:
    """Predict serving ``spec`` on one ``hardware``.

    Raises ConfigError where prompt and output exceed the context or the placement does not divide the model, CapacityError
    where weights and one request do not fit.
    """
    check_placement(spec, shape, hardware)
    limit = shape.max_model_len or spec.max_positions
    if limit > spec.max_positions:
        raise ConfigError(f"max_model_len={limit} is more than the model's max_positions={spec.max_positions}.")
    if shape.prompt_tokens + shape.output_tokens > limit:
        raise ConfigError(
            f"prompt_tokens={shape.prompt_tokens} and output_tokens={shape.output_tokens} make "
            f"{shape.prompt_tokens + shape.output_tokens} tokens; the context holds {limit}. Use less of either."
        )
    weights = weights_held(spec, shape, hardware)
    room = memory_for_kv(spec, shape, hardware)
    one = kv_bytes_on_device(spec, shape, request_kv_bytes(spec, shape))
    if room < one:
        each = f" on each of {shape.placement.devices} devices" if shape.placement.devices > 1 else ""
        raise CapacityError(
            f"{shape.scheme} weights take {weights / 1e9:.1f} GB and one request's KV cache {one / 1e9:.2f} GB{each}; "
            f"{hardware.label} has {hardware.memory_bytes / 1e9:.1f} GB, of which {(room + weights) / 1e9:.1f} GB may be used. "
            "Use a smaller type, a shorter context, more memory or more devices (--tensor)."
        )
    page = kv_bytes_on_device(spec, shape, page_bytes(spec, shape))
    pages = cache_pages(spec, shape, hardware)
    notes = list(spec.notes)
    fitting, most = largest_batch(spec, shape, pages), largest_batch(spec, shape, room / page)
    if fitting < shape.batch:
        notes.append(f"the KV cache holds {fitting} such requests at once, fewer than batch={shape.batch}: the others wait.")
    if hardware.basis == "datasheet":
        notes.append(rate_note(hardware))
    ours = runs_our_engine(spec, shape, hardware)
    if hardware.basis == "measured" and not ours:
        notes.append("this engine was not measured in such a shape: the machine's rates, with nothing lost between operations.")
    with within("prefill"):
        prefill = shown(prefill_works(spec, shape, hardware), "one prompt alone")
    with within("decode"):
        decode = shown(decode_works(spec, shape, hardware), f"one step of {shape.batch} requests")
    step, beside, rates = total_seconds(decode), None, efficiencies_of(hardware, shape.engine)
    if not ours:
        with within("mixed"):
            mixed = named("step_s", decode_pass(spec, shape, hardware, prompt=True).seconds(rates), "s", "a step with a prompt")
        beside = named("prompt_beside_s", max(0.0, mixed - step), "s", "what a prompt adds to a step")
    with within("check"):
        checking = check_s(spec, shape, hardware)
    if checking is not None:
        checking = named("check_s", checking, "s", "a step that checks γ drafted tokens of each request and draws one more")
    parameters = count_parameters(spec)
    w, tokens = letter("w", bytes_of(shape.compute_dtype)), smallest(shape.prompt_tokens, CHUNK_TOKENS)
    activations = tokens * (4 * spec.d_model + 3 * spec.d_ff) * w
    process, cache = letter("process", hardware.process.resident_bytes), pages * page
    cache = touched = named("kv_cache_bytes", cache, "bytes", "whole pages of the cache the engine takes, one device")
    working = "one layer of the longest prefill"
    if runs_natively(spec, shape, hardware):
        activations = native.step_memory_bytes(spec, shape)
        process += letter("engine", native.ENGINE_BYTES)
        touched = smallest(cache, touched_pages(spec, shape) * page)
        source = "the cache takes memory as its pages are touched; a server that runs on fills all of it"
        touched = named("kv_touched_bytes", touched, "bytes", source)
        working = "working memory of the largest step; the parts of a tied embedding that are looked up in its file"
    activations = named("activations_bytes", activations, "bytes", working)
    process = named("process_bytes", process, "bytes", "the process at rest, with torch and what the engine imports")
    logits = logits_bytes(spec.vocab_size, shape.sampled_rows)
    drawn = "a step's logits in fp32: a row for each token that is drawn or checked"
    reading = hardware.disk_cached_read_bytes_per_s or hardware.disk_write_bytes_per_s
    load, importing = weights / letter("reading", reading), letter("importing", hardware.process.torch_import_s)
    once, later = prefill_flops(spec, shape.prompt_tokens) / shape.prompt_tokens, decode_flops(spec, shape.context)
    return ServingPlan(
        spec=spec,
        shape=shape,
        hardware=hardware,
        parameters=parameters,
        memory_bytes={
            "weights": weights,
            "kv_cache": touched,
            "activations": activations,
            "logits": named("logits_bytes", logits, "bytes", drawn),
            "process": process,
        },
        kv_bytes_per_token=kv_bytes_per_token(spec, shape.cache_dtype),
        pages=pages,
        kv_cache_bytes=cache,
        largest_batch=named("largest_batch", most, "requests", "whole ones that the memory holds", section="memory"),
        prefill=prefill,
        decode=decode,
        prefill_flops_per_token=named("prefill_flops_per_token", once, "FLOP", "the head for the last token only"),
        decode_flops_per_token=named("decode_flops_per_token", later, "FLOP", "one new token at the mean context"),
        model_bytes=mixed_weights_bytes(spec, stored_scheme_name(spec, shape, hardware), shape.in_int8),
        startup_s=named("startup_s", importing + load, "s", "importing torch, and reading the weights"),
        cost_per_hour=cost_of(3600.0, hardware, shape.placement.devices),
        check_s=checking,
        prompt_beside_s=beside,
        interference=1.0 if ours else rates.interference,
        notes=tuple(notes),
    )
