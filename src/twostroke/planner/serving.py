"""What serving a model will take: memory by term, prefill and decode time by component, latency, throughput, energy, money."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from twostroke.core.dtypes import bytes_of
from twostroke.core.errors import CapacityError, ConfigError
from twostroke.core.spec import ModelSpec
from twostroke.planner.cost import Cost, cost_of, usd_per_million_tokens
from twostroke.planner.flops import attention_flops_per_token, decode_flops, prefill_flops
from twostroke.planner.hardware import DATASHEET_NOTE, SCHEME_BYTES, Hardware
from twostroke.planner.latency import elementwise_elements, elementwise_flops, prefill_attention_rate
from twostroke.planner.memory import kv_bytes_per_token, weights_bytes
from twostroke.planner.params import Parameters, Product, block_products, count_parameters, head_product
from twostroke.planner.work import Work, merge, total_seconds

SCHEMES = ("fp32", "bf16", "int8")
"""Weight schemes that the engine serves."""

PAGE_TOKENS = 16
"""Tokens of one page of the KV cache; a request's last page is counted whole."""

OPS_PER_LAYER = {"norms": 4, "attention": 9, "mlp": 2}
"""Torch operators of one layer of the interpreted plan that are not products, by component: norms and sums; splitting,
rotary turn, cache write, gather, attention; activation."""

OPS_PER_STEP = 6
"""Operators of a step outside the layers: embedding, final norm, row selection, and the copies of the batch's indices."""

SAMPLING_OPS_PER_STEP = 12
"""Operators that turn logits into a token."""

GPU_MEMORY_UTILISATION = 0.9
CPU_MEMORY_UTILISATION = 0.5
"""Share of memory that weights and KV cache may take: others live on a CPU machine too."""


@dataclass(frozen=True)
class ServingShape:
    """How a model is served: ``batch`` requests decode together, each with a prompt and an answer of the given tokens.

    ``kv_cache_bytes`` = 0: as much as the memory allows, at most what ``batch`` requests of ``max_model_len`` need;
    ``max_model_len`` = 0: the model's own. ``kv_dtype`` = "auto": bf16, or fp32 with fp32 weights. Raises ConfigError.
    """

    scheme: str = "bf16"
    batch: int = 1
    prompt_tokens: int = 512
    output_tokens: int = 128
    kv_dtype: str = "auto"
    kv_cache_bytes: int = 0
    max_model_len: int = 0

    def __post_init__(self) -> None:
        least = {"batch": 1, "prompt_tokens": 1, "output_tokens": 1, "kv_cache_bytes": 0, "max_model_len": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < bound:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least {bound}.")
        if self.scheme not in SCHEMES:
            raise ConfigError(f"scheme={self.scheme!r} is not a way to hold weights. Use one of {', '.join(SCHEMES)}.")
        if self.kv_dtype != "auto":
            bytes_of(self.kv_dtype)

    @property
    def cache_dtype(self) -> str:
        if self.kv_dtype != "auto":
            return self.kv_dtype
        return "fp32" if self.scheme == "fp32" else "bf16"

    @property
    def compute_dtype(self) -> str:
        """The type of activations."""
        return "fp32" if self.scheme == "fp32" else "bf16"

    @property
    def product_scheme(self) -> str:
        """The calibrated product that weights of this scheme use."""
        return "w8" if self.scheme == "int8" else self.scheme


@dataclass(frozen=True)
class ServingPlan:
    """Everything predicted of serving. ``prefill`` is one prompt alone; ``decode`` one step of the whole batch, at the mean
    context of an answer."""

    spec: ModelSpec
    shape: ServingShape
    hardware: Hardware
    parameters: Parameters
    memory_bytes: dict[str, float]  # by term
    kv_bytes_per_token: float
    pages: int
    largest_batch: int
    prefill: tuple[Work, ...]
    decode: tuple[Work, ...]
    prefill_flops_per_token: float
    decode_flops_per_token: float
    model_bytes: float
    startup_s: float
    cost_per_hour: Cost
    notes: tuple[str, ...] = ()

    @property
    def ttft_s(self) -> float:
        """First token of a request that arrives at an idle server: its prefill."""
        return total_seconds(self.prefill)

    @property
    def tpot_s(self) -> float:
        """Seconds between tokens of one request while ``batch`` requests decode: one decode step."""
        return total_seconds(self.decode)

    @property
    def decode_tok_per_s(self) -> float:
        """batch / TPOT, all requests together."""
        return self.shape.batch / self.tpot_s

    @property
    def prefill_tok_per_s(self) -> float:
        return self.shape.prompt_tokens / self.ttft_s

    @property
    def e2e_s(self) -> float:
        """TTFT + (output − 1)·TPOT."""
        return self.ttft_s + (self.shape.output_tokens - 1) * self.tpot_s

    @property
    def output_tok_per_s(self) -> float:
        """Output tokens/s of a full batch kept full: batch·output ÷ (batch prefills, one after another, + output·TPOT)."""
        shape = self.shape
        return shape.batch * shape.output_tokens / (shape.batch * self.ttft_s + shape.output_tokens * self.tpot_s)

    @property
    def usd_per_mtok(self) -> float:
        """$ per million output tokens of the machine's price, prefill included, never idle."""
        return usd_per_million_tokens(self.output_tok_per_s, self.hardware.usd_per_hour.value)

    @property
    def kwh_per_mtok(self) -> float:
        """kWh per million output tokens."""
        return self.cost_per_hour.energy_kwh * 1e6 / (3600 * self.output_tok_per_s)

    @property
    def kv_request_bytes(self) -> float:
        """KV cache of one prompt: what would move if prefill and decode were on two machines."""
        return self.shape.prompt_tokens * self.kv_bytes_per_token

    @property
    def peak_memory_bytes(self) -> float:
        return sum(self.memory_bytes.values())

    def prediction(self) -> dict[str, float | dict[str, float]]:
        """Ledger names → values."""
        return {
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "e2e_s": self.e2e_s,
            "prefill_tok_per_s": self.prefill_tok_per_s,
            "decode_tok_per_s": self.decode_tok_per_s,
            "output_tok_per_s": self.output_tok_per_s,
            "weights_bytes": self.memory_bytes["weights"],
            "kv_cache_bytes": self.memory_bytes["kv_cache"],
            "peak_memory_bytes": self.peak_memory_bytes,
            "model_bytes": self.model_bytes,
            "startup_s": self.startup_s,
            "energy_per_mtok_kwh": self.kwh_per_mtok,
            "cost_per_mtok_usd": self.usd_per_mtok,
        }

    def to_dict(self) -> dict[str, Any]:
        """The whole plan as plain data."""
        return {
            "kind": "serve",
            "model": asdict(self.spec),
            "shape": asdict(self.shape),
            "hardware": self.hardware.to_dict(),
            "parameters": self.parameters.to_dict(),
            "prediction": self.prediction(),
            "memory_bytes": {**self.memory_bytes, "peak": self.peak_memory_bytes},
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "kv_request_bytes": self.kv_request_bytes,
            "pages": self.pages,
            "largest_batch": self.largest_batch,
            "passes": {"prefill": [w.to_dict() for w in self.prefill], "decode": [w.to_dict() for w in self.decode]},
            "prefill_flops_per_token": self.prefill_flops_per_token,
            "decode_flops_per_token": self.decode_flops_per_token,
            "cost_per_hour": self.cost_per_hour.to_dict(),
            "notes": list(self.notes),
        }


# -- memory ---------------------------------------------------------------------------------------------------------------


def request_kv_bytes(spec: ModelSpec, shape: ServingShape) -> float:
    """KV cache of one whole request, its last page counted whole: ⌈(prompt + output)/page⌉·page·bytes per token."""
    pages = -(-(shape.prompt_tokens + shape.output_tokens) // PAGE_TOKENS)
    return pages * PAGE_TOKENS * kv_bytes_per_token(spec, shape.cache_dtype)


def memory_for_kv(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> float:
    """Bytes left for the KV cache: utilisation · memory − weights − the process at rest. May be negative."""
    share = GPU_MEMORY_UTILISATION if hardware.kind == "gpu" else CPU_MEMORY_UTILISATION
    return share * hardware.memory_bytes - weights_bytes(spec, shape.scheme) - hardware.extras.get("baseline_rss_bytes", 0.0)


# -- time -----------------------------------------------------------------------------------------------------------------


def product_work(product: Product, rows: int, scheme: str, w: float, working_set: float, hardware: Hardware) -> Work:
    """One weight matrix applied to ``rows`` rows: 2·rows·n·k FLOP; weights read once, activations read and written."""
    weight = product.weights * SCHEME_BYTES[scheme]
    moved = weight + rows * (product.n + product.k) * w
    flops = 2.0 * rows * product.weights
    arithmetic_s = flops / hardware.product_rate(scheme, rows, product.n, product.k)
    return Work.limited(
        product.component,
        flops,
        moved,
        arithmetic_s,
        moved / hardware.bandwidth(working_set),
        hardware.linear_launch_s,
    )


def layer_elementwise(spec: ModelSpec, rows: int, w: float, hardware: Hardware) -> list[Work]:
    """Norms, sums, rotary turn and activation of one layer on ``rows`` tokens, eager: bytes of the fused count over the rate an
    eager block reached in calibration, and one launch per operator."""
    rate = hardware.extras.get("block_bf16_eager_forward_bytes_per_s")
    flops = elementwise_flops(spec, backward=False)
    works = []
    for component, elements in elementwise_elements(spec, backward=False).items():
        moved = rows * elements * w
        seconds = moved / (rate or hardware.bandwidth(moved))
        launch_s = OPS_PER_LAYER[component] * hardware.op_launch_s
        works.append(Work.limited(component, rows * flops[component], moved, 0.0, seconds, launch_s))
    return works


def prefill_attention(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> Work:
    """softmax(QKᵀ)V of one layer over one prompt, forward only."""
    tokens, w = shape.prompt_tokens, bytes_of(shape.compute_dtype)
    square = 4.0 * spec.n_heads * spec.head_dim * tokens * tokens
    causal = attention_flops_per_token(spec, tokens) * tokens / spec.n_layers
    moved = tokens * w * (spec.qkv_rows + spec.n_heads * spec.head_dim)
    rate = prefill_attention_rate(hardware, shape.compute_dtype, tokens)
    return Work.limited("attention", causal, moved, square / rate, moved / hardware.bandwidth(moved))


def decode_attention(
    spec: ModelSpec, shape: ServingShape, layer: int, context: int, working_set: float, hardware: Hardware
) -> Work:
    """One token of each request against its cache in one layer: 4·H·D·keys FLOP and 2·K·D·keys·w bytes a request."""
    keys = min(context, spec.window_of_layer(layer) or context)
    flops = shape.batch * 4.0 * spec.n_heads * spec.head_dim * keys
    moved = shape.batch * 2.0 * spec.n_kv_heads * spec.head_dim * keys * bytes_of(shape.cache_dtype)
    arithmetic_s = flops / hardware.product_rate(shape.compute_dtype, 1, spec.head_dim, max(keys, 1))
    return Work.limited("attention", flops, moved, arithmetic_s, moved / hardware.bandwidth(working_set))


def _head_work(spec: ModelSpec, rows: int, shape: ServingShape, working_set: float, hardware: Hardware) -> Work:
    """The head keeps the activations' type under every scheme, and only rows that are sampled pass through it."""
    return product_work(head_product(spec), rows, shape.compute_dtype, bytes_of(shape.compute_dtype), working_set, hardware)


def _outside_layers(spec: ModelSpec, rows: int, shape: ServingShape, hardware: Hardware) -> list[Work]:
    w = bytes_of(shape.compute_dtype)
    embedding, norm = 2.0 * rows * spec.d_model * w, 2.0 * rows * spec.d_model * w
    step = OPS_PER_STEP * hardware.op_launch_s
    sampling = SAMPLING_OPS_PER_STEP * hardware.op_launch_s + hardware.extras.get("engine_step_s", 0.0)
    return [
        Work.limited("embedding", 0.0, embedding, 0.0, embedding / hardware.bandwidth(embedding), step),
        Work.limited("norms", 0.0, norm, 0.0, norm / hardware.bandwidth(norm), hardware.op_launch_s),
        Work.limited("head", 0.0, 0.0, 0.0, 0.0, sampling),
    ]


def prefill_works(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> tuple[Work, ...]:
    """One prompt through the model, the head for its last token only."""
    rows, w = shape.prompt_tokens, bytes_of(shape.compute_dtype)
    working_set = weights_bytes(spec, shape.scheme)
    layer = [product_work(p, rows, shape.product_scheme, w, working_set, hardware) for p in block_products(spec)]
    layer.append(prefill_attention(spec, shape, hardware))
    layer += layer_elementwise(spec, rows, w, hardware)
    works = [work.times(spec.n_layers) for work in layer]
    works.append(_head_work(spec, 1, shape, working_set, hardware))
    return merge([*works, *_outside_layers(spec, rows, shape, hardware)])


def decode_works(spec: ModelSpec, shape: ServingShape, hardware: Hardware, batch: int | None = None) -> tuple[Work, ...]:
    """One step of ``batch`` requests (default: the shape's), each with prompt + output/2 tokens before it."""
    if batch is not None:
        shape = ServingShape(**{**asdict(shape), "batch": batch})
    rows, w = shape.batch, bytes_of(shape.compute_dtype)
    context = shape.prompt_tokens + (shape.output_tokens + 1) // 2
    cache = shape.batch * context * kv_bytes_per_token(spec, shape.cache_dtype)
    working_set = weights_bytes(spec, shape.scheme) + cache
    layer = [product_work(p, rows, shape.product_scheme, w, working_set, hardware) for p in block_products(spec)]
    layer += layer_elementwise(spec, rows, w, hardware)
    works = [work.times(spec.n_layers) for work in layer]
    works += [decode_attention(spec, shape, i, context, working_set, hardware) for i in range(spec.n_layers)]
    works.append(_head_work(spec, rows, shape, working_set, hardware))
    return merge([*works, *_outside_layers(spec, rows, shape, hardware)])


# -- the plan -------------------------------------------------------------------------------------------------------------


def plan_serving(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> ServingPlan:
    """Predict serving ``spec`` on one ``hardware``.

    Raises ConfigError where prompt and output exceed the context, CapacityError where the weights alone do not fit.
    """
    limit = shape.max_model_len or spec.max_positions
    if limit > spec.max_positions:
        raise ConfigError(f"max_model_len={limit} is more than the model's max_positions={spec.max_positions}.")
    if shape.prompt_tokens + shape.output_tokens > limit:
        raise ConfigError(
            f"prompt_tokens={shape.prompt_tokens} and output_tokens={shape.output_tokens} make "
            f"{shape.prompt_tokens + shape.output_tokens} tokens; the context holds {limit}. Use less of either."
        )
    weights = weights_bytes(spec, shape.scheme)
    room = memory_for_kv(spec, shape, hardware)
    one = request_kv_bytes(spec, shape)
    if room < one:
        raise CapacityError(
            f"{shape.scheme} weights take {weights / 1e9:.1f} GB and one request's KV cache {one / 1e9:.2f} GB; "
            f"{hardware.label} has {hardware.memory_bytes / 1e9:.1f} GB. Use a smaller type, a shorter context or more memory."
        )
    page = PAGE_TOKENS * kv_bytes_per_token(spec, shape.cache_dtype)
    wanted = shape.kv_cache_bytes or min(room, max(shape.batch * one, -(-limit // PAGE_TOKENS) * page))
    pages = int(wanted // page)
    notes = []
    fitting = int(pages * page // one)
    if fitting < shape.batch:
        notes.append(f"the KV cache holds {fitting} such requests at once, fewer than batch={shape.batch}: the others wait.")
    if hardware.basis == "datasheet":
        notes.append(DATASHEET_NOTE)
    parameters = count_parameters(spec)
    activations = min(shape.prompt_tokens, 8192) * (4 * spec.d_model + 3 * spec.d_ff) * bytes_of(shape.compute_dtype)
    context = shape.prompt_tokens + (shape.output_tokens + 1) // 2
    load = weights / hardware.extras.get("disk_cached_read_bytes_per_s", hardware.disk_write_bytes_per_s)
    return ServingPlan(
        spec=spec,
        shape=shape,
        hardware=hardware,
        parameters=parameters,
        memory_bytes={
            "weights": weights,
            "kv_cache": pages * page,
            "activations": activations,
            "process": hardware.extras.get("baseline_rss_bytes", 0.0),
        },
        kv_bytes_per_token=kv_bytes_per_token(spec, shape.cache_dtype),
        pages=pages,
        largest_batch=int(room // one),
        prefill=prefill_works(spec, shape, hardware),
        decode=decode_works(spec, shape, hardware),
        prefill_flops_per_token=prefill_flops(spec, shape.prompt_tokens) / shape.prompt_tokens,
        decode_flops_per_token=decode_flops(spec, context),
        model_bytes=weights,
        startup_s=hardware.extras.get("torch_import_s", 2.0) + load,
        cost_per_hour=cost_of(3600.0, hardware),
        notes=tuple(notes),
    )
